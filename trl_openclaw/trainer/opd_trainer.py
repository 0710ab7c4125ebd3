"""`OPDTrainer`: hindsight-guided on-policy distillation on top of TRL's `GRPOTrainer`."""

import textwrap
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, cast

import torch
from accelerate.logging import get_logger
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.trainer_utils import get_last_checkpoint

from .._trl import Rollout, SeamGRPOTrainer
from ..judges.base import Judge
from ..next_states.base import NextStateProvider
from ..objectives import make_objective
from ..rewards import HindsightReward
from ..scoring import TokenScorer
from ..teachers import InitialWeights, LocalTeacher, ServerTeacher, Teacher
from ..types import Feedback
from .active_tokens import keep_tokens, record_missing_scores
from .alarms import AlarmAction, BandAlarm, parse_bands
from .build_teacher import TeacherModel, build_reference, build_teacher, choose_teacher_model, is_trl_reference
from .comparison import Comparison
from .early_feedback import EarlyFeedback
from .engine import lend_engine
from .guard import FailureGuard, SilenceAlarm, check_services, stop_together
from .inputs import (
    check_batch,
    check_columns,
    check_control,
    check_feedback,
    check_objective,
    check_policy,
    check_size,
    checked_args,
    resolve_hint_source,
    shared_vocabulary,
    with_judge_column,
)
from .model_card import write_model_card
from .opd_config import OPDConfig
from .roles import announce_roles
from .self_test import SelfTest
from .step_profile import ProfiledSteps
from .step_records import record_steps
from .teacher_pass import TeacherPass
from .teacher_server import check_teacher_server
from .teaching import Teaching
from .token_signals import TokenSignals
from .turn_rewards import TurnRewards
from .turns import BatchTurns, at_tokens

logger = get_logger(__name__)


class OPDTrainer(TokenSignals, TurnRewards, ProfiledSteps, SeamGRPOTrainer):
    """
    Trainer for hindsight-guided on-policy distillation (OPD), from [OpenClaw-RL](https://huggingface.co/papers/2603.10165).

    The policy samples a completion, a next state follows (the user's reply, a tool's output), a judge draws a textual
    hint from it, and a teacher (by default the same model as it was at the start) re-scores the very tokens that were
    sampled, now knowing the hint. The clipped log-prob difference is the token's advantage in GRPO's own loss.

    With tools, an environment or a rollout function a completion holds several turns. Each is judged by what followed
    it, has hints of its own, and is re-scored after the prompt and the turns before it.

    A turn without an accepted hint adds nothing to the loss or to its normaliser.

    Example:

    ```python
    trainer = OPDTrainer(
        model="Qwen/Qwen3-1.7B",
        judge=LLMJudge(model="Qwen/Qwen3-8B", base_url="http://localhost:8000/v1"),
        next_state=PERSONAS["one-sentence"],
        train_dataset=dataset,
    )
    trainer.train()
    ```

    Args:
        model (`str`, `PreTrainedModel` or `PeftModel`):
            The policy; see [`~trl.GRPOTrainer`].
        reward_funcs (*optional*):
            Reward functions, as in [`~trl.GRPOTrainer`]. Here they are logged; [`CombineTrainer`] trains on them.
        args ([`OPDConfig`], *optional*):
            Configuration.
        judge ([`Judge`], *optional*):
            Any `async def __call__(turn) -> Verdict`. Without one, hints come from a `privileged_context` column, or an
            external teacher scores the plain prompt.
        next_state ([`NextStateProvider`], *optional*):
            Any `async def __call__(turn, row) -> NextState | None`. Without one, the column `next_state` is read.
        teacher_model (`str`, `PreTrainedModel` or [`Teacher`], *optional*):
            An external teacher with the student's tokenizer, or an object with `score(rows) -> TeacherScores`.
        teacher_processing_class (`PreTrainedTokenizerBase`, *optional*):
            The external teacher's tokenizer, if it is not beside its weights.
        **kwargs:
            Everything else that [`~trl.GRPOTrainer`] takes.

    Attributes:
        feedback_listeners (`list[Callable[[str, list[Feedback]], None]]`):
            Called with `"train"` or `"eval"` and this rank's feedback, turn by turn, once per batch.
    """

    _tag_names = ["trl", "trl-openclaw", "opd"]
    _name = "OPD"
    _paper = {
        "title": "OpenClaw-RL: Train Any Agent Simply by Talking",
        "id": "2603.10165",
        "citation": textwrap.dedent("""\
            @article{wang2026openclawrl,
                title  = {{OpenClaw-RL: Train Any Agent Simply by Talking}},
                author = {Yinjie Wang and Xuyang Chen and Xiaolong Jin and Mengdi Wang and Ling Yang},
                year   = 2026,
                eprint = {arXiv:2603.10165},
            }"""),
    }
    config_class = OPDConfig
    teacher: Teacher | None = None
    extra_columns = ("privileged_context", "next_state")

    def __init__(
        self,
        model: str | PreTrainedModel | nn.Module,
        reward_funcs: Any = None,
        args: OPDConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        *,
        judge: Judge | None = None,
        next_state: NextStateProvider | None = None,
        teacher_model: str | nn.Module | Teacher | None = None,
        teacher_processing_class: PreTrainedTokenizerBase | None = None,
        **kwargs: Any,
    ):
        args = checked_args(type(self), model, args)
        teacher_model = choose_teacher_model(model, teacher_model, args)
        self.rl_weight, self.opd_weight = self._weights(args)
        self.judge = judge
        self.next_state = next_state
        check_columns(train_dataset, eval_dataset, kwargs.get("environment_factory"), processing_class)
        check_size(train_dataset, args)
        several_turns = any(kwargs.get(name) for name in ("tools", "environment_factory", "rollout_func"))
        check_feedback(judge, next_state, train_dataset, several_turns)
        user_rewards = list(reward_funcs) if isinstance(reward_funcs, list) else [f for f in [reward_funcs] if f]
        self._check_signals(judge, user_rewards, teacher_model)
        self.hint_source = (
            resolve_hint_source(args.hint_source, judge, teacher_model, train_dataset) if self.opd_weight else "none"
        )
        self.feedback = HindsightReward(
            judge,
            next_state,
            max_concurrency=args.feedback_concurrency,
            timeout=args.feedback_timeout,
            score_only=self.hint_source != "judge",
            judge_reward=self._judge_reward(args, several_turns),
        )
        args, kwargs = with_judge_column(args, kwargs, len(user_rewards))
        initial = InitialWeights(fresh_adapter=kwargs.get("peft_config") is not None)
        if self.opd_weight and (teacher_model is None or args.uses_initial_reference):
            initial = InitialWeights.before_training(model, args, kwargs.get("peft_config"))
        super().__init__(
            model,
            reward_funcs=[*user_rewards, self.feedback],
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            **kwargs,
        )
        check_policy(self, needs_teacher=bool(self.opd_weight))
        lend_engine(self, judge, next_state)
        self.feedback.eos_token_ids = frozenset([*self.eos_token_ids, self.pad_token_id])
        self.feedback.calls_tools, self.feedback.call_pattern = self.has_tools, self.call_pattern
        self._early = EarlyFeedback(self, self.feedback)
        self.announces_completions = self._early.possible
        self.feedback_listeners: list[Callable[[str, list[Feedback]], None]] = []
        self.scorer = TokenScorer(
            self.accelerator,
            self.pad_token_id,
            args.teacher_token_budget,
            self.temperature,
            args.cast_lm_head_to_fp32,
            self.prefix_sharing,
        )
        self._teaching: Teaching | None = None
        if self.opd_weight:
            self._teaching = self._hire_teacher(teacher_model, teacher_processing_class, initial)
            check_control(self, train_dataset)
        if bands := parse_bands(args.alarms, "alarms"):
            self.add_callback(BandAlarm(bands, cast(AlarmAction, args.alarm_action), args.alarm_patience))
        self._guard = FailureGuard(args.judge_failure_limit, args.judge_failure_patience)
        self._silence = SilenceAlarm()
        self._rewarded: tuple[Rollout, torch.Tensor] | None = None
        self._self_test = SelfTest(self, due=bool(args.self_test and self.opd_weight))
        self.profile_callbacks()

    # Set-up

    def _hire_teacher(
        self,
        teacher_model: TeacherModel | None,
        teacher_processing_class: PreTrainedTokenizerBase | None,
        initial: InitialWeights,
    ) -> Teaching:
        """Make teacher, reference and objective, and check that they go together."""
        self.objective = objective = make_objective(self.args)
        self.teacher = build_teacher(self, self.scorer, teacher_model, teacher_processing_class, initial)
        reference = build_reference(self, self.scorer, self.teacher, initial)
        check_objective(self, self.teacher, reference)
        by_trl = objective is None and is_trl_reference(self, reference)
        several = self.hint_source == "judge"
        vocabulary = shared_vocabulary(self, self.teacher, reference)
        teaching = Teaching(
            self,
            TeacherPass(self, self.teacher, objective, reference, trl_reference=by_trl, several_hints=several),
            Comparison(self.args, objective, vocabulary, self._bound_gap_at_format_tokens),
        )
        if isinstance(self.teacher, ServerTeacher):
            check_teacher_server(self, self.teacher, self.args.topk if teaching.lessons.uses_student else 0, initial)
        self.reads_old_policy = teaching.lessons.uses_student
        self.adds_token_losses = objective is not None or teaching.lessons.uses_student
        return teaching

    def _weights(self, args: OPDConfig) -> tuple[float, float]:
        """Weights of the reward and of the distillation advantage."""
        return 0.0, 1.0

    def _judge_reward(self, args: OPDConfig, several_turns: bool) -> str:
        """What a judge's votes come to as a reward."""
        return "majority"

    def _check_signals(self, judge: Judge | None, reward_funcs: list, teacher_model: TeacherModel | None) -> None:
        """Refuse, or warn about, arguments that this trainer would not use."""
        if reward_funcs:
            warnings.warn(
                f"{type(self).__name__} trains on hints only here: `reward_funcs` are logged, not trained. Use "
                "`CombineTrainer` with `rl_weight` above 0 to train on both.",
                UserWarning,
                stacklevel=4,
            )

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any):
        """Check that judge and next states can be reached, then train as usual, with the teacher as it was saved."""
        check_services([self.judge, self.next_state], self)
        if resume_from_checkpoint and isinstance(self.teacher, LocalTeacher):
            self._restore(self.teacher, resume_from_checkpoint)
        self.forget_batches()
        announce_roles(self)
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _restore(self, teacher: LocalTeacher, resume_from_checkpoint: str | bool) -> None:
        """Let the teacher go on as it was saved, or stop all processes: one may not see the folder of the others."""
        problem, output_dir = None, self.args.output_dir
        try:
            found = get_last_checkpoint(output_dir) if resume_from_checkpoint is True else resume_from_checkpoint
            if found is None:
                raise ValueError(f"There is no checkpoint in `output_dir`, {output_dir}.")
            teacher.restore(str(found))
        except (ValueError, OSError) as error:
            problem = str(error)
        stop_together(problem, self.accelerator, ValueError)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the policy as usual, without what the teacher keeps inside its model; in a checkpoint, beside it."""
        local = self.teacher if isinstance(self.teacher, LocalTeacher) else None
        with local.left_out() if local is not None else nullcontext():
            super().save_model(output_dir, _internal_call)
        # Checkpoints are saved by an internal call with a folder, before older ones are removed.
        is_checkpoint = _internal_call and not self.args.save_only_model
        if local is not None and output_dir is not None and is_checkpoint:
            local.save(output_dir, writes=self.args.should_save)

    def create_model_card(self, model_name=None, dataset_name=None, tags=None) -> None:
        """Write a card that says how the model was trained. The dataset may also be a folder."""
        write_model_card(self, super().create_model_card, model_name, dataset_name, tags)

    # From a sampled batch to what the loss needs

    def before_sampling(self, inputs: list[dict[str, Any]]) -> None:
        check_batch(inputs, self)
        if self._teaching is not None:
            self._teaching.forget()
        self._early.open(inputs)

    def on_completion(self, row: int, completion_ids: list[int]) -> None:
        self._early.start(row, completion_ids)

    def batch_over(self) -> None:
        self._early.close()

    def before_rewards(self, inputs: list[dict[str, Any]], rollout: Rollout) -> None:
        self.turns = BatchTurns.of(rollout)
        if not self._early.starts_all:
            return
        self._early.start_others(rollout)
        if self._teaching is not None:
            self._teaching.score_ahead(inputs, rollout)

    def on_rewards(self, rollout: Rollout, rewards_per_func: torch.Tensor) -> None:
        self._rewarded = rollout, rewards_per_func
        self.profile.divide_rewards(self.feedback)
        if self.announces_completions:
            self.record_metric("feedback/early", self.feedback.early)
        for listener in self.feedback_listeners:
            listener(self.mode, self.feedback.last)

    def extend_batch(self, inputs: list[dict[str, Any]], batch: dict[str, Any]) -> dict[str, Any]:
        rewarded, self._rewarded = self._rewarded, None
        assert rewarded is not None, "TRL scores completions before it returns them"
        rollout, rewards_per_func = rewarded
        if self.judge is None:
            self.drop_metrics("rewards/judge/mean", "rewards/judge/std")
            if len(self.reward_funcs) == 1:  # the judge's place, empty: there are no rewards at all
                self.drop_metrics("reward", "reward_std", "frac_reward_zero_std")
        elif self.mode == "train":
            self._guard.observe(self.feedback.last, self.accelerator)
        batch["turn_index"] = self.turns.index(batch["completion_ids"].shape, self.accelerator.device)
        advantages = self.step_advantages(batch, rewards_per_func)
        batch["step_advantages"] = advantages.nan_to_num(0.0)
        signal = at_tokens(batch["step_advantages"] != 0, batch["turn_index"], False)
        if self._teaching is not None:
            self._self_test(batch, rollout.prompts)
            self._teaching.teach(inputs, batch, rollout)
            signal = signal | batch["teacher_mask"]
            record_missing_scores(self, batch)
        share = keep_tokens(self, batch, signal)
        if self.mode == "train":
            self._silence.observe(share)
        if self.takes_several_turns:
            self.simplify_logged_completions(len(rewards_per_func))
            record_steps(self, batch, self.step_rewards(rewards_per_func))
        mean = advantages.nanmean(dim=1).nan_to_num(0.0)
        logged = self.rl_weight * mean if self.rl_weight else torch.full_like(mean, float("nan"))
        self.replace_logged_advantages(self.accelerator.gather(logged))
        return batch

    def step_advantages(self, batch: dict[str, Any], rewards_per_func: torch.Tensor) -> torch.Tensor:
        """This rank's reward advantages `(B, S)`, one for each turn of a row, NaN where a turn has none.

        Distillation alone has none at all. A turn whose advantage is 0 has nothing to say.

        Args:
            batch: The generation batch.
            rewards_per_func (`(world * B, F)`): All ranks' rewards, NaN where a function had none to give.
        """
        shape = (len(batch["completion_ids"]), self.turns.num_steps)
        return torch.full(shape, float("nan"), device=self.accelerator.device)

    # In the loss

    def read_old_policy(self, per_token_logps: torch.Tensor, hidden: torch.Tensor, model: nn.Module) -> None:
        assert self._teaching is not None, "without a teacher nobody asks"
        self._teaching.old_policy.read(hidden, model)

    def loss_scale(self, inputs: dict[str, Any]) -> torch.Tensor | float:
        return inputs["row_scale"]
