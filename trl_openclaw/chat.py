"""The one way to ask a chat model, shared by judges and by the simulated user.

`ChatClient` talks to any OpenAI-compatible server; `LocalChat` in `local_chat.py` has the same face over a model in
this process. Both answer with the final text only (no thinking) or raise `ChatError`; neither gives half an answer.
"""

import asyncio
import os
import re
import threading
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from .errors import ChatError, JudgeUnavailableError
from .types import Messages

if TYPE_CHECKING:
    import openai

MORE_ROOM = 4
"""An answer cut by its token limit is asked for once more with this many times the room."""

CHECK_TIMEOUT = 10.0

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


@dataclass(frozen=True)
class _Session:
    """What is bound to one event loop."""

    client: "openai.AsyncOpenAI"
    slots: asyncio.Semaphore


class ChatClient:
    """Chat over an OpenAI-compatible server, through the official `openai` client.

    Usable from several event loops at once. Timeouts, dropped connections and statuses 408, 409, 429 and 5xx are tried
    again with growing pauses.

    Args:
        model (`str`):
            Name of the model as the server lists it.
        base_url (`str`):
            Address of the API, `/v1` included.
        api_key (`str`, *optional*):
            Key. Defaults to the environment's `OPENAI_API_KEY`, else to a placeholder, for servers that need none.
        timeout (`float`, *optional*, defaults to `60.0`):
            Seconds to wait for a single try.
        max_retries (`int`, *optional*, defaults to `2`):
            Further tries after a failure that may pass.
        max_concurrency (`int`, *optional*, defaults to `64`):
            Requests in flight at once, per event loop.
        extra_body (`Mapping[str, Any]`, *optional*):
            More fields for each request, such as `{"chat_template_kwargs": {"enable_thinking": False}}`.
    """

    def __init__(
        self,
        model: str,
        base_url: str,
        *,
        api_key: str | None = None,
        timeout: float = 60.0,
        max_retries: int = 2,
        max_concurrency: int = 64,
        extra_body: Mapping[str, Any] | None = None,
    ):
        if not model:
            raise ValueError("`model` is empty: give the name under which the server lists the model.")
        if not base_url.startswith(("http://", "https://")):
            raise ValueError(f"`base_url` must start with http:// or https://, got {base_url!r}.")
        if api_key == "":
            raise ValueError("`api_key` is an empty string: leave it out for a server that needs no key.")
        if timeout <= 0 or max_retries < 0 or max_concurrency < 1:
            raise ValueError(
                "`timeout` must be positive, `max_retries` at least 0 and `max_concurrency` at least 1, got "
                f"{timeout}, {max_retries} and {max_concurrency}."
            )
        self.model = model
        self.base_url = base_url
        self.timeout = timeout
        self.max_retries = max_retries
        self.max_concurrency = max_concurrency
        self.extra_body = dict(extra_body or {})
        self._api_key = api_key or os.environ.get("OPENAI_API_KEY") or "none"
        self._limit_field = "max_tokens"
        self._sessions: weakref.WeakKeyDictionary[
            asyncio.AbstractEventLoop, tuple[AsyncGenerator[_Session, None], _Session]
        ] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    async def complete(self, messages: Messages, *, max_tokens: int, temperature: float | None = None) -> ChatReply:
        """Answer `messages`.

        Args:
            messages: The conversation.
            max_tokens: Room for the answer, thinking included.
            temperature: Sampling temperature; `None` leaves it to the server.

        Returns:
            The final answer. Raises `ChatError` when there is none.
        """
        session = await self._session()

        async def ask(room: int) -> Draft:
            async with session.slots:
                return await self._ask(session.client, messages, room, temperature)

        return await complete_with_room(ask, max_tokens)

    async def check(self) -> None:
        """See whether the server answers, takes the key and serves the model; raise `JudgeUnavailableError` if not."""
        import openai

        where = f"The chat server at {self.base_url} (model {self.model!r})"
        session = await self._session()
        client = session.client.with_options(timeout=min(CHECK_TIMEOUT, self.timeout), max_retries=1)
        try:
            page = await client.models.list()
        except openai.APIStatusError as error:
            if error.status_code in (404, 405):
                return
            if error.status_code in (401, 403):
                raise JudgeUnavailableError(
                    f"{where} refused the API key (HTTP {error.status_code}). Pass `api_key` or set OPENAI_API_KEY."
                ) from error
            raise JudgeUnavailableError(f"{where} answered with HTTP {error.status_code}: {_say(error)}") from error
        except openai.OpenAIError as error:
            raise JudgeUnavailableError(
                f"{where} cannot be reached: {_say(error)}. Start the server, or correct `base_url`."
            ) from error
        except (ValueError, AttributeError, TypeError) as error:
            raise JudgeUnavailableError(
                f"{where} answers, but not with a list of models. Correct `base_url`: it usually ends in /v1."
            ) from error
        served = [str(name) for entry in getattr(page, "data", None) or () if (name := getattr(entry, "id", None))]
        # Some servers list "name:tag" and answer to "name".
        if served and not any(name == self.model or name.startswith(f"{self.model}:") for name in served):
            raise JudgeUnavailableError(f"{where} does not serve that model. It serves: {', '.join(served[:20])}.")

    async def aclose(self) -> None:
        """Close the connections that the running event loop holds. They reopen when needed."""
        with self._lock:
            opened = self._sessions.pop(asyncio.get_running_loop(), None)
        if opened:
            await opened[0].aclose()

    async def _session(self) -> _Session:
        loop = asyncio.get_running_loop()
        with self._lock:
            # Open connections refer to their loop, so weak keys alone would never let a closed loop go.
            for stale in [known for known in self._sessions if known.is_closed()]:
                del self._sessions[stale]
            opened = self._sessions.get(loop)
        if opened is None:
            source = self._open()
            opened = (source, await anext(source))
            with self._lock:
                self._sessions[loop] = opened
        return opened[1]

    async def _open(self) -> AsyncGenerator[_Session, None]:
        """A generator, so that an event loop that shuts down its generators closes the connections as it ends.

        It must not await before its `yield`: two tasks of one loop would then each open a client.
        """
        import openai

        # openai's own default closes itself when collected, on whichever loop happens to run at that moment.
        http_client = openai.DefaultAsyncHttpxClient()
        client = openai.AsyncOpenAI(
            base_url=self.base_url,
            api_key=self._api_key,
            timeout=self.timeout,
            max_retries=self.max_retries,
            http_client=http_client,
        )
        try:
            yield _Session(client, asyncio.Semaphore(self.max_concurrency))
        finally:
            await client.close()

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
    import openai

    if isinstance(error, openai.APITimeoutError):
        kind = "timeout"
    elif isinstance(error, openai.APIConnectionError):
        kind = "unreachable"
    elif isinstance(error, openai.APIStatusError):
        status = error.status_code
        kind = "timeout" if status == 408 else "unreachable" if status in (409, 429) or status >= 500 else "refused"
    else:
        kind = "error"
    return ChatError(kind, f"{base_url}: {_say(error)}")


def _say(error: Exception) -> str:
    """The error's text with its cause, which is where a connection error keeps what happened."""
    cause = f" ({error.__cause__})" if error.__cause__ and str(error.__cause__) else ""
    return f"{str(error) or type(error).__name__}{cause}".rstrip(".")
