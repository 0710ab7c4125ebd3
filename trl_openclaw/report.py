"""Did it learn? Held-out replies before and after training, as numbers, side by side, and as a curve."""

import importlib.util
import json
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object
from transformers import ProgressCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from .trainer import OPDTrainer
from .types import Feedback, message_text


class QuietProgress(ProgressCallback):
    """The usual progress bar, with the few numbers that tell whether it learns instead of all of them."""

    SHOWN = {"satisfied": "next_state/satisfied", "gap": "opd/gap_abs_mean", "length": "completions/mean_length"}

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs=None, **kwargs: Any):
        """Show the latest training numbers beside the bar; everything still goes to the loggers."""
        shown = {name: f"{logs[key]:.2f}" for name, key in self.SHOWN.items() if (logs or {}).get(key) is not None}
        if shown and self.training_bar is not None:
            self.training_bar.set_postfix(shown)


class HeldOutReport(TrainerCallback):
    """Collects every evaluation's feedback; when training ends, prints and writes the report.

    Needs `eval_on_start=True`, so that there is a "before", and a next state that knows whether it is satisfied.

    Args:
        trainer: The trainer to listen to.
        folder: Where `summary.json` and `learning_curve.png` go.
        samples: Replies to print side by side.
    """

    def __init__(self, trainer: OPDTrainer, folder: str | Path, samples: int = 4):
        if trainer.eval_dataset is None or not trainer.args.eval_on_start:
            raise ValueError("A report compares held-out replies: set `eval_on_start: true` and an `eval_strategy`.")
        if importlib.util.find_spec("matplotlib") is None:
            raise ImportError("The learning curve needs matplotlib: `pip install trl-openclaw[demo]`.")
        self.trainer = trainer
        self.folder = Path(folder)
        self.samples = samples
        self.evaluations: list[tuple[int, list[Feedback]]] = []
        self._pending: list[Feedback] = []
        self._started = time.perf_counter()
        trainer.feedback_listeners.append(self._listen)
        if trainer.pop_callback(ProgressCallback) is not None:
            trainer.add_callback(QuietProgress())

    def _listen(self, mode: str, feedbacks: list[Feedback]) -> None:
        if mode == "eval":
            self._pending += feedbacks

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any):
        self.evaluations.append((state.global_step, gather_object(self._pending)))
        self._pending = []
        if state.is_world_process_zero:
            print(
                f"step {state.global_step}: {satisfied_share(self.evaluations[-1][1]):.0%} of held-out replies satisfy"
            )

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any):
        if not state.is_world_process_zero or not self.evaluations:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        summary = self.summary(state.global_step)
        (self.folder / "summary.json").write_text(to_json(summary), encoding="utf-8")
        draw_curve(summary["curve"], self.folder / "learning_curve.png")
        print(self.side_by_side())
        print(
            f"Satisfied replies on held-out prompts: {summary['before']['satisfied']:.0%} before, "
            f"{summary['after']['satisfied']:.0%} after {summary['steps']} steps ({summary['seconds']:.0f} s). "
            f"Report in {self.folder}."
        )

    def summary(self, steps: int) -> dict[str, Any]:
        """The numbers of the report."""
        curve = [{"step": step, "satisfied": satisfied_share(found)} for step, found in self.evaluations]
        before, after = self.evaluations[0][1], self.evaluations[-1][1]
        return {
            "before": {"satisfied": curve[0]["satisfied"], "replies": len(before)},
            "after": {"satisfied": curve[-1]["satisfied"], "replies": len(after)},
            "steps": steps,
            "seconds": round(time.perf_counter() - self._started, 1),
            "peak_memory_gib": round(_peak_memory_gib(), 2),
            "curve": curve,
        }

    def side_by_side(self) -> str:
        """A few held-out prompts with the reply before and after training."""
        before, after = self.evaluations[0][1], self.evaluations[-1][1]
        later = {_prompt_text(feedback): feedback for feedback in after}
        lines: list[str] = []
        for feedback in before:
            prompt = _prompt_text(feedback)
            if prompt in later and len(lines) < self.samples:
                replied = later.pop(prompt)
                lines.append(f"\n  {prompt}\n    before: {_reply(feedback)}\n    after:  {_reply(replied)}")
        return "\nHeld-out replies before and after training:" + "".join(lines) + "\n"


def satisfied_share(feedbacks: Sequence[Feedback]) -> float:
    """Share of satisfied next states among those that know; NaN when none does."""
    told = [f.turn.next_state.satisfied for f in feedbacks if f.turn.next_state is not None]
    known = [satisfied for satisfied in told if satisfied is not None]
    return sum(known) / len(known) if known else float("nan")


def to_json(summary: dict[str, Any]) -> str:
    """Strict JSON, in which what is not known is null: NaN is not part of it."""
    known = json.loads(json.dumps(summary), parse_constant=lambda name: None)
    return json.dumps(known, indent=2, allow_nan=False) + "\n"


def draw_curve(curve: Sequence[dict[str, float]], path: Path) -> None:
    """Draw the share of satisfied held-out replies over the steps as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.plot([point["step"] for point in curve], [100 * point["satisfied"] for point in curve], marker="o")
    axes.set(xlabel="optimizer step", ylabel="satisfied held-out replies (%)", ylim=(0, 102))
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def _prompt_text(feedback: Feedback) -> str:
    prompt = feedback.turn.prompt
    return prompt if isinstance(prompt, str) else message_text(prompt[-1])


def _reply(feedback: Feedback, width: int = 160) -> str:
    text = " ".join(feedback.turn.reply.split()) or "(nothing)"
    text = text if len(text) <= width else text[:width] + "..."
    mark = {True: "[ok] ", False: "[--] ", None: ""}[getattr(feedback.turn.next_state, "satisfied", None)]
    return mark + text + (" (cut)" if feedback.turn.truncated else "")


def _peak_memory_gib() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**30 if sys.platform == "darwin" else peak / 2**20
