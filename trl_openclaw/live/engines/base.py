"""What an engine is: it samples replies, with adapters that come and go, and says which ids it sampled."""

from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

Feature = Literal["tools", "tool_choice", "response_format"]
"""What not every engine can: tool calls at all, calls that are forced, replies that are forced into a form."""


GREEDY_BELOW = 1e-5
"""A temperature below which the likeliest token is taken, as in vLLM: divided by less, logits leave the range of their
numbers."""


@dataclass(frozen=True)
class EngineRequest:
    """One reply to sample.

    Args:
        messages: The conversation, contents as text.
        tools: The tools that may be called, or `None`.
        sampling: Settings under OpenAI's names; `temperature`, `top_p` and `stop` (a list) are always there.
        adapter: The name of an adapter that was loaded, or `None` for the model without one.
        user: Who waits for it. Engines that take one request at a time take turns between users.
        on_turn: Called when an engine that takes one request at a time begins with this one.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    sampling: dict[str, Any]
    adapter: str | None = None
    user: str = ""
    on_turn: Callable[[], None] = lambda: None


@dataclass
class Delta:
    """A piece of a reply.

    Args:
        content: Text to append.
        reasoning: Thinking to append, where the engine tells it from the text.
        tool_calls: Pieces of tool calls as in OpenAI's chunks: each with its `index`, and texts to append.
        token_ids: The ids sampled for it, those without any text included.
        logprobs: One number for each id: its log-prob in nats under the model's distribution at `temperature`.
        temperature: At which log-probs are taken; the same in all pieces.
        prompt_ids: What the model was given, once, in any piece; `None` in the others.
        finish_reason: In the last piece alone: `"stop"`, `"length"`, `"tool_calls"`, or another of the protocol's.
    """

    content: str = ""
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    temperature: float = 1.0
    prompt_ids: list[int] | None = None
    finish_reason: str | None = None

    @property
    def says_something(self) -> bool:
        """Whether a client has anything to see of it."""
        return bool(self.content or self.reasoning or self.tool_calls)


class Engine(Protocol):
    """Anything that samples replies. All methods are called on the gateway's event loop, which they must not block."""

    name: str
    """What kind of engine it is, in a word."""
    model: str
    """The name that clients give, and that turns are recorded under."""
    features: frozenset[Feature]

    @property
    def where(self) -> str:
        """Where the model runs, for the people who start the gateway."""
        ...

    @property
    def waiting(self) -> int | None:
        """Requests that wait for their turn; `None` where they take none, and `on_turn` is not called."""
        ...

    def stream(self, request: EngineRequest) -> AsyncGenerator[Delta, None]:
        """Sample a reply, in pieces that come as they are sampled. Closing the generator ends the generation.

        Raises:
            EngineError: When there is no reply, or no more of it.
        """
        ...

    async def load(self, adapter: str, path: Path) -> None:
        """Make an adapter usable under a name. Loading again what is loaded from the same folder changes nothing.

        Raises:
            EngineError: When it is at fault itself (`refused`), or cannot be loaded now (any other kind).
        """
        ...

    async def loaded(self) -> list[str]:
        """The names of the adapters that it has, whoever had them loaded. There may be names of other models.

        Raises:
            EngineError: When it does not say.
        """
        ...

    async def unload(self, adapter: str) -> None:
        """Forget an adapter that no request needs any more. One that is unknown is forgotten already.

        Raises:
            EngineError: When that cannot be done now.
        """
        ...

    async def check(self) -> None:
        """See whether the engine can reply.

        Raises:
            EngineError: When it cannot, with a line that says what to do.
        """
        ...

    async def aclose(self) -> None:
        """Let go of connections, threads and models."""
        ...
