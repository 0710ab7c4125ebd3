"""From sampled ids to what clients see: text in whole characters, stop texts, thinking and tool calls."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from live.gateway_harness import TOOL, USER
from tiny import tiny_tokenizer
from transformers import AutoTokenizer
from trl import chat_template_utils

from trl_openclaw.live.engines.messages import as_templates_read
from trl_openclaw.live.engines.reading import ReplyReader, StopCutter, TextStream


def feed_all(reader, ids):
    pieces = [reader.feed(token) for token in ids]
    return [*pieces, reader.end()]


@given(st.text(max_size=40))
@settings(deadline=None, max_examples=60)
def test_text_comes_in_whole_characters(text):
    tokenizer = tiny_tokenizer()
    ids = tokenizer(text)["input_ids"]
    stream = TextStream(tokenizer, keep_special=False)
    pieces = [stream.feed(token) for token in ids]
    whole = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert "".join(pieces) + stream.end() == whole
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


@given(st.lists(st.integers(0, 255), max_size=60))
@settings(deadline=None, max_examples=60)
def test_any_bytes_are_said_as_they_are_decoded(ids):
    tokenizer = tiny_tokenizer()
    stream = TextStream(tokenizer, keep_special=False)
    said = "".join([stream.feed(token) for token in ids]) + stream.end()
    whole = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert said.replace("\ufffd", "") == whole.replace("\ufffd", "")


def test_a_real_tokenizer_s_text_comes_in_whole_characters(smollm2):
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    text = "Naïve café: 你好, мир! 👩‍👩‍👧 and\n\n\tsome  spaces <|im_end|>"
    ids = tokenizer(text)["input_ids"]
    for keep in (True, False):
        stream = TextStream(tokenizer, keep_special=keep)
        pieces = [stream.feed(token) for token in ids]
        assert "".join(pieces) + stream.end() == tokenizer.decode(ids, skip_special_tokens=not keep)
        assert not any("\ufffd" in piece for piece in pieces)
        assert sum(map(bool, pieces)) > 15


@given(st.text("abE", max_size=30), st.lists(st.text("abE", min_size=1, max_size=4), max_size=3), st.data())
@settings(deadline=None)
def test_texts_are_cut_at_the_first_stop_however_they_come(text, stops, data):
    cutter, rest, said = StopCutter(stops), text, ""
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        said += cutter.feed(rest[:size])
        rest = rest[size:]
    said += cutter.end()
    places = [at for stop in stops if (at := text.find(stop)) >= 0]
    assert said == (text[: min(places)] if places else text)
    assert cutter.stopped == bool(places)


def qwen3_tokenizer():
    """A tokenizer whose replies can be read: TRL knows the template."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = chat_template_utils.qwen3_chat_template
    return chat_template_utils.add_response_schema(tokenizer)


CALL = '<tool_call>\n{"name": "look", "arguments": {"word": "north", "times": 2}}\n</tool_call>'


def read(text, tools=(TOOL,), stops=()):
    tokenizer = qwen3_tokenizer()
    prompt = list(tokenizer.apply_chat_template([USER], add_generation_prompt=True, return_dict=True)["input_ids"])
    reader = ReplyReader(tokenizer, prompt, list(tools), stops)
    pieces = feed_all(reader, tokenizer(text)["input_ids"])
    calls = [call for piece in pieces for call in piece.tool_calls]
    return "".join(p.content for p in pieces), "".join(p.reasoning for p in pieces), calls


def test_tool_calls_are_read():
    content, reasoning, (call,) = read(f"Let me see.{CALL}")
    assert (content, reasoning) == ("Let me see.", "")
    assert call["function"]["name"] == "look"
    assert json.loads(call["function"]["arguments"]) == {"word": "north", "times": 2}
    assert call["id"].startswith("call_")
    _, _, calls = read(f"{CALL}\n{CALL}")
    assert [call["index"] for call in calls] == [0, 1]
    assert len({call["id"] for call in calls}) == 2


def test_thinking_is_told_from_text():
    content, reasoning, calls = read(f"<think>\nHm.\n</think>\n\nYes.{CALL}")
    assert (content.strip(), reasoning.strip(), len(calls)) == ("Yes.", "Hm.", 1)


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "look", "arguments": {"word": \n</tool_call>',
        "<tool_call>\nlook north\n</tool_call> and so on",
        '<tool_call>\n{"arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "look"',
        "<tool_ca",
        "a < b and <tools>",
    ],
)
def test_what_is_no_call_is_text(text):
    content, _, calls = read(f"Well. {text}")
    assert calls == []
    assert content.split() == f"Well. {text}".split()


def test_calls_that_nobody_offered_are_text():
    content, _, calls = read(f"Well. {CALL}", tools=())
    assert calls == []
    assert content.split() == f"Well. {CALL}".split()


def test_stop_texts_are_found_before_calls_are_read():
    content, _, calls = read(f"one STOP {CALL}", stops=["STOP"])
    assert (content, calls) == ("one ", [])


def test_arguments_are_values_to_templates():
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"word": "x"}'}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    found = as_templates_read(message)
    assert found["tool_calls"][0]["function"]["arguments"] == {"word": "x"}
    assert call["function"]["arguments"] == '{"word": "x"}'
    for odd in ("", "{", None, [1]):
        call["function"]["arguments"] = odd
        expected = {} if odd == "" else odd
        assert as_templates_read(message)["tool_calls"][0]["function"]["arguments"] == expected
