"""Binary RL: the judge's +1 / -1 is the advantage of every token (OpenClaw-RL, arXiv 2603.10165).

    accelerate launch recipes/rl.py --config recipes/configs/rl.yaml

This is Combine with `opd_weight: 0`: no hint is asked for and no teacher runs. Unlike GRPO there is no group baseline
(`reward_baseline: group` brings it back), so one completion per prompt is enough. A neutral score says nothing and is
left out of the loss.
"""

from trl_openclaw import CombineConfig, CombineTrainer
from trl_openclaw.recipe import make_recipe_parser, run_script


def make_parser(prog: str | None = None):
    """The parser of this recipe, with `opd_weight` 0 by default."""
    parser = make_recipe_parser(CombineConfig, prog)
    parser.set_defaults(opd_weight=0.0)
    return parser


def check(args: CombineConfig) -> None:
    """Refuse hints."""
    if args.opd_weight:
        raise ValueError(f"`opd_weight={args.opd_weight}` is recipes/combine.py; here it is 0.")


if __name__ == "__main__":
    run_script(CombineTrainer, make_parser(), check)
