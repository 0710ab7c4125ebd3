"""The learner of the live system (OpenClaw-RL, arXiv 2603.10165): an adapter that follows what a user says of replies.

    accelerate launch recipes/live.py --config recipes/configs/live.yaml

`trl-openclaw serve` answers the user's requests meanwhile and writes down every turn; both share the folder `live_dir`.
As soon as `turns_per_step` turns have a verdict, they are trained in one step of Combine, the new version is checked,
and if it passes it is published: the gateway then answers with it.

Unlike the other recipes nothing is sampled here. The recorded token ids are trained, the recorded log-probs are the
old policy of the clipped loss, and a turn is trained once, however often the learner is stopped or killed.
"""

from trl import ModelConfig, TrlParser

from trl_openclaw.errors import OpenClawError
from trl_openclaw.live.learner import LiveConfig, LiveTrainer
from trl_openclaw.recipe import check_model_config, check_teacher_server, parse_recipe_args, policy_arguments


def make_parser(prog: str | None = None) -> TrlParser:
    """The parser of this recipe."""
    return TrlParser((LiveConfig, ModelConfig), prog=prog)


def main() -> None:
    """Learn until `max_updates` are made, or until the process is asked to end."""
    parser = make_parser()
    try:
        training_args, model_args = parse_recipe_args(parser)
        arguments = policy_arguments(training_args, model_args)
        check_teacher_server(training_args)
        check_model_config(model_args, training_args)
        trainer = LiveTrainer(**arguments)
        trainer.train()
    except (ValueError, OSError, OpenClawError) as error:  # of the system: a full disk, say
        parser.exit(2, f"{parser.prog}: error: {' '.join(str(error).split())}\n")
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()  # else threads that talk to the others may abort a process that ends


if __name__ == "__main__":
    main()
