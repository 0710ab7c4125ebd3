"""Control arms: each changes what it names, on the same rows."""

import random

import pytest
import torch
from datasets import Dataset
from trainer_harness import (
    ScriptedTeacher,
    alternating_judge,
    batches_of,
    judge_that,
    logged,
    make_trainer,
    prompts,
    rollout_by_prompt,
)

from trl_openclaw import Feedback, NextState, Turn, Verdict, Vote
from trl_openclaw.trainer.controls import CONTROLS, UNRELATED_HINTS, HintControl
from trl_openclaw.trainer.hint_rows import HintCandidates

NO_HINT = HintCandidates(drop="no_hint", found=True)


def control(name, clean=str.strip):
    return HintControl(name, clean)


def feedback(*words):
    """Feedback with these next states."""
    return [Feedback(Turn("p", "c", None if text is None else NextState(text))) for text in words]


def draw(arm, prompts, hints, **kwargs):
    rows = [HintCandidates(texts) if texts else NO_HINT for texts in hints]
    return arm(rows, prompts, feedback(*[None] * len(rows)), random.Random(0), **kwargs)


@pytest.mark.parametrize("name", [None, "negative_advantage"])
def test_leaves_the_hints_alone(name):
    rows = [HintCandidates(("a", "b")), NO_HINT]
    assert control(name)(rows, ["p", "q"], feedback("x", "y"), random.Random(0)) == rows


def test_nobody_reads_the_hint_so_one_is_enough():
    rows = [HintCandidates(("a", "b")), NO_HINT]
    kept = control("unhinted_teacher")(rows, ["p", "q"], feedback("x", "y"), random.Random(0))
    assert kept == [HintCandidates(("a",)), NO_HINT]


class TestRandomHint:
    def test_is_never_of_the_same_prompt(self):
        arm, names = control("random_hint"), "1234"
        for _ in range(50):
            rows = [names[i % 4] for i in range(8)]
            for prompt, found in zip(
                rows, draw(arm, rows, [(f"for {p} {i}", f"also {p} {i}") for i, p in enumerate(rows)]), strict=True
            ):
                assert len(found.texts) == 2
                assert not any(prompt == text.split()[1] for text in found.texts)

    def test_comes_from_earlier_batches_where_the_batch_holds_one_prompt(self):
        arm = control("random_hint")
        draw(arm, ["p", "p"], [("for p",), ("for p, too",)])
        assert {hint.texts for hint in draw(arm, ["q", "q"], [("for q",), ("for q, too",)])} <= {
            ("for p",), ("for p, too",),
        }  # fmt: skip

    def test_is_unrelated_where_nothing_else_is_known(self):
        unrelated = {(text,) for text in UNRELATED_HINTS}
        first, second = draw(control("random_hint"), ["p", "p"], [("a",), ("b",)])
        assert {first.texts, second.texts} <= unrelated
        same = draw(control("random_hint"), ["p", "q"], [("a",), ("a", "b")])
        assert {hint.texts for hint in same} <= unrelated

    def test_rows_without_a_hint_stay_without(self):
        assert draw(control("random_hint"), ["p", "q"], [("a",), None])[1] == NO_HINT

    def test_an_evaluation_leaves_no_trace(self):
        arm = control("random_hint")
        draw(arm, ["p", "q"], [("of p",), ("of q",)], remember=False)
        (found,) = draw(arm, ["r"], [("of r",)])
        assert found.texts[0] in UNRELATED_HINTS

    def test_in_training(self, tmp_path):
        async def judge(turn):
            return Verdict.from_votes([Vote(score=-1, hint=f"About {len(turn.prompt[0]['content'])}.")])

        teacher = ScriptedTeacher(lambda row: [-1.0] * len(row.completion_ids))
        trainer = make_trainer(
            tmp_path, teacher_model=teacher, judge=judge, config={"control": "random_hint", "max_steps": 4}
        )
        trainer.train()
        assert logged(trainer, "hint/accepted") == [1.0] * 4
        for row in teacher.rows:
            text = trainer.processing_class.decode(row.prompt_ids)
            assert f"Hint: About {2 * text.split('user')[1].split('Hint')[0].count('hi')}." not in text


class TestRawNextState:
    def test_its_words_are_the_hint(self):
        rows = [HintCandidates(("a",)), NO_HINT, HintCandidates(("a", "b"))]
        found = control("raw_next_state")(rows, "pqr", feedback(" Shorter! ", "No.", None), random.Random(0))
        assert found == [HintCandidates(("Shorter!",)), NO_HINT, HintCandidates((), "no_hint")]

    def test_in_training_without_control_tokens(self, tmp_path):
        async def replies(turn, row):
            return NextState("Shorter,<|im_end|> please.")

        teacher = ScriptedTeacher(lambda row: [-1.0] * len(row.completion_ids))
        trainer = make_trainer(
            tmp_path, teacher_model=teacher, next_state=replies, config={"control": "raw_next_state"}
        )
        trainer.train()
        assert len(teacher.rows) == 4
        for row in teacher.rows:
            text = trainer.processing_class.decode(row.prompt_ids)
            assert "Hint: Shorter, please.<|im_end|>" in text
            assert "brief" not in text


@pytest.mark.parametrize("objective", [{}, {"opd_loss": "topk_surrogate"}, {"opd_loss": "full_divergence"}], ids=str)
def test_a_teacher_without_the_hint_agrees_with_the_student_at_first(tmp_path, objective):
    trainer = make_trainer(tmp_path, config={**objective, "control": "unhinted_teacher", "log_completions": True})
    trainer.train()
    assert logged(trainer, "hint/accepted") == [1.0]
    assert logged(trainer, "opd/gap_abs_max")[0] < 1e-4
    assert abs(logged(trainer, "opd/loss" if objective else "loss")[0]) < 1e-4


@pytest.mark.parametrize(("clip", "expected"), [(0.5, -0.5), (1.0, -1.0)])
def test_a_fixed_negative_advantage_on_hinted_rows_only(tmp_path, clip, expected):
    judge = alternating_judge(Vote(score=1, hint="Be brief."), Vote(score=1))
    trainer = make_trainer(tmp_path, judge=judge, config={"control": "negative_advantage", "logp_gap_clip": clip})
    seen, advantages = [], trainer.token_advantages
    trainer.token_advantages = lambda *args: seen.append((args[0], advantages(*args))) or seen[-1][1]
    trainer.train()
    inputs, tokens = seen[0]
    hinted = inputs["hint_mask"].unsqueeze(1) & inputs["completion_mask"].bool()
    assert inputs["hint_mask"].sum() == 2
    assert (tokens[hinted] == expected).all()
    assert (tokens[~hinted] == 0).all()


def test_all_arms_train_on_the_same_rows(tmp_path):
    """One row has no hint, one no message that a hint could go into, one an empty hint."""
    rows = [
        {"prompt": [{"role": "user", "content": "hi"}], "privileged_context": "Be brief."},
        {"prompt": [{"role": "user", "content": "hihi"}], "privileged_context": None},
        {"prompt": [{"role": "system", "content": "hihihi"}], "privileged_context": "Be kind."},
        {"prompt": [{"role": "user", "content": "hihihihi"}], "privileged_context": "Be quick."},
        {"prompt": [{"role": "user", "content": "hihihihihi"}], "privileged_context": " "},
    ]
    found = {}
    for arm in (None, *CONTROLS):
        trainer = make_trainer(
            tmp_path, judge=None, data=Dataset.from_list(rows), rollout_func=rollout_by_prompt,
            config={"control": arm, "per_device_train_batch_size": 10, "shuffle_dataset": False},
        )  # fmt: skip
        batches = batches_of(trainer)
        trainer.train()
        found[arm] = batches[0]["tool_mask"].any(dim=1).tolist()
    assert found[None] == [True, True, False, False, False, False, True, True, False, False]
    assert all(arm == found[None] for arm in found.values())


def test_an_unknown_arm(tmp_path):
    with pytest.raises(ValueError, match="`control` must be one of random_hint, raw_next_state, unhinted_teacher"):
        make_trainer(tmp_path, config={"control": "placebo"})


def test_controls_do_not_touch_who_is_asked(tmp_path):
    """The judge is asked alike in every arm, so that scores and failures can be compared."""
    for arm in (None, *CONTROLS):
        trainer = make_trainer(tmp_path, judge=judge_that(), data=prompts(), config={"control": arm})
        trainer.train()
        assert logged(trainer, "judge/hinted") == [1.0]
        assert torch.tensor(logged(trainer, "loss")).isfinite().all()
