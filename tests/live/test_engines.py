"""The engine in this process: what it samples, with which log-probs, under which adapter, and what clients see."""

import asyncio
import json
import threading
import time
from contextlib import aclosing

import openai
import pytest
import torch
from live.gateway_harness import TOOL, USER, publish_adapter, run, serving, wait_for
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tiny import tiny_llama, tiny_tokenizer
from trl import chat_template_utils

from trl_openclaw.errors import EngineError
from trl_openclaw.live.engines import EngineRequest
from trl_openclaw.live.engines import transformers as engine_module
from trl_openclaw.live.engines.decoding import Sampling, _draw
from trl_openclaw.live.engines.transformers import TransformersEngine
from trl_openclaw.live.gateway.app import GatewayOptions

END = 256


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    """A tiny model with a byte-level tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    tiny_llama().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """The folders of two adapters that change what it says."""
    folders = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
        folder = tmp_path_factory.mktemp("adapters") / f"v{seed}"
        model = get_peft_model(tiny_llama(), config)
        torch.manual_seed(seed)
        for name, weight in model.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(weight, std=0.5)
        model.save_pretrained(folder)
        folders.append(folder)
    return folders


@pytest.fixture
def engine(model_path):
    engine = TransformersEngine(str(model_path))
    yield engine
    asyncio.run(engine.aclose())
    assert not engine._thread.is_alive()


def request(*messages, tools=None, adapter=None, user="", **sampling):
    return EngineRequest(
        list(messages or [USER]),
        tools,
        {"temperature": 1.0, "top_p": 1.0, "stop": [], "max_tokens": 24, **sampling},
        adapter,
        user,
    )


async def collect(engine, asked):
    """All pieces of a reply."""
    async with aclosing(engine.stream(asked)) as source:
        return [piece async for piece in source]


def joined(pieces):
    """Ids, log-probs, text, the prompt's ids and the reason for the end."""
    assert all(piece.finish_reason is None for piece in pieces[:-1])
    assert [piece.prompt_ids is None for piece in pieces] == [False] + [True] * (len(pieces) - 1)
    return (
        [token for piece in pieces for token in piece.token_ids],
        [value for piece in pieces for value in piece.logprobs],
        "".join(piece.content for piece in pieces),
        pieces[0].prompt_ids,
        pieces[-1].finish_reason,
    )


@torch.no_grad()
def own_logprobs(model, prompt, ids, temperature=1.0):
    logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1].float()
    return (logits / temperature).log_softmax(-1).gather(1, torch.tensor(ids).unsqueeze(1)).squeeze(1).tolist()


@pytest.mark.parametrize(
    ("sampling", "taken_at"),
    [
        ({}, 1.0),
        ({"temperature": 0.5}, 0.5),
        ({"temperature": 0.2}, 0.2),
        ({"temperature": 1.7, "top_p": 0.6}, 1.7),
        ({"temperature": 0.19}, 1.0),
        ({"temperature": 0}, 1.0),
    ],
)
def test_log_probs_are_those_at_the_temperature_of_sampling(engine, sampling, taken_at):
    pieces = run(collect(engine, request(**sampling, seed=3)))
    ids, logprobs, _, prompt, _ = joined(pieces)
    assert len(pieces) == len(ids) > 1  # really one by one
    rendered = tiny_tokenizer().apply_chat_template([USER], add_generation_prompt=True, return_dict=True)
    assert prompt == list(rendered["input_ids"])
    assert {piece.temperature for piece in pieces} == {taken_at}
    assert logprobs == pytest.approx(own_logprobs(tiny_llama(), prompt, ids, taken_at), abs=1e-4)


def test_a_seed_gives_the_same_reply_again(engine):
    async def replies(*seeds):
        return [joined(await collect(engine, request(seed=seed)))[0] for seed in seeds]

    first, again, other, none, neither = run(replies(5, 5, 6, None, None))
    assert first == again
    assert len({tuple(ids) for ids in (first, other, none, neither)}) == 4


def test_temperature_and_top_p_shape_what_is_sampled(engine):
    async def ids(**sampling):
        return joined(await collect(engine, request(**sampling)))[0]

    likeliest = run(ids(temperature=0))
    assert run(ids(top_p=1e-6)) == likeliest
    for temperature in (1e-4, 1e-40, 5e-324):
        assert run(ids(temperature=temperature)) == likeliest
    assert run(ids(seed=1)) != likeliest


def test_top_p_keeps_the_likeliest_tokens_with_that_mass():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    generator = torch.Generator().manual_seed(0)
    for top_p, kept in ((0.5, {0}), (0.51, {0, 1}), (0.8, {0, 1}), (0.81, {0, 1, 2}), (1.0, {0, 1, 2, 3})):
        drawn = {int(_draw(logits, Sampling(1.0, top_p), generator)) for _ in range(400)}
        assert drawn == kept


def test_the_end_token_is_sampled_and_not_said(engine):
    async def until_ended():
        for seed in range(200):
            found = joined(await collect(engine, request(seed=seed, max_tokens=200)))
            if found[-1] == "stop":
                return found

    ids, logprobs, text, _, _ = run(until_ended())
    assert ids[-1] == END
    assert END not in ids[:-1]
    assert len(logprobs) == len(ids)
    assert text == tiny_tokenizer().decode(ids, skip_special_tokens=True)


def test_the_limit_on_tokens_and_the_window(engine):
    ids, _, _, _, reason = joined(run(collect(engine, request(max_tokens=3, seed=0))))
    assert (len(ids), reason) == (3, "length")
    long = {"role": "user", "content": "x" * 450}
    ids, _, _, prompt, reason = joined(run(collect(engine, request(long, max_tokens=500, seed=0))))
    assert len(prompt) + len(ids) <= 512
    with pytest.raises(EngineError, match="maximum context length is 512 tokens") as caught:
        run(collect(engine, request({"role": "user", "content": "x" * 600})))
    assert caught.value.kind == "refused"


def test_messages_that_the_template_does_not_take(engine):
    engine._tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(EngineError, match="roles must alternate") as caught:
        run(collect(engine, request()))
    assert caught.value.kind == "refused"


def scripted(monkeypatch, text):
    """Lets the engine sample this text, then the end."""
    ids = [*tiny_tokenizer()(text)["input_ids"], END]
    monkeypatch.setattr(engine_module, "sampled_tokens", lambda *args: ((token, -0.5) for token in ids))
    return ids


def test_stop_texts_end_a_reply_and_are_not_said(engine, monkeypatch):
    ids = scripted(monkeypatch, "one two END three")
    found, logprobs, text, _, reason = joined(run(collect(engine, request(stop=["END", "never"], max_tokens=100))))
    assert (text, reason) == ("one two ", "stop")
    assert found == ids[: len("one two END")]
    assert len(logprobs) == len(found)
    assert joined(run(collect(engine, request(stop=["ENDE"], max_tokens=100))))[2] == "one two END three"


def test_users_take_turns(engine):
    gate = threading.Event()

    async def ask_all():
        done = []

        async def one(name, user):
            await collect(engine, request(user=user, seed=0, max_tokens=2))
            done.append(name)

        held = asyncio.create_task(engine._call(lambda adapters: gate.wait(20)))  # until all have asked
        tasks = [asyncio.create_task(one(f"a{place}", "ada")) for place in range(4)]
        await asyncio.sleep(0)
        tasks += [asyncio.create_task(one(f"b{place}", "bob")) for place in range(2)]
        await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(held, *tasks)
        return done

    run(engine.check())
    assert run(ask_all()) == ["a0", "b0", "a1", "b1", "a2", "a3"]


def test_nobody_s_reply_is_sampled_no_further(engine, monkeypatch):
    sampled = []

    def slowly(*args):
        while True:
            time.sleep(0.01)
            sampled.append(1)
            yield 65, -0.5

    monkeypatch.setattr(engine_module, "sampled_tokens", slowly)

    async def give_up():
        source = engine.stream(request(max_tokens=10_000))
        await anext(source)
        waiting = asyncio.create_task(collect(engine, request(max_tokens=10_000)))
        await asyncio.sleep(0)
        waiting.cancel()
        await source.aclose()
        before = len(sampled)
        await collect(engine, request(max_tokens=5))
        return len(sampled) - before

    run(engine.check())
    assert run(give_up()) < 20


def test_adapters_come_and_go(engine, adapters, model_path):
    async def ids(adapter):
        found = joined(await collect(engine, request(adapter=adapter, temperature=0, max_tokens=12)))
        return found[0], found[1], found[3]

    async def all_of_them():
        base = await ids(None)
        await engine.load("me-v000001", adapters[0])
        await engine.load("me-v000001", adapters[0])  # again: nothing happens
        one = await ids("me-v000001")
        await engine.load("me.or.you-v000002", adapters[1])
        two = await ids("me.or.you-v000002")
        assert await ids("me-v000001") == one
        assert await ids(None) == base
        await engine.unload("me-v000001")
        await engine.unload("me-v000001")
        assert await ids("me.or.you-v000002") == two
        await engine.unload("me.or.you-v000002")
        assert await ids(None) == base
        for adapter in ("me-v000001", "nobody"):
            with pytest.raises(EngineError) as caught:
                await ids(adapter)
        assert caught.value.kind == "unloaded"
        await engine.load("me-v000001", adapters[0])
        assert await ids("me-v000001") == one
        return one, two

    for folder, (ids_, logprobs, prompt) in zip(adapters, run(all_of_them()), strict=True):
        model = PeftModel.from_pretrained(tiny_llama(), folder).eval()
        assert logprobs == pytest.approx(own_logprobs(model, prompt, ids_), abs=1e-4)
        assert own_logprobs(tiny_llama(), prompt, ids_) != pytest.approx(logprobs, abs=1e-2)


FAULTS = ("empty", "no weights", "other sizes", "other modules", "half of it", "whole modules")


@pytest.mark.parametrize("first", [True, False], ids=["first", "second"])
@pytest.mark.parametrize(
    "fault", ["empty", "no weights", "other sizes", "other modules", "half of it", "whole modules"]
)
def test_an_adapter_that_does_not_fit_changes_nothing(engine, adapters, tmp_path, fault, first):
    async def greedy(adapter=None):
        return joined(await collect(engine, request(adapter=adapter, temperature=0, max_tokens=12)))[:2]

    async def try_it():
        before = await greedy()
        if not first:
            await engine.load("good", adapters[0])
            good = await greedy("good")
        with pytest.raises(EngineError, match="cannot be loaded") as caught:
            await engine.load("bad", tmp_path)
        assert caught.value.kind == "refused"
        assert await greedy() == before
        if first:
            await engine.load("good", adapters[0])
            good = await greedy("good")
        assert await greedy("good") == good
        assert await greedy() == before
        return good

    spoil(tmp_path, adapters[0], fault)
    good = run(try_it())
    assert good[0] != []
    assert len(engine._adapters.result()._peft.peft_config) == 1  # nothing of it is left


def spoil(folder, good, fault):
    """An adapter with something wrong."""
    if fault == "empty":
        return
    if fault == "whole modules":
        weights_of = get_peft_model(tiny_llama(), LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]))
        weights_of.save_pretrained(folder)
        return
    config = json.loads((good / "adapter_config.json").read_text())
    weights = load_file(good / "adapter_model.safetensors")
    if fault == "other modules":
        config["target_modules"] = ["no_such_proj"]
    if fault == "other sizes":
        weights = {name: torch.cat([weight, weight]) for name, weight in weights.items()}
    if fault == "half of it":
        weights = dict(list(weights.items())[::2])
    (folder / "adapter_config.json").write_text(json.dumps(config))
    if fault != "no weights":
        save_file(weights, folder / "adapter_model.safetensors")


def test_a_folder_without_a_model_or_a_template(tmp_path, model_path):
    with pytest.raises(ValueError, match="cannot be used"):
        TransformersEngine(str(tmp_path))
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no chat template"):
        TransformersEngine(str(tmp_path))
    tiny_tokenizer().save_pretrained(tmp_path)
    engine = TransformersEngine(str(tmp_path))
    with pytest.raises(EngineError, match="cannot be loaded"):
        run(engine.check())
    with pytest.raises(EngineError, match="cannot be loaded"):
        run(collect(engine, request()))
    run(engine.aclose())


CALL = '<tool_call>\n{"name": "look", "arguments": {"word": "north", "times": 2}}\n</tool_call>'


@pytest.fixture
def caller(tmp_path, model_path):
    """An engine whose model can call tools."""
    folder = tmp_path / "caller"
    tiny_llama(max_position_embeddings=8192).save_pretrained(folder)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = chat_template_utils.qwen3_chat_template
    tokenizer.save_pretrained(folder)
    return TransformersEngine(str(folder), served_name="tiny")


def test_a_call_that_must_be_made_is_refused(tmp_path, caller):
    refused = pytest.raises(openai.BadRequestError, match="tool_choice")
    with serving(tmp_path, caller) as gateway, gateway.client() as client, refused:
        client.chat.completions.create(model="tiny", messages=[USER], tools=[TOOL], tool_choice="required")


def test_a_developer_is_heard_by_templates_that_do_not_know_the_role(tmp_path, caller, monkeypatch):
    scripted(monkeypatch, "Bonjour.")
    messages = [{"role": "developer", "content": "Only French."}, USER]
    with serving(tmp_path, caller) as gateway, gateway.client() as client:
        client.chat.completions.create(model="tiny", messages=messages)
        (turn,) = gateway.turns()
    assert "Only French." in tiny_tokenizer().decode(turn.prompt_ids)
    again = caller._tokenizer.apply_chat_template(turn.messages, add_generation_prompt=True, return_dict=True)
    assert tuple(again["input_ids"]) == turn.prompt_ids  # as the learner renders it


def test_tools_through_the_official_client(tmp_path, caller, monkeypatch):
    ids = scripted(monkeypatch, f"Let me see.{CALL}")
    assert caller.features == {"tools"}
    with serving(tmp_path, caller) as gateway, gateway.client() as client:
        with client.chat.completions.stream(model="tiny", messages=[USER], tools=[TOOL], max_tokens=300) as stream:
            reply = stream.get_final_completion()
        (call,) = reply.choices[0].message.tool_calls
        assert (reply.choices[0].finish_reason, reply.choices[0].message.content) == ("tool_calls", "Let me see.")
        said = {"role": "assistant", "content": "Let me see.", "tool_calls": [call.model_dump(exclude={"index"})]}
        said["tool_calls"][0]["function"].pop("parsed_arguments", None)
        answer = {"role": "tool", "tool_call_id": call.id, "content": "a wall"}
        again = client.chat.completions.create(model="tiny", messages=[USER, said, answer], tools=[TOOL])
        assert again.choices[0].message.tool_calls[0].function.name == "look"
        first, second = gateway.turns()
    assert first.completion_ids == tuple(ids)
    assert second.parent == first.turn_id
    rendered = bytes(tiny_tokenizer().decode(second.prompt_ids), "utf-8").decode()
    assert '{"word": "north", "times": 2}' in rendered  # as values, not as JSON in JSON
    assert "a wall" in rendered


def test_what_this_engine_cannot_do_is_refused(tmp_path, model_path):
    engine = TransformersEngine(str(model_path), served_name="tiny")
    with serving(tmp_path, engine) as gateway, gateway.client() as client:
        refused = {
            "tools": {"tools": [TOOL]},
            "response_format": {"response_format": {"type": "json_object"}},
        }
        for param, fields in refused.items():
            with pytest.raises(openai.BadRequestError, match=param):
                client.chat.completions.create(model="tiny", messages=[USER], **fields)
        reply = client.chat.completions.create(
            model="tiny", messages=[USER], tools=[TOOL], tool_choice="none", max_tokens=2
        )
        assert reply.choices[0].finish_reason in ("length", "stop")
        assert gateway.turns()[0].tools is None


async def ask_behind(gateway, tokens, count=1):
    """What short requests come to that stand behind a long one."""
    async with gateway.async_client() as client:

        async def one(most):
            return await client.chat.completions.create(model="tiny", messages=[USER], max_tokens=most)

        long = asyncio.create_task(one(tokens))
        while gateway.gateway.answering == 0:
            await asyncio.sleep(0.01)
        short = []
        for _ in range(count):
            await asyncio.sleep(0.1)
            short.append(asyncio.create_task(one(2)))
        found = await asyncio.gather(*short, return_exceptions=True)
        long.cancel()
        return found


def test_the_replies_of_others_are_no_silence(tmp_path, model_path, monkeypatch):
    """It waits for most of the time that the engine may be silent, and gets all of that time for itself."""
    monkeypatch.setattr(engine_module, "sampled_tokens", slowly(1.5))
    engine = TransformersEngine(str(model_path), served_name="tiny")
    with serving(tmp_path, engine, options=GatewayOptions(timeout=2.5)) as gateway:
        (reply,) = run(ask_behind(gateway, 1))
        assert reply.usage.completion_tokens == 2
        assert gateway.metric("engine_failures_total", kind="slow") == 0


def slowly(first, other=0.0):
    """Takes so many seconds for the first token of each reply, and for each other one."""

    def sampled(*args):
        time.sleep(first)
        while True:
            yield 65, -0.5
            time.sleep(other)

    return sampled


def test_who_waits_too_long_is_told_how_many_do(tmp_path, model_path, monkeypatch):
    monkeypatch.setattr(engine_module, "sampled_tokens", slowly(0.1, 0.1))
    engine = TransformersEngine(str(model_path), served_name="tiny")
    with serving(tmp_path, engine, options=GatewayOptions(timeout=0.5)) as gateway:
        found = run(ask_behind(gateway, 400, count=3))
        for error in found:
            assert isinstance(error, openai.InternalServerError)
            assert (error.status_code, error.code) == (503, "engine_busy")
            assert error.response.headers["retry-after"] == "10"
        assert "Others that wait: 2." in str(found[0])


def test_versions_change_while_people_chat(tmp_path, model_path, adapters):
    """Real adapters: each recorded log-prob is one of the version that the turn names."""
    engine = TransformersEngine(str(model_path), served_name="tiny")

    async def chat(gateway):
        async with gateway.async_client() as client:

            async def one(place):
                found = []
                for turn in range(12):
                    messages = [{"role": "user", "content": f"{place} {turn}"}]
                    stream = turn % 2 == 0
                    answer = await client.chat.completions.create(
                        model="tiny", messages=messages, stream=stream, max_tokens=8
                    )
                    if stream:
                        found.append({chunk.system_fingerprint async for chunk in answer})
                    else:
                        found.append({answer.system_fingerprint})
                return found

            async def swap():
                for turn in range(10):
                    await asyncio.sleep(0.2)
                    publish_adapter(gateway.store, f"v{turn + 1:06d}", adapters[turn % 2])

            *found, _ = await asyncio.gather(one(0), one(1), one(2), swap())
            return [versions for client in found for versions in client]

    with serving(tmp_path, engine) as gateway:
        gateway.gateway.versions.poll_seconds = 0.02
        told = run(chat(gateway), seconds=200)
        wait_for(lambda: gateway.gateway.versions.current("default") == "v000010")
        turns = gateway.turns()
    assert all(len(versions) == 1 for versions in told)
    assert len(turns) == len(told) == 36
    assert {turn.model_version for turn in turns} == set().union(*told)
    assert len(set().union(*told)) > 2
    models = [tiny_llama(), *(PeftModel.from_pretrained(tiny_llama(), folder).eval() for folder in adapters)]
    for turn in turns:
        number = 0 if turn.model_version == "base" else int(turn.model_version[1:])
        model = models[0] if number == 0 else models[1 + (number - 1) % 2]
        expected = own_logprobs(model, turn.prompt_ids, list(turn.completion_ids))
        assert list(turn.logprobs) == pytest.approx(expected, abs=1e-3)
