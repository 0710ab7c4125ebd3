"""Alarms on the training logs: a run that collapses shows it in length, entropy and truncation first."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from accelerate.logging import get_logger
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from .settings import Number

logger = get_logger(__name__)

Band = tuple[float | None, float | None]
AlarmAction = Literal["warn", "stop"]


@dataclass(frozen=True)
class Watched:
    """A metric that can have a band.

    Args:
        metric: Its name in the logs.
        bound: What a bound of its band may be.
        below: What usually takes it below its band.
        above: What usually takes it above.
    """

    metric: str
    bound: Number
    below: str
    above: str


WATCHED = {
    "length": Watched(
        "completions/mean_length",
        Number(at_least=0, optional=True),
        "replies shrink when most hints ask for brevity, or when ending early is what the teacher likes best",
        "replies grow when the end of a reply is no longer learned, or when length is what pleases the judge",
    ),
    "entropy": Watched(
        "entropy",
        Number(at_least=0, optional=True),
        "the policy collapses onto few replies when the learning rate is too high or the prompts are too few",
        "the policy dissolves into noise when the learning rate is too high or the teacher is far from the student",
    ),
    "truncation": Watched(
        "completions/clipped_ratio",
        Number(at_least=0, at_most=1, optional=True),
        "replies end sooner than expected, so they have probably become short",
        "replies reach `max_completion_length` when it is too small, or when they no longer learn to end",
    ),
}
_NOT_A_NUMBER = (
    "numbers overflow when the learning rate is too high; look at `loss` and `grad_norm` of the steps before"
)


def parse_bands(value: Mapping[str, Any] | str | None, field: str = "bands") -> dict[str, Band]:
    """Read bands from a configuration.

    Args:
        value: `{"length": [20, 400], "entropy": [0.3, None]}`, or the same as JSON. Names are those of `WATCHED`.
        field: What the setting is called, for the errors.

    Returns:
        Low and high bound of each name, `None` where there is no such bound. Empty for `None` and `{}`.

    Raises:
        ValueError: Naming the entry that is wrong.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ValueError(f"`{field}` must be a mapping, or one as JSON, got {value!r}: {error}.") from error
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f"`{field}` must map {', '.join(WATCHED)} to [low, high], got {value!r}.")
    return {name: _parse_band(f"{field}.{name}", name, band) for name, band in value.items()}


def _parse_band(entry: str, name: str, band: Any) -> Band:
    if name not in WATCHED:
        raise ValueError(f"`{entry}`: no such metric is watched. Use {', '.join(WATCHED)}.")
    if not isinstance(band, list | tuple) or len(band) != 2:
        raise ValueError(f"`{entry}` must be [low, high], with None (null in YAML) for no bound, got {band!r}.")
    low, high = band
    WATCHED[name].bound.check(f"{entry}[0]", low)
    WATCHED[name].bound.check(f"{entry}[1]", high)
    if low is None and high is None:
        raise ValueError(f"`{entry}` has neither a low nor a high bound. Give one, or leave the entry out.")
    if low is not None and high is not None and low > high:
        raise ValueError(f"`{entry}` must be [low, high], got {band!r}: the low bound is above the high one.")
    return low, high


class BandAlarm(TrainerCallback):
    """Warns, or ends the training, when a metric of the training logs leaves its band.

    It warns once, and again after the metric has been back inside. A value that is no number is outside. What a log
    does not hold changes nothing: evaluations, and the lengths in steps that sampled nothing. Entropy is that of
    trained tokens, so it says nothing while no row carries a signal (`train_rows/share` is 0).

    TRL forms all of these metrics over all processes before each logs them, so all come to the same decision.

    Args:
        bands: Low and high bound by name (`WATCHED`), `None` for no such bound; also as `parse_bands` takes them.
        action: `"warn"`, or `"stop"` to end the training after this step. Nothing is saved beyond what the checkpoints
            hold.
        patience: Logs in a row outside of the band before it acts.

    Raises:
        ValueError: When there is no band, or a value is wrong.
    """

    def __init__(self, bands: Mapping[str, Band] | str, action: AlarmAction = "warn", patience: int = 1):
        self.bands = parse_bands(bands)
        if not self.bands:
            raise ValueError(f"`bands` holds nothing to watch. Give a band to one of {', '.join(WATCHED)}.")
        if action not in get_args(AlarmAction):
            raise ValueError(f"`action` must be one of {', '.join(get_args(AlarmAction))}, got {action!r}.")
        Number(whole=True, at_least=1).check("patience", patience)
        self.action = action
        self.patience = patience
        self._forget()

    def _forget(self) -> None:
        self._outside = dict.fromkeys(self.bands, 0)
        self._has_signal = True

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._forget()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        for name, value in self._values(logs or {}).items():
            self._outside[name] = 0 if _inside(value, self.bands[name]) else self._outside[name] + 1
            if self._outside[name] == self.patience:
                message = self._message(name, value, state.global_step)
                if self.action == "stop":
                    control.should_training_stop = True
                    message += " Training stops here."
                logger.warning(message)

    def _values(self, logs: Mapping[str, Any]) -> dict[str, float]:
        """The watched values that a log holds, NaN where TRL had nothing but NaN and logs None."""
        self._has_signal = logs.get("train_rows/share", self._has_signal) != 0
        return {
            name: math.nan if logs[metric] is None else logs[metric]
            for name in self.bands
            if (metric := WATCHED[name].metric) in logs and (name != "entropy" or self._has_signal)
        }

    def _message(self, name: str, value: float, step: int) -> str:
        watched, (low, high) = WATCHED[name], self.bands[name]
        if math.isnan(value):
            cause = _NOT_A_NUMBER
        else:
            cause = watched.below if low is not None and value < low else watched.above
        logs = f", in {self.patience} logs in a row" if self.patience > 1 else ""
        return (
            f"`{watched.metric}` is {value:.4g} at step {step}, outside of its band from {_bound(low)} to "
            f"{_bound(high)}{logs}. Usual cause: {cause}."
        )


def _inside(value: float, band: Band) -> bool:
    low, high = band
    return not math.isnan(value) and (low is None or value >= low) and (high is None or value <= high)


def _bound(bound: float | None) -> str:
    return "no bound" if bound is None else f"{bound:g}"
