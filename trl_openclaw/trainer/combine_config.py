"""Configuration of `CombineTrainer`."""

from dataclasses import dataclass, field
from typing import ClassVar

from ..rewards import JUDGE_REWARDS
from .opd_config import OPDConfig
from .settings import Number

REWARD_BASELINES = ("none", "group")

_WITHOUT_DISTILLATION: dict[str, tuple] = {
    "teacher": ("frozen",),
    "hint_source": ("auto", "none"),
    "opd_loss": ("sampled_token",),
    "reward_scale": (1,),
    "control": (None,),
    "logp_gap_clip": (1, None),
    "format_gap_clip": (None,),
    "topk": (4,),
    "max_hints": (3, 1),
}
"""What `opd_weight=0` leaves for the settings of a teacher."""


@dataclass
class CombineConfig(OPDConfig):
    r"""
    Configuration class for the [`CombineTrainer`]. Every field of [`OPDConfig`] is there.

    Args:
        rl_weight (`float`, *optional*, defaults to `1.0`):
            Weight of the reward in a token's advantage.
        opd_weight (`float`, *optional*, defaults to `1.0`):
            Weight of the distillation advantage. With `0` no hint is asked for and no teacher runs: Binary RL.
        reward_baseline (`str`, *optional*, defaults to `"none"`):
            `"none"`: the weighted sum of rewards is the row's advantage as it is, so equal scores still teach. A row
            whose reward is exactly 0 (neutral) then says nothing and is left out of the loss, as in OpenClaw-RL.
            `"group"`: TRL's group-relative advantage (`scale_rewards` applies). Equal scores in a group give 0, and
            such rows are left out of the loss as well. Where completions have several turns (tools, environments,
            rollout functions), each turn has a reward of its own, outcome plus the judge's, and is compared with the
            turn of the same step in the other completions of its prompt.
        judge_reward (`str`, *optional*):
            What the judge's votes come to as a reward: `"majority"` (-1, 0 or 1, none for a draw) or `"mean"` (of the
            valid votes). By default `"mean"` where completions have several turns, else `"majority"`.
    """

    _NUMBERS: ClassVar[dict[str, Number]] = {
        **OPDConfig._NUMBERS,
        "rl_weight": Number(at_least=0),
        "opd_weight": Number(at_least=0),
    }

    rl_weight: float = field(default=1.0, metadata={"help": "Weight of the reward in a token's advantage."})
    opd_weight: float = field(
        default=1.0, metadata={"help": "Weight of the distillation advantage; 0 is Binary RL without a teacher."}
    )
    reward_baseline: str = field(
        default="none",
        metadata={"help": "`none`: rewards are advantages as they are; `group`: TRL's group-relative advantages."},
    )
    judge_reward: str | None = field(
        default=None,
        metadata={"help": "The judge's votes as a reward: `majority`, or `mean`, the default with several turns."},
    )

    def _check_values(self) -> None:
        super()._check_values()
        if self.reward_baseline not in REWARD_BASELINES:
            raise ValueError(
                f"`reward_baseline` must be one of {', '.join(REWARD_BASELINES)}, got {self.reward_baseline!r}."
            )
        if self.judge_reward not in (None, *JUDGE_REWARDS):
            raise ValueError(f"`judge_reward` must be one of {', '.join(JUDGE_REWARDS)}, got {self.judge_reward!r}.")
        unused = [name for name, off in _WITHOUT_DISTILLATION.items() if getattr(self, name) not in off]
        if self.opd_weight == 0 and unused:
            raise ValueError(
                "With `opd_weight=0` no hint is asked for and no teacher runs; leave "
                f"{' and '.join(f'`{name}`' for name in unused)} alone."
            )
        if self.rl_weight == 0 and self.reward_baseline != "none":
            raise ValueError("With `rl_weight=0` no reward is trained; leave `reward_baseline` alone.")
        if self.rl_weight == 0 and self.judge_reward is not None:
            raise ValueError("With `rl_weight=0` no reward is trained; leave `judge_reward` alone.")
        if self.rl_weight == 0 and self.opd_weight == 0:
            raise ValueError("`rl_weight` and `opd_weight` are both 0: there is nothing to train on.")

    def _check_against_grpo(self) -> None:
        super()._check_against_grpo()
        if self.reward_baseline == "group" and self.num_generations == 1 and self.rl_weight > 0:
            raise ValueError(
                "`reward_baseline='group'` compares the completions of one prompt, but `num_generations=1`. Use "
                "`reward_baseline='none'` or more generations."
            )
        if self.reward_baseline == "none" and self.multi_objective_aggregation != "sum_then_normalize":
            raise ValueError(
                f"`multi_objective_aggregation={self.multi_objective_aggregation!r}` normalises within a group, which "
                "`reward_baseline='none'` does not do. Use `reward_baseline='group'`."
            )
