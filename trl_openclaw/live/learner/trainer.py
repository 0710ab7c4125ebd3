"""`LiveTrainer`: `CombineTrainer` on turns that people had with the model, as they come in."""

import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast
from datasets import IterableDataset
from transformers import PrinterCallback, ProgressCallback

from ...scoring import TeacherScores
from ...teachers import LocalTeacher, max_model_length
from ...trainer import CombineTrainer
from ...trainer.hint_rows import HintedTurn
from ..store import Store
from .adapters import check_adapter, read_adapter
from .checkpoints import Progress, last_checkpoint, read_progress
from .config import LiveConfig
from .desk import Desk, GoTo, LiveBatch, Waiting
from .folders import lock_of, store_of
from .lock import only_learner
from .measure import Item, gathered_logps
from .ratios import record_ratio, record_sampling, strange_turns
from .rendering import render
from .rollouts import LiveTurn, StoredJudge, StoredNextState, TurnReader, recorded_rollout
from .snapshot import trained_tensors
from .stopping import stop_on_signals
from .together import on_main
from .token_notes import TokenNotes
from .updates import Updates


def _no_rows() -> Iterator[dict[str, Any]]:
    """TRL wants a dataset; rows come from the store."""
    yield from ()


class LiveTrainer(CombineTrainer):
    """
    [`CombineTrainer`] on recorded turns. It waits until enough of a user's turns have a verdict, trains one step on
    them, checks what came of it, publishes it as a new version or goes back, and begins anew.

    Nothing is sampled and nothing is rendered again: prompt ids, completion ids and log-probs are those that were
    recorded, and the log-probs are the old policy's in the clipped loss, which corrects for weights that moved since.
    The verdicts are those of the store. Every turn is trained once, whenever the learner is killed: what was trained is
    what the last whole checkpoint says.

    With several processes each has the whole model (DDP), and the main one alone talks to the store.

    Args:
        model (`str` or `PreTrainedModel`):
            The gateway's base model. An adapter is trained on top of it: pass `peft_config`.
        args ([`LiveConfig`]):
            Configuration.
        processing_class (`PreTrainedTokenizerBase`, *optional*):
            The tokenizer of the engine.
        store ([`~trl_openclaw.live.store.Store`], *optional*):
            The store, by default the one in `args.live_dir`.
        **kwargs:
            `peft_config` and what else [`CombineTrainer`] takes, except for data, judges and what samples.
    """

    _tag_names = ["trl", "trl-openclaw", "live"]
    _name = "Live"
    config_class = LiveConfig
    role = "the gateway's engine, and nothing is sampled here"
    args: LiveConfig

    def __init__(
        self,
        model: Any,
        args: LiveConfig | None = None,
        processing_class: Any = None,
        *,
        store: Store | None = None,
        **kwargs: Any,
    ):
        args = args if args is not None else LiveConfig()
        check_adapter(kwargs.get("peft_config"))
        self.turns_at_hand: dict[str, LiveTurn] = {}
        self.progress = Progress()
        self.batch: LiveBatch | None = None
        self.stopping = False
        self.saw_stranger = False
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "You are using 'rollout_func'")
            super().__init__(
                model,
                args=args,
                train_dataset=IterableDataset.from_generator(_no_rows),
                processing_class=processing_class,
                judge=StoredJudge(self.turns_at_hand),
                next_state=StoredNextState(self.turns_at_hand),
                rollout_func=lambda prompts, trainer: recorded_rollout(self._rows),
                **kwargs,
            )
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            raise ValueError("Live training has the whole model in each process: launch it without DeepSpeed and FSDP.")
        self.initial_weights = broadcast({name: tensor.clone() for name, tensor in trained_tensors(self).items()})
        self.notes = TokenNotes(self)
        self.updates = Updates(self)
        self.add_callback(self.updates)
        for printer in (PrinterCallback, ProgressCallback):  # one line for each update says more
            self.remove_callback(printer)
        name = args.engine_model or self.model.get_base_model().config.name_or_path
        self.desk: Desk | None = None
        if self.accelerator.is_main_process:
            store = store or Store(store_of(args.live_folder), durable=True)  # as its checkpoints are
            self.desk = Desk(store, args.user, args.turns_per_step, args.max_version_lag, name)
        self.read = TurnReader(
            self,
            self.model.config.get_text_config().vocab_size,
            min((n for n in (args.max_turn_tokens, max_model_length(self.model)) if n is not None), default=None),
            takes_cut=not args.mask_truncated_completions,
            takes_temperature=self.takes_row_temperatures
            and (not self.opd_weight or isinstance(self.teacher, LocalTeacher)),
        )
        self._rows: list[LiveTurn] = []
        self._student: torch.Tensor | None = None
        self._said: int | None = None

    @property
    def takes_several_turns(self) -> bool:
        """Each row is one turn, as it was recorded."""
        return False

    @property
    def at_desk(self) -> Desk:
        """The desk, on the main process."""
        assert self.desk is not None, "only the main process talks to the store"
        return self.desk

    @property
    def chosen_hints(self) -> list[HintedTurn]:
        """What each of this process's turns is taught with, as far as it is known; none where no teacher runs."""
        return self._teaching.chosen if self._teaching is not None else []

    # The run

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train until `max_updates` are made or the process is asked to end, from where an earlier learner stopped.

        Raises:
            LearnerError: If another learner trains this user, or the turns are of another model.
            ValueError: If a checkpoint is named: which one to go on from is known.
        """
        if resume_from_checkpoint:
            raise ValueError("Live training goes on from its own last checkpoint; leave `resume_from_checkpoint` out.")
        folder = Path(self.args.output_dir or "")
        with ExitStack() as stack:
            lock = only_learner(lock_of(self.args.live_folder, self.args.user), self.args.user)
            on_main(self.accelerator, lambda: stack.enter_context(lock))
            checkpoint = on_main(self.accelerator, lambda: last_checkpoint(folder))
            self.progress = on_main(self.accelerator, lambda: read_progress(checkpoint, self.args.user))
            freed = on_main(self.accelerator, lambda: self.at_desk.reconcile(self.progress))
            self._announce(checkpoint, freed)
            self.updates.average = checkpoint
            stack.enter_context(stop_on_signals(self._stop))
            try:
                return super().train(str(checkpoint) if checkpoint is not None else None, *args, **kwargs)
            finally:
                if self.desk is not None:
                    self.desk.release()

    def _announce(self, checkpoint: Path | None, freed: int) -> None:
        start = f"from version {self.progress.version}" if checkpoint is not None else "from the base model"
        again = f"; {freed} interrupted batch is taken up again" if freed else ""
        self.accelerator.print(f"Learning from user {self.args.user!r} {start}{again}.", flush=True)
        if others := on_main(self.accelerator, lambda: self.at_desk.other_users()):
            named = ", ".join(map(repr, others[:5])) + (", ..." if len(others) > 5 else "")
            self.accelerator.print(f"This user has no turns yet; there are turns of {named} (`user`).", flush=True)

    def _stop(self) -> None:
        self.stopping = True

    # Rows

    def get_train_dataloader(self) -> Any:
        """This process's rows of one batch after another: each as often as the step has forward passes."""
        return self._batches()

    def _batches(self) -> Iterator[list[dict[str, Any]]]:
        while (batch := self._next_batch()) is not None:
            rows = [one.row for one in self._share(batch)]
            for _ in range(self.args.gradient_accumulation_steps):
                yield rows
        self.control.should_training_stop = True

    def _share(self, batch: LiveBatch) -> Sequence[LiveTurn]:
        """This process's turns of a batch."""
        share = len(batch.turns) // self.accelerator.num_processes
        start = share * self.accelerator.process_index
        return batch.turns[start : start + share]

    def _next_batch(self) -> LiveBatch | None:
        """Wait for a batch; `None` when the process has been asked to end. A collective."""
        began = time.monotonic()
        while not self._anyone_stops() and not self._is_done():
            found = on_main(self.accelerator, lambda: self.at_desk.next(self.progress.version, self.read))
            if isinstance(found, LiveBatch):
                student = self._read_by_policy(found)
                if self._has_strange_turns(found, student):
                    continue
                self._take(found, student)
                self.record_metric("live/waited_seconds", time.monotonic() - began)
                return found
            if isinstance(found, GoTo):
                self._go_to(found)
            else:
                self._wait(found)
        return None

    def _read_by_policy(self, batch: LiveBatch) -> TeacherScores | None:
        """What the policy says before a step of this process's share, where anything asks for that. A collective."""
        if self.args.max_engine_gap is None and not self.args.token_preferences:
            return None
        rows = [Item.of(one.turn).row for one in self._share(batch)]
        return self.scorer.score(self.model, rows, keep_states=self.args.token_preferences)

    def _has_strange_turns(self, batch: LiveBatch, student: TeacherScores | None) -> bool:
        """Whether there were turns that nobody can have sampled as they are recorded; they are set aside, and the batch
        given back. A collective."""
        if student is None:
            return False
        now = gathered_logps([Item.of(one.turn) for one in self._share(batch)], student)
        strange = strange_turns(self, batch, now)
        if strange:
            on_main(self.accelerator, lambda: self.at_desk.set_aside(strange))
        return bool(strange)

    def _is_done(self) -> bool:
        return self.state.global_step >= self.args.max_steps

    def _anyone_stops(self) -> bool:
        """Whether any process was asked to end. A collective."""
        if self.accelerator.num_processes == 1:
            return self.stopping
        flags = torch.tensor([self.stopping], device=self.accelerator.device)
        return bool(self.accelerator.gather(flags).any())

    def _wait(self, waiting: Waiting) -> None:
        if waiting.ready is not None and waiting.ready != self._said:
            self._said = waiting.ready
            wanted = self.args.turns_per_step
            self.accelerator.print(f"{waiting.ready}/{wanted} turns ready, waiting for feedback", flush=True)
        time.sleep(self.args.poll_seconds)

    def _take(self, batch: LiveBatch, student: TeacherScores | None) -> None:
        self.batch, self._said = batch, None
        self.notes.read(self._share(batch), student)
        self.turns_at_hand.clear()
        self.turns_at_hand.update({one.turn.turn_id: one for one in batch.turns})

    def _go_to(self, wanted: GoTo) -> None:
        """Take up the version that answers by now."""
        read_adapter(self, wanted.path)
        self.optimizer.state.clear()
        if isinstance(self.teacher, LocalTeacher):  # of no use to the self-test any more
            self.teacher.same_weights_at_start = False
        self.updates.begin_average()
        why = "which was published by hand"
        if wanted.refused is not None:
            why = f"since the engine cannot load {self.progress.version}: {wanted.refused.rstrip('.')}"
        self.progress = Progress(wanted.version, self.progress.batches)
        self.accelerator.print(f"Going on from version {wanted.version}, {why}.", flush=True)

    # From recorded turns to the loss

    def before_sampling(self, inputs: list[dict[str, Any]]) -> None:
        self._rows = [self.turns_at_hand[row["turn_id"]] for row in inputs]
        super().before_sampling(inputs)

    def tokenize_prompts(self, prompts: list, rows: Any = None) -> list[list[int]]:
        """Token ids of `prompts`, each rendered with the tools, settings and date of the turn of its row."""
        owners = range(len(prompts)) if rows is None else rows
        rows = [self._rows[i] for i in owners]
        return [render(self, prompt, row.turn, row.clock) for prompt, row in zip(prompts, rows, strict=True)]

    def extend_batch(self, inputs: list[dict[str, Any]], batch: dict[str, Any]) -> dict[str, Any]:
        device = self.accelerator.device
        current = [one.turn.model_version == self.progress.version for one in self._rows]
        batch["old_per_token_logps"] = batch["sampling_per_token_logps"]
        batch["place"] = torch.arange(len(current), device=device)
        batch["current"] = torch.tensor(current, device=device)
        record_sampling(self, self._rows)
        batch = super().extend_batch(inputs, batch)
        self.notes.begin(self._rows)
        return batch

    def on_student(self, inputs: dict[str, Any], per_token_logps: torch.Tensor) -> None:
        self._student = per_token_logps

    def token_advantages(self, inputs: dict[str, Any], old_per_token_logps: torch.Tensor) -> torch.Tensor:
        advantages = said = super().token_advantages(inputs, old_per_token_logps)
        assert self._student is not None, "the loss shows the student before it asks for advantages"
        record_ratio(self, inputs, self._student, old_per_token_logps)
        if self.objective is not None:
            said = self.sampled_token_advantages(inputs, old_per_token_logps)
        self.notes.add(inputs, said)
        return advantages
