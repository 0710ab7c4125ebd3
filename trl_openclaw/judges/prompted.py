"""A judge that asks a chat model. The call is fixed; the question and the way its answer is read vary."""

import asyncio
import copy
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import resources
from string import Template
from typing import Any, Literal, Self, TypedDict, TypeVar, get_args

from ..calls import call_in_thread, exits_as_errors, runs_in_process
from ..chat import MORE_ROOM, Chat
from ..errors import ChatError, ParseError
from ..types import VOTE_FAILURES, Messages, Turn, Verdict, Vote
from .images import Images, UnreadableError
from .parsing import parse_hint, parse_score
from .transcript import render_transcript

Question = Literal["combined", "separate"]
T = TypeVar("T")

CHARS_PER_TOKEN = 16
"""Characters that a token of an answer may come to. What is longer did not keep to `max_tokens` and is not read."""


class PromptedOptions(TypedDict, total=False):
    """The arguments that judges pass on to [`PromptedJudge`]."""

    question: Question
    ask_hints: bool
    max_tokens: int
    temperature: float | None
    max_hint_chars: int
    max_transcript_chars: int
    reads_images: bool
    max_images: int


class PromptedJudge:
    """Asks a chat model several times how well a reply was received, and what hint would have improved it.

    What is judged is fenced with a marker that is new for every call and that the answer lines must carry. Text under
    judgement cannot know it, so no answer in it counts, not even where the model repeats it. What such text argues for
    may still persuade the model.

    Args:
        client (`Chat`):
            The chat model.
        num_votes (`int`, *optional*, defaults to `3`):
            Independent answers per turn, asked for at the same time.
        question (`str`, *optional*, defaults to `"combined"`):
            `"combined"` asks for score and hint at once; `"separate"` asks two questions per vote, at the same time.
        ask_hints (`bool`, *optional*, defaults to `True`):
            Whether to ask for hints.
        max_tokens (`int`, *optional*, defaults to `512`):
            Room for an answer, thinking included. An answer that does not fit is asked for once more with four times
            the room; one of more than 16 characters for each token of that is not read, and counts as unparseable.
        temperature (`float`, *optional*, defaults to `0.6`):
            Sampling temperature; votes at 0 would all be one vote. `None` leaves it to the server.
        max_hint_chars (`int`, *optional*, defaults to `2000`):
            Longer hints are refused, and counted as such.
        max_transcript_chars (`int`, *optional*, defaults to `24000`):
            Longer transcripts lose their middle, and say how much they lost.
        reads_images (`bool`, *optional*, defaults to `False`):
            Whether the model is given the images of a turn, each in its place in the transcript (see
            `judges.images.image_part` for what can be). Without it, text that followed together with images is judged
            with a line for each image, and images alone cannot be judged: all votes fail as `unreadable`. So do they,
            with or without it, when a part of what followed is malformed or an image of it cannot be read.
        max_images (`int`, *optional*, defaults to `8`):
            Most images in a question. Those that followed the reply come first, then those closest before it.
    """

    def __init__(
        self,
        client: Chat,
        *,
        num_votes: int = 3,
        question: Question = "combined",
        ask_hints: bool = True,
        max_tokens: int = 512,
        temperature: float | None = 0.6,
        max_hint_chars: int = 2000,
        max_transcript_chars: int = 24_000,
        reads_images: bool = False,
        max_images: int = 8,
    ):
        if question not in get_args(Question):
            raise ValueError(f"`question` must be one of {get_args(Question)}, got {question!r}.")
        limits = {
            "num_votes": num_votes,
            "max_tokens": max_tokens,
            "max_hint_chars": max_hint_chars,
            "max_transcript_chars": max_transcript_chars,
            "max_images": max_images,
        }
        for name, value in limits.items():
            if value < 1:
                raise ValueError(f"`{name}` must be at least 1, got {value}.")
        if temperature is not None and temperature < 0:
            raise ValueError(f"`temperature` must not be negative, got {temperature}.")
        if reads_images and not getattr(client, "reads_images", True):
            raise ValueError(
                f"`reads_images=True`: {type(client).__name__} gives its model text only. Serve a model that sees "
                "images and ask it with `LLMJudge`, or leave `reads_images` out."
            )
        self.client = client
        self.num_votes = num_votes
        self.question = question
        self.ask_hints = ask_hints
        self.max_tokens = max_tokens
        self.temperature = temperature
        self.max_hint_chars = max_hint_chars
        self.max_transcript_chars = max_transcript_chars
        self.reads_images = reads_images
        self.max_images = max_images

    async def __call__(self, turn: Turn) -> Verdict:
        """Judge `turn`.

        Args:
            turn: A turn whose next state is known.

        Returns:
            The verdict. A model that fails does not raise: its votes carry the failure.
        """
        if turn.next_state is None:
            raise ValueError("A turn without a next state cannot be judged: nothing says how the reply was received.")
        marker = secrets.token_hex(5)
        images = Images(self.max_images) if self.reads_images else None
        request = turn, turn.next_state, marker, self.max_transcript_chars, images
        try:
            # Images take time to encode, and the event loop serves all turns.
            transcript = await call_in_thread(render_transcript, *request) if images else render_transcript(*request)
        except UnreadableError as error:
            vote = Vote(failure="unreadable", hint_failure="unreadable" if self.ask_hints else None, raw=str(error))
            return Verdict.from_votes([vote] * self.num_votes)
        votes = await asyncio.gather(*(self._vote(transcript, marker, images) for _ in range(self.num_votes)))
        return Verdict.from_votes(votes)

    @property
    def runs_in_process(self) -> bool:
        """Whether the chat model is one in this process."""
        return runs_in_process(self.client)

    async def check(self) -> None:
        """Raise `JudgeUnavailableError` when the chat model cannot be reached."""
        await self.client.check()

    def without_hints(self) -> Self:
        """The same judge, asking only for scores."""
        judge = copy.copy(self)
        judge.ask_hints = False
        return judge

    async def _vote(self, transcript: str, marker: str, images: Images | None) -> Vote:
        def read_score(text: str) -> int:
            return parse_score(text, marker)

        def read_hint(text: str) -> str | None:
            return parse_hint(text, marker, self.max_hint_chars)

        if not self.ask_hints:
            answer = await self._ask("evaluate", transcript, marker, images)
            score, failure = answer.read(read_score)
            return Vote(score, failure, raw=answer.raw)
        if self.question == "combined":
            answer = hinting = await self._ask("combined", transcript, marker, images)
            raw = answer.raw
        else:
            answer, hinting = await asyncio.gather(
                self._ask("evaluate", transcript, marker, images), self._ask("hint", transcript, marker, images)
            )
            raw = f"{answer.raw}\n\n{hinting.raw}"
        score, failure = answer.read(read_score)
        hint, hint_failure = hinting.read(read_hint)
        return Vote(score, failure, hint, hint_failure, raw)

    async def _ask(self, question: str, transcript: str, marker: str, images: Images | None) -> "_Answer":
        user = prompt("transcript").substitute(
            marker=marker,
            transcript=transcript,
            question=prompt(question).substitute(marker=marker, max_hint_chars=self.max_hint_chars),
        )
        content = images.content(user, marker) if images else user
        messages: Messages = [
            {"role": "system", "content": prompt("system").template},
            {"role": "user", "content": content},
        ]
        try:
            with exits_as_errors():  # here, since this runs in tasks of its own
                reply = await self.client.complete(messages, max_tokens=self.max_tokens, temperature=self.temperature)
        except ChatError as error:
            return _Answer(str(error), error.kind if error.kind in VOTE_FAILURES else "error")
        # Reading takes its time on the event loop, which all turns share.
        too_long = len(reply.text) > CHARS_PER_TOKEN * MORE_ROOM * self.max_tokens
        return _Answer(reply.text, "unparseable" if too_long else None)


@dataclass(frozen=True)
class _Answer:
    """What came back for one question: the model's text, or the error's text and kind."""

    raw: str
    failure: str | None = None

    def read(self, parse: Callable[[str], T]) -> tuple[T | None, Any]:
        """The parsed value, or `None` and the kind of failure."""
        if self.failure:
            return None, self.failure
        try:
            return parse(self.raw), None
        except ParseError as error:
            return None, error.kind


@cache
def prompt(name: str) -> Template:
    """The prompt in `prompts/<name>.md`. `Template` looks at its text once; values are not expanded."""
    return Template(resources.files(__package__).joinpath("prompts", f"{name}.md").read_text("utf-8").strip())
