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
from tqdm.auto import tqdm
from transformers import ProgressCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from .trainer import OPDTrainer
from .types import Feedback, message_text


class QuietProgress(ProgressCallback):
    """One progress bar, with the few numbers that tell whether it learns instead of all of them.

    Where nobody watches a terminal there is no bar, whose control characters would fill a file, but a line per log.
    """

    SHOWN = {"satisfied": "next_state/satisfied", "gap": "opd/gap_abs_mean", "length": "completions/mean_length"}
    """What the bar calls a metric, and its name in the log."""

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any):
        self.current_step = 0
        if state.is_world_process_zero:
            self.training_bar = tqdm(total=state.max_steps, dynamic_ncols=True, disable=not sys.stderr.isatty())
            metrics = ", ".join(f"{name} = {key}" for name, key in self.SHOWN.items())
            say(f"Training {state.max_steps} steps. The numbers are those of the step's own replies: {metrics}.")

    def on_prediction_step(self, *args: Any, **kwargs: Any):
        """Say so in the bar; a second one would leave its control characters behind."""
        self._describe("evaluating")

    def on_evaluate(self, *args: Any, **kwargs: Any):
        self._describe("")

    def _describe(self, what: str) -> None:
        if self.training_bar is not None:
            self.training_bar.set_description_str(what)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs=None, **kwargs: Any):
        """Show the latest training numbers; everything still goes to the loggers."""
        shown = {name: f"{logs[key]:.2f}" for name, key in self.SHOWN.items() if (logs or {}).get(key) is not None}
        if not shown or self.training_bar is None:
            return
        if self.training_bar.disable:
            say(f"step {state.global_step}/{state.max_steps}: " + ", ".join(f"{k} {v}" for k, v in shown.items()))
        else:
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
            say(f"step {state.global_step}: {satisfied_share(self.evaluations[-1][1]):.0%} of held-out replies satisfy")

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any):
        if not state.is_world_process_zero or not self.evaluations:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        summary = self.summary(state)
        (self.folder / "summary.json").write_text(to_json(summary), encoding="utf-8")
        draw_curve(summary["curve"], self.folder / "learning_curve.png", summary["training_curve"])
        say(side_by_side(summary["samples"], self.samples))
        say(
            f"Satisfied replies on held-out prompts: {summary['before']['satisfied']:.0%} before, "
            f"{summary['after']['satisfied']:.0%} after {summary['steps']} steps ({summary['seconds']:.0f} s). "
            f"Report with all replies in {self.folder}."
        )

    def summary(self, state: TrainerState) -> dict[str, Any]:
        """The numbers of the report, and the replies they come from."""
        curve = [{"step": step, "satisfied": satisfied_share(found)} for step, found in self.evaluations]
        before, after = self.evaluations[0][1], self.evaluations[-1][1]
        satisfied = QuietProgress.SHOWN["satisfied"]
        return {
            "before": {"satisfied": curve[0]["satisfied"], "replies": len(before)},
            "after": {"satisfied": curve[-1]["satisfied"], "replies": len(after)},
            "steps": state.global_step,
            "seconds": round(time.perf_counter() - self._started, 1),
            "peak_memory_gib": round(_peak_memory_gib(), 2),
            "curve": curve,
            "training_curve": [
                {"step": entry["step"], "satisfied": entry[satisfied]}
                for entry in state.log_history
                if entry.get(satisfied) is not None
            ],
            "samples": pair_replies(before, after),
        }


def say(line: str) -> None:
    """Print a line at once, and not behind a progress bar."""
    tqdm.write(line)
    sys.stdout.flush()


def pair_replies(before: Sequence[Feedback], after: Sequence[Feedback]) -> list[dict[str, Any]]:
    """Each question with a reply from before and one from after training, and whether they satisfied and were cut.

    Several replies to a question are paired in the order they came in; what has no partner is left out.
    """
    later: dict[str, list[Feedback]] = {}
    for feedback in after:
        later.setdefault(_prompt_text(feedback), []).append(feedback)
    pairs = []
    for feedback in before:
        question = _prompt_text(feedback)
        if later.get(question):
            pair: dict[str, Any] = {"question": question}
            for when, told in (("before", feedback), ("after", later[question].pop(0))):
                pair[when] = told.turn.reply
                pair[f"satisfied_{when}"] = getattr(told.turn.next_state, "satisfied", None)
                pair[f"truncated_{when}"] = told.turn.truncated
            pairs.append(pair)
    return pairs


def side_by_side(samples: Sequence[dict[str, Any]], count: int) -> str:
    """The first pair of replies to each of the first `count` questions, and what the marks mean."""
    first: dict[str, dict[str, Any]] = {}
    for pair in samples:
        first.setdefault(pair["question"], pair)
    lines = [
        "",
        "Held-out replies before and after training ([ok] satisfied the user, [--] did not, (cut) ran too long):",
    ]
    for question, pair in list(first.items())[:count]:
        lines += [f"  {question}", f"    before: {_reply(pair, 'before')}", f"    after:  {_reply(pair, 'after')}"]
    return "\n".join([*lines, ""])


def satisfied_share(feedbacks: Sequence[Feedback]) -> float:
    """Share of satisfied next states among those that know; NaN when none does."""
    told = [f.turn.next_state.satisfied for f in feedbacks if f.turn.next_state is not None]
    known = [satisfied for satisfied in told if satisfied is not None]
    return sum(known) / len(known) if known else float("nan")


def to_json(summary: dict[str, Any]) -> str:
    """Strict JSON, in which what is not known is null: NaN is not part of it."""
    known = json.loads(json.dumps(summary), parse_constant=lambda name: None)
    return json.dumps(known, indent=2, allow_nan=False) + "\n"


def draw_curve(curve: Sequence[dict[str, float]], path: Path, training_curve: Sequence[dict[str, float]] = ()) -> None:
    """Draw the share of satisfied replies over the steps as a PNG: held-out as a line, training batches as dots."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    dots: dict[str, Any] = {"marker": ".", "linestyle": "", "color": "0.6", "label": "replies of each training step"}
    line: dict[str, Any] = {"marker": "o", "label": "replies to held-out prompts"}
    for points, look in ((training_curve, dots), (curve, line)):
        axes.plot([point["step"] for point in points], [100 * point["satisfied"] for point in points], **look)
    axes.set(
        title="Replies that satisfy the user", xlabel="optimizer step", ylabel="satisfied replies (%)", ylim=(-2, 102)
    )
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)


def _prompt_text(feedback: Feedback) -> str:
    prompt = feedback.turn.prompt
    return prompt if isinstance(prompt, str) else message_text(prompt[-1])


def _reply(pair: dict[str, Any], when: str, width: int = 160) -> str:
    text = " ".join(pair[when].split()) or "(nothing)"
    text = text if len(text) <= width else text[:width] + "..."
    mark = {True: "[ok] ", False: "[--] ", None: ""}[pair[f"satisfied_{when}"]]
    return mark + text + (" (cut)" if pair[f"truncated_{when}"] else "")


def _peak_memory_gib() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**30 if sys.platform == "darwin" else peak / 2**20
