"""TRL's loop of tool calls, kept going whatever a policy writes or a tool does, and in step on all processes."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from trl import GRPOTrainer
from trl.trainer import grpo_trainer

from ..calls import exits_as_errors
from ..errors import ToolError
from ..types import valid_text
from .forward import replaced
from .in_step import rows_in_step
from .parsing import as_answer, parse_turn


class ToolLoopTrainer(GRPOTrainer):
    """`GRPOTrainer` whose tool loop takes any text of the policy's, and any answer of a tool.

    Each process samples as long as its own rows call tools, and those that are done sample along on filler rows; see
    `rows_in_step`.
    """

    _loops = False
    _sync_tool_dicts: list[dict[str, Callable]]
    _async_tool_dicts: list[dict[str, Callable]]

    def _generate(self, prompts):
        with replaced(grpo_trainer, "parse_response", parse_turn):
            return super()._generate(prompts)

    def _tool_call_loop(self, *args, **kwargs):
        for tools, guard in ((self._sync_tool_dicts, _guarded), (self._async_tool_dicts, _guarded_async)):
            for row in tools:
                row |= {name: guard(tool, self._is_vlm) for name, tool in row.items()}
        self._loops = True
        try:
            output = super()._tool_call_loop(*args, **kwargs)
        finally:
            self._loops = False
        while (rows := rows_in_step(self, 0)) is not None:
            self._generate_single_turn(self._fillers(rows), None, {}, 1)
        return output

    def _generate_single_turn(self, prompt_ids, images, *args, **kwargs):
        if not self._loops:
            return super()._generate_single_turn(prompt_ids, images, *args, **kwargs)
        own = len(prompt_ids)
        fillers = self._fillers((rows_in_step(self, own) or 0) - own)
        shown = None if images is None else [*images, *[None] * len(fillers)]
        ids, logprobs = super()._generate_single_turn([*prompt_ids, *fillers], shown, *args, **kwargs)
        return ids[:own], None if logprobs is None else logprobs[:own]

    def _fillers(self, rows: int) -> list[list[int]]:
        return [[self.eos_token_ids[0]]] * rows


def _guarded(tool: Callable, shows_images: bool) -> Callable:
    """The tool; what it gives can be shown to the policy, and what it raises, `exit()` too, can be told."""

    @functools.wraps(tool)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        with _told():
            return as_answer(tool(*args, **kwargs), shows_images=shows_images)

    return guarded


def _guarded_async(tool: Callable, shows_images: bool) -> Callable:
    """The same for an asynchronous tool."""

    @functools.wraps(tool)
    async def guarded(*args: Any, **kwargs: Any) -> Any:
        with _told():
            return as_answer(await tool(*args, **kwargs), shows_images=shows_images)

    return guarded


@contextmanager
def _told() -> Iterator[None]:
    """Raise errors as `ToolError`, whose text TRL answers the policy with."""
    try:
        with exits_as_errors():
            yield
    except Exception as error:
        try:
            text = valid_text(str(error))
        except Exception:
            text = ""
        raise ToolError(text or type(error).__name__) from error
