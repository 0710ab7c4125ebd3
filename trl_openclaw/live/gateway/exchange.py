"""One request and its reply: from the engine to the client and into the store."""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...errors import EngineError
from ..engines import Delta, EngineRequest
from ..records import LOGPROBS_TEMPERATURE, NewTurn
from ..sessions import Match
from ..side_traffic import side_reason
from .recorder import WAIT_SECONDS, Origin
from .reply import Reply
from .requests import ChatRequest, sampling_of
from .versions import Served

if TYPE_CHECKING:
    from .app import Gateway

MAX_SESSION_CHARS = 256

_FINISHED = {"stop", "length", "tool_calls", "content_filter"}


@dataclass(frozen=True)
class SessionHeaders:
    """What clients may say about a conversation, and need not."""

    session_id: str | None
    turn_type: str | None

    @classmethod
    def of(cls, headers: Mapping[str, str]) -> "SessionHeaders":
        """Those of a request. `X-Session-Done` is taken and changes nothing: what follows nothing is not trained."""
        session_id = headers.get("x-session-id", "").strip()[:MAX_SESSION_CHARS]
        return cls(session_id or None, headers.get("x-turn-type"))


class Exchange:
    """A request that is being answered.

    Args:
        gateway: What it needs of the gateway.
        user: Who asks.
        request: What is asked.
        headers: What the client says about the conversation.
        size: Bytes of the request.
    """

    def __init__(self, gateway: "Gateway", user: str, request: ChatRequest, headers: SessionHeaders, size: int):
        self.gateway, self.user, self.request = gateway, user, request
        self.turn_id = f"chatcmpl-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.started = time.monotonic()
        self.reply = Reply()
        self.version = ""
        self._silence: asyncio.Timeout | None = None
        self._begun = False
        self.messages = request.said
        defaults = gateway.options
        self.sampling = sampling_of(request, defaults.temperature, defaults.top_p, defaults.max_tokens)
        reason = side_reason(self.messages, self.sampling, headers.turn_type)
        self.origin = Origin(self.turn_id, user, self.messages, headers.session_id, reason, size)
        gateway.recorder.begin(self.origin)

    async def pieces(self) -> AsyncGenerator[Delta, None]:
        """The reply's pieces; the last one has the reason for its end, and has not been given before its record.

        Closing the generator before its end ends the generation and records what was there, as `"disconnect"`. Nothing
        is recorded where the client waits for the whole, since nobody has seen any of it.

        Raises:
            EngineError: When the engine fails. What was there is recorded as `"error"`, likewise.
        """
        cut = "error"
        try:
            async with aclosing(self._from_engine()) as source:
                async for piece in source:
                    self.reply.add(piece)
                    if piece.finish_reason is None:
                        yield piece
                        continue
                    cut = ""
                    await self._recorded(piece.finish_reason)
                    yield piece
                    return
            raise EngineError("broken", "The engine ended its reply without a reason.")
        except EngineError as error:
            self.gateway.metrics.engine_failures.labels(error.kind).inc()
            raise
        except (asyncio.CancelledError, GeneratorExit):
            cut = cut and "disconnect"
            raise
        finally:
            if cut == "disconnect":
                self.gateway.metrics.disconnects.inc()
            if cut and self.reply and self.request.stream:
                self._record(cut)

    async def _from_engine(self) -> AsyncGenerator[Delta, None]:
        """The engine's pieces. An adapter that it has forgotten is loaded once more, or another version answers."""
        versions = self.gateway.versions
        for last_try in (False, True):
            with versions.lease(self.user) as served:
                self.version = served.version
                try:
                    async with aclosing(self.gateway.engine.stream(self._engine_request(served))) as source:
                        while (piece := await self._next(source)) is not None:
                            yield piece
                    return
                except EngineError as error:
                    if error.kind != "unloaded" or last_try:
                        raise
            await versions.load_again(self.user, served)

    async def _next(self, source: AsyncIterator[Delta]) -> Delta | None:
        seconds = self.gateway.options.timeout
        try:
            async with asyncio.timeout(seconds) as self._silence:
                return await anext(source, None)
        except TimeoutError as error:
            waiting = self.gateway.engine.waiting
            if waiting is not None and not self._begun:
                raise EngineError(
                    "busy",
                    f"The engine answers one request at a time, and has not come to this one in {seconds:g} seconds. "
                    f"Others that wait: {waiting}. Try again later.",
                ) from error
            raise EngineError("slow", f"The engine said nothing for {seconds:g} seconds.") from error
        finally:
            self._silence = None

    def _on_turn(self) -> None:
        """The engine begins: until now others were answered, which is no silence."""
        self._begun = True
        if self._silence is not None and not self._silence.expired():
            self._silence.reschedule(asyncio.get_running_loop().time() + self.gateway.options.timeout)

    def _engine_request(self, served: Served) -> EngineRequest:
        return EngineRequest(
            messages=self.messages,
            tools=self.request.offered_tools,
            sampling=self.sampling,
            adapter=served.adapter,
            user=self.user,
            on_turn=self._on_turn,
        )

    async def _recorded(self, finish_reason: str) -> None:
        """Record the turn, and wait for it for a moment."""
        future = asyncio.wrap_future(self._record(finish_reason))
        await asyncio.wait({future}, timeout=WAIT_SECONDS)

    def _record(self, finish_reason: str) -> Any:
        reply, metrics = self.reply, self.gateway.metrics
        cut = finish_reason not in (*_FINISHED, "disconnect")
        problem = "cut" if cut else "forced form" if self.request.forces_form else reply.problem
        if finish_reason in _FINISHED and not self.request.forces_form:
            self.gateway.ids_watch.note(reply.problem)
        if problem is not None:
            metrics.unusable.labels(problem).inc()
        metrics.tokens.labels("prompt").inc(len(reply.prompt_ids))
        metrics.tokens.labels("reply").inc(len(reply.completion_ids))

        def turn_of(found: Match) -> NewTurn:
            return NewTurn(
                turn_id=self.turn_id,
                user=self.user,
                session_id=found.session_id or self.turn_id,
                parent=found.parent,
                kind=self.origin.kind,
                side_reason=self.origin.side_reason,
                messages=self.messages,
                tools=self.request.offered_tools,
                reply=reply.message,
                finish_reason="error" if cut else finish_reason,
                prompt_ids=() if problem else tuple(reply.prompt_ids),
                completion_ids=() if problem else tuple(reply.completion_ids),
                logprobs=() if problem else tuple(reply.logprobs),
                sampling=self.sampling | ({LOGPROBS_TEMPERATURE: reply.temperature} if reply.temperature != 1 else {}),
                model=self.gateway.engine.model,
                model_version=self.version,
            )

        size = len(reply.content) + len(reply.reasoning) + 8 * (len(reply.prompt_ids) + 2 * len(reply.completion_ids))
        return self.gateway.recorder.finish(self.origin, turn_of, size)
