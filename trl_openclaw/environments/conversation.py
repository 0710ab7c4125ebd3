"""Conversations: a user answers each turn of the policy, and sampling goes on with what the user said."""

import copy
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from accelerate.utils import gather_object

from .._trl import SeamGRPOTrainer
from .._trl.sampling import SampledTurn, context_window, sample_turns
from .._trl.suffixes import ChatSuffixes
from ..calls import callable_name, is_async_callable
from ..feedback import collect_feedback
from ..hints import without_special_tokens
from ..next_states.base import NextStateProvider
from ..types import Feedback, Message, Messages, NextState, ToolResult, Turn

logger = logging.getLogger(__name__)

Ending = Literal["max_turns", "cut", "full", "satisfied", "silent", "failed"]
"""Why a conversation ended: the number of turns was reached; a turn was cut at the length limit; the user's message
would leave no room for another turn; the user was satisfied, had nothing to say, or failed to answer."""

ENDINGS: tuple[Ending, ...] = get_args(Ending)


class ConversationRollout:
    """A `rollout_func` that leads a conversation: the user answers each of the policy's turns, up to `max_turns`.

    ```python
    trainer = OPDTrainer(..., rollout_func=ConversationRollout(make_persona("one-sentence"), max_turns=4))
    ```

    A completion is the whole conversation after the prompt, with `env_mask` 0 on the user's tokens: the sampled ids
    stay as they were sampled, and the user's messages are put between them as the chat template writes them. The user
    is asked after the last turn as well, so that every turn has the reply that followed it; that last reply is not part
    of the completion.

    TRL shows a `rollout_func` the prompts alone: the user gets `row={}`, whatever columns the dataset has. What it
    writes loses the tokenizer's control tokens, which could otherwise open a turn of the policy's. A user that fails or
    takes too long ends its own conversation and no other.

    It needs one of this package's trainers (not a bare `GRPOTrainer`) and conversational prompts of text, and cannot be
    combined with `tools`. The metrics `conversation/turns` and `conversation/ended/<ending>` (see `ENDINGS`) tell how
    long the conversations were and which share of them ended how.

    Args:
        user ([`~trl_openclaw.next_states.NextStateProvider`]):
            A `UserSimulator`, a `Persona`, or anything else that gives next states.
        max_turns (`int`, *optional*, defaults to `4`):
            The most turns of the policy in one conversation.
        stop_when_satisfied (`bool`, *optional*, defaults to `True`):
            Whether a conversation ends when the user's `NextState` is `satisfied`.
        max_concurrency (`int`, *optional*, defaults to `32`):
            How many users are asked at once, in each process.
        timeout (`float`, *optional*, defaults to `600.0`):
            Seconds for all users' answers to one turn each.

    Raises:
        TypeError: When the user is a plain function.
        ValueError: When a number is not positive.
    """

    def __init__(
        self,
        user: NextStateProvider,
        *,
        max_turns: int = 4,
        stop_when_satisfied: bool = True,
        max_concurrency: int = 32,
        timeout: float = 600.0,
    ):
        if not is_async_callable(user):
            raise TypeError(f"`user` must be an async callable, got {user!r}. Wrap a function in `FunctionNextState`.")
        limits = {"max_turns": max_turns, "max_concurrency": max_concurrency, "timeout": timeout}
        for name, value in limits.items():
            if value <= 0:
                raise ValueError(f"`{name}` must be positive, got {value}.")
        self.user, self.max_turns, self.stop_when_satisfied = user, max_turns, stop_when_satisfied
        self.max_concurrency, self.timeout = max_concurrency, timeout
        self._warned = False

    def __call__(self, prompts: list[Messages], trainer: Any) -> dict[str, Any]:
        """Lead one conversation for each prompt. Called by TRL, on every process alike.

        Returns:
            For each prompt, `prompt_ids`, `completion_ids`, `env_mask` (1 for what was sampled), `logprobs` (0 for what
            was not; `None` where the sampler tells none), and `trajectory`: the messages after the prompt, the
            assistant's and the user's in turn. The user's content is a [`~trl_openclaw.types.ToolResult`], a text that
            keeps `satisfied` and `info` of the next state it was.

        Raises:
            TypeError: When the trainer is not one of this package's.
            ValueError: When prompts are plain text or hold images, or the trainer has tools.
        """
        _check(prompts, trainer)
        suffixes, window = ChatSuffixes(trainer), context_window(trainer)
        suffixes.after_turn([{"role": "user", "content": "dummy"}])  # raises where the template has no place for it
        ids = trainer.tokenize_prompts(prompts)
        talks = [
            _Talk(prompt, list(row), trainer.max_completion_length, window)
            for prompt, row in zip(prompts, ids, strict=True)
        ]
        for step in range(self.max_turns):
            going_on = [talk for talk in talks if talk.ending is None]
            turns = sample_turns(trainer, [talk.context for talk in going_on], [talk.room for talk in going_on])
            if turns is None:  # on all processes
                break
            for talk, turn in zip(going_on, turns, strict=True):
                talk.take_turn(turn)
            going_on = [talk for talk in going_on if talk.ending is None]
            for talk, feedback in zip(going_on, self._ask(going_on, step, trainer), strict=True):
                self._take_reply(talk, feedback, suffixes, trainer)
        for talk in talks:
            talk.ending = talk.ending or "max_turns"
        _record(talks, trainer)
        return {
            "prompt_ids": [talk.prompt_ids for talk in talks],
            "completion_ids": [talk.completion_ids for talk in talks],
            "logprobs": None if any(talk.logprobs is None for talk in talks) else [talk.logprobs for talk in talks],
            "env_mask": [talk.env_mask for talk in talks],
            "trajectory": [talk.messages for talk in talks],
        }

    def _ask(self, talks: Sequence["_Talk"], step: int, trainer: SeamGRPOTrainer) -> list[Feedback]:
        """What the users say to the latest turns, all asked at once."""
        turns = [talk.as_turn(step) for talk in talks]
        asking = collect_feedback(
            turns,
            [{} for _ in turns],
            next_state=self.user,
            judge=None,
            max_concurrency=self.max_concurrency,
            timeout=self.timeout,
        )
        return trainer.run_async(asking) if turns else []

    def _take_reply(self, talk: "_Talk", feedback: Feedback, suffixes: ChatSuffixes, trainer: SeamGRPOTrainer) -> None:
        """Put the reply to a conversation's latest turn behind it, or end the conversation there."""
        if feedback.failure is not None:
            talk.ending = self._failed(feedback.detail)
            return
        message = _as_message(feedback.turn.next_state, trainer)
        if message is None:
            talk.ending = "silent"
            return
        talk.messages.append(message)
        if talk.cut:
            talk.ending = "cut"
        elif self.stop_when_satisfied and message["content"].satisfied:
            talk.ending = "satisfied"
        else:
            try:
                talk.ending = None if talk.go_on(suffixes.after_turn([message])) else "full"
            except ValueError as error:
                talk.ending = self._failed(str(error))

    def _failed(self, detail: str) -> Ending:
        if not self._warned:  # the first says why; the metric counts the others
            self._warned = True
            name = callable_name(self.user)
            logger.warning(f"The user {name} failed, counted as `conversation/ended/failed`: {detail}")
        return "failed"


@dataclass
class _Talk:
    """One conversation as far as it has come."""

    prompt: Messages
    prompt_ids: list[int]
    max_completion_length: int
    window: float
    messages: list[Message] = field(default_factory=list)
    completion_ids: list[int] = field(default_factory=list)
    env_mask: list[int] = field(default_factory=list)
    logprobs: list[float | None] | None = field(default_factory=list)
    suffix: list[int] = field(default_factory=list)  # what the user said last, with the next turn's beginning
    cut: bool = False
    turns: int = 0
    ending: Ending | None = None

    @property
    def context(self) -> list[int]:
        """The ids that the next turn is sampled from."""
        return self.prompt_ids + self.completion_ids + self.suffix

    @property
    def room(self) -> int:
        """How many ids the next turn may have."""
        return self.max_completion_length - len(self.completion_ids) - len(self.suffix)

    def take_turn(self, turn: SampledTurn) -> None:
        """Add a sampled turn, and before it what it answers. One without a single id, if not the first, is none."""
        if self.turns and not turn.ids:
            self.ending = "cut"
            return
        self.completion_ids += self.suffix + turn.ids
        self.env_mask += [0] * len(self.suffix) + [1] * len(turn.ids)
        if turn.logprobs is None or self.logprobs is None:
            self.logprobs = None
        else:
            self.logprobs += [0.0] * len(self.suffix) + turn.logprobs
        self.messages.append(turn.message)
        self.suffix, self.cut = [], turn.cut
        self.turns += 1

    def go_on(self, suffix: list[int]) -> bool:
        """Whether another turn, which would go on from `suffix`, has room."""
        self.suffix = suffix
        return self.room >= 1 and len(self.context) < self.window

    def as_turn(self, step: int) -> Turn:
        """The latest turn, for the user to answer; a copy, since a provider may change what it is shown."""
        prompt, completion = copy.deepcopy(([*self.prompt, *self.messages[:-1]], self.messages[-1:]))
        return Turn(prompt, completion, truncated=self.cut, step=step)


def _check(prompts: Sequence[Any], trainer: Any) -> None:
    """Refuse what no conversation can be made of."""
    if not isinstance(trainer, SeamGRPOTrainer):
        raise TypeError(
            f"`ConversationRollout` needs a trainer of this package, got {type(trainer).__name__}. Use `OPDTrainer` or "
            "`CombineTrainer`."
        )
    if trainer.tools:
        raise ValueError(
            "`ConversationRollout` cannot be combined with tools. Leave out `tools` and `environment_factory`."
        )
    for prompt in prompts:
        if isinstance(prompt, str):
            raise ValueError(
                "`ConversationRollout` needs conversational prompts, got plain text. Give messages: "
                "`[{'role': 'user', 'content': ...}]`."
            )
        parts = [part for message in prompt if isinstance(message["content"], list) for part in message["content"]]
        if any(part["type"] != "text" for part in parts):
            raise ValueError("`ConversationRollout` takes prompts of text only; this one holds images or other parts.")


def _as_message(state: NextState | None, trainer: SeamGRPOTrainer) -> Message | None:
    """What the policy is shown of a next state; `None` when the user has nothing to say."""
    text = "" if state is None else without_special_tokens(state.text, trainer.special_tokens, tidy=False)
    if state is None or (state.role == "user" and not text.strip()):
        return None
    return {"role": state.role, "content": ToolResult(text, satisfied=state.satisfied, info=state.info)}


def _record(talks: Sequence[_Talk], trainer: SeamGRPOTrainer) -> None:
    """Log how long the conversations of all processes were, and how they ended."""
    found = gather_object([(talk.turns, talk.ending) for talk in talks])
    endings = Counter(ending for _, ending in found)
    trainer.record_metric("conversation/turns", sum(turns for turns, _ in found) / len(found))
    for ending in ENDINGS:
        trainer.record_metric(f"conversation/ended/{ending}", endings[ending] / len(found))
