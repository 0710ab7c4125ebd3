"""Where hints come from, and what is left of them."""

from typing import ClassVar

import pytest
from datasets import Dataset
from tiny import tiny_tokenizer
from trainer_harness import ScriptedTeacher, batches_of, judge_with_hints, make_trainer, prompts

from trl_openclaw._trl import SeamGRPOTrainer
from trl_openclaw.trainer.hint_rows import HintCandidates, Placement, PlainTurn, find_hints, render_candidates
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


def tokenized(trainer) -> list[str]:
    """Every prompt that is rendered and tokenized, as text."""
    seen, tokenize = [], trainer._tokenize_prompts

    def recording(prompts):
        ids = tokenize(prompts)
        seen.extend(trainer.processing_class.decode(row) for row in ids[0])
        return ids

    trainer._tokenize_prompts = recording
    return seen


def rows_with_context(*texts: str) -> Dataset:
    return Dataset.from_list([{**row, "privileged_context": texts[i % len(texts)]} for i, row in enumerate(prompts())])


@pytest.mark.parametrize("rule", ["sequence", "longest"])
def test_every_hinted_prompt_is_tokenized_once_and_no_plain_one_again(tmp_path, rule):
    hints = ("Be brief.", "Use numbers.")
    config = {"self_test": False, "hint_selection": rule, "per_device_train_batch_size": 8, "num_generations": 4}
    trainer = make_trainer(tmp_path, judge=judge_with_hints(*hints), rollout_func=rollout_of_given_ids(), config=config)
    seen = tokenized(trainer)
    trainer.train()
    assert len(seen) == 4  # two prompts, eight completions, two hints
    assert len(set(seen)) == 4
    assert all(any(hint in text for hint in hints) for text in seen)


def test_a_teacher_without_the_hint_reads_the_ids_that_were_sampled_from(tmp_path):
    config = {"self_test": False, "control": "unhinted_teacher"}
    teacher = ScriptedTeacher(lambda row: [-1.0] * len(row.completion_ids))
    trainer = make_trainer(
        tmp_path, data=rows_with_context("Be brief."), judge=None, next_state=None, teacher_model=teacher,
        rollout_func=rollout_of_given_ids(), config=config,
    )  # fmt: skip
    seen, batches = tokenized(trainer), batches_of(trainer)
    trainer.train()
    assert not seen
    plain = [
        ids[mask.bool()].tolist() for ids, mask in zip(batches[0]["prompt_ids"], batches[0]["prompt_mask"], strict=True)
    ]
    assert [list(row.prompt_ids) for row in teacher.rows] == plain


def rollout_of_given_ids():
    """A `rollout_func` that tokenizes by itself, so that the trainer's calls can be counted."""
    tokenizer = tiny_tokenizer()

    def rollout(prompts, trainer):
        ids = [tokenizer.apply_chat_template(p, add_generation_prompt=True)["input_ids"] for p in prompts]
        return {"prompt_ids": ids, "completion_ids": [[65, 66, 256]] * len(ids), "logprobs": [[-1.0] * 3] * len(ids)}

    return rollout


def test_rows_keep_their_own_tools():
    """Where environments have tools, a prompt is rendered with those of its row, and equal ones of one kind once."""
    calls = []

    class Trainer:
        has_environment = True
        _batch_environments: ClassVar = ["a", "b", "a", "a"]
        tokenize_prompts = SeamGRPOTrainer.tokenize_prompts

        def _tokenize_prompts(self, prompts):
            calls.append(list(zip(prompts, self._batch_environments, strict=True)))
            return ([[f"{prompt}{name}"] for prompt, name in calls[-1]],)

    trainer = Trainer()
    assert trainer.tokenize_prompts(["p", "p", "q"], [3, 1, 2]) == [["pa"], ["pb"], ["qa"]]
    assert trainer.tokenize_prompts(["p", "p", "p"], [0, 2, 3]) == [["pa"]] * 3
    assert trainer.tokenize_prompts(["p"] * 4) == [["pa"], ["pb"], ["pa"], ["pa"]]
    assert trainer.tokenize_prompts([], []) == []
    assert [len(call) for call in calls] == [3, 1, 2]
    assert trainer._batch_environments == ["a", "b", "a", "a"]


@pytest.mark.parametrize(("window", "drop"), [(8, "too_long"), (9, None)])
def test_a_row_must_fit_with_and_without_its_hint(window, drop):
    """A hint may stand in the place of something longer, but a reference reads the plain prompt."""
    placement = Placement(lambda prompt, hint: hint, lambda prompts, rows: [[2] * 2 for _ in prompts])
    turn = PlainTurn(0, "plain", [1] * 6, [], 3)
    (found,) = render_candidates([turn], [HintCandidates(("Be brief.",))], placement, window)
    assert [one.drop for one in found] == [drop]
    later = PlainTurn(0, "plain", [1] * 4, [3] * 2, 3)  # the same, with earlier turns in the place of prompt tokens
    (found,) = render_candidates([later], [HintCandidates(("Be brief.",))], placement, window)
    assert [one.drop for one in found] == [drop]
