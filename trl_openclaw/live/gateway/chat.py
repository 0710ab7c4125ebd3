"""`POST /v1/chat/completions`, whole and in pieces."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ...errors import EngineError
from ..engines import Delta
from .api_errors import CLIENT_GONE, ApiError
from .auth import CurrentUser
from .exchange import Exchange, SessionHeaders
from .requests import parse_chat, read_json

logger = logging.getLogger(__name__)
router = APIRouter()
T = TypeVar("T")


class ClientGoneError(Exception):
    """Nobody waits for the answer any more."""


@router.post("/v1/chat/completions")
async def chat(request: Request, user: CurrentUser) -> Response:
    """A reply to a conversation."""
    gateway = request.app.state.gateway
    gateway.uploads.check(user)
    with gateway.uploads.taken_by(user):
        body = await request.body()
    gateway.answers.check(user)
    with gateway.in_flight(user):
        asked = parse_chat(read_json(body), gateway.engine.features)
        if asked.model != gateway.engine.model:
            raise ApiError(
                404,
                f"The model {asked.model!r} does not exist. This gateway serves {gateway.engine.model!r}.",
                param="model",
                code="model_not_found",
            )
        exchange = Exchange(gateway, user, asked, SessionHeaders.of(request.headers), len(body))
        pieces = exchange.pieces()
        try:
            first = await unless_gone(request.receive, anext(pieces))
            gateway.metrics.first_piece.observe(time.monotonic() - exchange.started)
            if asked.stream:
                return EventStream(_events(exchange, first, pieces), exchange, gateway.in_flight(user))
            await unless_gone(request.receive, _drain(pieces))
        except EngineError as error:
            raise ApiError.of(error) from error
        except ClientGoneError:
            await pieces.aclose()
            return _done(exchange, Response(status_code=CLIENT_GONE))
        headers = {"x-request-id": exchange.turn_id}
        return _done(exchange, Response(_encoded(_whole(exchange)), headers=headers, media_type="application/json"))


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """What `work` returns.

    Raises:
        ClientGoneError: When the client goes away first. The work is cancelled then.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError
    finally:
        gone.cancel()
        task.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _drain(pieces: AsyncIterator[Delta]) -> None:
    async for _ in pieces:
        pass


class EventStream(Response):
    """Server-sent events that end their source at once when the client goes away."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], exchange: Exchange, in_flight: Any):
        super().__init__(headers={"x-request-id": exchange.turn_id, "cache-control": "no-store"})
        del self.headers["content-length"]
        self._events, self._exchange, self._in_flight = events, exchange, in_flight

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._in_flight:
            async with aclosing(self._events):
                try:
                    await unless_gone(receive, self._send_all(send))
                except (ClientGoneError, OSError):
                    self.status_code = CLIENT_GONE
        _done(self._exchange, self)

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for event in self._events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        except EngineError as error:
            told = ApiError.of(error)
            self.status_code = told.status  # what it counts as; that it went well has been said already
            await send({"type": "http.response.body", "body": _event(told.body), "more_body": True})
        await send({"type": "http.response.body", "body": b""})


async def _events(exchange: Exchange, first: Delta, rest: AsyncGenerator[Delta, None]) -> AsyncGenerator[bytes, None]:
    """The chunks of a reply, then its end; or an `EngineError` in their midst. What comes at once is sent at once."""
    async with aclosing(rest):
        events = _event(_chunk(exchange, {"role": "assistant", "content": ""}))
        async for piece in _chained(first, rest):
            if piece.says_something:
                events += _event(_chunk(exchange, _delta(piece)))
            if piece.finish_reason is not None:
                events += _event(_chunk(exchange, {}, piece.finish_reason))
            elif piece.says_something:
                yield events
                events = b""
        if exchange.request.wants_usage:
            usage = {"choices": [], "usage": exchange.reply.usage}
            events += _event({**_frame(exchange, "chat.completion.chunk"), **usage})
        yield events + b"data: [DONE]\n\n"


async def _chained(first: Delta, rest: AsyncIterator[Delta]) -> AsyncIterator[Delta]:
    yield first
    async for piece in rest:
        yield piece


def _delta(piece: Delta) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if piece.content:
        found["content"] = piece.content
    if piece.reasoning:
        found["reasoning_content"] = piece.reasoning
    if piece.tool_calls:
        found["tool_calls"] = piece.tool_calls
    return found


def _chunk(exchange: Exchange, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": None}
    return {**_frame(exchange, "chat.completion.chunk"), "choices": [choice]}


def _whole(exchange: Exchange) -> dict[str, Any]:
    reply = exchange.reply
    choice = {"index": 0, "message": reply.message, "finish_reason": reply.finish_reason, "logprobs": None}
    return {**_frame(exchange, "chat.completion"), "choices": [choice], "usage": reply.usage}


def _frame(exchange: Exchange, kind: str) -> dict[str, Any]:
    return {
        "id": exchange.turn_id,
        "object": kind,
        "created": exchange.created,
        "model": exchange.request.model,
        "system_fingerprint": exchange.version,
    }


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + _encoded(data) + b"\n\n"


def _encoded(data: dict[str, Any]) -> bytes:
    """As JSON; half an emoji, which has no bytes in UTF-8, as a question mark."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def _done(exchange: Exchange, response: Response) -> Response:
    """Count a request that was answered, and say so in the log; its text only where that was asked for."""
    gateway, reply = exchange.gateway, exchange.reply
    seconds = time.monotonic() - exchange.started
    gateway.metrics.seconds.observe(seconds)
    gateway.metrics.requests.labels(str(response.status_code)).inc()
    logger.info(
        "%s %s %s %d+%d tokens %.2f s",
        exchange.turn_id,
        response.status_code,
        exchange.version,
        len(reply.prompt_ids),
        len(reply.completion_ids),
        seconds,
    )
    if gateway.options.log_content:
        logger.info("%s %s", exchange.turn_id, json.dumps([*exchange.messages, reply.message], ensure_ascii=False))
    return response
