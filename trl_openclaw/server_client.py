"""The connection to an OpenAI-compatible server, shared by whoever asks one: judges, simulated users and teachers."""

import asyncio
import functools
import os
import threading
import weakref
from collections.abc import AsyncGenerator, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypedDict, TypeVar

from .errors import OpenClawError

if TYPE_CHECKING:
    import openai

T = TypeVar("T")

CHECK_TIMEOUT = 10.0
"""Seconds to wait for an answer that costs a server nothing."""


@dataclass(frozen=True)
class Session:
    """What is bound to one event loop.

    Args:
        client: Sends requests.
        slots: Bounds how many are in flight.
    """

    client: "openai.AsyncOpenAI"
    slots: asyncio.Semaphore


class ConnectionOptions(TypedDict, total=False):
    """The arguments that clients pass on to [`ServerClient`]."""

    api_key: str | None
    timeout: float
    max_retries: int
    max_concurrency: int


class ServerClient:
    """Connections to a server, through the official `openai` client.

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
    """

    server: ClassVar[str] = "The server"
    """What errors call it."""

    unavailable: ClassVar[type[OpenClawError]] = OpenClawError
    """What is raised when it cannot be of use."""

    def __init__(
        self,
        model: str,
        base_url: str,
        *,
        api_key: str | None = None,
        timeout: float = 60.0,
        max_retries: int = 2,
        max_concurrency: int = 64,
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
        self._api_key = api_key or os.environ.get("OPENAI_API_KEY") or "none"
        self._sessions: weakref.WeakKeyDictionary[
            asyncio.AbstractEventLoop, tuple[AsyncGenerator[Session, None], Session]
        ] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    @property
    def where(self) -> str:
        """The server as errors speak of it."""
        return f"{self.server} at {self.base_url} (model {self.model!r})"

    async def served(self) -> list[Any] | None:
        """The models that the server lists, or `None` where it keeps no list.

        Raises:
            OpenClawError: If it does not answer, does not take the key, or is no such server; of the class
                `unavailable`.
        """
        import openai

        client = await self.impatient_client()
        try:
            page = await client.models.list()
        except openai.APIStatusError as error:
            if error.status_code in (404, 405):
                return None
            if error.status_code in (401, 403):
                raise self.unavailable(
                    f"{self.where} refused the API key (HTTP {error.status_code}). Pass `api_key` or set "
                    "OPENAI_API_KEY."
                ) from error
            raise self.unavailable(f"{self.where} answered with HTTP {error.status_code}: {say(error)}") from error
        except openai.OpenAIError as error:
            raise self.unavailable(
                f"{self.where} cannot be reached: {say(error)}. Start the server, or correct `base_url`."
            ) from error
        except (ValueError, AttributeError, TypeError) as error:
            raise self.unavailable(
                f"{self.where} answers, but not with a list of models. Correct `base_url`: it usually ends in /v1."
            ) from error
        return [card for card in getattr(page, "data", None) or () if getattr(card, "id", None)]

    async def aclose(self) -> None:
        """Close the connections that the running event loop holds. They reopen when needed."""
        with self._lock:
            opened = self._sessions.pop(asyncio.get_running_loop(), None)
        if opened:
            await opened[0].aclose()

    async def session(self) -> Session:
        """The connections of the running event loop."""
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

    async def impatient_client(self) -> "openai.AsyncOpenAI":
        """The client for a check, which soon says that nobody answers."""
        client = (await self.session()).client
        return client.with_options(timeout=min(CHECK_TIMEOUT, self.timeout), max_retries=1)

    async def _open(self) -> AsyncGenerator[Session, None]:
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
            yield Session(client, asyncio.Semaphore(self.max_concurrency))
        finally:
            await client.close()


def failure_kind(error: Exception) -> str:
    """What an exception of the `openai` client is counted as.

    Returns:
        `timeout`, `unreachable`, `denied` (the server does not take the key, has no such model, or wants to be paid),
        `refused` (this request, which it would refuse again) or `error`.
    """
    import openai

    if isinstance(error, openai.APITimeoutError):
        return "timeout"
    if isinstance(error, openai.APIConnectionError):
        return "unreachable"
    if isinstance(error, openai.APIStatusError):
        status = error.status_code
        if status in (401, 402, 403, 404):
            return "denied"
        return "timeout" if status == 408 else "unreachable" if status in (409, 429) or status >= 500 else "refused"
    return "error"


def say(error: Exception) -> str:
    """The error's text with its cause, which is where a connection error keeps what happened, without full stops."""
    said, cause = (str(text or "").strip().rstrip(".") for text in (error, error.__cause__))
    return f"{said or type(error).__name__}{cause and f' ({cause})'}"


@functools.cache
def _background_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="server requests", daemon=True).start()
    return loop


def run_in_background(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on an event loop of this module's own, in a thread of its own, and wait for it.

    Connections stay open from one call to the next, and it does not matter whether the caller's thread runs a loop.
    """
    future = asyncio.run_coroutine_threadsafe(coroutine, _background_loop())
    try:
        return future.result()
    finally:
        future.cancel()  # does nothing to one that is done; Ctrl-C leaves others
