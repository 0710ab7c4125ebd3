"""Configuration of `LiveTrainer`."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from transformers.trainer_utils import SaveStrategy, SchedulerType

from ...trainer import CombineConfig
from ...trainer.settings import Number
from ..records import DEFAULT_USER
from .check_fields import CheckFields
from .folders import checkpoints_of

FOREVER = 1_000_000_000
"""Steps that nobody lives to see, for trainers that want a number."""

_FIXED: dict[str, tuple[Any, str]] = {
    "num_generations": (1, "a turn of the traffic was sampled once"),
    "num_iterations": (1, "a batch is trained once"),
    "temperature": (1.0, "each turn is trained at the temperature of its own log-probs"),
    "use_vllm": (False, "the gateway's engine samples, and nothing is sampled here"),
    "reward_baseline": ("none", "there is no group to compare with"),
    "eval_strategy": ("no", "every version is checked on its own"),
    "max_steps": (-1, "use `max_updates`"),
    "save_only_model": (False, "a checkpoint must hold all that training goes on from"),
    "load_best_model_at_end": (False, "checks decide which version is kept"),
    "log_completions": (False, "what people wrote stays in the store, where they can delete it"),
}
"""Settings of a trainer that samples, the value each must have here, and why."""


@dataclass
class LiveConfig(CheckFields, CombineConfig):
    r"""
    Configuration class for the [`LiveTrainer`]. Every field of [`CombineConfig`] is there, those about sampling are
    refused; [`CheckFields`] has the checks of a new version.

    Args:
        live_dir (`str`, *optional*, defaults to `"runs/live"`):
            The folder shared with the gateway: the store, the adapters and the checkpoints.
        user (`str`, *optional*, defaults to `"default"`):
            Whose turns are trained.
        engine_model (`str`, *optional*):
            The name under which the gateway records its model, where it is not the name or path of the one trained.
        turns_per_step (`int`, *optional*, defaults to `16`):
            Turns in one optimizer step, over all processes. `gradient_accumulation_steps` follows from it and from
            `per_device_train_batch_size`.
        max_version_lag (`int`, *optional*, defaults to `4`):
            Versions that may have been published since a turn was sampled. Older turns expire.
        max_updates (`int`, *optional*, defaults to `0`):
            Optimizer steps until the learner ends, earlier runs included; `0` for no end.
        max_turn_tokens (`int`, *optional*):
            Tokens that a turn may have, prompt and reply; longer ones are set aside. By default as many as fit into the
            model.
        max_engine_gap (`float`, *optional*, defaults to `1.0`):
            Mean absolute difference, in nats, between a turn's recorded log-probs and those of the same weights here,
            above which it is set aside. Where most turns are above, the engine has another model, and the learner
            refuses to train. `None` for no limit, on turns of earlier versions neither.
        poll_seconds (`float`, *optional*, defaults to `0.5`):
            Seconds between two looks into the store.
        token_preferences (`bool`, *optional*, defaults to `True`):
            Keep for the status page which token teacher and student preferred. Costs one more pass of the teacher, and
            memory for the last hidden states of a step's replies, twice.
        keep_versions (`int`, *optional*, defaults to `50`):
            Adapter folders to keep. The version in use is always kept.

    > [!NOTE]
    > `learning_rate` defaults to `1e-4` instead of `1e-5`: adapters are trained. `hint_selection` defaults to
    > `"longest"` whatever `opd_loss` is: with a hint that is known before the loss the page can show what the teacher
    > preferred, and one candidate is scored instead of all.
    """

    _NUMBERS: ClassVar[dict[str, Number]] = {
        **CombineConfig._NUMBERS,
        **CheckFields._CHECK_NUMBERS,
        "turns_per_step": Number(whole=True, at_least=1),
        "max_version_lag": Number(whole=True, at_least=0),
        "max_updates": Number(whole=True, at_least=0),
        "max_turn_tokens": Number(whole=True, at_least=1, optional=True),
        "max_engine_gap": Number(above=0, optional=True),
        "poll_seconds": Number(above=0),
        "keep_versions": Number(whole=True, at_least=1),
    }

    per_device_train_batch_size: int = field(
        default=1, metadata={"help": "Turns in one forward pass of a process; must divide its share of a step."}
    )
    learning_rate: float = field(default=1e-4, metadata={"help": "The initial learning rate for AdamW."})
    num_generations: int | None = field(default=1, metadata={"help": "Samples of a prompt: the one that was recorded."})
    judge_reward: str | None = field(default="majority", metadata={"help": "The judge's votes as a reward."})
    lr_scheduler_type: SchedulerType | str = field(
        default="constant", metadata={"help": "The learning rate over time."}
    )
    save_strategy: SaveStrategy | str = field(default="steps", metadata={"help": "A checkpoint after every step."})
    save_steps: float = field(default=1, metadata={"help": "A checkpoint after every step."})
    save_total_limit: int | None = field(default=2, metadata={"help": "Checkpoints to keep, at least 2."})
    logging_steps: float = field(default=1, metadata={"help": "Log every so many steps."})
    live_dir: str = field(default="runs/live", metadata={"help": "The folder shared with the gateway."})
    user: str = field(default=DEFAULT_USER, metadata={"help": "Whose turns are trained."})
    engine_model: str | None = field(
        default=None, metadata={"help": "The model's name in the gateway's records, where it is another."}
    )
    turns_per_step: int = field(default=16, metadata={"help": "Turns in one optimizer step, over all processes."})
    max_version_lag: int = field(
        default=4, metadata={"help": "Versions that may have been published since a turn was sampled."}
    )
    max_updates: int = field(default=0, metadata={"help": "Optimizer steps until the learner ends; 0 for no end."})
    max_turn_tokens: int | None = field(
        default=None, metadata={"help": "Tokens that a turn may have; by default what fits into the model."}
    )
    max_engine_gap: float | None = field(
        default=1.0,
        metadata={"help": "Largest mean gap (nats) between a turn's log-probs and those of the same weights."},
    )
    poll_seconds: float = field(default=0.5, metadata={"help": "Seconds between two looks into the store."})
    token_preferences: bool = field(
        default=True,
        metadata={"help": "Keep which tokens teacher and student preferred; one more pass of the teacher."},
    )
    keep_versions: int = field(default=50, metadata={"help": "Adapter folders to keep."})

    @property
    def live_folder(self) -> Path:
        """`live_dir` as a path."""
        return Path(self.live_dir)

    def __post_init__(self):
        self._check_fixed()
        if not self.output_dir:
            self.output_dir: str | None = str(checkpoints_of(self.live_folder, self.user))
        self.max_steps = self.max_updates or FOREVER
        self.ignore_data_skip = True  # what was trained is known to the store, not by counting rows
        self.gradient_accumulation_steps = self._accumulation()
        if self.hint_selection is None:
            self.hint_selection = "longest"
        super().__post_init__()
        self.max_steps = self.max_updates or FOREVER

    def _check_fixed(self) -> None:
        wrong = [name for name, (value, _) in _FIXED.items() if getattr(self, name) not in (value, None)]
        if self.max_steps in (self.max_updates, FOREVER) and "max_steps" in wrong:  # its own copy
            wrong.remove("max_steps")
        if wrong:
            value, reason = _FIXED[wrong[0]]
            raise ValueError(f"`{wrong[0]}` must be {value!r} in live training: {reason}.")
        if str(getattr(self.save_strategy, "value", self.save_strategy)) != "steps" or self.save_steps != 1:
            raise ValueError(
                "Live training saves a checkpoint after every step (`save_strategy='steps'`, `save_steps=1`): it is "
                "the record of what was trained."
            )
        if self.save_total_limit is not None and self.save_total_limit < 2:
            raise ValueError(
                "`save_total_limit` must be at least 2: the last checkpoint stays until the next is whole."
            )
        if self.hint_source == "privileged_context":
            raise ValueError("`hint_source='privileged_context'` needs a dataset; hints come from the store here.")

    def _accumulation(self) -> int:
        """Forward passes of a process in one step.

        Raises:
            ValueError: If turns do not fill them evenly, or another number was asked for.
        """
        processes = int(os.environ.get("WORLD_SIZE", "1"))
        passes, rest = divmod(self.turns_per_step, processes * self.per_device_train_batch_size)
        if rest or not passes:
            raise ValueError(
                f"`turns_per_step={self.turns_per_step}` must be a multiple of `per_device_train_batch_size` "
                f"({self.per_device_train_batch_size}) times the number of processes ({processes})."
            )
        if self.gradient_accumulation_steps not in (1, passes):
            raise ValueError(
                f"`gradient_accumulation_steps` follows from `turns_per_step` and is {passes} here, not "
                f"{self.gradient_accumulation_steps}. Leave it out."
            )
        if self.steps_per_generation not in (None, passes):
            raise ValueError("`steps_per_generation` follows from `turns_per_step`. Leave it out.")
        return passes

    def _check_values(self) -> None:
        super()._check_values()
        self._check_bands()
