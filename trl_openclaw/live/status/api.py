"""The page itself, the data that it shows, and what its buttons do, as routes for the gateway's application."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Body, Query, Request, Response
from fastapi.responses import FileResponse, JSONResponse
from fastapi.routing import APIRoute
from starlette.concurrency import run_in_threadpool

from ...errors import StoreBusyError, StoreError, UnknownTurnError
from ...types import valid_text
from ..gateway.api_errors import ApiError
from ..gateway.app import Gateway
from ..gateway.auth import CurrentUser
from ..records import BASE_VERSION
from ..store import Store
from .headers import DATA_HEADERS, PAGE_HEADERS
from .overview import Overviews
from .views import problem_views, scores_view, session_view, turn_view, version_views

PAGE = Path(__file__).with_name("page")
FILES = {
    "style.css": "text/css",
    "icon.svg": "image/svg+xml",
    **{f"{name}.js": "text/javascript" for name in ("app", "client", "conversation", "dom", "heatmap", "learning")},
}
MOST_HINTS = 20
LONGEST_HINT = 4000

Limit = Annotated[int, Query(ge=1, le=100)]
Before = Annotated[int | None, Query(ge=0, lt=2**63)]  # what SQLite has for numbers
Json = Annotated[Any, Body()]


def status_router(store: Store, *, turns_per_step: int = 16, max_version_lag: int = 4) -> APIRouter:
    """The routes of the status page: `/` and everything under `/status/`. Whose data they show says the key.

    Args:
        store: The store.
        turns_per_step: Turns in one update of the learner, until the first one says how many it had.
        max_version_lag: How old they may be, in versions.
    """
    router = APIRouter(route_class=_Route, include_in_schema=False)
    overviews = Overviews(store, turns_per_step, max_version_lag)
    _add_reads(router, store, overviews)
    _add_changes(router, store, overviews)
    _add_files(router)
    return router


def _add_reads(router: APIRouter, store: Store, overviews: Overviews) -> None:
    @router.get("/status/overview")
    async def overview(request: Request, user: CurrentUser) -> Response:
        gateway: Gateway = request.app.state.gateway
        now = {"model": gateway.engine.model, "problems": problem_views(await gateway.problems(user))}
        etag, data = await run_in_threadpool(overviews.of, user, now)
        headers = {**DATA_HEADERS, "ETag": etag}
        if request.headers.get("if-none-match") == etag:
            return Response(status_code=304, headers=headers)
        return JsonAnswer(data, headers=headers)

    @router.get("/status/sessions")
    def sessions(user: CurrentUser, limit: Limit = 20, before: Before = None, side: bool = False) -> JSONResponse:
        found = store.session_page(user, limit + 1, before, side)
        return _data({"sessions": [session_view(line) for line in found[:limit]], "more": len(found) > limit})

    @router.get("/status/turns")
    def turns(user: CurrentUser, session: str, limit: Limit = 20, before: Before = None) -> JSONResponse:
        found = store.turns(user, session, limit=limit + 1, before=before)
        shown = found[:limit][::-1]
        scored = store.scored_batches(shown)
        views = [turn_view(turn, scored.get(turn.turn_id)) for turn in shown]
        return _data({"turns": views, "more": len(found) > limit})

    @router.get("/status/tokens")
    def tokens(user: CurrentUser, turn: str) -> JSONResponse:
        scores = store.token_scores(turn, user)
        if scores is None:
            raise ApiError(404, "This turn has no token scores.")
        return _data(scores_view(scores))


def _add_changes(router: APIRouter, store: Store, overviews: Overviews) -> None:
    def change(path: str) -> Callable[[Callable[[str, Any], dict[str, Any]]], None]:
        def add(do: Callable[[str, Any], dict[str, Any]]) -> None:
            def changed(user: CurrentUser, body: Json = None) -> JSONResponse:
                try:
                    return _data(do(user, body))
                finally:  # also when all is deleted, but traces of it are left
                    overviews.forget(user)

            router.add_api_route(f"/status/{path}", changed, methods=["POST"], name=path)

        return add

    @change("hints")
    def set_hints(user: str, body: Any) -> dict[str, Any]:
        hints = [hint.strip() for hint in _field(body, "hints", list) if isinstance(hint, str) and hint.strip()]
        if len(hints) > MOST_HINTS or any(len(hint) > LONGEST_HINT for hint in hints):
            raise ApiError(400, f"A turn takes at most {MOST_HINTS} hints of {LONGEST_HINT} characters.", param="hints")
        turn_id = _field(body, "turn", str)
        store.edit_hint(user, turn_id, hints)
        return {"hints": hints, "state": store.show(user, turn_id).state}

    @change("delete")
    def delete(user: str, body: Any) -> dict[str, Any]:
        given = [name for name in ("turn", "session", "all") if isinstance(body, dict) and name in body]
        if len(given) != 1:
            raise ApiError(400, "The body must be JSON with one of 'turn', 'session' and 'all'.")
        what = given[0]
        if what != "all":
            return {"turns": store.delete(user, **{f"{what}_id": _field(body, what, str)}).turns}
        if not _field(body, what, bool):
            raise ApiError(400, "Nothing is deleted unless 'all' is true.", param=what)
        return {"turns": store.delete(user, missing_ok=True).turns}

    @change("opt-out")
    def opt_out(user: str, body: Any) -> dict[str, Any]:
        on = _field(body, "on", bool)
        store.opt_out(user, on)
        return {"on": on}

    @change("roll-back")
    def roll_back(user: str, body: Any) -> dict[str, Any]:
        to, published = _field(body, "to", str), store.published_version(user)
        offered = {view["version"] for view in version_views(store.versions(user), published) if view["can_return_to"]}
        if to not in offered:
            raise ApiError(409, f"No going back to {to[:40]!r}: it never answered, answers now, or was removed.")
        if published == BASE_VERSION:
            store.publish(user, to)
        else:
            store.roll_back(user, to)
        return {"published": to}


def _add_files(router: APIRouter) -> None:
    @router.get("/")
    def page() -> FileResponse:
        return FileResponse(PAGE / "index.html", headers=PAGE_HEADERS)

    @router.get("/status/{name}")
    def file(name: str) -> FileResponse:
        if name not in FILES:
            raise ApiError(404, f"There is no file {name[:40]!r}.")
        return FileResponse(PAGE / name, media_type=FILES[name], headers=PAGE_HEADERS)


def _data(content: dict[str, Any]) -> JSONResponse:
    return JsonAnswer(content, headers=DATA_HEADERS)


def _field(body: Any, name: str, kind: type) -> Any:
    value = body.get(name) if isinstance(body, dict) else None
    if not isinstance(value, kind):
        raise ApiError(400, f"The body must be JSON with {name!r}: {kind.__name__}.", param=name)
    return valid_text(value) if isinstance(value, str) else value


class JsonAnswer(JSONResponse):
    """JSON that holds whatever the store does, half an emoji too, which has no bytes of its own."""

    def render(self, content: Any) -> bytes:
        """The content as ASCII."""
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()


class _Route(APIRoute):
    """A route whose troubles with the store are answers."""

    def get_route_handler(self) -> Callable[..., Any]:
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            try:
                return await handle(request)
            except UnknownTurnError as error:
                raise ApiError(404, str(error)) from error
            except StoreError as error:
                raise ApiError(503 if isinstance(error, StoreBusyError) else 500, str(error)) from error

        return answer
