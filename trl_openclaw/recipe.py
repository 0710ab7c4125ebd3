"""What the recipes share: arguments for feedback, and how names in a config file become judges and next states."""

import asyncio
import importlib
import importlib.util
import json
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from trl import (
    DatasetMixtureConfig,
    ModelConfig,
    ScriptArguments,
    TrlParser,
    get_dataset,
    get_peft_config,
    get_quantization_config,
)

from .calls import is_async_callable
from .config_file import read_config_file
from .cores import available_cores
from .errors import JudgeUnavailableError, SandboxError
from .judges import Judge, LLMJudge
from .judges.named import build_judge, load_object
from .next_states import PERSONAS, FunctionNextState, NextStateProvider, UserSimulator
from .report import HeldOutReport
from .trainer import OPDConfig, OPDTrainer


@dataclass
class FeedbackArguments(ScriptArguments):
    """
    Script arguments of the recipes: the dataset, who replies, and who judges.

    Args:
        judge (`str`, *optional*):
            `"llm"` (an OpenAI-compatible server), `"local"` (a model in this process), `"outcome"` (the next state
            knows whether it is satisfied), or a dotted path to a judge or to a function of a turn.
        judge_model (`str`, *optional*):
            Model name on the judge's server, or path of the local judge.
        judge_base_url (`str`, *optional*, defaults to `"http://localhost:8000/v1"`):
            Address of the judge's server.
        judge_api_key_env (`str`, *optional*, defaults to `"OPENAI_API_KEY"`):
            Environment variable that holds the server's key.
        judge_num_votes (`int`, *optional*, defaults to `3`):
            Votes per turn.
        judge_question (`str`, *optional*, defaults to `"combined"`):
            `"combined"` asks for score and hint at once, `"separate"` in two questions.
        judge_max_tokens (`int`, *optional*, defaults to `512`):
            Room for one answer of the judge.
        judge_timeout (`float`, *optional*, defaults to `60.0`):
            Seconds that one request may take.
        judge_extra_body (`dict` or `str`, *optional*):
            More fields for each request to the judge's server, the simulated user's included, such as
            `{"chat_template_kwargs": {"enable_thinking": false}}`. As text it is JSON.
        next_state (`str`, *optional*):
            The name of a scripted persona, `"simulator"` (the judge's model plays `persona`), or a dotted path to a
            provider or to a function of turn and row. Without it the dataset column `next_state` is read.
        persona (`str`, *optional*):
            Whom the simulator plays, in words.
        report_dir (`str`, *optional*):
            Write `summary.json`, a learning curve and sample replies there; needs an eval dataset.
    """

    judge: str | None = field(default=None, metadata={"help": "`llm`, `local`, `outcome`, or a dotted path."})
    judge_model: str | None = field(default=None, metadata={"help": "Model name on the server, or a local path."})
    judge_base_url: str = field(
        default="http://localhost:8000/v1", metadata={"help": "Address of an OpenAI-compatible server."}
    )
    judge_api_key_env: str = field(
        default="OPENAI_API_KEY", metadata={"help": "Environment variable that holds the server's key."}
    )
    judge_num_votes: int = field(default=3, metadata={"help": "Votes per turn."})
    judge_question: Literal["combined", "separate"] = field(
        default="combined", metadata={"help": "`combined` or `separate`."}
    )
    judge_max_tokens: int = field(default=512, metadata={"help": "Room for one answer of the judge."})
    judge_timeout: float = field(default=60.0, metadata={"help": "Seconds that one request may take."})
    judge_extra_body: dict | str | None = field(
        default=None, metadata={"help": "More fields for each request to the judge's server, as JSON."}
    )
    next_state: str | None = field(default=None, metadata={"help": "A persona's name, `simulator`, or a dotted path."})
    persona: str | None = field(default=None, metadata={"help": "Whom the simulator plays, in words."})
    report_dir: str | None = field(default=None, metadata={"help": "Write a before-and-after report there."})

    def __post_init__(self):
        body = self.judge_extra_body
        if isinstance(body, str):
            try:
                body = json.loads(body)
            except ValueError as error:
                raise ValueError(f"`judge_extra_body` is not JSON: {error}. Got {body!r}.") from error
        if body is not None and not isinstance(body, dict):
            raise ValueError(f"`judge_extra_body` must hold fields and their values, got {body!r}.")
        self.judge_extra_body = body


def make_recipe_parser(
    config_class: type[OPDConfig],
    prog: str | None = None,
    script_class: type[FeedbackArguments] = FeedbackArguments,
) -> TrlParser:
    """The parser of a recipe: feedback, training, model and dataset arguments."""
    return TrlParser((script_class, config_class, ModelConfig, DatasetMixtureConfig), prog=prog)


def run_script(
    trainer_class: type[OPDTrainer],
    parser: TrlParser,
    check: Callable[[Any], None] | None = None,
    complete: Callable[[Any, Any, dict[str, Any]], dict[str, Any]] | None = None,
) -> OPDTrainer:
    """What a recipe does when it is run: read the arguments, build the trainer, train, save and push.

    What is wrong with the arguments, or with what they name, ends it with one line and exit code 2, before a model is
    loaded.

    Args:
        trainer_class: The recipe's trainer.
        parser: The recipe's parser.
        check: Called with the training arguments; raises `ValueError` for what the recipe does not stand for.
        complete: Called with script arguments, model arguments and the trainer's arguments; returns the latter with
            what the recipe adds to them.
    """
    try:
        script_args, training_args, model_args, dataset_args = parse_recipe_args(parser)
        if check is not None:
            check(training_args)
        arguments = trainer_arguments(script_args, training_args, model_args, dataset_args)
        if complete is not None:
            arguments = complete(script_args, model_args, arguments)
    except (ValueError, JudgeUnavailableError, SandboxError) as error:
        parser.exit(2, f"{parser.prog}: error: {' '.join(str(error).split())}\n")
    trainer = train(trainer_class(**arguments), script_args)
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()  # else threads that talk to the others may abort a process that ends
    return trainer


def parse_recipe_args(parser: TrlParser) -> tuple[Any, ...]:
    """The arguments of this process, with those of its `--config` file.

    The file may also hold options of `accelerate launch`, which `trl-openclaw` passes on.

    Raises:
        ValueError: If the file cannot be read or holds a setting that nobody reads, the command line an unknown
            argument, or a setting a value that cannot be.
    """
    from accelerate.commands.launch import launch_command_parser

    _check_config_file(sys.argv[1:])
    try:
        *parsed, from_file, from_command = parser.parse_args_and_config(
            return_remaining_strings=True, separate_remaining_strings=True
        )
    except ValueError as error:
        if "support bf16" not in str(error):
            raise
        raise ValueError(
            "`bf16`, which is on unless `fp16` is, needs a GPU that computes in it, and there is none here. On a CPU "
            "pass `--bf16 false`, or `--use_cpu true` to keep it."
        ) from error
    launcher = {option for action in launch_command_parser()._actions for option in action.option_strings}
    known = launcher | {"--accelerate_config"}
    unknown = [option for option in from_file[::2] if option not in known] + list(from_command)
    if unknown:
        raise ValueError(f"Nobody reads {', '.join(unknown)}: correct or remove it.")
    return tuple(parsed)


def trainer_arguments(
    script_args: FeedbackArguments,
    training_args: OPDConfig,
    model_args: ModelConfig,
    dataset_args: DatasetMixtureConfig,
) -> dict[str, Any]:
    """The trainer that the arguments describe, as its arguments; the cheapest checks come first.

    Raises:
        ValueError: If the arguments name something that is not there, or contradict each other.
        JudgeUnavailableError: If the judge's server does not answer.
        TeacherError: If the teacher's server does not, or cannot teach.
    """
    policy = policy_arguments(training_args, model_args, script_args.report_dir)
    judge = build_judge(script_args)
    next_state = build_next_state(script_args, judge)
    if isinstance(judge, LLMJudge) and training_args.process_index == 0:  # the other processes end with this one
        asyncio.run(judge.check())
    check_teacher_server(training_args)
    dataset = _load_dataset(script_args, dataset_args)
    evaluates = training_args.eval_strategy != "no" or training_args.eval_on_start
    arguments = {
        **policy,
        "judge": judge,
        "next_state": next_state,
        "train_dataset": _get_split(dataset, script_args.dataset_train_split),
        "eval_dataset": _get_split(dataset, script_args.dataset_test_split) if evaluates else None,
    }
    check_model_config(model_args, training_args)
    return arguments


def policy_arguments(
    training_args: OPDConfig, model_args: ModelConfig, report_dir: str | None = None
) -> dict[str, Any]:
    """The policy that the arguments describe, as arguments of a trainer.

    Raises:
        ValueError: If a package or a folder that is named is not there.
    """
    # TRL 1.16 reads this property under its old name, which is no concern of whoever runs a recipe.
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
    _use_all_cores(training_args)
    _check_extras(report_dir, training_args, model_args)
    _check_model_path(model_args.model_name_or_path)
    training_args.model_init_kwargs = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
        **(training_args.model_init_kwargs or {}),
    }
    return {
        "model": model_args.model_name_or_path,
        "args": training_args,
        "peft_config": get_peft_config(model_args),
        "quantization_config": get_quantization_config(model_args),
    }


def check_teacher_server(training_args: OPDConfig) -> None:
    """Ask a teacher on a server, where there is one, whether it can teach.

    Raises:
        TeacherError: If it does not answer, or cannot.
    """
    teacher = training_args.server_teacher()
    if teacher is not None and training_args.process_index == 0:  # the other processes end with this one
        teacher.check()


def train(trainer: OPDTrainer, script_args: FeedbackArguments) -> OPDTrainer:
    """Train, report, save and push."""
    training_args = trainer.args
    if script_args.report_dir is not None:
        trainer.add_callback(HeldOutReport(trainer, script_args.report_dir))
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model(training_args.output_dir)
    data = _find_dataset(script_args.dataset_name) if script_args.dataset_name else None
    trainer.create_model_card(dataset_name=data)
    trainer.accelerator.print(f"Model saved to {training_args.output_dir}.")
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=data)
    return trainer


def build_next_state(args: FeedbackArguments, judge: Judge | None) -> NextStateProvider | None:
    """The next-state provider that `args.next_state` names, or `None`."""
    if args.next_state is None:
        return None
    if args.next_state in PERSONAS:
        return PERSONAS[args.next_state]
    if args.next_state == "simulator":
        client = getattr(judge, "client", None)
        if client is None or args.persona is None:
            raise ValueError("`next_state: simulator` needs `persona`, and a judge of kind `llm` or `local` to ask.")
        return UserSimulator(client, args.persona)
    provider = load_object(args.next_state, "next_state", [*PERSONAS, "simulator"])
    return provider if is_async_callable(provider) else FunctionNextState(provider)


def _use_all_cores(args: OPDConfig) -> None:
    """On CPU, share all cores among the processes: `accelerate launch` gives a process one thread if nobody asks."""
    if args.device.type == "cpu" and os.environ.get("OMP_NUM_THREADS", "1") == "1":
        torch.set_num_threads(max(available_cores() // max(args.world_size, 1), 1))


def _check_config_file(argv: list[str]) -> None:
    if "--config" in argv:
        value = argv[argv.index("--config") + 1 :][:1]
        if not value:
            raise ValueError("--config needs a value.")
        read_config_file(value[0])


def _check_extras(report_dir: str | None, training_args: OPDConfig, model_args: ModelConfig) -> None:
    """Name the extra to install for a setting whose package is missing."""
    quantized = model_args.load_in_4bit or model_args.load_in_8bit
    for setting, used, package, extra in (
        ("use_peft", model_args.use_peft, "peft", "peft"),
        ("load_in_4bit` or `load_in_8bit", quantized, "bitsandbytes", "quantization"),
        ("use_vllm", training_args.use_vllm, "vllm", "vllm"),
        ("report_dir", report_dir, "matplotlib", "demo"),
    ):
        if used and importlib.util.find_spec(package) is None:
            raise ValueError(f"`{setting}` needs {package}, which is missing: pip install 'trl-openclaw[{extra}]'")


def _check_model_path(path: str | None) -> None:
    if path is None:
        raise ValueError("`model_name_or_path` is missing: a Hub name or a folder.")
    if (path.count("/") > 1 or path.startswith((".", "/"))) and not Path(path).is_dir():  # no Hub name looks like that
        raise ValueError(f"`model_name_or_path`: there is no folder {path}. `make model` fetches the demo's model.")


def check_model_config(model_args: ModelConfig, training_args: OPDConfig) -> None:
    """Load the model's small config file, so that a missing model is noticed before everything else is set up."""
    from transformers import AutoConfig

    try:
        AutoConfig.from_pretrained(
            model_args.model_name_or_path,
            revision=model_args.model_revision,
            trust_remote_code=training_args.trust_remote_code,
        )
    except (OSError, ValueError) as error:
        raise ValueError(f"`model_name_or_path: {model_args.model_name_or_path}` cannot be loaded: {error}") from error


def _load_dataset(script_args: FeedbackArguments, dataset_args: DatasetMixtureConfig) -> Any:
    from datasets import load_dataset

    if dataset_args.datasets:
        return get_dataset(dataset_args)
    if not script_args.dataset_name:
        raise ValueError("Pass `dataset_name` (a Hub name, or a folder with train and test files) or `datasets`.")
    name = _find_dataset(script_args.dataset_name)
    try:
        return load_dataset(name, name=script_args.dataset_config, streaming=script_args.dataset_streaming)
    except OSError as error:  # nothing there, or no way to the Hub
        raise ValueError(f"`dataset_name: {script_args.dataset_name}` cannot be loaded: {error}") from error


def _find_dataset(name: str) -> str:
    """A recipe's own data is found from any working directory."""
    shipped = Path(sys.argv[0]).resolve().parent.parent / name
    return str(shipped) if not Path(name).exists() and shipped.is_dir() else name


def _get_split(dataset: Any, split: str) -> Any:
    if split not in dataset:
        raise ValueError(f"The dataset has no split {split!r}, only {', '.join(dataset)}.")
    return dataset[split]
