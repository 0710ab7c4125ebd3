"""The gateway as an application: what it is made of is given to it."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from ...errors import EngineError
from ...judges import Judge
from ..engines import Engine
from ..judging import JudgingWorker
from ..store import Store
from . import chat, feedback_api
from .api_errors import ApiError, on_api_error, on_client_gone, on_http_error, on_invalid, on_unexpected
from .auth import CurrentUser, Keys, current_user
from .guard import Guard
from .ids_watch import IdsWatch
from .log_keeper import LogKeeper
from .metrics import Metrics
from .places import Places
from .recorder import Recorder
from .versions import ServedVersions

logger = logging.getLogger(__name__)

_HEALTH_SECONDS = 1.0


@dataclass(frozen=True)
class GatewayOptions:
    """What requests get that ask for nothing else, and what is refused.

    Args:
        temperature: For requests that name none.
        top_p: Likewise.
        max_tokens: Likewise; `None` for as many as fit.
        timeout: Seconds that the engine may say nothing.
        max_body: Bytes that a request may have.
        max_in_flight: Requests that are answered at once, and bodies that are read at once; further ones are told to
            come back. Where there are several users, an eighth of it is out of reach of each of them.
        upload_seconds: Seconds that a body may take to come.
        judge_concurrency: Turns that are judged at once.
        log_content: Whether messages and replies are written to the log.
        hosts: The names under which the gateway may be asked; `None` for any.
        origins: The pages that may use the API besides the gateway's own.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int | None = None
    timeout: float = 120.0
    max_body: int = 8 * 2**20
    max_in_flight: int = 256
    upload_seconds: float = 30.0
    judge_concurrency: int = 4
    log_content: bool = False
    hosts: tuple[str, ...] | None = None
    origins: tuple[str, ...] = ()


class Gateway:
    """All that belongs to one gateway; `request.app.state.gateway` for whoever answers a request.

    Args:
        store: The store.
        engine: What samples replies.
        judge: What judges turns; `None` leaves them to feedback by thumbs.
        keys: Who may ask.
        options: See `GatewayOptions`.
    """

    def __init__(self, store: Store, engine: Engine, judge: Judge | None, keys: Keys, options: GatewayOptions):
        self.store, self.engine, self.keys, self.options = store, engine, keys, options
        self.metrics = Metrics()
        self.versions = ServedVersions(store, engine, keys.users, self.metrics)
        self.judging = JudgingWorker(store, judge, self.metrics, options.judge_concurrency) if judge else None
        self.recorder = Recorder(store, self.metrics, on_answer=self.judging.wake if self.judging else lambda: None)
        self.uploads, self.answers = (Places(options.max_in_flight, len(keys.users)) for _ in range(2))
        self.ids_watch = IdsWatch()
        self._health: tuple[float, str | None] = (-_HEALTH_SECONDS, None)

    @property
    def answering(self) -> int:
        """Requests that are being answered."""
        return self.answers.taken

    @contextmanager
    def in_flight(self, user: str) -> Iterator[None]:
        """Counts a request for as long as it is being answered."""
        try:
            with self.answers.taken_by(user):
                self.metrics.in_flight.set(self.answering)
                yield
        finally:
            self.metrics.in_flight.set(self.answering)

    async def engine_problem(self) -> str | None:
        """Why the engine cannot reply, as of a moment ago; `None` when it can."""
        checked, problem = self._health
        if time.monotonic() - checked >= _HEALTH_SECONDS:
            try:
                await self.engine.check()
                problem = None
            except EngineError as error:
                problem = str(error)
            self._health = (time.monotonic(), problem)
        return problem

    async def problems(self, user: str | None) -> dict[str, Any]:
        """What does not work now, for a user or for somebody who is none.

        Returns:
            `engine`, `store`, `judge`, `replies` and the user's own `version`: those that do not work, with a text.
        """
        found: dict[str, Any] = {
            "engine": await self.engine_problem(),
            "store": self.recorder.problem,
            "judge": self.judging.problem if self.judging else None,
            "replies": self.ids_watch.problem,
            "version": None if user is None else self.versions.problem(user),
        }
        return {name: problem for name, problem in found.items() if problem is not None}

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Follow versions and judge turns; in the end write down what is left."""
        with contextlib.suppress(Exception):
            await self.versions.follow()  # what is published answers from the first request on
        workers: list[ServedVersions | JudgingWorker | LogKeeper] = [self.versions, LogKeeper(self.store)]
        workers += [self.judging] if self.judging else []
        tasks = [asyncio.create_task(worker.run()) for worker in workers]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for worker in workers:
                await worker.aclose()
            await asyncio.to_thread(self.recorder.close)
            await self.engine.aclose()


def create_app(
    store: Store,
    engine: Engine,
    *,
    judge: Judge | None = None,
    keys: Keys | None = None,
    options: GatewayOptions | None = None,
    routers: Sequence[APIRouter] = (),
) -> FastAPI:
    """The gateway. See [`Gateway`] for its arguments.

    Args:
        routers: More paths, such as those of the status page.
    """
    options = options or GatewayOptions()
    gateway = Gateway(store, engine, judge, keys or Keys(), options)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with gateway.running():
            yield

    app = FastAPI(title="trl-openclaw", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.gateway = gateway
    app.add_middleware(
        Guard,
        hosts=options.hosts,
        origins=options.origins,
        max_body=options.max_body,
        upload_seconds=options.upload_seconds,
    )
    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(ClientDisconnect, on_client_gone)
    app.add_exception_handler(Exception, on_unexpected)
    app.add_exception_handler(RequestValidationError, on_invalid)
    for router in (_router, chat.router, feedback_api.router, *routers):
        app.include_router(router)
    return app


_router = APIRouter()


@_router.get("/v1/models")
async def models(request: Request, user: CurrentUser) -> dict[str, Any]:
    """The one model there is, with the version that answers this user."""
    gateway: Gateway = request.app.state.gateway
    card = {
        "id": gateway.engine.model,
        "object": "model",
        "created": 0,
        "owned_by": "trl-openclaw",
        "version": gateway.versions.current(user),
    }
    return {"object": "list", "data": [card]}


@_router.get("/v1/models/{name:path}")
async def model(request: Request, name: str, user: CurrentUser) -> dict[str, Any]:
    """The model by its name."""
    (card,) = (await models(request, user))["data"]
    if card["id"] != name:
        raise ApiError(404, f"The model {name!r} does not exist.", param="model", code="model_not_found")
    return card


@_router.get("/health")
async def health(request: Request) -> JSONResponse:
    """Whether chat works (200 or 503), and what does not. Details are for those with a key."""
    gateway: Gateway = request.app.state.gateway
    user = gateway.keys.user_of(request.headers.get("authorization"))
    found = await gateway.problems(user)
    status = "down" if "engine" in found else "degraded" if found else "ok"
    body: dict[str, Any] = {"status": status}
    if user is not None:
        body |= {"engine": gateway.engine.name, "model": gateway.engine.model, "problems": found}
    return JSONResponse(body, 503 if "engine" in found else 200)


@_router.get("/metrics")
def metrics(request: Request, user: Annotated[str, Depends(current_user)]) -> Response:
    """What Prometheus reads."""
    gateway: Gateway = request.app.state.gateway
    return Response(generate_latest(gateway.metrics.registry), media_type=CONTENT_TYPE_LATEST)
