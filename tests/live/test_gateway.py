"""The gateway over the stub engine: what official clients see, what is recorded, and what is refused."""

import asyncio
import json
import math
import re
import shutil
import subprocess
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from live.gateway_harness import TOOL, run, serving_stub, wait_for
from live.stub_engine import CALL, ids_of, prompt_of

from trl_openclaw.errors import EngineError
from trl_openclaw.live.engines import Delta
from trl_openclaw.live.gateway.app import GatewayOptions
from trl_openclaw.live.gateway.reply import Reply
from trl_openclaw.types import Verdict, Vote


def user(text):
    return {"role": "user", "content": text}


def post(gateway, path, body, **headers):
    """Status and JSON of a request that no client would send."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", **{name.replace("_", "-"): value for name, value in headers.items()}}
    try:
        with urllib.request.urlopen(urllib.request.Request(gateway.url + path, data, headers), timeout=30) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def chat(gateway, **fields):
    return post(gateway, "/v1/chat/completions", {"model": "stub", "messages": [user("hi")], **fields})


def tool(**more):
    """A tool whose function says more than its name and parameters."""
    return {"type": "function", "function": {**TOOL["function"], **more}}


def test_a_reply_and_its_record(gateway, stub):
    reply = gateway.ask("hello there", temperature=0.5, max_tokens=7, seed=3, stop="END", top_p=0.9)
    assert reply.choices[0].message.content == "stub: hello there"
    assert reply.choices[0].finish_reason == "stop"
    assert re.fullmatch("chatcmpl-[0-9a-f]{32}", reply.id)
    assert (reply.model, reply.system_fingerprint) == ("stub", "base")
    (turn,) = gateway.turns()
    assert turn.turn_id == turn.session_id == reply.id
    assert (turn.kind, turn.parent, turn.finish_reason, turn.model_version) == ("main", None, "stop", "base")
    assert turn.messages == [user("hello there")]
    assert turn.reply == {"role": "assistant", "content": "stub: hello there"}
    assert turn.prompt_ids == tuple(prompt_of([user("hello there")]))
    assert turn.completion_ids == tuple(ids_of("stub: hello there"))
    assert turn.logprobs == pytest.approx([-token / 256 for token in turn.completion_ids])
    sampling = {"temperature": 0.5, "top_p": 0.9, "max_tokens": 7, "seed": 3, "stop": ["END"]}
    assert turn.sampling == sampling
    assert {name: stub.requests[0][name] for name in sampling} == sampling
    assert (stub.requests[0]["top_k"], stub.requests[0]["repetition_penalty"]) == (0, 1.0)
    assert reply.usage.prompt_tokens == len(turn.prompt_ids)
    assert reply.usage.completion_tokens == len(turn.completion_ids)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("logprobs", "sampled_at", "recorded"),
    [
        ("raw", 0.5, None),
        ("processed", 0.5, 0.5),
        ("processed", 0.1, 0.1),
        ("processed", 1, None),
        ("processed", 0, None),
    ],
)
def test_the_temperature_of_the_log_probs_is_recorded(tmp_path, stub, logprobs, sampled_at, recorded, stream):
    with serving_stub(tmp_path, stub, logprobs=logprobs) as running:
        with running.client() as client:
            asked = {"model": "stub", "messages": [user("hello")], "temperature": sampled_at}
            answer = client.chat.completions.create(**asked, stream=stream)
            list(answer)
        wait_for(running.turns)
    (turn,) = running.turns()
    assert turn.sampling.get("logprobs_temperature") == recorded
    assert turn.logprobs_temperature == (1.0 if recorded is None else recorded)
    assert "logprobs_temperature" not in stub.requests[0]


def test_pieces_are_the_same_reply(gateway):
    with gateway.client() as client:
        stream = client.chat.completions.create(
            model="stub", messages=[user("one two")], stream=True, stream_options={"include_usage": True}
        )
        chunks = list(stream)
    texts = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
    assert texts == ["", "stub:", " one", " two", None]
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices] == [None, None, None, None, "stop"]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage.completion_tokens == len(ids_of("stub: one two"))
    (turn,) = gateway.turns()
    assert {chunk.id for chunk in chunks} == {turn.turn_id}
    assert {chunk.system_fingerprint for chunk in chunks} == {"base"}
    assert turn.completion_ids == tuple(ids_of("stub: one two"))
    assert len(turn.logprobs) == len(turn.completion_ids)


@pytest.mark.parametrize("asked", ["one two", f"{CALL} north"])
def test_the_whole_is_what_the_pieces_come_to(gateway, stub, asked):
    stub.thought = "well then"
    fields = {"model": "stub", "messages": [user(asked)], "tools": [TOOL]}
    with gateway.client() as client:
        whole = client.chat.completions.create(**fields)
        with client.chat.completions.stream(**fields, stream_options={"include_usage": True}) as source:
            pieces = source.get_final_completion()
    first, second = gateway.turns()
    for reply in (whole, pieces):
        assert reply.choices[0].finish_reason == ("tool_calls" if CALL in asked else "stop")
        assert reply.choices[0].message.reasoning_content == "wellthen"
        assert reply.usage == whole.usage
        assert (reply.choices[0].message.content or None) == first.reply["content"]
    for part in ("reply", "prompt_ids", "completion_ids", "logprobs", "finish_reason", "sampling", "tools"):
        assert getattr(first, part) == getattr(second, part), part
    calls = first.reply.get("tool_calls", [])
    assert [call.to_dict() for call in whole.choices[0].message.tool_calls or []] == calls
    assert [call.function.arguments for call in pieces.choices[0].message.tool_calls or []] == [
        call["function"]["arguments"] for call in calls
    ]
    assert whole.usage.prompt_tokens == len(first.prompt_ids)
    assert whole.usage.completion_tokens == len(first.completion_ids) > len("wellthen")


def test_a_whole_reply_may_take_longer_than_the_engine_may_be_silent(tmp_path, stub):
    stub.pause = 0.3
    with serving_stub(tmp_path, stub, options=GatewayOptions(timeout=1.5)) as gateway:
        reply = gateway.ask("a b c d e f g")
        assert reply.choices[0].message.content == "stub: a b c d e f g"
        assert [turn.finish_reason for turn in gateway.turns()] == ["stop"]
    assert [request["stream"] for request in stub.requests] == [True]


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_call_and_what_follows_it(gateway, stream):
    messages = [user(f"{CALL} north")]
    with gateway.client() as client:
        if stream:
            with client.chat.completions.stream(model="stub", messages=messages, tools=[TOOL]) as source:
                reply = source.get_final_completion()
        else:
            reply = client.chat.completions.create(model="stub", messages=messages, tools=[TOOL], tool_choice="auto")
        (call,) = reply.choices[0].message.tool_calls
        assert reply.choices[0].finish_reason == "tool_calls"
        assert (call.function.name, json.loads(call.function.arguments)) == ("look", {"word": "north"})
        said = reply.choices[0].message.model_dump()  # with all the fields that the client's class has
        said.pop("parsed", None)
        for made in said["tool_calls"]:
            made["function"].pop("parsed_arguments", None)
            made.pop("index", None)
        answer = {"role": "tool", "tool_call_id": call.id, "content": "a wall"}
        client.chat.completions.create(model="stub", messages=[*messages, said, answer], tools=[TOOL])
    first, second = gateway.turns()
    assert first.tools == [TOOL]
    assert first.reply["tool_calls"][0]["function"]["name"] == "look"
    assert (second.parent, second.session_id) == (first.turn_id, first.turn_id)
    assert first.next_state == [answer]
    assert first.state in ("answered", "held_out")


def test_the_async_client_and_many_at_once(gateway):
    async def ask_all():
        async with gateway.async_client() as client:

            async def one(place):
                stream = await client.chat.completions.create(model="stub", messages=[user(f"n{place}")], stream=True)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return await asyncio.gather(*(one(place) for place in range(40)))

    assert run(ask_all()) == [f"stub: n{place}" for place in range(40)]
    assert len(gateway.turns()) == 40


def test_curl(gateway):
    curl = shutil.which("curl")
    assert curl, "curl is needed for this test: apt-get install curl"
    body = json.dumps({"model": "stub", "messages": [user("hi")], "stream": True})
    done = subprocess.run(
        [curl, "-sS", "-N", f"{gateway.url}/v1/chat/completions", "-H", "Content-Type: application/json", "-d", body],
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    events = [line for line in done.stdout.split("\n\n") if line]
    assert all(event.startswith("data: ") for event in events)
    assert events[-1] == "data: [DONE]"
    assert json.loads(events[1][6:])["choices"][0]["delta"] == {"content": "stub:"}
    done = subprocess.run([curl, "-sS", f"{gateway.url}/v1/models"], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["data"][0]["id"] == "stub"


def test_conversations_are_found_without_ids(gateway):
    with gateway.client() as client:
        talks = {name: [user(f"I am {name}")] for name in ("ada", "bob", "cleo")}
        for turn in range(3):
            for name, messages in talks.items():
                reply = client.chat.completions.create(model="stub", messages=messages)
                messages += [reply.choices[0].message.to_dict(), user(f"{name} says {turn}")]
    turns = gateway.turns()
    assert len({turn.session_id for turn in turns}) == 3
    for turn in turns[:6]:
        name = turn.messages[0]["content"].split()[-1]
        place = len(turn.messages) // 2
        assert turn.next_state == [user(f"{name} says {place}")]
    assert all(turn.next_state is None for turn in turns[6:])


def test_what_a_developer_says_the_system_says(gateway, stub):
    messages = [{"role": "developer", "content": "Only French."}, user("Hi")]
    with gateway.client() as client:
        said = client.chat.completions.create(model="stub", messages=messages).choices[0].message
        messages += [said.to_dict(), user("Merci, and now?")]
        client.chat.completions.create(model="stub", messages=messages)
    first, second = gateway.turns()
    for asked, turn in zip(stub.requests, (first, second), strict=True):
        assert turn.messages == asked["messages"]
        assert turn.messages[0] == {"role": "system", "content": "Only French."}
        assert turn.prompt_ids == tuple(prompt_of(turn.messages))
    assert second.parent == first.turn_id
    assert first.next_state == [user("Merci, and now?")]


def test_headers_that_nobody_needs(gateway):
    with gateway.client() as client:
        for kind in ("main", "side"):
            client.chat.completions.create(
                model="stub",
                messages=[user("hi")],
                extra_headers={"X-Session-Id": "mine", "X-Turn-Type": kind, "X-Session-Done": "true"},
            )
    first, second = gateway.turns()
    assert (first.session_id, first.kind, second.kind) == ("mine", "main", "side")


def test_models_and_unknown_ones(gateway):
    with gateway.client() as client:
        assert [model.id for model in client.models.list()] == ["stub"]
        assert client.models.retrieve("stub").id == "stub"
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("other")
        with pytest.raises(openai.NotFoundError) as caught:
            client.chat.completions.create(model="other", messages=[user("hi")])
    assert caught.value.body["code"] == "model_not_found"
    assert gateway.turns() == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 2}, "n"),
        ({"logprobs": True}, "logprobs"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"made_up": 1}, "made_up"),
        ({"temperature": 3}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"seed": 2**64}, "seed"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "robot", "content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x", "cache_control": {}}]}, "messages[0].cache_control"),
        ({"tools": [{"type": "retrieval"}]}, "tools[0]"),
        ({"tools": [{**TOOL, "cache_control": {}}]}, "tools[0].cache_control"),
        ({"tools": [TOOL, tool(strict=True)]}, "tools[1].function.strict"),
        ({"tools": [tool(defer_loading=True)]}, "tools[0].function.defer_loading"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {}}]}]},
            "messages[0].content",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"chat_template_kwargs": {"chat_template": "{{ x }}"}}, "chat_template_kwargs.chat_template"),
        ({"model": None}, "model"),
    ],
    ids=str,
)
def test_what_cannot_be_honoured_is_refused_by_its_name(gateway, stub, fields, param):
    status, answer = chat(gateway, **fields)
    assert status == 400
    assert answer["error"]["param"] == param
    assert answer["error"]["type"] == "invalid_request_error"
    assert param.split("[")[0].split(".")[0] in answer["error"]["message"]
    assert stub.requests == []


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file"])
def test_images_and_sounds_are_refused(gateway, kind):
    parts = [{"type": "text", "text": "what is this?"}, {"type": kind, kind: {"url": "data:,"}}]
    status, answer = chat(gateway, messages=[{"role": "user", "content": parts}])
    assert status == 400
    assert answer["error"]["param"] == "messages[0].content"
    assert kind in answer["error"]["message"]


def test_what_asks_for_nothing_is_taken(gateway, stub):
    neutral = {
        "n": 1,
        "frequency_penalty": 0,
        "presence_penalty": 0.0,
        "logit_bias": {},
        "logprobs": False,
        "parallel_tool_calls": True,
        "response_format": {"type": "text"},
        "user": "me",
        "metadata": {"a": "b"},
        "tools": [],
        "store": False,
        "stop": None,
        "service_tier": "auto",
    }
    status, _ = chat(gateway, **neutral)
    assert status == 200
    assert not set(neutral) - {"logprobs", "stop"} & set(stub.requests[0])  # these two are the gateway's own
    for strict in (False, None):
        assert chat(gateway, tools=[tool(strict=strict, description=None)])[0] == 200
    part = {"type": "text", "text": "hi", "cache_control": None}
    assert chat(gateway, messages=[{"role": "user", "content": [part]}])[0] == 200


def test_parts_of_text_are_one_text(gateway, stub):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert chat(gateway, messages=[{"role": "user", "content": parts}])[0] == 200
    assert stub.requests[0]["messages"] == [user("one\ntwo")]
    assert gateway.turns()[0].messages == [user("one\ntwo")]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b'{"model": "stub", "messages": [{"role": "user", "content": "half an emoji \xed\xa0\x80"}]}',
        b'{"model": "stub", "messages": NaN}',
        b'{"model": "stub", "messages": [{"role": "user", "content": "hi"}], "temperature": 1e999}',
        b'{"model": "stub", "messages": [{"role": "user", "content": "hi"}], "tools": [{"type": "function", "function":'
        b'{"name": "look", "parameters": {"maximum": -1e999}}}]}',
        b"[" * 100_000,
        b'{"model": "stub", "seed": ' + b"9" * 5000 + b"}",
    ],
    ids=lambda body: str(body[:20]),
)
def test_malformed_bodies(gateway, body):
    status, answer = post(gateway, "/v1/chat/completions", body)
    assert status == 400
    assert answer["error"]["type"] == "invalid_request_error"


def test_half_an_emoji_is_answered_and_recorded(gateway):
    body = b'{"model": "stub", "messages": [{"role": "user", "content": "hi \\ud83d"}]}'
    assert post(gateway, "/v1/chat/completions", body)[0] == 200
    assert gateway.turns()[0].messages == [user("hi ?")]


def test_huge_bodies_are_refused(tmp_path, stub):
    with serving_stub(tmp_path, stub, options=GatewayOptions(max_body=10_000)) as gateway:
        status, answer = chat(gateway, messages=[user("x" * 50_000)])
        assert (status, answer["error"]["code"]) == (413, "request_too_large")
        request = urllib.request.Request(
            f"{gateway.url}/v1/chat/completions",
            iter([b"x" * 9_000] * 5),  # sent in chunks, without saying how many
            {"Content-Type": "application/json"},
        )
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request, timeout=30)
        assert caught.value.code == 413
        assert chat(gateway)[0] == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("trouble", "status"), [("refuses", 400), ("fails", 502), ("is full", 503), ("html", 502), ("drops", 503)]
)
def test_an_engine_that_gives_no_reply(gateway, stub, trouble, status, stream):
    stub.trouble = lambda request: trouble
    found, answer = chat(gateway, stream=stream)
    assert (found, answer["error"]["code"][:7]) == (status, "engine_")
    assert gateway.turns() == []
    stub.trouble = lambda request: None
    assert chat(gateway)[0] == 200


def test_an_engine_that_is_down_and_comes_back(gateway, stub):
    stub.stop()
    status, answer = chat(gateway)
    assert (status, answer["error"]["code"]) == (503, "engine_down")
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(f"{gateway.url}/health", timeout=30)
    assert caught.value.code == 503
    assert "cannot be reached" in json.load(caught.value)["problems"]["engine"]
    stub.start()
    assert chat(gateway)[0] == 200
    wait_for(lambda: run_health(gateway) == "ok", what="health")


def run_health(gateway):
    try:
        with urllib.request.urlopen(f"{gateway.url}/health", timeout=30) as answer:
            return json.load(answer)["status"]
    except urllib.error.HTTPError:
        return "down"


def test_half_an_emoji_is_a_question_mark(gateway, stub):
    stub.trouble, stub.pieces = lambda request: "half an emoji", 1
    said, answer = chat(gateway)
    assert (said, answer["choices"][0]["message"]["content"][:2]) == (200, "a?")
    with gateway.client() as client:
        pieces = list(client.chat.completions.create(model="stub", messages=[user("hi")], stream=True))
    assert "a?" in [piece.choices[0].delta.content for piece in pieces]


@pytest.mark.parametrize("trouble", ["hangs", "stalls"])
def test_an_engine_that_says_nothing_any_more(tmp_path, stub, trouble):
    stub.trouble = lambda request: trouble
    with serving_stub(tmp_path, stub, options=GatewayOptions(timeout=0.3)) as gateway:
        if trouble == "hangs":
            status, answer = chat(gateway)
            assert (status, answer["error"]["code"]) == (504, "engine_slow")
        else:
            with gateway.client() as client, pytest.raises(openai.APIError, match="said nothing"):
                list(client.chat.completions.create(model="stub", messages=[user("a b c")], stream=True))
            wait_for(gateway.turns)
            assert gateway.turns()[0].finish_reason == "error"
        wait_for(lambda: stub.aborted == 1, what="the end of the generation")
        if trouble == "stalls":
            status, answer = chat(gateway, messages=[user("a b c")])
            assert (status, answer["error"]["code"]) == (504, "engine_slow")
            wait_for(lambda: stub.aborted == 2, what="the end of the generation")


BREAKS = pytest.mark.parametrize(
    ("trouble", "status"), [("dies", 503), ("errors", 502), ("refuses late", 400), ("ends", 502)]
)


@BREAKS
def test_a_whole_reply_that_breaks_off_is_an_error_and_no_turn(gateway, stub, trouble, status):
    stub.trouble = lambda request: trouble
    found, answer = chat(gateway, messages=[user("a b c")])
    assert (found, answer["error"]["code"][:7]) == (status, "engine_")
    stub.trouble = lambda request: None
    gateway.ask("x")
    assert [turn.reply["content"] for turn in gateway.turns()] == ["stub: x"]  # turns are recorded in their order


@BREAKS
def test_a_reply_that_breaks_off(gateway, stub, trouble, status):
    stub.trouble = lambda request: trouble
    with gateway.client() as client:
        stream = client.chat.completions.create(model="stub", messages=[user("a b c")], stream=True)
        seen = []
        with pytest.raises(openai.APIError):
            seen.extend(stream)
    wait_for(gateway.turns)
    (turn,) = gateway.turns()
    assert (turn.finish_reason, turn.state, turn.completion_ids) == ("error", "unusable", ())
    assert turn.reply["content"] == "stub:"
    wait_for(lambda: gateway.metric("requests_total", status=str(status)) == 1, what="its count")
    assert gateway.metric("requests_total", status="200") == 0


@pytest.mark.parametrize("index", [-1, 1024, "0", None])
def test_a_tool_call_has_a_place_that_fits_into_memory(index):
    with pytest.raises(EngineError, match="tool call number"):
        Reply().add(Delta(tool_calls=[{"index": index, "function": {"name": "look"}}]))


@pytest.mark.parametrize(
    "call",
    [
        {"function": "look"},
        {"function": {"name": ["look"]}},
        {"function": {"name": "look", "arguments": {}}},
        {"id": 1},
    ],
    ids=str,
)
def test_a_tool_call_that_is_none_is_the_engine_s_fault(call):
    with pytest.raises(EngineError, match="tool call that is none") as caught:
        Reply().add(Delta(tool_calls=[{"index": 0, **call}]))
    assert caught.value.kind == "broken"


@pytest.mark.parametrize(
    ("trouble", "stream"),
    [
        ("call without function", False),  # in a stream it comes too late for a status
        *((trouble, stream) for trouble in ("text in parts", "end in parts", "prompt of one") for stream in (0, 1)),
    ],
)
def test_a_reply_that_is_none_is_the_engine_s_fault(gateway, stub, trouble, stream):
    stub.trouble = lambda request: trouble
    status, answer = chat(gateway, stream=bool(stream), messages=[user(f"{CALL} north")], tools=[TOOL])
    assert (status, answer["error"]["code"]) == (502, "engine_broken")


def test_what_nobody_thought_of_is_an_error_of_openai_s(gateway, monkeypatch):
    monkeypatch.setattr("trl_openclaw.live.gateway.chat._whole", lambda exchange: 1 / 0)
    status, answer = chat(gateway)
    assert (status, answer["error"]["type"]) == (500, "server_error")
    assert "ZeroDivisionError" in answer["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        ("no prompt ids", "no prompt ids"),
        ("no ids", "no ids"),
        ("missing log-probs", "missing log-probs"),
        ("no number", "missing log-probs"),
        ("wrong ids", "wrong ids"),
        ("wrong log-probs", "wrong log-probs"),
    ],
)
def test_ids_that_cannot_be_right_are_not_recorded(gateway, stub, trouble, reason, stream):
    stub.trouble = lambda request: trouble
    with gateway.client() as client:
        reply = client.chat.completions.create(model="stub", messages=[user("a b")], stream=stream)
        if stream:
            assert "".join(chunk.choices[0].delta.content or "" for chunk in reply) == "stub: a b"
        else:
            assert reply.choices[0].message.content == "stub: a b"
    (turn,) = gateway.turns()
    assert (turn.prompt_ids, turn.completion_ids, turn.logprobs, turn.state) == ((), (), (), "unusable")
    assert gateway.metric("turns_without_ids_total", reason=reason) == 1


def test_an_engine_that_never_sends_what_training_needs_is_told_of(gateway, stub):
    """No client misses it, so it would go on for weeks."""
    stub.trouble = lambda request: "no ids"
    for _ in range(2):
        assert chat(gateway)[0] == 200
    assert gateway.health()["status"] == "ok"
    assert chat(gateway)[0] == 200
    health = gateway.health()
    assert health["status"] == "degraded"
    assert "the last 3 cannot be trained on (no ids)" in health["problems"]["replies"]
    assert "`return_token_ids`" in health["problems"]["replies"]
    stub.trouble = lambda request: None
    assert chat(gateway)[0] == 200
    assert gateway.health()["status"] == "ok"


def test_a_reply_that_was_forced_into_a_form_is_not_trained(gateway, stub):
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}
    assert chat(gateway, response_format=schema)[0] == 200
    assert stub.requests[0]["response_format"] == schema
    (turn,) = gateway.turns()
    assert (turn.completion_ids, turn.state) == ((), "unusable")
    assert turn.sampling["response_format"] == schema


def test_too_many_at_once_are_told_to_come_back(tmp_path, stub):
    stub.delay = 0.5
    options = GatewayOptions(max_in_flight=2)
    with serving_stub(tmp_path, stub, options=options) as gateway, ThreadPoolExecutor(6) as pool:
        found = sorted(status for status, _ in pool.map(lambda _: chat(gateway), range(6)))
    assert found == [200, 200, 429, 429, 429, 429]


@pytest.fixture
def trainable(monkeypatch):
    """No turn is kept for checks, as one in eight is otherwise."""
    monkeypatch.setattr("trl_openclaw.live.store_turns.is_held_out", lambda turn_id: False)


def test_feedback(trainable, gateway):
    reply = gateway.ask("hello")
    body = {"turn_id": reply.id, "thumb": "down", "correction": "Greet me by name."}
    assert post(gateway, "/v1/feedback", body) == (
        200,
        {"object": "feedback", "turn_id": reply.id, "new": True, "state": "ready"},
    )
    assert post(gateway, "/v1/feedback", body)[1]["new"] is False
    same = {"id": reply.id, "thumb": -1, "correction": "Greet me by name."}  # in other words
    assert post(gateway, "/v1/feedback", same)[1]["new"] is False
    (turn,) = gateway.turns()
    assert (turn.verdict.score, turn.verdict.hints, turn.verdict.source) == (-1, ("Greet me by name.",), "feedback")
    assert gateway.metric("feedback_total", thumb="down") == 1
    assert post(gateway, "/v1/feedback", {"id": "chatcmpl-no", "thumb": "up"})[0] == 404
    for wrong in ({"id": reply.id}, {"id": reply.id, "thumb": "sideways"}, {"id": reply.id, "thumb": "up", "x": 1}, []):
        assert post(gateway, "/v1/feedback", wrong)[0] == 400
    assert post(gateway, "/v1/feedback", b'{"id": "\\ud800", "thumb": "up"}')[0] in (400, 404)


def test_the_last_thumb_counts(gateway):
    reply, other = gateway.ask("hello"), gateway.ask("hello again")
    for thumb, score in (("up", 1), ("down", -1), ("up", 1)):
        assert post(gateway, "/v1/feedback", {"id": reply.id, "thumb": thumb})[1]["new"] is True
        assert gateway.store.show("default", reply.id).verdict.score == score
    assert post(gateway, "/v1/feedback", {"id": reply.id, "thumb": "up", "correction": "Greet me."})[1]["new"] is True
    again = {"id": reply.id, "thumb": "up", "correction": " Greet me. "}
    assert post(gateway, "/v1/feedback", again)[1]["new"] is False
    assert gateway.store.show("default", reply.id).verdict.hints == ("Greet me.",)
    news = [
        post(gateway, "/v1/feedback", {"id": one.id, "thumb": "down", "key": "1"})[1]["new"]
        for one in (reply, other, other)
    ]
    assert news == [True, True, False]  # a key names feedback on one reply
    assert [turn.verdict.score for turn in gateway.turns()] == [-1, -1]


def test_a_correction_is_withdrawn_by_the_same_thumb_without_one(gateway):
    reply = gateway.ask("hello")
    for more, hints in (
        ({"correction": "Greet me."}, ("Greet me.",)),
        ({}, ()),
        ({"correction": "Greet me."}, ("Greet me.",)),
        ({"correction": "Be kind."}, ("Be kind.",)),
        ({"correction": "  "}, ()),
    ):
        body = {"id": reply.id, "thumb": "down", **more}
        assert [post(gateway, "/v1/feedback", body)[1]["new"] for _ in range(3)] == [True, False, False]
        verdict = gateway.store.show("default", reply.id).verdict
        assert (verdict.score, verdict.hints) == (-1, hints)


def test_a_judge_s_hint_is_no_correction_to_withdraw(gateway):
    """The same thumb again is no news then, and does not take the hint away."""
    reply = gateway.ask("hello")
    hinted = Verdict.from_votes([Vote(-1, None, hint="Greet me.")])
    for news in (True, False):
        assert post(gateway, "/v1/feedback", {"id": reply.id, "thumb": "down"})[1]["new"] is news
        gateway.store.add_verdict(reply.id, hinted)
    assert gateway.store.show("default", reply.id).verdict.hints == ("Greet me.",)


def test_feedback_that_comes_too_late_is_told_so(trainable, gateway):
    reply, other = gateway.ask("hello"), gateway.ask("hello again")
    states, correction = [], {"thumb": "down", "correction": "Greet me."}

    def say(one):
        states.append(post(gateway, "/v1/feedback", {"id": one.id, **correction})[1]["state"])

    say(reply)
    batch = gateway.store.claim("default", 1, 9)
    say(reply)
    gateway.store.end_batch(batch.batch_id, "trained", "v000001")
    correction["correction"] = "Name the river."
    say(reply)
    gateway.store.opt_out("default")
    say(other)
    assert states == ["ready", "claimed", "trained", "opted_out"]


def test_feedback_on_what_is_kept_for_checks_says_so(gateway, monkeypatch):
    monkeypatch.setattr("trl_openclaw.live.store_turns.is_held_out", lambda turn_id: True)
    body = {"id": gateway.ask("hello").id, "thumb": "down", "correction": "Greet me."}
    assert [post(gateway, "/v1/feedback", body)[1]["state"] for _ in range(2)] == ["held_out", "held_out"]


def test_unknown_paths_and_methods(gateway):
    assert post(gateway, "/v1/completions", {})[0] == 404
    assert post(gateway, "/v1/models", {})[0] == 405


def test_metrics(gateway):
    gateway.ask("hello")
    chat(gateway, n=2)
    with urllib.request.urlopen(f"{gateway.url}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    assert 'openclaw_requests_total{status="200"} 1.0' in text
    assert 'openclaw_requests_total{status="400"} 1.0' in text
    assert 'openclaw_turns_recorded_total{kind="main"} 1.0' in text
    assert "default" not in text
    assert "hello" not in text


def test_content_is_logged_only_when_asked_for(tmp_path, stub, caplog):
    caplog.set_level("DEBUG", logger="trl_openclaw")
    with serving_stub(tmp_path, stub) as gateway:
        gateway.ask("my secret")
        chat(gateway, messages=[user("my secret"), {"role": "user", "content": 3}])
        stub.trouble = lambda request: "refuses"
        chat(gateway, messages=[user("my secret")])
        stub.trouble = lambda request: None
    assert "chatcmpl-" in caplog.text
    assert "secret" not in caplog.text
    with serving_stub(tmp_path, stub, options=GatewayOptions(log_content=True)) as gateway:
        gateway.ask("my secret")
    assert "my secret" in caplog.text


def test_log_probs_survive_the_store(gateway):
    gateway.ask("x")
    assert all(math.isfinite(value) and value <= 0 for value in gateway.turns()[0].logprobs)
