"""What is refused before it is read: foreign host names, other sites' pages, bodies that are too large or too slow."""

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import Any

from .api_errors import ApiError

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")

_SWALLOWED = 16
"""A client reads an answer only when it has sent its body, so this many times the limit is read and thrown away."""


class Guard:
    """An ASGI layer around the gateway.

    A page in a browser may send requests to this machine's own addresses, under a name that its owner lets point here,
    or without being allowed to read the answer. Such requests say so in their headers.

    Args:
        app: What is guarded.
        hosts: The names under which the gateway may be asked, without port; `None` for any.
        max_body: Bytes that a request's body may have.
        upload_seconds: Seconds that it may take to come.
    """

    def __init__(self, app: App, *, hosts: tuple[str, ...] | None, max_body: int, upload_seconds: float):
        self.app, self.hosts, self.max_body, self.upload_seconds = app, hosts, max_body, upload_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        error = self._refusal(scope["method"], headers)
        if error is None:
            return await self.app(scope, self._limited(receive), send)
        if error.status == 413:
            with suppress(TimeoutError):
                async with asyncio.timeout(self.upload_seconds):
                    await _swallow(receive, _SWALLOWED * self.max_body)
        await _answer(send, error)

    def _refusal(self, method: str, headers: dict[str, str]) -> ApiError | None:
        host = headers.get("host", "")
        if self.hosts is not None and host_name(host) not in self.hosts:
            return ApiError(403, f"This gateway answers to {', '.join(self.hosts)} only, not to {host_name(host)!r}.")
        if method in ("GET", "HEAD"):
            return None
        origin = headers.get("origin")
        foreign = headers.get("sec-fetch-site") in ("cross-site", "same-site")
        if foreign or (origin is not None and origin.partition("://")[2] != host):
            return ApiError(403, "Pages of other sites may not use this gateway.")
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > self.max_body:
            return self._too_large()
        kind = headers.get("content-type", "application/json").partition(";")[0].strip().lower()
        if method in ("POST", "PUT", "PATCH") and kind != "application/json":
            return ApiError(415, f"Send `Content-Type: application/json`, not {kind!r}.")
        return None

    def _limited(self, receive: Receive) -> Receive:
        """The same, for bodies that do not say how long they are, and not for longer than a body may take."""
        seen = 0
        until: float | None = asyncio.get_running_loop().time() + self.upload_seconds

        async def limited() -> Message:
            nonlocal seen, until
            try:
                async with asyncio.timeout_at(until):
                    message = await receive()
            except TimeoutError as error:
                said = f"The body did not come within {self.upload_seconds:g} seconds."
                raise ApiError(408, said, code="request_timeout") from error
            if not message.get("more_body"):
                until = None
            seen += len(message.get("body", b""))
            if seen > self.max_body:
                raise self._too_large()
            return message

        return limited

    def _too_large(self) -> ApiError:
        return ApiError(413, f"The body may have {self.max_body:,} bytes.", code="request_too_large")


def host_name(host: str) -> str:
    """A `Host` header without its port."""
    name, colon, port = host.rpartition(":")
    return (name if colon and (port.isdecimal() or not port) else host).lower()


async def _swallow(receive: Receive, most: int) -> None:
    while most > 0:
        message = await receive()
        most -= len(message.get("body", b"")) or 1
        if message["type"] == "http.disconnect" or not message.get("more_body"):
            return


async def _answer(send: Send, error: ApiError) -> None:
    body = json.dumps(error.body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
