"""Judges by name, as config files and command lines give them, and anything else by its dotted path."""

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any, Literal, Protocol, cast

from ..calls import is_async_callable
from .base import Judge
from .llm import LLMJudge
from .local import LocalJudge
from .outcome import OutcomeJudge
from .rule import RuleJudge


class JudgeArguments(Protocol):
    """What is read of the arguments of a recipe or of the gateway."""

    judge: str | None
    judge_model: str | None
    judge_base_url: str
    judge_api_key_env: str
    judge_num_votes: int
    judge_question: Literal["combined", "separate"]
    judge_max_tokens: int
    judge_timeout: float
    judge_extra_body: dict | str | None


def build_judge(args: JudgeArguments) -> Judge | None:
    """The judge that `args.judge` names, or `None`."""
    if args.judge_extra_body and args.judge != "llm":
        raise ValueError(
            f"`judge_extra_body` goes to a server, and `judge: {args.judge}` asks none: use `judge: llm`, or empty it "
            "(`--judge_extra_body {}`)."
        )
    if args.judge is None:
        return None
    if args.judge in JUDGES:
        return JUDGES[args.judge](args)
    judge = load_object(args.judge, "judge", JUDGES)
    return judge if is_async_callable(judge) else RuleJudge(judge)


def _llm_judge(args: JudgeArguments) -> Judge:
    if args.judge_model is None:
        raise ValueError("`judge: llm` needs `judge_model`, the name of the model on the server.")
    return LLMJudge(
        args.judge_model,
        args.judge_base_url,
        api_key=os.environ.get(args.judge_api_key_env),
        num_votes=args.judge_num_votes,
        question=args.judge_question,
        max_tokens=args.judge_max_tokens,
        timeout=args.judge_timeout,
        extra_body=cast(dict | None, args.judge_extra_body),  # parsed when the arguments were made
    )


def _local_judge(args: JudgeArguments) -> Judge:
    if args.judge_model is None:
        raise ValueError("`judge: local` needs `judge_model`, the path of a model.")
    return LocalJudge(
        args.judge_model,
        num_votes=args.judge_num_votes,
        question=args.judge_question,
        max_tokens=args.judge_max_tokens,
    )


JUDGES: dict[str, Callable[[JudgeArguments], Judge]] = {
    "llm": _llm_judge,
    "local": _local_judge,
    "outcome": lambda args: OutcomeJudge(),
}
"""Judges by the name that a config file takes. Anything else is a dotted path."""


def load_object(path: str, what: str, names: Any, *, classes: bool = False) -> Any:
    """Import `package.module.attribute`, with the working directory on the path as in TRL's own scripts.

    Args:
        path: The dotted path.
        what: The setting that holds it.
        names: What else that setting may be.
        classes: Whether it may name a class.

    Raises:
        ValueError: If there is no such thing, or it is nothing to call.
    """
    module, _, attribute = path.rpartition(".")
    if not module:
        raise ValueError(
            f"`{what}` is one of {', '.join(names)}, or a dotted path such as `my_module.my_{what}`; got {path!r}."
        )
    sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, TypeError) as error:
        raise ValueError(f"`{what}: {path}` cannot be imported: {error}") from error
    finally:
        sys.path.remove(os.getcwd())
    if (isinstance(found, type) and not classes) or not callable(found):
        raise ValueError(f"`{what}: {path}` is {found!r}; name a function, or an object that can be called.")
    return found
