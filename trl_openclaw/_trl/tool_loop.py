"""TRL's loop of tool calls, kept going whatever a policy writes or a tool does, and in step on all processes."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from trl import GRPOTrainer
from trl.trainer import grpo_trainer

from ..calls import exits_as_errors
from ..errors import ToolError
from ..types import valid_text
from .forward import replaced
from .parsing import as_answer, parse_turn


class ToolLoopTrainer(GRPOTrainer):
    """`GRPOTrainer` whose tool loop takes any text of the policy's, and any answer of a tool.

    Each process samples as long as its own rows call tools. Where processes share a model they must sample equally
    often, so those that are done sample along on a filler row.
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
        while self._anyone_samples(False):
            self._generate_single_turn([[self.eos_token_ids[0]]], None, {}, 1)
        return output

    def _generate_single_turn(self, *args, **kwargs):
        if self._loops:
            self._anyone_samples(True)
        return super()._generate_single_turn(*args, **kwargs)

    def _anyone_samples(self, samples: bool) -> bool:
        """Whether any process is about to sample. A collective."""
        if self.accelerator.num_processes == 1:
            return samples
        flags = torch.tensor([samples], device=self.accelerator.device)
        return bool(self.accelerator.gather(flags).any())


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
