"""Messages in the middle of a sampled conversation, as token ids that are put in beside what was sampled.

What was sampled is never decoded and encoded again. The messages around it are rendered in small conversations of their
own, which differ from the real one in what stands before; everything behind the last difference of two such renderings
is what the template writes after a message, whatever the message says.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import takewhile
from typing import Any

from trl.data_utils import prepare_multimodal_messages

from ..errors import HintError
from ..types import Message, Messages

_USER: Message = {"role": "user", "content": "dummy"}
_MARKS = ("a", "b")


class ChatSuffixes:
    """Renders messages as ids with a trainer's chat template, template keywords and processing class.

    Args:
        trainer: A `GRPOTrainer`, fully made.
    """

    def __init__(self, trainer: Any):
        self._trainer = trainer
        self._turns = lru_cache(maxsize=64)(self._make_turns)  # bounded: a policy makes up names of tools

    def after_turn(self, messages: Messages) -> list[int]:
        """The ids that follow an assistant's turn which ended with its end-of-turn token, up to the next turn's start.

        What a template writes behind that token, such as a line break, comes first: the model never samples it.

        Args:
            messages: One or several, with the role `tool`, `user` or `system`. A tool's may carry its `name`.

        Returns:
            Their ids, the generation prompt included.

        Raises:
            ValueError: When the template cannot render such messages after an assistant's turn.
        """
        name = messages[0].get("name", "tool") if messages[0]["role"] == "tool" else None
        try:
            turns, last = self._turns(name)
            found = self._behind([(*turn, *messages) for turn in turns])
        except Exception as error:  # templates raise what they like
            roles = ", ".join(message["role"] for message in messages)
            raise ValueError(
                f"The chat template cannot put messages with the roles {roles} after an assistant's turn: {error}"
            ) from error
        closing = last[: _shared(last, found)]
        ends = [i for i, token in enumerate(closing) if token in self._trainer.eos_token_ids]
        # Without an end token in common, the template closes the last turn with another token than an earlier one (as
        # GPT-OSS does), or closes turns with text that is no end token.
        return found[ends[0] + 1 if ends else max(len(closing), 1) :]

    def hint_before_turn(self, context_ids: Sequence[int], text: str) -> list[int]:
        """The context of an assistant's turn with one more message of the user's, right before the turn.

        The given ids stay as they are up to the generation prompt, so that all turns of a trajectory share what came
        before them.

        Args:
            context_ids: The exact ids before the turn: a prompt, or a prompt with earlier turns and what followed them.
                They end with the generation prompt.
            text: What the message says, without control tokens: those would count as such.

        Returns:
            `context_ids` with the message's ids between the last message and the generation prompt.

        Raises:
            HintError: When the ids do not end with the generation prompt, or when the template takes no user message
                there.
        """
        context = list(context_ids)
        fitting = [(_shared(context[::-1], place.ids[::-1]), place) for place in self._places]
        fitting = [(shared, place) for shared, place in fitting if shared >= max(place.prompt_length, 1)]
        if not fitting:
            raise HintError(
                "The ids do not end with the chat template's generation prompt, so no hint can be put before it. Give "
                "the ids that the turn was sampled from."
            )
        _, place = max(fitting, key=lambda pair: pair[0])
        kept = len(place.ids) - place.prompt_length
        hinted = self._hinted(place, text)
        if hinted[:kept] != place.ids[:kept]:
            raise _no_place("it writes the message before it differently")
        return context[: len(context) - place.prompt_length] + hinted[kept:]

    def _make_turns(self, tool: str | None) -> tuple[list[Messages], list[int]]:
        """Two conversations whose last messages are turns of the assistant's that differ, and what follows such a turn.

        Args:
            tool: The tool that the turns call with different arguments; without one they say different things. Where a
                template shows no calls, they say different things, too.
        """
        turns: list[Messages] = []
        for mark in _MARKS:
            call = {"type": "function", "function": {"name": tool, "arguments": {"x": mark}}}
            says = {"content": "", "tool_calls": [call]} if tool else {"content": mark}
            turns.append((_USER, {"role": "assistant", **says}))
        if tool and self._render(turns[0], False) == self._render(turns[1], False):
            return self._turns(None)
        return turns, self._behind(turns, generation_prompt=False)

    @cached_property
    def _places(self) -> list["_Place"]:
        """What the template writes after a last message of each kind that it can show."""
        places = []
        for role in ("user", "tool", "system"):
            try:
                before, named = (self._turns("tool")[0][0], {"name": "tool"}) if role == "tool" else ((), {})
                pair = [(*before, {"role": role, **named, "content": mark}) for mark in _MARKS]
                ids, plain = self._behind(pair), self._behind(pair, generation_prompt=False)
            except Exception:  # such a message is not for this template
                continue
            places.append(_Place(pair[0], ids, len(ids) - _shared(ids, plain)))
        return places

    def _hinted(self, place: "_Place", text: str) -> list[int]:
        """What stands after the last message of a context when a message of the user's is added to it."""
        try:
            if place.hinted_start is None:
                pair = [(*place.messages[:-1], {**place.messages[-1], "content": mark}, _USER) for mark in _MARKS]
                place.hinted_start = self._render(pair[0])[: -len(self._behind(pair))]
            ids = self._render((*place.messages, {"role": "user", "content": text}))
        except Exception as error:
            raise _no_place(str(error)) from error
        start = len(place.hinted_start)
        if ids[:start] != place.hinted_start:
            raise _no_place("it reads this text as something other than a user's message")
        return ids[start:]

    def _behind(self, pair: Sequence[Messages], generation_prompt: bool = True) -> list[int]:
        """The ids behind the last place where two conversations differ."""
        first, second = (self._render(messages, generation_prompt) for messages in pair)
        if first == second:
            raise ValueError("it leaves such a message out")
        return first[len(first) - _shared(first[::-1], second[::-1]) :]

    def _render(self, messages: Messages, generation_prompt: bool = True) -> list[int]:
        trainer = self._trainer
        ids = trainer.processing_class.apply_chat_template(
            prepare_multimodal_messages(list(messages)) if trainer._is_vlm else list(messages),
            add_generation_prompt=generation_prompt,
            tokenize=True,
            chat_template=trainer.chat_template,
            return_dict=False,
            **trainer.chat_template_kwargs,
        )
        return ids[0] if trainer._is_vlm else ids  # processors answer with a batch


@dataclass
class _Place:
    """What a template writes after one kind of last message.

    Args:
        messages: A conversation that ends with such a message.
        ids: What follows the message's content, the generation prompt included.
        prompt_length: How many of them are the generation prompt.
        hinted_start: The ids of the conversation up to there when another message follows, once known.
    """

    messages: Messages
    ids: list[int]
    prompt_length: int
    hinted_start: list[int] | None = None


def _shared(first: Sequence[int], second: Sequence[int]) -> int:
    """How many ids two rows have in common at their beginning."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def _no_place(reason: str) -> HintError:
    return HintError(
        f"The chat template takes no message of the user's right before this turn: {reason.rstrip('.')}. Use "
        "`hint_placement='user'`, which appends the hint to the last user message of the prompt."
    )
