"""`POST /v1/feedback`: what a person says of a reply."""

import hashlib
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from ...errors import StoreError, UnknownTurnError
from ..store import Store
from .api_errors import ApiError
from .auth import CurrentUser

router = APIRouter()

MAX_CORRECTION_CHARS = 4000
_THUMBS: dict[str | int, int] = {"up": 1, "down": -1, "none": 0, 1: 1, -1: -1, 0: 0}
_WORDS = {1: "up", -1: "down", 0: "none"}


class Feedback(BaseModel):
    """Feedback on one reply.

    Args:
        turn_id: The completion's own id; under the name `id`, too.
        thumb: `"up"`, `"down"` or `"none"`; or 1, -1 or 0.
        correction: What the reply should have been like. It is the turn's hint.
        key: Names this piece of feedback, so that sending it again counts once. By default its content does.
    """

    model_config = ConfigDict(extra="forbid")

    turn_id: Annotated[str, Field(max_length=100, validation_alias=AliasChoices("turn_id", "id"))]
    thumb: Literal["up", "down", "none", 1, -1, 0]
    correction: Annotated[str, Field(max_length=MAX_CORRECTION_CHARS)] | None = None
    key: Annotated[str, Field(min_length=1, max_length=200)] | None = None

    @property
    def name(self) -> str:
        """The key, given or made of the content."""
        content = "\0".join([self.turn_id, str(_THUMBS[self.thumb]), self.correction or ""])
        return self.key or hashlib.sha256(content.encode("utf-8", "replace")).hexdigest()


@router.post("/v1/feedback")
async def feedback(request: Request, said: Feedback, user: CurrentUser) -> dict[str, Any]:
    """Take feedback. `new` says whether it was heard for the first time."""
    gateway = request.app.state.gateway
    thumb = _THUMBS[said.thumb]

    def work(store: Store) -> bool:
        return store.add_feedback(user, said.turn_id, thumb, said.correction, said.name)

    try:
        new = await gateway.recorder.call(work)
    except UnknownTurnError as error:
        raise ApiError(404, f"There is no reply {said.turn_id!r}.", param="turn_id", code="turn_not_found") from error
    except StoreError as error:
        raise ApiError(503, "The store cannot be written now; send this again later.") from error
    if new:
        gateway.metrics.feedback.labels(_WORDS[thumb]).inc()
    return {"object": "feedback", "turn_id": said.turn_id, "new": new}
