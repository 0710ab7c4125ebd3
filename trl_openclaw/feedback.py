"""From a batch of sampled turns to feedback: next state, then judge, all turns at once, and what failed is counted."""

import asyncio
import copy
import inspect
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from .calls import call_in_thread, exits_as_errors
from .next_states.base import NextStateProvider, as_next_state
from .types import (
    HINT_FAILURES,
    VOTE_FAILURES,
    Feedback,
    FeedbackFailure,
    NextState,
    Outcome,
    Turn,
    Verdict,
)

if TYPE_CHECKING:
    from .judges import Judge

NEXT_STATE_COLUMN = "next_state"
ENVIRONMENT_COLUMN = "environments"
"""Where TRL hands an environment to what rewards its row."""

_DETAIL_LENGTH = 500
# Seconds that cancelled turns may take to tidy up before they are left behind. A judge that is the policy itself needs
# one decoding step to let go of the model, which for a large batch on a CPU takes seconds; others need next to none.
_GRACE = 10.0


async def collect_feedback(
    turns: Sequence[Turn],
    rows: Sequence[Mapping[str, Any]],
    *,
    next_state: NextStateProvider | None,
    judge: "Judge | None",
    max_concurrency: int = 32,
    timeout: float = 600.0,
) -> list[Feedback]:
    """Get the next state of every turn and have it judged, concurrently.

    An error of the provider or the judge costs its own turn and no other, and so does `exit()`. Both must keep the
    event loop free: what blocks it blocks every turn, and the deadline too. Ctrl-C ends the batch.

    Args:
        turns: The sampled turns. A turn that already has a next state keeps it, and the provider is not asked.
        rows: The rows of the dataset the turns came from, as many as turns.
        next_state: The provider. It is not asked where a row's environment (`environments`) has a `next_state` that is
            not `None`. Without one, a row's column `next_state` is used: a text (the user's message), a message with
            role `user` or `tool`, a `NextState`, or `None` for no next state.
        judge: The judge. It is not asked about a turn without next state, nor about a blank user message.
        max_concurrency: Turns in flight at once. A turn's votes go out together inside its one place, so a judge with
            three votes sees up to three times as many requests. Turns that hang keep their places until the deadline.
        timeout: Seconds for the whole batch. Turns unfinished by then are cancelled; those that do not stop within ten
            more seconds are left behind.

    Returns:
        One `Feedback` per turn, in the order of `turns`. Its `failure` is `next_state_failed` or `judge_failed` for an
        error (or a verdict whose votes all failed), `next_state_timeout` or `judge_timeout` for what the deadline cut
        (also when it never got its place), else `None`.

    Raises:
        ValueError: When turns and rows differ in number, or a limit is not positive.
    """
    if timeout <= 0:
        raise ValueError(f"`timeout` must be positive, got {timeout}.")
    batch = FeedbackBatch(next_state, judge, max_concurrency)
    try:
        return await batch.collect(turns, rows, timeout)
    finally:
        await batch.close()


class FeedbackBatch:
    """The feedback of one batch of turns, where a turn may be started before the others are there.

    It belongs to one event loop and takes one `collect`, after which, or instead of which, it must be closed. A
    `collect` that still waits when it is closed is cancelled, since nobody wants its answer.

    Args:
        next_state: The provider, as in [`collect_feedback`].
        judge: The judge.
        max_concurrency: Turns in flight at once, whenever they started.
    """

    def __init__(self, next_state: NextStateProvider | None, judge: "Judge | None", max_concurrency: int):
        if max_concurrency < 1:
            raise ValueError(f"`max_concurrency` must be at least 1, got {max_concurrency}.")
        self.next_state, self.judge = next_state, judge
        self.num_early = 0
        """How many turns of `collect` had been started before it, as early ones."""
        self._gate = asyncio.Semaphore(max_concurrency)
        self._started: dict[int, _TurnRun] = {}
        self._early: set[int] = set()
        self._tasks: list[asyncio.Task[Feedback]] = []
        self._closed = False

    def start(self, place: int, turn: Turn, row: Mapping[str, Any], *, early: bool = True) -> None:
        """Start the turn that will stand at `place` in `collect`. Call it on the event loop.

        Args:
            early: Whether it counts in `num_early`.
        """
        self._started[place] = self._run(turn, row)
        if early:
            self._early.add(place)

    async def collect(self, turns: Sequence[Turn], rows: Sequence[Mapping[str, Any]], timeout: float) -> list[Feedback]:
        """One `Feedback` per turn; see [`collect_feedback`]. What was started is waited for and not started again.

        A turn that was started otherwise than it stands here, or with another row, is given up and started afresh. The
        time limit counts from here on.
        """
        if len(turns) != len(rows):
            raise ValueError(f"There are {len(turns)} turns but {len(rows)} rows; give one row per turn.")
        started, self._started = self._started, {}
        fitting = {
            place: started.pop(place)
            for place, (turn, row) in enumerate(zip(turns, rows, strict=True))
            if place in started and started[place].is_for(turn, row)
        }
        for run in started.values():
            _give_up(run.task)
        self.num_early = len(self._early & fitting.keys())
        runs = [
            fitting.get(place) or self._run(turn, row)
            for place, (turn, row) in enumerate(zip(turns, rows, strict=True))
        ]
        if not runs:
            return []
        done, _ = await asyncio.wait([run.task for run in runs], timeout=timeout)
        if self._closed:
            raise asyncio.CancelledError
        return [run.result() if run.task in done else run.cut(timeout) for run in runs]

    async def close(self) -> None:
        """Cancel what still runs. A task that will not stop is left behind rather than waited for."""
        self._closed = True
        pending = [task for task in self._tasks if not task.done()]
        for task in pending:
            _give_up(task)
        if pending:
            await asyncio.wait(pending, timeout=_GRACE)

    def _run(self, turn: Turn, row: Mapping[str, Any]) -> "_TurnRun":
        run = _TurnRun(turn, row, self.next_state, self.judge, self._gate)
        self._tasks.append(run.task)
        return run


def _give_up(task: asyncio.Task[Feedback]) -> None:
    """Cancel a task, once: a second time would cut short how it tidies up."""
    if not task.cancelling():
        task.add_done_callback(lambda t: t.cancelled() or t.exception())  # read, so that asyncio does not complain
        task.cancel()


class _TurnRun:
    """One turn on its way to feedback; remembers how far it came, for when it is cut off."""

    def __init__(
        self,
        turn: Turn,
        row: Mapping[str, Any],
        provider: NextStateProvider | None,
        judge: "Judge | None",
        gate: asyncio.Semaphore,
    ):
        self.turn, self.row, self.provider, self.judge, self.gate = turn, row, provider, judge, gate
        self._asked = copy.deepcopy(turn), dict(row)  # of its own, since a provider may write into what it is given
        self.running_since: float | None = None
        self.judging_since: float | None = None
        self.task = asyncio.create_task(self.go())

    def is_for(self, turn: Turn, row: Mapping[str, Any]) -> bool:
        """Whether it was started with this turn and this row. Values that cannot be compared are taken to differ."""
        try:
            return bool(self._asked == (turn, row))
        except Exception:
            return False

    async def go(self) -> Feedback:
        async with self.gate:
            self.running_since = time.perf_counter()
            try:
                with exits_as_errors():
                    state = await self._next_state()
                    missing = _is_missing(state)
                    self.turn = replace(self.turn, next_state=state)
                    if self.judge is None or missing:
                        return Feedback(self.turn, **self._seconds())
                    self.judging_since = time.perf_counter()
                    verdict: Any = await self.judge(self.turn)
            except Exception as error:
                return self._failed("failed", f"{type(error).__name__}: {error}")
        if not isinstance(verdict, Verdict):
            return self._failed("failed", f"the judge must give a Verdict, got {type(verdict).__name__}")
        if verdict.failed:
            kinds = ", ".join(sorted({vote.failure for vote in verdict.votes if vote.failure}))
            return replace(self._failed("failed", f"every vote failed: {kinds}"), verdict=verdict)
        return Feedback(self.turn, verdict, **self._seconds())

    async def _next_state(self) -> NextState | None:
        if self.turn.next_state is not None:
            return self.turn.next_state
        state = await _from_environment(self.row.get(ENVIRONMENT_COLUMN))
        if state is not None:
            return state
        if self.provider is not None:
            return as_next_state(await self.provider(self.turn, self.row), "A next-state provider")
        return _from_column(self.row.get(NEXT_STATE_COLUMN))

    def result(self) -> Feedback:
        """What the finished task gave. One that was cancelled from inside counts as failed."""
        return self._failed("failed", "cancelled from inside") if self.task.cancelled() else self.task.result()

    def cut(self, timeout: float) -> Feedback:
        """The feedback of a turn that the deadline found unfinished."""
        return self._failed("timeout", f"not finished when the batch's {timeout:g} s were over")

    def _failed(self, how: Literal["failed", "timeout"], detail: str) -> Feedback:
        failure: FeedbackFailure
        if self.judging_since is not None:
            failure = "judge_failed" if how == "failed" else "judge_timeout"
            return Feedback(self.turn, failure=failure, detail=detail[:_DETAIL_LENGTH], **self._seconds())
        failure = "next_state_failed" if how == "failed" else "next_state_timeout"
        turn = replace(self.turn, next_state=None)
        return Feedback(turn, failure=failure, detail=detail[:_DETAIL_LENGTH], **self._seconds())

    def _seconds(self) -> dict[str, Any]:
        """How long the next state and the judge took, up to now where they are not done."""
        now = time.perf_counter()
        judging = now if self.judging_since is None else self.judging_since
        running = judging if self.running_since is None else self.running_since
        return {"next_state_seconds": judging - running, "seconds": now - judging}


def _is_missing(state: NextState | None) -> bool:
    """Whether there is nothing to judge by. A tool that prints nothing has said something, a blank user has not.

    Reads the text whatever the role, so that content nobody can read fails here and not in the logs.
    """
    return state is None or (not state.text.strip() and state.role == "user")


async def _from_environment(environment: Any) -> NextState | None:
    """The state an environment was left in, if it says so by an attribute; a property may take its time."""
    if inspect.getattr_static(environment, "next_state", None) is None:
        return None
    state = await call_in_thread(getattr, environment, "next_state")
    return as_next_state(state, "The environment's attribute `next_state`")


def _from_column(value: Any) -> NextState | None:
    """The next state that a row carries."""
    if not isinstance(value, Mapping):
        return as_next_state(value, f"The column {NEXT_STATE_COLUMN!r}")
    role, content = value.get("role"), value.get("content")
    if role not in ("user", "tool") or content is None:
        raise ValueError(
            f"A message in the column {NEXT_STATE_COLUMN!r} needs the role 'user' or 'tool', and content; got the role "
            f"{role!r} and content of type {type(content).__name__}."
        )
    return NextState(content, role=role)


_SCORED: tuple[Outcome, ...] = ("positive", "negative", "neutral")
_SCORE_NAMES = {1: "positive", -1: "negative", 0: "neutral"}


def feedback_metrics(feedbacks: Sequence[Feedback]) -> dict[str, list[float]]:
    """Numbers for the logs, one per turn or vote, whose plain means are the shares.

    Every key is there every time; its list is empty when nothing in the batch can say. All are 0 or 1 but the seconds.

    | key | mean over | is the share that |
    |---|---|---|
    | `judge/score/positive`, `.../negative`, `.../neutral` | turns | got that score |
    | `judge/score/tied` | turns | drew for first place, and has no score |
    | `judge/score/failed` | turns | was shown to the judge, without one valid vote: failures, an error, the deadline |
    | `judge/score/unasked` | turns | has a verdict that was not asked for a score |
    | `judge/score/none` | turns | was never shown to the judge |
    | `judge/vote/positive`, `.../negative`, `.../neutral`, `.../failed` | votes asked for a score | came out so |
    | `judge/vote_failed/<kind>` | votes asked for a score | failed in that way (`VOTE_FAILURES`) |
    | `judge/hint_failed/<kind>` | votes | gave no usable hint when asked, in that way (`HINT_FAILURES`) |
    | `judge/hinted` | turns with a verdict | has at least one hint |
    | `judge/seconds` | turns shown to the judge | (seconds, not a share) |
    | `feedback/failed/<kind>` | turns | failed in that way (`FeedbackFailure`) |
    | `next_state/seconds` | turns | (seconds, not a share) |
    | `next_state/missing` | turns | had none, without any failure |
    | `next_state/satisfied` | turns whose next state knows | pleased |

    The seven `judge/score/*` of a turn add up to 1, and so do the four `judge/vote/*` of a vote.
    """
    votes = [vote for feedback in feedbacks if feedback.verdict for vote in feedback.verdict.votes]
    scored = [vote for vote in votes if vote.score is not None or vote.failure]
    vote_results = ["failed" if vote.score is None else _SCORE_NAMES[vote.score] for vote in scored]
    known = [f.turn.next_state.satisfied for f in feedbacks if f.turn.next_state is not None]
    metrics = _split("judge/score", [*get_args(Outcome), "none"], [_outcome(f) for f in feedbacks])
    metrics |= _split("judge/vote", [*_SCORED, "failed"], vote_results)
    metrics |= _split("judge/vote_failed", VOTE_FAILURES, [vote.failure for vote in scored])
    metrics |= _split("judge/hint_failed", HINT_FAILURES, [vote.hint_failure for vote in votes])
    metrics |= _split("feedback/failed", get_args(FeedbackFailure), [f.failure for f in feedbacks])
    metrics["judge/hinted"] = [float(bool(f.hints)) for f in feedbacks if f.verdict]
    metrics["judge/seconds"] = [f.seconds for f in feedbacks if _outcome(f) != "none"]
    metrics["next_state/seconds"] = [f.next_state_seconds for f in feedbacks]
    metrics["next_state/missing"] = [float(_is_missing(f.turn.next_state) and not f.failure) for f in feedbacks]
    metrics["next_state/satisfied"] = [float(satisfied) for satisfied in known if satisfied is not None]
    return metrics


def _split(prefix: str, names: Sequence[str], values: Sequence[str | None]) -> dict[str, list[float]]:
    """For each name, 1 where the value is that name and 0 elsewhere."""
    return {f"{prefix}/{name}": [float(value == name) for value in values] for name in names}


def _outcome(feedback: Feedback) -> str:
    """The verdict's outcome; `failed` when the judge was asked and gave none, `none` when it was not asked."""
    if feedback.verdict is not None:
        return feedback.verdict.outcome
    return "failed" if feedback.failure in ("judge_failed", "judge_timeout") else "none"


def feedback_columns(feedbacks: Sequence[Feedback], rows: Sequence[int] | None = None) -> dict[str, list[Any]]:
    """Columns for the completions table, one entry per row.

    Args:
        feedbacks: Of all turns, row by row.
        rows: The row of each turn. By default every turn is a row.

    Returns:
        `next_state` (text, or `None`), `verdict` (the failure, else the outcome, else `"none"`), `judge_score` (-1, 0,
        1 or `None`) and `hints` (one per line, possibly empty text). Of a row with several turns, the texts of all
        steps and the mean of their scores.
    """
    groups: dict[int, list[Feedback]] = {}
    for row, feedback in zip(range(len(feedbacks)) if rows is None else rows, feedbacks, strict=True):
        groups.setdefault(row, []).append(feedback)
    return {
        "next_state": [step_texts([_state_text(f) for f in turns]) for turns in groups.values()],
        "verdict": [step_texts([f.failure or _outcome(f) for f in turns]) for turns in groups.values()],
        "judge_score": [_mean([f.score for f in turns if f.score is not None]) for turns in groups.values()],
        "hints": [step_texts(["\n".join(f.hints) for f in turns]) for turns in groups.values()],
    }


def step_texts(texts: Sequence[str | None]) -> str | None:
    """One text of a row's turns: the only one as it is, or each under its step, where there is one."""
    if len(texts) == 1:
        return texts[0]
    return "\n".join(f"[{step}] {text}" for step, text in enumerate(texts) if text)


def _state_text(feedback: Feedback) -> str | None:
    state = feedback.turn.next_state
    return state.text if state is not None else None


def _mean(scores: Sequence[int]) -> float | None:
    if len(scores) == 1:
        return scores[0]
    return sum(scores) / len(scores) if scores else None
