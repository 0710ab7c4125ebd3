"""Whatever a policy samples, a tool answers or a rollout leaves behind: training goes on, and nothing is made up."""

import copy
import json
import threading

import pandas as pd
import pytest
import torch
from agent_harness import CALL, Doubler, agent_trainer, call
from datasets import Dataset
from trainer_harness import batches_of, logged, moved, snapshot

from trl_openclaw import CombineTrainer, NextState, Verdict, Vote
from trl_openclaw.trajectories import UNANSWERED_CALL, UNREAD_CALL
from trl_openclaw.types import ToolResult

DONE = "4<|im_end|>"
DEEP = '<tool_call>\n{"name": "double", "arguments": {"x": ' + "[" * 500 + "]" * 500 + "}}\n</tool_call><|im_end|>"


def tool_call(arguments: str, name: str = '"double"') -> str:
    return f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call><|im_end|>'


def judged(tmp_path, texts, **kwargs):
    """A trained trainer, and the turns that were judged."""
    seen = []

    async def judge(turn):
        seen.append(turn)
        return Verdict.from_votes([Vote(-1, hint=f"hint {turn.step}")])

    trainer = agent_trainer(tmp_path, CombineTrainer, texts, judge=judge, **kwargs)
    before = snapshot(trainer.model)
    trainer.train()
    assert all(moved(trainer.model, before).values())
    return trainer, sorted(seen, key=lambda turn: turn.step)


def echo(x: str) -> str:
    """Say it again.

    Args:
        x: What to say.
    """
    return x


CALLS = [
    tool_call('{"x": 2}', '"\\ud800"'), tool_call('{"\\ud800": 2}'), tool_call('{"x": "\\ud83d"}'), DEEP,
    tool_call("[1, 2]"), tool_call('{"x": 2}', "3"), tool_call('{"x": 2}', "null"), tool_call("null"),
    tool_call('{"x": 1}', '"nobody"'), tool_call('{"x": "a", "y": 1}'), tool_call('"x"'), tool_call('{"x":'),
    '<tool_call>\n{"name": "double"}\n</tool_call><|im_end|>', "<tool_call>\n[]\n</tool_call><|im_end|>",
    "<tool_call>\n" + json.dumps([{"name": "double"}]) + "\n</tool_call><|im_end|>",
    "<tool_call>\n3\n</tool_call><|im_end|>", "<tool_call></tool_call><|im_end|>", "<tool_call><|im_end|>",
]  # fmt: skip
NO_CALLS = ["", "<|im_end|>", "cut in the", "<think>\nhm\n</think>\n\n<|im_end|>"]


class TestWhatIsSampled:
    @pytest.mark.parametrize("text", [*CALLS, *NO_CALLS])
    @pytest.mark.parametrize("log", [False, True])
    def test_anything_in_any_turn(self, tmp_path, text, log):
        texts = [[text, CALL, text, CALL], text, DONE, DONE]
        trainer = agent_trainer(tmp_path, CombineTrainer, texts, config={"log_completions": log})
        before = snapshot(trainer.model)
        trainer.train()
        assert all(moved(trainer.model, before).values())
        assert logged(trainer, "turns/unmatched") == [0.0]

    @pytest.mark.parametrize(("depth", "is_call"), [(40, True), (60, False)])
    def test_what_nests_too_deep_is_no_call(self, tmp_path, depth, is_call):
        _, seen = judged(tmp_path, [tool_call(f'{{"x": {"[" * depth}{"]" * depth}}}'), DONE])
        assert (seen[0].next_state.text == UNREAD_CALL) is not is_call

    @pytest.mark.parametrize("transform", [{}, {"transform": {"type": "function", "name": "double"}}])
    def test_calls_of_another_form_are_texts(self, tmp_path, transform):
        """A tokenizer's own response template may give calls that pass TRL's check and that its loop cannot read."""
        trainer = agent_trainer(tmp_path, config={"log_completions": True})
        template = trainer.tokenizer.response_template = copy.deepcopy(trainer.tokenizer.response_template)
        del template["fields"]["tool_calls"]["transform"]
        template["fields"]["tool_calls"] |= transform
        trainer.train()
        assert [feedback.turn.next_state.text for feedback in trainer.feedback.last] == [UNREAD_CALL] * 4

    def test_the_table_holds_calls_and_answers_of_every_kind(self, tmp_path):
        def some(x: int) -> list:
            """Give parts, or text.

            Args:
                x: Which.
            """
            return [{"type": "text", "text": "four"}] if x == 2 else "four"

        texts = [[call(2, "some"), call(3, "some"), tool_call("{}", '"some"'), DONE], ["ok<|im_end|>"] * 3]
        judged(tmp_path, texts, tools=[some], config={"log_completions": True})
        table = pd.read_parquet(tmp_path / "completions" / "completions_00001.parquet")
        messages = table["completion"][0]
        assert messages[0]["tool_calls"][0]["function"] == {"name": "some", "arguments": '{"x": 2}'}
        assert [message["role"] for message in messages] == ["assistant", "tool", "assistant"]
        assert all(isinstance(message["content"], str) for row in table["completion"] for message in row)

    def test_a_call_that_nobody_ran_is_not_judged_by_an_earlier_one(self, tmp_path):
        class Env(Doubler):
            next_state = NextState("of the first call", "tool", satisfied=False)

        config = {"max_tool_calling_iterations": 1}
        _, seen = judged(tmp_path, [call(2), call(3)], environment_factory=Env, config=config)
        assert [turn.next_state.text for turn in seen] == ["4"] * 4 + [UNANSWERED_CALL] * 4
        assert all(turn.next_state.satisfied is None for turn in seen)

    def test_nor_answered_by_the_user(self, tmp_path):
        _, seen = judged(tmp_path, [call(2), call(3)], config={"max_tool_calling_iterations": 1})
        assert seen[-1].next_state.text == UNANSWERED_CALL

    def test_an_answer_of_json_is_no_call(self, tmp_path):
        _, seen = judged(tmp_path, [CALL, '{"name": "Ada", "age": 36}<|im_end|>'])
        assert seen[-1].next_state.text == "Shorter, please."

    def test_a_turn_that_was_answered_was_not_cut(self, tmp_path):
        """The answer fills the completion to its last token, so that nothing more is sampled."""
        trainer = agent_trainer(tmp_path)
        room = len(trainer.tokenizer(CALL)["input_ids"]) + len(
            trainer._get_tool_suffix_ids([{"role": "tool", "name": "double", "content": "4"}])
        )
        _, seen = judged(tmp_path, [CALL, ""], config={"max_completion_length": room})
        assert [(turn.next_state.text, turn.truncated) for turn in seen] == [("4", False)] * 4


class TestWhatToolsAnswer:
    @pytest.mark.parametrize(("answer", "shown"), [
        (None, "None"), (b"\xff", r"b'\xff'"), ([1, 2], "[1, 2]"), (["a"], "['a']"), ([None], "[None]"), ("", ""),
        ([{"text": "no type"}], "[{'text': 'no type'}]"), ([{"type": "text", "text": "\ud83d"}], "?"),
        ([{"type": "text", "text": 5}], "[{'type': 'text', 'text': 5}]"), ("\ud83d", "?"), ({"a": {1}}, "{'a': {1}}"),
        (ToolResult("\ud800x", satisfied=True), "?x"), (ToolResult("x", info={"lock": threading.Lock()}), "x"),
    ], ids=repr)  # fmt: skip
    def test_anything(self, tmp_path, answer, shown):
        def give(x: int):
            """Give it.

            Args:
                x: Nothing.
            """
            return answer

        trainer, seen = judged(tmp_path, [call(2, "give"), DONE], tools=[give], config={"log_completions": True})
        assert len(seen) == 8
        assert logged(trainer, "hint/accepted") == [1.0]
        assert logged(trainer, "tools/failure_frequency") == [0.0]
        assert (seen[0].next_state.role, seen[0].next_state.text) == ("tool", shown)

    @pytest.mark.parametrize(
        ("error", "said"),
        [
            (SystemExit(1), "SystemExit: 1"),
            (RuntimeError("\ud800"), "?"),
            (RecursionError(), "RecursionError"),
            (MemoryError("full"), "full"),
        ],
        ids=repr,
    )
    def test_a_tool_that_raises(self, tmp_path, error, said):
        def fail(x: int) -> str:
            """Fail.

            Args:
                x: Nothing.
            """
            raise error

        trainer, seen = judged(tmp_path, [call(2, "fail"), DONE], tools=[fail])
        assert seen[0].next_state.text == str({"error": said})
        assert logged(trainer, "tools/failure_frequency") == [1.0]

    def test_halves_of_emoji_come_back_as_question_marks(self, tmp_path):
        _, seen = judged(tmp_path, [tool_call('{"x": "a\\ud83d"}', '"echo"'), DONE], tools=[echo])
        assert seen[0].next_state.text == "a?"

    def test_so_do_those_in_the_names_of_arguments(self, tmp_path):
        _, seen = judged(tmp_path, [tool_call('{"\\ud83d": 2}', '"echo"'), DONE], tools=[echo])
        assert seen[0].completion[0]["tool_calls"][0]["function"]["arguments"] == {"?": 2}


class TestColumnsOfADataset:
    @pytest.mark.parametrize("value", [None, 3, "text", [{"role": "assistant", "content": "LOGGED"}]], ids=repr)
    @pytest.mark.parametrize("name", ["trajectory", "turn_index", "step_advantages"])
    def test_what_was_sampled_is_what_is_judged(self, tmp_path, name, value):
        rows = [{"prompt": [{"role": "user", "content": "2?"}], name: value}] * 4
        trainer, seen = judged(tmp_path, [CALL, DONE], train_dataset=Dataset.from_list(rows))
        assert [turn.reply for turn in seen] == [""] * 4 + ["4"] * 4
        assert logged(trainer, "turns/unmatched") == [0.0]


class TestReferences:
    @pytest.mark.parametrize("ahead", [False, True])
    def test_the_reference_reads_no_further_than_the_last_turn_that_fits(self, tmp_path, ahead):
        """The third turn ends behind the window, so the first two are taught, and their reference is there."""
        rows, texts = [], [call(2), call(4), "8" * 40 + "<|im_end|>"]
        probe = agent_trainer(tmp_path, texts=texts)
        spans = batches_of(probe)
        probe.train()
        prompt = int(spans[0]["prompt_mask"][0].sum())
        window = prompt + int((spans[0]["turn_index"][0] == 1).nonzero().max()) + 30

        async def judge(turn):
            return Verdict.from_votes([Vote(-1, hint="short")])

        judge.runs_in_process = not ahead  # one that is gets its turn after sampling, and the reference after it
        trainer = agent_trainer(
            tmp_path, texts=texts, judge=judge, config={"reward_scale": 1.5, "teacher": "ema", "teacher_ema_rate": 0.5}
        )
        lessons = trainer._teaching.lessons
        assert lessons.has_reference_apart
        for model in (lessons.teacher, lessons.reference):
            type(model).max_length = property(lambda self: window)
        score = lessons.reference.score
        lessons.reference.score = lambda given, **kw: rows.extend(given) or score(given, **kw)
        batches = batches_of(trainer)
        try:
            trainer.train()
        finally:
            for kind in {type(lessons.teacher), type(lessons.reference)}:
                del kind.max_length
        assert rows
        assert all(row.length <= window for row in rows)
        taught = batches[0]["teacher_mask"][0]
        assert taught.equal((batches[0]["turn_index"][0] == 0) | (batches[0]["turn_index"][0] == 1))
        assert torch.isfinite(batches[0]["teacher_per_token_logps"][0][taught]).all()
