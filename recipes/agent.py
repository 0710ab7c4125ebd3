"""An agent with tools: a verdict, a hint and a reward for every turn (OpenClaw-RL, arXiv 2603.10165).

    accelerate launch recipes/agent.py --config recipes/configs/agent.yaml

The policy calls tools of an environment, here one that runs its code against unit tests in a sandbox. What a tool
answers is the next state of the turn that called it: it says whether the turn was right, and how it should have been.
The reward of a step is the outcome of the trajectory plus the judge's score of the step, and each turn is re-scored
after a hint of its own.

Unlike GRPO with tools every turn has an advantage of its own, and every token of it; the tools' tokens have none.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datasets import Features, Json, List
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from trl import ModelConfig, chat_template_utils

from trl_openclaw import CombineConfig, CombineTrainer
from trl_openclaw.environments import CodeEnvironment, ShellEnvironment, wrap_environment
from trl_openclaw.environments.code import check_tests
from trl_openclaw.recipe import FeedbackArguments, load_object, make_recipe_parser, run_script

CHATML = ("<|im_start|>", "<|im_end|>")
LLAMA = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
TOOL_TEMPLATES = {
    "qwen2_5": CHATML,
    "qwen3": CHATML,
    "qwen3_instruct_2507": CHATML,
    "qwen3_5_nothink": CHATML,
    "llama3_1": LLAMA,
    "llama3_2": LLAMA,
}
"""TRL's templates that a model without one may be given, and the tokens that its tokenizer must have for it."""

ENVIRONMENTS = {"code": CodeEnvironment, "shell": ShellEnvironment}


@dataclass
class AgentArguments(FeedbackArguments):
    """
    Script arguments of this recipe: those of the others, and where the agent acts.

    Args:
        environment (`str`, *optional*, defaults to `"code"`):
            `"code"` (unit tests), `"shell"` (commands in a scratch directory), or a dotted path: to an environment
            class, which is put into a process of its own, or to a function that makes an environment.
        tool_template (`str`, *optional*):
            The chat template of TRL's that the model is given, for a model whose own knows no tools. Without it the
            model keeps its own.
        opening (`str`, *optional*):
            A JSON file with messages to put before every prompt, such as an example of what a good agent does.
    """

    environment: str = field(default="code", metadata={"help": "`code`, `shell`, or a dotted path."})
    tool_template: str | None = field(
        default=None, metadata={"help": f"A template that knows tools: {', '.join(TOOL_TEMPLATES)}."}
    )
    opening: str | None = field(default=None, metadata={"help": "A JSON file with messages to put before each prompt."})


def make_parser(prog: str | None = None):
    """The parser of this recipe."""
    return make_recipe_parser(CombineConfig, prog, AgentArguments)


def complete(script_args: AgentArguments, model_args: ModelConfig, arguments: dict[str, Any]) -> dict[str, Any]:
    """The trainer's arguments with environment, tokenizer and opening.

    Raises:
        ValueError: If one of them cannot be had, or the data does not suit the environment.
        SandboxError: If this machine cannot hold the sandbox.
    """
    factory = build_environment(script_args.environment)
    opening = read_opening(script_args.opening)
    datasets = {name: arguments[name] for name in ("train_dataset", "eval_dataset") if arguments[name] is not None}
    if script_args.environment == "code":
        for dataset in datasets.values():
            check_tasks(dataset)
    datasets = {name: with_opening(dataset, opening) for name, dataset in datasets.items()}
    tokenizer = build_tokenizer(model_args, arguments["args"], script_args.tool_template)
    return {**arguments, **datasets, "environment_factory": factory, "processing_class": tokenizer}


def build_environment(name: str) -> Callable[[], Any]:
    """What makes the environment that `name` stands for; tried once, so that what this machine lacks is said now."""
    if name in ENVIRONMENTS:
        factory = ENVIRONMENTS[name]
        factory()
        return factory
    found = load_object(name, "environment", ENVIRONMENTS, classes=True)
    return wrap_environment(found) if isinstance(found, type) else found


def check_tasks(dataset: Any) -> None:
    """Refuse data without `tests`, or with tests that cannot be run, naming the row."""
    columns = dataset.column_names
    if columns is None:
        return  # a stream, whose rows the environment checks one by one
    if "tests" not in columns:
        raise ValueError(
            f"`environment: code` needs a column `tests` (Python text with assertions); the data set has "
            f"{', '.join(map(repr, columns))}."
        )
    for row, tests in enumerate(dataset["tests"]):
        try:
            check_tests(tests)
        except ValueError as error:
            raise ValueError(f"Row {row} of the data set: {error}") from None


def read_opening(path: str | None) -> list[dict[str, Any]]:
    """The messages in a JSON file; a recipe's own file is found from any working directory."""
    if path is None:
        return []
    shipped = Path(__file__).resolve().parent.parent / path
    file = Path(path) if Path(path).is_file() else shipped
    try:
        opening = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"`opening: {path}` cannot be read: {error}") from None
    if not isinstance(opening, list) or not all(isinstance(message, dict) for message in opening):
        raise ValueError(f"`opening: {path}` must hold a list of messages.")
    return opening


def with_opening(dataset: Any, opening: list[dict[str, Any]]) -> Any:
    """The data with `opening` before every prompt."""
    if not opening:
        return dataset
    # As JSON: else each message would get `tool_calls` and all else that another has, which TRL's tables do not expect.
    features = Features({**dataset.features, "prompt": List(Json())}) if dataset.features else None
    return dataset.map(lambda row: {"prompt": [*opening, *row["prompt"]]}, features=features)


def build_tokenizer(model_args: ModelConfig, args: CombineConfig, template: str | None) -> PreTrainedTokenizerBase:
    """The model's tokenizer, with a template in which it can call tools and TRL can read the calls."""
    if template is not None and template not in TOOL_TEMPLATES:
        raise ValueError(f"`tool_template` must be one of {', '.join(TOOL_TEMPLATES)}, got {template!r}.")
    name = model_args.model_name_or_path
    tokenizer = AutoTokenizer.from_pretrained(
        name, revision=model_args.model_revision, trust_remote_code=args.trust_remote_code, padding_side="left"
    )
    if template is not None:
        missing = [token for token in TOOL_TEMPLATES[template] if token not in tokenizer.get_vocab()]
        if missing:
            raise ValueError(
                f"`tool_template: {template}` writes {', '.join(missing)}, which the tokenizer of {name} does not have."
            )
        tokenizer.chat_template = getattr(chat_template_utils, f"{template}_chat_template")
    elif not chat_template_utils.supports_tool_calling(tokenizer):
        raise ValueError(
            f"The chat template of {name} knows no tools. Give it one with `tool_template`: "
            f"{', '.join(TOOL_TEMPLATES)}."
        )
    if not reads_calls(tokenizer):
        raise ValueError(
            f"TRL cannot read the tool calls in the chat template of {name}. Give it another with `tool_template`: "
            f"{', '.join(TOOL_TEMPLATES)}."
        )
    return tokenizer


def reads_calls(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether TRL knows how to read a reply of this tokenizer's template."""
    if getattr(tokenizer, "response_template", None) or getattr(tokenizer, "response_schema", None):
        return True
    try:
        chat_template_utils.add_response_schema(tokenizer)
    except ValueError:
        return False
    return True


if __name__ == "__main__":
    run_script(CombineTrainer, make_parser(), complete=complete)
