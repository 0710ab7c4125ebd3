"""On-policy distillation from hindsight hints (OpenClaw-RL, arXiv 2603.10165).

    accelerate launch recipes/opd.py --config recipes/configs/demo.yaml

The policy answers, a next state follows, a judge draws a hint from it, and the policy as it was at the start, now
knowing the hint, re-scores the very tokens that were sampled. The clipped log-prob difference is the advantage of each
token. With a `privileged_context` column and no judge this is OPCD; with `teacher_model_name_or_path` and neither it is
classic on-policy distillation.

Unlike GRPO there is no reward and no group: one completion per prompt is enough.
"""

from trl_openclaw import OPDConfig, OPDTrainer
from trl_openclaw.recipe import make_recipe_parser, run_script


def make_parser(prog: str | None = None):
    """The parser of this recipe."""
    return make_recipe_parser(OPDConfig, prog)


if __name__ == "__main__":
    run_script(OPDTrainer, make_parser())
