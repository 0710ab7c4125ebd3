"""Where hints come from, and what is left of them."""

import pytest
from datasets import Dataset
from trainer_harness import make_trainer, prompts

from trl_openclaw.trainer.hint_rows import find_hints
from trl_openclaw.types import Feedback, Turn, Verdict, Vote

CODE = "\ndef double(x):\n    return  2 * x\n\n\n\n# done<|im_end|>\n"


def said(*hints: str) -> Feedback:
    return Feedback(Turn("p", "c"), Verdict.from_votes([Vote(score=-1, hint=hint) for hint in hints]))


def test_privileged_context_keeps_its_layout_but_no_control_tokens():
    found = find_hints("privileged_context", {"privileged_context": CODE}, said(), {"<|im_end|>"})
    assert found.texts == ("def double(x):\n    return  2 * x\n\n\n\n# done",)
    assert found.had_control_tokens
    assert not find_hints("privileged_context", {"privileged_context": CODE}, said(), {"<s>"}).had_control_tokens


def test_hint_of_a_judge_is_tidied_and_said_once():
    found = find_hints("judge", {}, said("Be  brief.", "Be brief.", "<s>Be\u00a0brief.", "..."), {"<s>"})
    assert found.texts == ("Be brief.",)


@pytest.mark.parametrize("blank", ["", " \n", "<|im_end|>", "-- !"])
@pytest.mark.parametrize("source", ["judge", "privileged_context"])
def test_nothing_left_is_no_hint(source, blank):
    found = find_hints(source, {"privileged_context": blank}, said(blank), {"<|im_end|>"})
    assert (found.texts, found.drop) == ((), "no_hint")


def scores_of_the_student(trainer, monkeypatch) -> list[int]:
    """How many rows the student was asked to score, per batch."""
    asked = []
    score = trainer.scorer.score

    def counted(model, rows, **wanted):
        asked.append((model is trainer.model, len(rows)))
        return score(model, rows, **wanted)

    monkeypatch.setattr(trainer.scorer, "score", counted)
    trainer.train()
    return [rows for is_student, rows in asked if is_student]


def test_student_scores_for_a_choice_of_hints_but_not_for_the_only_one(tmp_path, monkeypatch):
    config = {"opd_loss": "full_divergence", "self_test": False}
    assert scores_of_the_student(make_trainer(tmp_path, config=config), monkeypatch) == [4]
    data = Dataset.from_list([{**row, "privileged_context": "Be brief."} for row in prompts()])
    single = make_trainer(tmp_path, data=data, judge=None, next_state=None, config=config)
    assert scores_of_the_student(single, monkeypatch) == []
