"""`POST /v1/feedback`: what a person says of a reply."""

import uuid
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from ...errors import StoreError, UnknownTurnError
from ..records import StoredVerdict, TurnState
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
        key: Names this piece of feedback on this reply, so that sending it again counts once. Without one, saying what
            was said last counts once.
    """

    model_config = ConfigDict(extra="forbid")

    turn_id: Annotated[str, Field(max_length=100, validation_alias=AliasChoices("turn_id", "id"))]
    thumb: Literal["up", "down", "none", 1, -1, 0]
    correction: Annotated[str, Field(max_length=MAX_CORRECTION_CHARS)] | None = None
    key: Annotated[str, Field(min_length=1, max_length=200)] | None = None

    def repeats(self, last: StoredVerdict | None) -> bool:
        """Whether it says what already counts, and has no key of its own."""
        if self.key is not None or last is None or last.source != "feedback" or last.score != _THUMBS[self.thumb]:
            return False
        counts = last.hints[0] if last.hint_source == "feedback" else ""  # a correction is one hint
        return (self.correction or "").strip() == counts


@router.post("/v1/feedback")
async def feedback(request: Request, said: Feedback, user: CurrentUser) -> dict[str, Any]:
    """Take feedback. `new` says whether it was news, and `state` what has become of the turn.

    It comes in time for those that are `open`, `answered`, `judged`, `ready` or `claimed`.
    """
    gateway = request.app.state.gateway
    thumb = _THUMBS[said.thumb]

    def work(store: Store) -> tuple[bool, TurnState]:
        before = store.show(user, said.turn_id)
        if said.repeats(before.verdict):
            return False, before.state
        key = f"{said.turn_id} {said.key or uuid.uuid4().hex}"  # a client may name each reply's first feedback alike
        new = store.add_feedback(user, said.turn_id, thumb, said.correction, key)
        return new, store.show(user, said.turn_id).state

    try:
        new, state = await gateway.recorder.call(work)
    except UnknownTurnError as error:
        raise ApiError(404, f"There is no reply {said.turn_id!r}.", param="turn_id", code="turn_not_found") from error
    except StoreError as error:
        raise ApiError(503, "The store cannot be written now; send this again later.") from error
    if new:
        gateway.metrics.feedback.labels(_WORDS[thumb]).inc()
    return {"object": "feedback", "turn_id": said.turn_id, "new": new, "state": state}
