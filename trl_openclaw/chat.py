"""The one way to ask a chat model, shared by judges and by the simulated user.

`ChatClient` talks to any OpenAI-compatible server; `LocalChat` in `local_chat.py` has the same face over a model in
this process. Both answer with the final text only (no thinking) or raise `ChatError`; neither gives half an answer.
"""

import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Unpack

from .errors import ChatError, JudgeUnavailableError
from .server_client import ConnectionOptions, ServerClient, failure_kind, say
from .types import Messages

if TYPE_CHECKING:
    import openai

MORE_ROOM = 4
"""An answer cut by its token limit is asked for once more with this many times the room."""

_THINK_END = re.compile(r"</think(?:ing)?>", re.IGNORECASE)
# At the very start only: an answer may well quote the tag, or speak of it ("print no <think> tags").
_THINK_START = re.compile(r"\s*<think(?:ing)?>", re.IGNORECASE)


@dataclass(frozen=True)
class ChatReply:
    """A complete answer.

    Args:
        text: The answer without the model's thinking.
    """

    text: str


class Chat(Protocol):
    """Anything that answers chat messages."""

    async def complete(self, messages: Messages, *, max_tokens: int, temperature: float | None = None) -> ChatReply:
        """Answer `messages`, or raise `ChatError`."""
        ...

    async def check(self) -> None:
        """Raise `JudgeUnavailableError`, naming the address or the model, when no answer can be expected."""
        ...


@dataclass(frozen=True)
class Draft:
    """An answer as it came from the model.

    Args:
        text: Everything that was written, thinking included.
        truncated: Whether the token limit cut it.
    """

    text: str
    truncated: bool


def strip_thinking(text: str) -> str | None:
    """What follows the last `</think>`, or `None` when thinking was begun and never ended."""
    final = _THINK_END.split(text)[-1]
    return None if _THINK_START.match(final) else final.strip()


async def complete_with_room(ask: Callable[[int], Awaitable[Draft]], max_tokens: int) -> ChatReply:
    """Ask with room for `max_tokens`, and once more with `MORE_ROOM` times as much if the answer did not fit.

    Args:
        ask: Takes a number of tokens and gives a draft.
        max_tokens: Room for the first try.

    Returns:
        The complete answer. Raises `ChatError("truncated")` when it did not fit the second time either.
    """
    if max_tokens < 1:
        raise ValueError(f"`max_tokens` must be at least 1, got {max_tokens}.")
    for room in (max_tokens, MORE_ROOM * max_tokens):
        try:
            draft = await ask(room)
        except ChatError as error:
            # The larger request may exceed the server's window: what is known is that the answer did not fit.
            if room > max_tokens and error.kind == "refused":
                raise ChatError("truncated", f"cut at {max_tokens} tokens; no more room was given: {error}") from error
            raise
        text = strip_thinking(draft.text)
        if not draft.truncated and text is not None:
            return ChatReply(text)
    raise ChatError("truncated", f"the answer, thinking included, did not end within {MORE_ROOM * max_tokens} tokens")


class ChatClient(ServerClient):
    """Chat over an OpenAI-compatible server.

    Args:
        model (`str`):
            Name of the model as the server lists it.
        base_url (`str`):
            Address of the API, `/v1` included.
        extra_body (`Mapping[str, Any]`, *optional*):
            More fields for each request, such as `{"chat_template_kwargs": {"enable_thinking": False}}`.
        **connection:
            `api_key`, `timeout`, `max_retries` and `max_concurrency`; see [`~trl_openclaw.server_client.ServerClient`].
    """

    server = "The chat server"
    unavailable = JudgeUnavailableError

    def __init__(
        self,
        model: str,
        base_url: str,
        *,
        extra_body: Mapping[str, Any] | None = None,
        **connection: Unpack[ConnectionOptions],
    ):
        super().__init__(model, base_url, **connection)
        self.extra_body = dict(extra_body or {})
        self._limit_field = "max_tokens"

    async def complete(self, messages: Messages, *, max_tokens: int, temperature: float | None = None) -> ChatReply:
        """Answer `messages`.

        Args:
            messages: The conversation.
            max_tokens: Room for the answer, thinking included.
            temperature: Sampling temperature; `None` leaves it to the server.

        Returns:
            The final answer. Raises `ChatError` when there is none.
        """
        session = await self.session()

        async def ask(room: int) -> Draft:
            async with session.slots:
                return await self._ask(session.client, messages, room, temperature)

        return await complete_with_room(ask, max_tokens)

    async def check(self) -> None:
        """See whether the server answers, takes the key and serves the model; raise `JudgeUnavailableError` if not."""
        served = await self.served()
        names = [str(card.id) for card in served or ()]
        # Some servers list "name:tag" and answer to "name".
        if names and not any(name == self.model or name.startswith(f"{self.model}:") for name in names):
            raise JudgeUnavailableError(f"{self.where} does not serve that model. It serves: {', '.join(names[:20])}.")

    async def _ask(
        self, client: "openai.AsyncOpenAI", messages: Messages, room: int, temperature: float | None
    ) -> Draft:
        for _ in range(2):
            choice = await self._send(client, messages, room, temperature)
            if choice is None:
                continue
            text = choice.message.content
            if choice.finish_reason == "length":
                return Draft(text or "", truncated=True)
            if choice.finish_reason == "content_filter":
                raise ChatError("refused", f"{self.base_url} withheld the answer (content filter)")
            if text is not None:
                return Draft(text, truncated=False)
        raise ChatError("error", f"{self.base_url} answered twice without any content")

    async def _send(
        self, client: "openai.AsyncOpenAI", messages: Messages, room: int, temperature: float | None
    ) -> Any | None:
        """The first choice of one answer, or `None` when the answer holds no choice."""
        import openai

        field = self._limit_field
        request: dict[str, Any] = {"model": self.model, "messages": [dict(message) for message in messages]}
        request[field] = room
        if temperature is not None:
            request["temperature"] = temperature
        try:
            answer = await client.chat.completions.create(**request, extra_body=self.extra_body)
        except openai.BadRequestError as error:
            if field == "max_completion_tokens" or "max_completion_tokens" not in str(error):
                raise _chat_error(error, self.base_url) from error
            # Newer hosted models want the limit under another name and say so.
            self._limit_field = "max_completion_tokens"
            return await self._send(client, messages, room, temperature)
        except (openai.OpenAIError, ValueError) as error:
            raise _chat_error(error, self.base_url) from error
        # Unvalidated by the client: a broken server may send text, or an object without these fields.
        choice = next(iter(getattr(answer, "choices", None) or ()), None)
        return choice if getattr(choice, "message", None) is not None else None


def _chat_error(error: Exception, base_url: str) -> ChatError:
    """The `ChatError` for an exception of the `openai` client."""
    return ChatError(failure_kind(error), f"{base_url}: {say(error)}")
