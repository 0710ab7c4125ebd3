"""Recorded turns in the place of sampled ones: rows, what was said of them, and which of them can be used."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from ...trajectories import TEMPERATURES, next_state_of
from ...types import NextState, Turn, Verdict
from ..records import StoredTurn
from .rendering import Messages, Renders, matching_prompt

EXPLICIT_FEEDBACK = "(explicit feedback)"
"""The next state of a turn that nothing followed, but that somebody had an opinion of."""


UNUSABLE = ("too_long", "cut", "temperature", "other_vocabulary", "other_template", "other_logprobs")
"""Why a recorded turn cannot be trained; the last three may say that the engine has another model or template."""


@dataclass(frozen=True)
class LiveTurn:
    """A recorded turn that can be trained.

    Args:
        turn: As it is stored.
        prompt: Its messages in the form that renders to the recorded prompt ids.
        clock: When they were rendered, where their template asks for the time.
    """

    turn: StoredTurn
    prompt: Messages
    clock: datetime | None = None

    @property
    def row(self) -> dict[str, Any]:
        """What a trainer gets in place of a dataset's row."""
        return {"prompt": self.prompt, "turn_id": self.turn.turn_id}


@dataclass(frozen=True)
class TurnReader:
    """Finds out whether turns can be trained.

    Args:
        trainer: What prompts are rendered with.
        vocabulary: Tokens that the model has.
        max_tokens: Tokens that prompt and reply may have together; `None` for no limit.
        takes_cut: Whether a reply may have ended at the length limit.
        takes_temperature: Whether its log-probs may be taken at another temperature than 1.
    """

    trainer: Renders
    vocabulary: int
    max_tokens: int | None
    takes_cut: bool = True
    takes_temperature: bool = True

    def __call__(self, turn: StoredTurn) -> LiveTurn | str:
        """The turn, or why it cannot be trained, in a word: one of `UNUSABLE`."""
        ids = (*turn.prompt_ids, *turn.completion_ids)
        if self.max_tokens is not None and len(ids) > self.max_tokens:
            return "too_long"
        if turn.finish_reason == "length" and not self.takes_cut:
            return "cut"
        if turn.logprobs_temperature != 1 and not self.takes_temperature:
            return "temperature"
        if max(ids) >= self.vocabulary:
            return "other_vocabulary"
        found = matching_prompt(self.trainer, turn)
        return "other_template" if found is None else LiveTurn(turn, *found)


class _OfTheStore:
    """What the store says of the turns of the batch at hand.

    Args:
        turns: These turns, by id.
    """

    def __init__(self, turns: Mapping[str, LiveTurn]):
        self.turns = turns


class StoredNextState(_OfTheStore):
    """Next-state provider: what followed a turn."""

    role = "whoever talks to the gateway"

    async def __call__(self, turn: Turn, row: Mapping[str, Any]) -> NextState:
        """What followed, with the turn's id, by which `StoredJudge` finds the verdict."""
        state = next_state_of(self.turns[row["turn_id"]].turn.next_state or ())
        if state is None or not state.text.strip():
            state = NextState(EXPLICIT_FEEDBACK)
        return replace(state, info={**state.info, "turn_id": row["turn_id"]})


class StoredJudge(_OfTheStore):
    """Judge: the verdict that counts. Nothing is judged a second time."""

    role = "the gateway's judge, and what people say of replies"

    async def __call__(self, turn: Turn) -> Verdict:
        """The verdict, with hints as people have edited them."""
        assert turn.next_state is not None, "`StoredNextState` gives one to every turn"
        verdict = self.turns[turn.next_state.info["turn_id"]].turn.verdict
        assert verdict is not None, "turns without a verdict are not ready"
        return Verdict(verdict.score, verdict.outcome, verdict.hints, verdict.votes)  # type: ignore[arg-type]


def recorded_rollout(turns: Sequence[LiveTurn]) -> dict[str, list[Any]]:
    """What a `rollout_func` gives for turns that were sampled long ago: the recorded ids and log-probs."""
    return {
        "prompt_ids": [list(one.turn.prompt_ids) for one in turns],
        "completion_ids": [list(one.turn.completion_ids) for one in turns],
        "logprobs": [list(one.turn.logprobs) for one in turns],
        TEMPERATURES: [one.turn.logprobs_temperature for one in turns],
        "trajectory": [[{"content": None, **one.turn.reply, "role": "assistant"}] for one in turns],
    }
