"""Rewards and hindsight hints in one advantage (Combine of OpenClaw-RL, arXiv 2603.10165).

    accelerate launch recipes/combine.py --config recipes/configs/combine.yaml

The judge's score is the reward of the whole reply, its hint the source of a token-level advantage; a token gets
`rl_weight * r + opd_weight * A_t`. A reply trains if it has either signal.

Unlike GRPO the score is the advantage as it is (`reward_baseline: none`); `group` brings GRPO's baseline back.
"""

from trl_openclaw import CombineConfig, CombineTrainer
from trl_openclaw.recipe import make_recipe_parser, run_script


def make_parser(prog: str | None = None):
    """The parser of this recipe."""
    return make_recipe_parser(CombineConfig, prog)


if __name__ == "__main__":
    run_script(CombineTrainer, make_parser())
