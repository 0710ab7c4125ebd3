"""`CombineTrainer`: rewards and distillation in one token advantage."""

from typing import Any

import torch
from accelerate.logging import get_logger
from torch.nn import functional as F

from ..judges.base import Judge
from .build_teacher import TeacherModel
from .combine_config import CombineConfig
from .opd_config import OPDConfig
from .opd_trainer import OPDTrainer
from .step_rewards import standardised

logger = get_logger(__name__)

HUGE_REWARD = 1e6
"""A weighted reward beyond this is a mistake of scale, not a judgement."""


class CombineTrainer(OPDTrainer):
    """
    Trainer for Combine, from [OpenClaw-RL](https://huggingface.co/papers/2603.10165): the advantage of a token is
    `rl_weight * r + opd_weight * A_t`, where `r` is the judge's score plus the weighted `reward_funcs`, and `A_t` is
    [`OPDTrainer`]'s. A turn trains if it has either signal.

    With tools, an environment or a rollout function, `r` is the reward of the turn's step: the outcome of its
    trajectory (the `reward_funcs` and the environment's `get_reward`) plus what the judge says of the step.

    With `opd_weight=0` this is Binary RL: no hint is asked for and no teacher runs.

    Args:
        reward_funcs (*optional*):
            Reward functions that add to the judge's score. With them, the judge may be left out.
        args ([`CombineConfig`], *optional*):
            Configuration.

    All other arguments are those of [`OPDTrainer`].
    """

    _tag_names = ["trl", "trl-openclaw", "combine"]
    _name = "Combine"
    config_class = CombineConfig
    _saw_huge_reward = False

    def _weights(self, args: OPDConfig) -> tuple[float, float]:
        assert isinstance(args, CombineConfig)
        return args.rl_weight, args.opd_weight

    def _judge_reward(self, args: OPDConfig, several_turns: bool) -> str:
        assert isinstance(args, CombineConfig)
        return args.judge_reward or ("mean" if several_turns else "majority")

    def _check_signals(self, judge: Judge | None, reward_funcs: list, teacher_model: TeacherModel | None) -> None:
        if not self.rl_weight:
            super()._check_signals(judge, reward_funcs, teacher_model)
        if not self.opd_weight and teacher_model is not None:
            raise ValueError(
                "With `opd_weight=0` no teacher runs, but a teacher model is named. Remove one of the two."
            )
        if self.rl_weight and judge is None and not reward_funcs:
            raise ValueError(
                "There is nothing to reward: pass a `judge` or `reward_funcs`, or use `OPDTrainer` to train on hints "
                "alone."
            )

    def step_advantages(self, batch: dict[str, Any], rewards_per_func: torch.Tensor) -> torch.Tensor:
        """Rewards as they are, or relative to the group; see [`OPDTrainer.step_advantages`].

        Raises:
            ValueError: On every rank, when a reward is infinite.
        """
        self._check_rewards(rewards_per_func)
        if not self.rl_weight:
            return super().step_advantages(batch, rewards_per_func)
        group = self.args.reward_baseline == "group"
        if group and not self.takes_several_turns:
            scored = ~self.own_rows(rewards_per_func).isnan().all(dim=1)
            return torch.where(scored, batch["advantages"], float("nan")).unsqueeze(1)
        rewards = self.step_rewards(rewards_per_func)
        return self.own_rows(self._standardised(rewards))[:, : rewards.size(1)] if group else rewards

    def _standardised(self, rewards: torch.Tensor) -> torch.Tensor:
        """The advantages of all ranks' steps, whose numbers may differ from rank to rank."""
        longest = torch.tensor([rewards.size(1)], device=rewards.device)
        width = int(self.accelerator.gather(longest).max())
        padded = F.pad(rewards, (0, width - rewards.size(1)), value=float("nan"))
        size = self.num_generations if self.mode == "train" else self.num_generations_eval
        return standardised(self.accelerator.gather(padded), size, self.scale_rewards)

    def _check_rewards(self, rewards: torch.Tensor) -> None:
        """Refuse infinite rewards, and point out those that drown all others, once."""
        weighted = rewards * self.reward_weights.to(rewards)
        infinite = self._givers(rewards.isinf() | weighted.isinf())
        if infinite:
            raise ValueError(f"Infinite rewards from {infinite}: one step would turn all weights into NaN.")
        huge = self._givers(weighted.abs() > HUGE_REWARD)
        if huge and self.rl_weight and self.args.reward_baseline == "none" and not self._saw_huge_reward:
            self._saw_huge_reward = True
            logger.warning(
                f"Rewards of more than {HUGE_REWARD:g} from {huge}: with `reward_baseline='none'` they are advantages "
                "as they are, and drown every other signal of the batch. Scale them, give them a smaller "
                "`reward_weights`, or use `reward_baseline='group'`."
            )

    def _givers(self, entries: torch.Tensor) -> str:
        """Names of the reward functions with an entry `(world * B, F)`."""
        found = entries.any(dim=0).tolist()
        return ", ".join(name for name, hit in zip(self.reward_func_names, found, strict=True) if hit)
