"""What is refused before it is read: foreign host names, other sites' pages, bodies that are too large or too slow.
And what browsers are told of the pages that are allowed.
"""

import asyncio
import json
import re
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

_API = "/v1/"
"""Where the paths begin that pages of other sites may be allowed to use. What the status page shows and changes is its
own."""

_ORIGIN = re.compile(r"null|[a-z][a-z0-9+.-]*://[^/?#@*,\s]*")
_NAME = re.compile(r"[a-z0-9_](?:[a-z0-9_.-]*[a-z0-9_])?|\[[0-9a-f:.]+\]")

_PREFLIGHT_SECONDS = 600

_SWALLOWED = 16
"""A client reads an answer only when it has sent its body, so this many times the limit is read and thrown away."""


class Guard:
    """An ASGI layer around the gateway.

    A page in a browser may send requests to this machine's own addresses, under a name that its owner lets point here,
    or without being allowed to read the answer. Such requests say so in their headers.

    Args:
        app: What is guarded.
        hosts: The names under which the gateway may be asked, without port; `None` for any.
        origins: The pages that may use the API besides the gateway's own, by what browsers call them.
        max_body: Bytes that a request's body may have.
        upload_seconds: Seconds that it may take to come.
    """

    def __init__(
        self,
        app: App,
        *,
        hosts: tuple[str, ...] | None,
        origins: tuple[str, ...] = (),
        max_body: int,
        upload_seconds: float,
    ):
        self.app, self.hosts, self.origins = app, hosts, origins
        self.max_body, self.upload_seconds = max_body, upload_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        allowed = self._is_allowed(scope["path"], headers)
        error = self._refusal(scope["method"], headers, allowed)
        if allowed and self._is_asked_under_its_name(headers):
            send = _telling(send, headers["origin"])
            if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
                return await _answer_preflight(send, headers)
        if error is None:
            return await self.app(scope, self._limited(receive), send)
        if error.status == 413:
            with suppress(TimeoutError):
                async with asyncio.timeout(self.upload_seconds):
                    await _swallow(receive, _SWALLOWED * self.max_body)
        await _answer(send, error)

    def _is_allowed(self, path: str, headers: dict[str, str]) -> bool:
        """Whether a page of another site asks that may use the API, and asks for that."""
        return path.startswith(_API) and headers.get("origin", "").lower() in self.origins

    def _is_asked_under_its_name(self, headers: dict[str, str]) -> bool:
        return self.hosts is None or host_name(headers.get("host", "")) in self.hosts

    def _refusal(self, method: str, headers: dict[str, str], allowed: bool) -> ApiError | None:
        host = headers.get("host", "")
        if not self._is_asked_under_its_name(headers):
            return ApiError(
                403,
                f"This gateway answers to {', '.join(self.hosts or ())} only, not to {host_name(host)!r}. "
                "Other names are allowed by `--allow-host`.",
            )
        if method in ("GET", "HEAD"):
            return None
        origin = headers.get("origin")
        foreign = headers.get("sec-fetch-site") in ("cross-site", "same-site")
        if not allowed and (foreign or (origin is not None and origin.partition("://")[2] != host)):
            named = "" if origin is None else f" {origin[:100]!r} is one."
            return ApiError(
                403,
                f"Pages of other sites may not use this gateway.{named} `--allow-origin` allows one to use the API.",
            )
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


def read_origin(text: str) -> str:
    """A page's origin as browsers write it.

    Raises:
        ValueError: When it is none.
    """
    origin = text.strip().lower()
    origin = origin[:-1] if origin.endswith("/") and not origin.endswith("://") else origin
    if not _ORIGIN.fullmatch(origin):
        raise ValueError(
            "`allow_origin` names pages as browsers do, such as `http://localhost:3000`, `app://obsidian.md`, "
            f"`file://` or `null`, got {text!r}."
        )
    return origin


def read_host(text: str) -> str:
    """A host's name without its port.

    Raises:
        ValueError: When it is none.
    """
    name = host_name(text.strip())
    if not _NAME.fullmatch(name):
        raise ValueError(f"`allow_host` names hosts, such as `host.docker.internal`, got {text!r}.")
    return name


def _telling(send: Send, origin: str) -> Send:
    """The same, where the browser is told that this origin may read the answer."""
    more = [
        (b"access-control-allow-origin", origin.encode("latin-1")),
        (b"access-control-expose-headers", b"x-request-id, retry-after"),
        (b"vary", b"Origin"),
    ]

    async def telling(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), *more]}
        await send(message)

    return telling


async def _answer_preflight(send: Send, headers: dict[str, str]) -> None:
    """Say what an allowed page may send: any headers, as clients have many of their own."""
    found = [
        (b"access-control-allow-methods", b"GET, POST"),
        (b"access-control-max-age", str(_PREFLIGHT_SECONDS).encode()),
    ]
    for what in ("headers", "private-network"):
        if asked := headers.get(f"access-control-request-{what}"):
            found.append((f"access-control-allow-{what}".encode(), asked.encode("latin-1")))
    await send({"type": "http.response.start", "status": 204, "headers": found})
    await send({"type": "http.response.body", "body": b""})


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
