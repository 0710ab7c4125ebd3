"""An agent's turns: which tokens are whose, what followed each, and the same through TRL's own tool loop."""

import copy
import json
import random
import re
from itertools import pairwise
from types import SimpleNamespace

import pytest
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from test_suffixes import trainer_with
from tiny import tiny_llama
from trainer_harness import SETTINGS, always_replies, judge_that
from trl.chat_template_utils import add_response_schema

from trl_openclaw import NextState, OPDConfig, OPDTrainer
from trl_openclaw._trl.parsing import call_pattern
from trl_openclaw.trainer.turns import BatchTurns
from trl_openclaw.trajectories import UNANSWERED_CALL, UNREAD_CALL, Span, next_state_of, sampled_spans, split_trajectory
from trl_openclaw.types import ToolResult

PROMPT = [{"role": "user", "content": "2?"}]
CALL = {"type": "function", "function": {"name": "double", "arguments": {"x": 2}}}


def calls(text="", *more):
    return {"role": "assistant", "content": text, "tool_calls": [CALL, *more]}


def tool(content, name="double"):
    return {"role": "tool", "name": name, "content": content}


def says(text):
    return {"role": "assistant", "content": text}


class TestSpans:
    @given(st.lists(st.integers(0, 1), max_size=40))
    def test_every_sampled_token_is_in_one_span_and_no_other_in_any(self, mask):
        spans = sampled_spans(len(mask), mask)
        found = [i for span in spans for i in range(span.start, span.stop)]
        assert found == [i for i, sampled in enumerate(mask) if sampled]
        assert all(span.start < span.stop for span in spans)
        assert all(a.stop < b.start for a, b in pairwise(spans))  # maximal runs

    def test_without_a_mask_all_is_one_turn(self):
        assert sampled_spans(3) == [Span(0, 3)]
        assert sampled_spans(0) == []


class TestSplit:
    def test_each_turn_has_what_came_before_and_what_followed(self):
        completion = [calls("Let me see."), tool("4"), calls(), tool("8"), says("8")]
        turns = split_trajectory(PROMPT, completion, truncated=True)
        assert [list(turn.prompt) for turn in turns] == [
            PROMPT, [*PROMPT, *completion[:2]], [*PROMPT, *completion[:4]],
        ]  # fmt: skip
        assert [list(turn.completion) for turn in turns] == [completion[:1], completion[2:3], completion[4:]]
        assert [turn.next_state for turn in turns] == [NextState("4", "tool"), NextState("8", "tool"), None]
        assert [turn.step for turn in turns] == [0, 1, 2]
        assert [turn.truncated for turn in turns] == [False, False, True]

    def test_answers_to_parallel_calls_are_one_next_state(self):
        (turn, _) = split_trajectory(PROMPT, [calls("", CALL), tool("4"), tool("x" * 3, "other"), says("4")])
        assert turn.next_state.content == "[double]\n4\n\n[other]\nxxx"
        assert turn.next_state.role == "tool"
        assert [message["content"] for message in turn.next_state.info["messages"]] == ["4", "xxx"]

    def test_a_users_last_word_is_the_last_turns_next_state(self):
        user = {"role": "user", "content": ToolResult("Thanks!", satisfied=True, info={"persona": "p"})}
        (turn,) = split_trajectory(PROMPT, [says("4"), user])
        assert turn.next_state == NextState("Thanks!", "user", True, {"persona": "p"})

    def test_assistant_messages_in_a_row_are_one_turn(self):
        turns = split_trajectory(PROMPT, [says("a"), says("b"), tool("4"), says("c")])
        assert [turn.reply for turn in turns] == ["a\nb", "c"]

    def test_what_precedes_the_first_turn_belongs_to_its_prompt(self):
        (turn,) = split_trajectory(PROMPT, [tool("0"), says("a")])
        assert list(turn.prompt) == [*PROMPT, tool("0")]

    def test_a_completion_without_anything_in_between_is_left_whole(self):
        for completion in ("text", [says("a")], [says("a"), says("b")], [], [tool("4")]):
            (turn,) = split_trajectory("2?", completion)
            assert (turn.prompt, turn.completion) == ("2?", completion)

    @pytest.mark.parametrize(
        ("known", "satisfied"),
        [
            ([True, True], True),
            ([True, None], None),
            ([True, False], False),
            ([None, None], None),
            ([None, False], False),
            ([False, False, False], False),
        ],
    )
    def test_several_answers_went_well_if_all_did(self, known, satisfied):
        messages = [
            tool(ToolResult("x", satisfied=k, info={"wish": f"w{i // 2}"} if k is False else {}))
            for i, k in enumerate(known)
        ]
        state = next_state_of(messages)
        assert state.satisfied is satisfied
        assert state.info.get("wish") == {0: None, 1: "w0", 3: "w0\nw1"}[known.count(False)]

    @pytest.mark.parametrize("content", [[1, 2], ["a"], [None], 3, {"a": 1}])
    def test_other_content_is_shown_as_text(self, content):
        assert next_state_of([tool(content)]).text == str(content)

    def test_images_are_kept_as_parts(self):
        image = {"type": "image", "image": object()}
        state = next_state_of([tool([image]), tool("4")])
        assert state.content[1] is image
        assert state.text == "[double]\n[image]\n[double]\n4"


TAG = re.compile("<tool_call>")


class TestFailedCalls:
    @pytest.mark.parametrize("text", ['<tool_call>\n{"name": "double", "argu', "I call <tool_call>"])
    def test_a_call_that_nobody_could_read_is_followed_by_that(self, text):
        (turn,) = split_trajectory(PROMPT, [says(text)], calls_tools=True, call_pattern=TAG)
        assert turn.next_state.text == UNREAD_CALL
        assert turn.next_state.satisfied is False
        assert turn.next_state.info["wish"]

    def test_a_call_that_nobody_answered_is_followed_by_that(self):
        turns = split_trajectory(PROMPT, [calls(), tool("4"), calls()], calls_tools=True, truncated=True)
        assert [turn.next_state.text for turn in turns] == ["4", UNANSWERED_CALL]
        assert turns[1].next_state.satisfied is None

    @pytest.mark.parametrize(
        ("completion", "kwargs"),
        [
            ([says("<tool_call>{")], {"call_pattern": TAG}),
            ([calls()], {}),
            ([says("<tool_call>{")], {"calls_tools": True}),
            ([says("Done.")], {"calls_tools": True, "call_pattern": TAG}),
            ([says("<tool_call>{")], {"calls_tools": True, "call_pattern": TAG, "truncated": True}),
            ("<tool_call>{", {"calls_tools": True, "call_pattern": TAG}),
        ],
    )
    def test_nothing_is_made_up_elsewhere(self, completion, kwargs):
        (turn,) = split_trajectory(PROMPT, completion, **kwargs)
        assert turn.next_state is None

    @pytest.mark.parametrize(
        ("template", "call", "no_call"),
        [
            ("qwen3", '<tool_call>\n{"na', '{"name": "Ada", "parameters": {}}'),
            ("glm4moe", "<tool_call>doub", "tool_call"),
            ("llama3_2", '{"name": "double", "parameters": {"x"', '{"name": "Ada", "age": 36}'),
            ("gptoss", "to=functions.double<|chan", "functions"),
            ("lfm2_2_5", "<|tool_call_start|>[dou", "[double(x=2)]"),
        ],
    )
    def test_what_shows_that_a_call_was_meant(self, template, call, no_call):
        tokenizer = add_response_schema(trainer_with(template).processing_class)
        pattern = call_pattern(tokenizer)
        assert pattern.search(call)
        assert not pattern.search(no_call)

    def test_a_tokenizer_that_does_not_tell(self):
        assert call_pattern(SimpleNamespace()) is None


class TestCuts:
    def test_a_turn_that_a_tool_has_answered_was_not_cut(self):
        (turn,) = split_trajectory(PROMPT, [calls(), tool("4")], truncated=True)
        assert not turn.truncated

    def test_one_that_a_user_answered_may_have_been(self):
        (turn,) = split_trajectory(PROMPT, [says("It is f"), {"role": "user", "content": "?"}], truncated=True)
        assert turn.truncated


def double(x: int) -> int:
    """Double a number.

    Args:
        x: The number.
    """
    return 2 * x


# How a template writes a call.
TEMPLATES = {
    "qwen3": lambda name, arguments: (
        "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"
    ),
    "qwen2_5": lambda name, arguments: (
        "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"
    ),
    "llama3_2": lambda name, arguments: json.dumps({"name": name, "parameters": arguments}),
    "glm4moe": lambda name, arguments: (
        f"\n<tool_call>{name}"
        + "".join(f"\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>" for key, value in arguments.items())
        + "\n</tool_call>"
    ),
}


class RandomPolicy:
    """Stands in for sampling: turns drawn at random, with calls good and bad, and remembers each row's ids."""

    def __init__(self, trainer, write_call, seed):
        self.trainer, self.write_call, self.random = trainer, write_call, random.Random(seed)
        self.turns: dict[str, list[list[int]]] = {}

    def __call__(self, prompt_ids, *args, **kwargs):
        ids = [self.turn() for _ in prompt_ids]
        if self.trainer.empty_rows is None:
            ids, _ = self.trainer._fill_empty(ids, None)
        for context, turn in zip(prompt_ids, ids, strict=True):
            self.of(context).append(turn)
        return copy.deepcopy(ids), None

    def of(self, context):
        """The turns of the row whose prompt these ids begin with: each prompt has a number of its own."""
        number = re.search(r"row (\d+)\.", self.trainer.tokenizer.decode(context))[1]
        return self.turns.setdefault(number, [])

    def turn(self):
        chance, tokenizer = self.random.random(), self.trainer.tokenizer
        end = tokenizer.eos_token
        if chance < 0.45:
            text = self.write_call("double", {"x": self.random.randrange(99)})
        elif chance < 0.55:
            text = self.write_call("unknown", {"x": 1})
        elif chance < 0.62:
            text = self.write_call("double", {"wrong": 1})
        elif chance < 0.70:
            text = self.write_call("double", {"x": 2})[:-7]  # cannot be read
        elif chance < 0.75:
            text, end = "cut in the middle of a w", ""
        elif chance < 0.80:
            text = ""
        else:
            text = "It is " + "é" * self.random.randrange(9)
        return tokenizer(text + end, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("template", TEMPLATES)
def test_random_trajectories_of_trls_tool_loop(tmp_path, template):
    """1,000 rows in all: every sampled token is in exactly one turn, and no token of a tool in any."""
    rows = 250
    tokenizer = trainer_with(template).processing_class
    trainer = OPDTrainer(
        model=tiny_llama(vocab_size=len(tokenizer), max_position_embeddings=8192),
        args=OPDConfig(
            output_dir=str(tmp_path), **{**SETTINGS, "max_completion_length": 700}, max_tool_calling_iterations=9
        ),
        processing_class=tokenizer,
        train_dataset=Dataset.from_list([{"prompt": PROMPT}] * 4),
        judge=judge_that(),
        next_state=always_replies,
        tools=[double],
    )
    policy = trainer._generate_single_turn = RandomPolicy(trainer, TEMPLATES[template], seed=len(template))
    trainer._sync_tool_dicts, trainer._async_tool_dicts = [{"double": double}] * rows, [{}] * rows
    prompts = [[{"role": "user", "content": f"row {i}."}] for i in range(rows)]
    _, ids, tool_mask, completions, *_ = trainer._generate(prompts)
    lengths = set()
    for i in range(rows):
        spans = sampled_spans(len(ids[i]), tool_mask[i])
        found = [ids[i][span.start : span.stop] for span in spans]
        assert_as_sampled(found, [turn for turn in policy.turns[str(i)] if turn])
        turns = split_trajectory(prompts[i], completions[i], calls_tools=True)
        assert len(turns) == len(spans), i
        outside = trainer.tokenizer.decode([t for t, own in zip(ids[i], tool_mask[i], strict=True) if not own])
        for turn in turns[:-1]:
            assert turn.next_state.role == "tool"
            assert letters(turn.next_state.text) in letters(outside)
        lengths.add(len(turns))
    assert {1, 2, 3, 4} <= lengths
    rollout = SimpleNamespace(
        prompts=prompts, completions=completions, completion_ids=ids, tool_mask=tool_mask, prompt_ids=None, masked=None
    )
    table = BatchTurns.of(rollout)
    assert table.unmatched == 0
    steps = table.index((rows, max(map(len, ids))), trainer.accelerator.device)
    for i in range(rows):
        assert (steps[i, : len(ids[i])] >= 0).tolist() == [bool(own) for own in tool_mask[i]]
        assert (steps[i, len(ids[i]) :] == -1).all()


def assert_as_sampled(found, sampled):
    """The turns are what was sampled, up to where TRL's length limit cuts the last one, or leaves it out."""
    assert len(sampled) - 1 <= len(found) <= len(sampled)
    assert found[:-1] == sampled[: len(found) - 1]
    assert found[-1] == sampled[len(found) - 1][: len(found[-1])]


def letters(text):
    """Text without what templates escape."""
    return "".join(filter(str.isalnum, text))
