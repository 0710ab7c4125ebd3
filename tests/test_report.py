"""The before-and-after report: numbers worked by hand, replies side by side, and what it refuses."""

import importlib.util
import io
import json
import math
import sys
from types import SimpleNamespace

import numpy
import pytest
from datasets import Dataset
from matplotlib import image
from trainer_harness import make_trainer, prompts
from transformers import ProgressCallback, TrainerControl, TrainerState

from trl_openclaw import Feedback, NextState, Turn
from trl_openclaw.report import (
    HeldOutReport,
    QuietProgress,
    draw_curve,
    pair_replies,
    satisfied_share,
    say,
    side_by_side,
    to_json,
)


def feedback(prompt="Why?", reply="Because.", satisfied: bool | None = True, truncated=False) -> Feedback:
    """Feedback whose next state is `satisfied`."""
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": prompt}]
    completion = [{"role": "assistant", "content": reply}]
    state = NextState("Hm.", satisfied=satisfied)
    return Feedback(Turn(messages, completion, next_state=state, truncated=truncated))


NO_STATE = Feedback(Turn("Why?", "Because."))


@pytest.fixture
def listening(tmp_path):
    """A report on a trainer that only has listeners, and a way to let it see evaluations."""
    trainer = SimpleNamespace(
        eval_dataset=[1],
        args=SimpleNamespace(eval_on_start=True),
        feedback_listeners=[],
        pop_callback=lambda callback: None,
    )
    report = HeldOutReport(trainer, tmp_path / "report", samples=2)

    def evaluate(step: int, *batches: list[Feedback]) -> None:
        for batch in batches:
            trainer.feedback_listeners[0]("eval", batch)
        report.on_evaluate(None, TrainerState(global_step=step, is_world_process_zero=True), TrainerControl())

    return report, evaluate


def test_numbers_by_hand(listening, capsys):
    report, evaluate = listening
    report.trainer.feedback_listeners[0]("train", [feedback()] * 5)
    evaluate(0, [feedback(satisfied=True), feedback(satisfied=False)], [feedback(satisfied=False), NO_STATE])
    evaluate(4, [feedback(satisfied=True)], [feedback(satisfied=True), feedback(satisfied=None)])
    evaluate(6, [feedback(satisfied=True), feedback(satisfied=True), feedback(satisfied=True)], [feedback("x", "y", 0)])
    log = [
        {"step": 1, "next_state/satisfied": 0.25},
        {"step": 1, "eval_next_state/satisfied": 1 / 3},
        {"step": 2, "next_state/satisfied": 0.5},
        {"step": 6, "train_runtime": 1.0},
    ]
    summary = report.summary(TrainerState(global_step=6, log_history=log))
    assert summary["before"] == {"satisfied": pytest.approx(1 / 3), "replies": 4}
    assert summary["after"] == {"satisfied": 0.75, "replies": 4}
    assert summary["steps"] == 6
    assert summary["seconds"] >= 0
    assert 0 < summary["peak_memory_gib"] < 1000
    assert summary["curve"] == [
        {"step": 0, "satisfied": pytest.approx(1 / 3)},
        {"step": 4, "satisfied": 1.0},
        {"step": 6, "satisfied": 0.75},
    ]
    assert summary["training_curve"] == [{"step": 1, "satisfied": 0.25}, {"step": 2, "satisfied": 0.5}]
    assert capsys.readouterr().out.splitlines() == [
        "step 0: 33% of held-out replies satisfy",
        "step 4: 100% of held-out replies satisfy",
        "step 6: 75% of held-out replies satisfy",
    ]


def test_share_counts_only_next_states_that_know():
    assert satisfied_share([feedback(satisfied=True), feedback(satisfied=None), NO_STATE]) == 1.0
    assert math.isnan(satisfied_share([feedback(satisfied=None), NO_STATE]))
    assert math.isnan(satisfied_share([]))


BEFORE = [
    feedback("First?", "A long\n\n  answer.", satisfied=False, truncated=True),
    feedback("First?", "Another sample of the same prompt.", satisfied=False),
    feedback("Asked only before?", "Yes."),
    feedback("Second?", "", satisfied=None),
    feedback("Third?", "Not printed: two questions are enough."),
]
AFTER = [
    feedback("Second?", "x" * 200),
    feedback("First?", "Short."),
    feedback("Third?", "No.", satisfied=False),
    feedback("Asked only after?", "Yes."),
    feedback("First?", "Shorter.", truncated=True),
    feedback("First?", "One more than before."),
]


def test_every_reply_has_its_partner():
    def row(question, before, after):
        names = ("question", *(f"{name}before" for name in ("", "satisfied_", "truncated_")))
        names += tuple(f"{name}after" for name in ("", "satisfied_", "truncated_"))
        return dict(zip(names, (question, *before, *after), strict=True))

    assert pair_replies(BEFORE, AFTER) == [
        row("First?", ("A long\n\n  answer.", False, True), ("Short.", True, False)),
        row("First?", ("Another sample of the same prompt.", False, False), ("Shorter.", True, True)),
        row("Second?", ("", None, False), ("x" * 200, True, False)),
        row("Third?", ("Not printed: two questions are enough.", True, False), ("No.", False, False)),
    ]
    assert pair_replies([NO_STATE], [NO_STATE])[0]["satisfied_before"] is None


def test_side_by_side():
    legend = "Held-out replies before and after training ([ok] satisfied the user, [--] did not, (cut) ran too long):"
    assert side_by_side(pair_replies(BEFORE, AFTER), 2) == (
        f"\n{legend}"
        "\n  First?\n    before: [--] A long answer. (cut)\n    after:  [ok] Short."
        f"\n  Second?\n    before: (nothing)\n    after:  [ok] {'x' * 160}..."
        "\n"
    )


def test_at_the_end_everything_is_written_and_said(listening, tmp_path, capsys):
    report, evaluate = listening
    evaluate(0, [feedback(satisfied=False)])
    evaluate(2, [feedback(satisfied=True)])
    report.on_train_end(None, TrainerState(global_step=2, is_world_process_zero=True), TrainerControl())
    written = json.loads((tmp_path / "report" / "summary.json").read_text())
    assert (written["before"]["satisfied"], written["after"]["satisfied"], written["steps"]) == (0.0, 1.0, 2)
    assert [(pair["before"], pair["satisfied_after"]) for pair in written["samples"]] == [("Because.", True)]
    assert (tmp_path / "report" / "learning_curve.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    out = capsys.readouterr().out
    assert "Satisfied replies on held-out prompts: 0% before, 100% after 2 steps" in out
    assert "before: [--] Because." in out


def test_rising_curve_rises_in_the_picture(tmp_path):
    draw_curve([{"step": 0, "satisfied": 0.1}, {"step": 4, "satisfied": 0.9}], tmp_path / "curve.png")
    pixels = image.imread(tmp_path / "curve.png")
    rows, columns = numpy.nonzero(pixels[:, :, 2] - pixels[:, :, 0] > 0.3)  # the line is blue, all else is grey
    height, width = pixels.shape[:2]
    assert columns.max() - columns.min() > width / 2
    assert rows[columns.argmin()] - rows[columns.argmax()] > height / 2  # row 0 is at the top


def test_training_batches_are_dots_beside_the_line(tmp_path):
    points = [{"step": 0, "satisfied": 0.1}, {"step": 4, "satisfied": 0.9}]
    grey = []
    for name, training in (("without", []), ("with", [{"step": 2, "satisfied": 0.1}, {"step": 3, "satisfied": 0.2}])):
        draw_curve(points, tmp_path / f"{name}.png", training)
        pixels = image.imread(tmp_path / f"{name}.png")[:, :, :3]
        grey.append((numpy.ptp(pixels, axis=2) < 0.01) & (abs(pixels[:, :, 0] - 0.6) < 0.01))
    assert grey[1].sum() > grey[0].sum() + 10


def test_other_processes_write_nothing(listening, tmp_path, capsys):
    report, evaluate = listening
    evaluate(0, [feedback()])
    capsys.readouterr()
    report.on_train_end(None, TrainerState(global_step=2, is_world_process_zero=False), TrainerControl())
    assert not (tmp_path / "report").exists()
    assert capsys.readouterr().out == ""


def test_unknown_share_is_null_in_strict_json(listening, tmp_path):
    report, evaluate = listening
    evaluate(0, [feedback(satisfied=None)])
    evaluate(2, [NO_STATE])
    report.on_train_end(None, TrainerState(global_step=2, is_world_process_zero=True), TrainerControl())
    text = (tmp_path / "report" / "summary.json").read_text()
    assert "NaN" not in text
    assert json.loads(text)["after"] == {"satisfied": None, "replies": 1}
    assert json.loads(to_json({"a": [1.5, float("nan")]})) == {"a": [1.5, None]}


async def pleased_by_short_prompts(turn, row):
    return NextState("Hm.", satisfied=len(turn.prompt[0]["content"]) <= 4)


def test_evaluation_of_many_batches_is_collected_whole(tmp_path):
    # Contents "hi" times 1, 2, 3, 4, 1, 2: four of the six prompts please, whatever is answered.
    trainer = make_trainer(
        tmp_path / "out",
        next_state=pleased_by_short_prompts,
        eval_dataset=prompts(6),
        config={
            "eval_on_start": True,
            "eval_strategy": "steps",
            "eval_steps": 2,
            "max_steps": 3,
            "num_generations": 1,
            "num_generations_eval": 2,
            "per_device_eval_batch_size": 4,
            "disable_tqdm": False,
        },
    )
    report = HeldOutReport(trainer, tmp_path / "report")
    assert trainer.pop_callback(QuietProgress) is not None
    assert trainer.pop_callback(ProgressCallback) is None
    trainer.add_callback(report)
    trainer.train()
    summary = json.loads((tmp_path / "report" / "summary.json").read_text())
    assert summary["before"] == summary["after"] == {"satisfied": pytest.approx(4 / 6), "replies": 12}
    assert [point["step"] for point in summary["curve"]] == [0, 2, 3]  # the end is there even off the rhythm
    prompts_seen = [f.turn.prompt[0]["content"] for f in report.evaluations[-1][1]]
    assert sorted(prompts_seen) == sorted(2 * [row["prompt"][0]["content"] for row in prompts(6)])


LOG = {"next_state/satisfied": 0.256, "opd/gap_abs_mean": 1, "loss": 3.0}


def progress(monkeypatch, terminal: bool) -> tuple[QuietProgress, TrainerState]:
    """Progress at its beginning, with somebody or nobody before a terminal."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    progress, state = QuietProgress(), TrainerState(max_steps=3, is_world_process_zero=True)
    progress.on_train_begin(None, state, None)
    return progress, state


def go(progress: QuietProgress, state: TrainerState) -> None:
    """A step, and an evaluation of two batches after it."""
    state.global_step += 1
    progress.on_step_end(None, state, None)
    progress.on_log(None, state, None, logs=LOG)
    for _ in range(2):
        progress.on_prediction_step(None, state, None, eval_dataloader=[1, 2])
    progress.on_log(None, state, None, logs={"eval_next_state/satisfied": 0.5})
    progress.on_evaluate(None, state, None)
    say("step 1: 50% of held-out replies satisfy")
    progress.on_log(None, state, None, logs=None)


def test_bar_on_a_terminal(monkeypatch, capsys):
    progress_bar, state = progress(monkeypatch, terminal=True)
    go(progress_bar, state)
    progress_bar.on_train_end(None, state, None)
    out, err = capsys.readouterr()
    bars = [bar.strip() for bar in err.replace("\n", "\r").split("\r") if bar.strip()]
    assert "1/3" in bars[-1]
    assert "satisfied=0.26, gap=1.00" in bars[-1]
    assert sum("evaluating" in bar for bar in bars) == 2
    assert "evaluating" not in bars[-1]
    assert "\x1b" not in err  # one bar alone needs no moving up and down
    assert "loss" not in err
    assert "satisfied = next_state/satisfied, gap = opd/gap_abs_mean" in out
    assert out.splitlines()[-1] == "step 1: 50% of held-out replies satisfy"


def test_lines_where_there_is_no_terminal(monkeypatch, capsys):
    progress_bar, state = progress(monkeypatch, terminal=False)
    go(progress_bar, state)
    progress_bar.on_train_end(None, state, None)
    out, err = capsys.readouterr()
    assert err == ""
    assert out.splitlines()[1:] == ["step 1/3: satisfied 0.26, gap 1.00", "step 1: 50% of held-out replies satisfy"]
    assert "satisfied = next_state/satisfied, gap = opd/gap_abs_mean" in out


def test_other_processes_show_nothing(capsys):
    progress_bar, state = QuietProgress(), TrainerState(max_steps=3, is_world_process_zero=False)
    progress_bar.on_train_begin(None, state, None)
    progress_bar.on_log(None, state, None, logs=LOG)
    progress_bar.on_prediction_step(None, state, None)
    progress_bar.on_evaluate(None, state, None)
    progress_bar.on_train_end(None, state, None)
    assert capsys.readouterr() == ("", "")


def test_a_line_is_there_at_once(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, write_through=False))
    say("half-way")
    assert raw.getvalue() == b"half-way\n"


@pytest.mark.parametrize(
    ("eval_dataset", "config"),
    [(None, {}), (Dataset.from_list([{"prompt": "x"}]), {"eval_strategy": "steps", "eval_steps": 1})],
)
def test_refuses_without_a_before(tmp_path, eval_dataset, config):
    trainer = SimpleNamespace(eval_dataset=eval_dataset, args=SimpleNamespace(eval_on_start=eval_dataset is None))
    with pytest.raises(ValueError, match=r"`eval_on_start: true` and an `eval_strategy`"):
        HeldOutReport(trainer, tmp_path)


def test_refuses_without_matplotlib_before_training(tmp_path, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "matplotlib" else find_spec(name, *rest)
    )
    trainer = SimpleNamespace(eval_dataset=[1], args=SimpleNamespace(eval_on_start=True))
    with pytest.raises(ImportError, match=r"trl-openclaw\[demo\]"):
        HeldOutReport(trainer, tmp_path)
