"""Errors as OpenAI's clients expect them."""

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.responses import Response

from ...errors import EngineError

ENGINE_STATUS = {"down": 503, "slow": 504, "refused": 400, "unloaded": 503, "broken": 502, "busy": 503}
"""The status for each kind of `EngineError`."""

RETRY_SECONDS = {"engine_busy": 10, "too_many_requests": 1}
"""When to come back, by the word for programs."""

CLIENT_GONE = 499
"""The status under which requests are counted whose client went away."""

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """What a client is told in place of an answer.

    Args:
        status: HTTP status.
        message: What is wrong, and what to do about it.
        param: The field that is wrong, such as `"messages[0].content"`.
        code: A word for programs.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    @classmethod
    def of(cls, error: EngineError) -> "ApiError":
        """What a client is told when the engine fails."""
        return cls(ENGINE_STATUS.get(error.kind, 502), str(error), code=f"engine_{error.kind}")

    @property
    def body(self) -> dict:
        """The error as JSON."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The error as an answer."""
        headers = {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}
        if self.code in RETRY_SECONDS:
            headers["Retry-After"] = str(RETRY_SECONDS[self.code])
        if self.status == 408:
            headers["Connection"] = "close"  # the rest of the body may still come
        return JSONResponse(self.body, self.status, headers=headers)


async def on_api_error(request: Request, error: Exception) -> JSONResponse:
    """Answers an `ApiError`, and counts it."""
    assert isinstance(error, ApiError)
    request.app.state.gateway.metrics.requests.labels(str(error.status)).inc()
    return error.response()


async def on_client_gone(request: Request, error: Exception) -> Response:
    """Counts a request whose client went away in the middle of its body. Nobody reads the answer."""
    request.app.state.gateway.metrics.requests.labels(str(CLIENT_GONE)).inc()
    return Response(status_code=CLIENT_GONE)


async def on_unexpected(request: Request, error: Exception) -> JSONResponse:
    """Answers what nobody thought of. The server writes it to the log."""
    said = ApiError(500, f"The gateway failed, as its log says ({type(error).__name__}).", code="internal_error")
    return await on_api_error(request, said)


async def on_http_error(request: Request, error: Exception) -> JSONResponse:
    """Answers what the framework refuses, such as an unknown path."""
    assert isinstance(error, HTTPException)
    if isinstance(error.__cause__, ApiError):  # while it read the body
        return error.__cause__.response()
    return ApiError(error.status_code, f"{error.detail}: {request.method} {request.url.path}").response()


async def on_invalid(request: Request, error: Exception) -> JSONResponse:
    """Answers a body or a query that does not fit."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    place = field_name(first["loc"][1:])
    return ApiError(400, f"`{place}`: {first['msg']}." if place else str(first["msg"]), param=place).response()


def field_name(place: tuple[int | str, ...]) -> str:
    """A place in a body as people write it: `messages[0].content`."""
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
    return name.removeprefix(".")
