"""The judge's score as a plain TRL reward function, for stock `GRPOTrainer` with its group normalisation."""

import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .feedback import FeedbackBatch, feedback_columns, feedback_metrics
from .next_states.base import NextStateProvider
from .trajectories import TRAJECTORY_COLUMN, split_trajectory
from .types import Feedback, Messages, Turn

if TYPE_CHECKING:
    from .judges import Judge

logger = logging.getLogger(__name__)

JUDGE_REWARDS = ("majority", "mean")


class HindsightReward:
    """Async TRL reward function: what followed the reply is judged, and the score is the reward.

    A turn without a score (no next state, a tie, any failure) gets `None`, which TRL leaves out of its group's mean.
    Where a completion holds several turns (tools, environments, rollout functions), each is judged by what followed it,
    and the reward is the mean of their scores; see [`~trl_openclaw.trajectories.split_trajectory`]. What follows the
    last turn is what the environment's `next_state` says, else the provider, else the column.

    Nothing is ever raised, since an error on one rank would leave the others waiting. The metrics of
    [`~trl_openclaw.feedback.feedback_metrics`] and the columns of [`~trl_openclaw.feedback.feedback_columns`] go to
    TRL's own logs, the reward itself as `rewards/judge/mean`.

    Args:
        judge ([`~trl_openclaw.judges.Judge`], *optional*):
            The judge. `None` only collects next states; every reward is then `None`.
        next_state ([`~trl_openclaw.next_states.NextStateProvider`], *optional*):
            Where the next state comes from. Without one, the dataset's column `next_state` is used.
        max_concurrency (`int`, *optional*, defaults to `32`):
            Turns in flight at once.
        timeout (`float`, *optional*, defaults to `600.0`):
            Seconds for a whole batch; turns unfinished by then get `None`. Keep it well under the process group's own
            time limit.
        eos_token_ids (`int` or `Iterable[int]`, *optional*):
            The ids that end a completion (and the padding id, where it may stand last). A completion with another last
            id is marked `truncated`. Without them none is.
        score_only (`bool`, *optional*, defaults to `True`):
            Whether to ask the judge for scores alone, since a reward has no use for hints. Needs a judge with
            `without_hints()`; another is used as it is.

        judge_reward (`str`, *optional*, defaults to `"majority"`):
            What a turn's score is: `"majority"` (-1, 0 or 1), or `"mean"` of the valid votes.

    Attributes:
        last (`list[Feedback]`): The feedback of the latest call, turn by turn, row by row.
        places (`list[tuple[int, int]]`): The row and the step of each of these turns.
        calls_tools (`bool`): Whether the policy has tools, so that a call nobody answered, or could read, counts as
            one.
        call_pattern (`re.Pattern`, *optional*): What shows that a text was meant to be a call.
        early (`float`): The share of that call's turns that had been started before it, as early ones; see
            [`open_batch`].
        seconds (`float`): How long that call took.
    """

    def __init__(
        self,
        judge: "Judge | None",
        next_state: NextStateProvider | None = None,
        *,
        max_concurrency: int = 32,
        timeout: float = 600.0,
        eos_token_ids: int | Iterable[int] | None = None,
        score_only: bool = True,
        judge_reward: str = "majority",
    ):
        if judge_reward not in JUDGE_REWARDS:
            raise ValueError(f"`judge_reward` must be one of {', '.join(JUDGE_REWARDS)}, got {judge_reward!r}.")
        if max_concurrency < 1 or timeout <= 0:
            raise ValueError(
                f"`max_concurrency` must be at least 1 and `timeout` positive, got {max_concurrency} and {timeout}."
            )
        without_hints = getattr(judge, "without_hints", None) if score_only else None
        self.judge: Judge | None = without_hints() if without_hints is not None else judge
        self.next_state = next_state
        self.max_concurrency = max_concurrency
        self.timeout = timeout
        ids = [eos_token_ids] if isinstance(eos_token_ids, int) else eos_token_ids
        self.eos_token_ids = None if ids is None else frozenset(ids)
        self.judge_reward = judge_reward
        self.calls_tools = False
        self.call_pattern: re.Pattern[str] | None = None
        self.last: list[Feedback] = []
        self.places: list[tuple[int, int]] = []
        self.early = 0.0
        self._opened: FeedbackBatch | None = None
        self.seconds = 0.0
        # TRL names a reward function by this in `rewards/<name>/mean`.
        self.__name__ = "judge"

    async def __call__(
        self,
        prompts: Sequence[str | Messages],
        completions: Sequence[str | Messages],
        completion_ids: Sequence[Sequence[int]] | None = None,
        log_extra: Callable[[str, list[Any]], None] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
        trainer_state: Any = None,
        **columns: Any,
    ) -> list[float | None]:
        """Score a batch.

        Args:
            prompts: One prompt per row, text or messages.
            completions: One completion per row, text or messages.
            completion_ids: The sampled ids of each row, used only to see which ones were cut.
            log_extra: TRL's hook for columns of the completions table.
            log_metric: TRL's hook for metrics.
            trainer_state: Ignored.
            columns: The dataset's other columns, one entry per row.

        Returns:
            -1, 0, 1 or `None` per row; the mean of what its turns have, where it has several.
        """
        started = time.perf_counter()
        batch = self.take_batch() or self._new_batch()
        try:
            rows = _rows(columns, len(prompts))
            ids: Sequence[Any] = completion_ids if completion_ids is not None else [None] * len(prompts)
            split = [self.turns(*row) for row in zip(prompts, completions, ids, rows, strict=True)]
            self.places = [(row, turn.step) for row, turns in enumerate(split) for turn in turns]
            turns = [turn for found in split for turn in found]
            self.last = await batch.collect(turns, [rows[row] for row, _ in self.places], self.timeout)
        except Exception as error:
            logger.warning("No turn of this batch could be judged: %s: %s", type(error).__name__, error)
            bare = [Turn(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]
            self.places = [(row, 0) for row in range(len(bare))]
            self.last = [Feedback(turn, failure="judge_failed", detail=repr(error)) for turn in bare]
        finally:
            await batch.close()
        self.early = batch.num_early / len(self.last) if self.last else 0.0
        self._log(log_extra, log_metric)
        self.seconds = time.perf_counter() - started
        scores: list[list[float]] = [[] for _ in prompts]
        for (row, _), score in zip(self.places, self.turn_scores(), strict=True):
            scores[row] += [] if score is None else [score]
        return [sum(found) / len(found) if found else None for found in scores]

    def turn_scores(self) -> list[float | None]:
        """The score of each turn of the latest call."""
        if self.judge_reward == "mean":
            return [feedback.verdict.mean_vote if feedback.verdict else None for feedback in self.last]
        return [None if feedback.score is None else float(feedback.score) for feedback in self.last]

    def open_batch(self) -> FeedbackBatch:
        """Let the turns of the next call be started before it, one by one, each with what the call will show of it.

        The next call waits for them. Without such a call, close what [`take_batch`] gives.
        """
        self._opened = self._new_batch()
        return self._opened

    def take_batch(self) -> FeedbackBatch | None:
        """The batch that was opened and not called for yet, which is no longer waited for."""
        batch, self._opened = self._opened, None
        return batch

    def turns(
        self,
        prompt: str | Messages,
        completion: str | Messages,
        ids: Sequence[int] | None,
        row: Mapping[str, Any],
    ) -> list[Turn]:
        """The turns of a row, as judge and provider see them. Most have one."""
        return split_trajectory(
            prompt,
            row.get(TRAJECTORY_COLUMN) or completion,
            truncated=self._is_truncated(ids),
            calls_tools=self.calls_tools,
            call_pattern=self.call_pattern,
        )

    def _new_batch(self) -> FeedbackBatch:
        return FeedbackBatch(self.next_state, self.judge, self.max_concurrency)

    def _is_truncated(self, ids: Sequence[int] | None) -> bool:
        if self.eos_token_ids is None or ids is None or len(ids) == 0:
            return False
        return int(ids[-1]) not in self.eos_token_ids

    def _log(
        self,
        log_extra: Callable[[str, list[Any]], None] | None,
        log_metric: Callable[[str, float], None] | None,
    ) -> None:
        try:
            if log_metric is not None:
                for name, values in feedback_metrics(self.last).items():
                    for value in values:
                        log_metric(name, value)
            if log_extra is not None:
                for name, column in feedback_columns(self.last, [row for row, _ in self.places]).items():
                    log_extra(name, column)
        except Exception as error:
            logger.warning("The judge's metrics could not be logged: %s: %s", type(error).__name__, error)


def _rows(columns: Mapping[str, Any], n: int) -> list[dict[str, Any]]:
    """One dict per row. What is no list with an entry per row is given to every row whole."""
    per_row = {k: v for k, v in columns.items() if isinstance(v, (list, tuple)) and len(v) == n}
    shared = {k: v for k, v in columns.items() if k not in per_row}
    return [shared | {k: v[i] for k, v in per_row.items()} for i in range(n)]
