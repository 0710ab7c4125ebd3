"""The gateway over a real vLLM server: what is recorded, streams, ends, and versions that change under load."""

import asyncio
import time

import openai
import pytest
import torch
from live.gateway_harness import publish_adapter, run, serving, wait_for
from peft import LoraConfig, PeftModel, get_peft_model
from real_server.own_logprobs import assert_own_logprobs
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_openclaw.live.engines.vllm import VllmEngine
from trl_openclaw.live.gateway.app import GatewayOptions

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1200)]

SWAPS = 200
USER = {"role": "user", "content": "Name a fruit."}


@pytest.fixture(scope="module")
def base_model(smollm2):
    return AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)


PATIENT = GatewayOptions(timeout=300.0)


def engine_of(server):
    return VllmEngine(server.name, server.base_url)


def patient(gateway):
    """A client that waits as long as a busy machine takes."""
    return gateway.client(timeout=300.0)


def test_ids_and_raw_log_probs_are_recorded(vllm_server, tmp_path, smollm2, base_model):
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    rendered = tokenizer.apply_chat_template([USER], add_generation_prompt=True, return_dict=True)["input_ids"]
    with serving(tmp_path, engine_of(vllm_server), options=PATIENT) as gateway, patient(gateway) as client:
        for stream in (False, True):
            answer = client.chat.completions.create(
                model="smollm2", messages=[USER], stream=stream, temperature=0.7, top_p=0.9, seed=4, max_tokens=24
            )
            texts = [answer.choices[0].message.content] if not stream else [c.choices[0].delta.content for c in answer]
            turn = gateway.turns()[-1]
            assert "".join(filter(None, texts)) == turn.reply["content"]
            assert turn.prompt_ids == tuple(rendered)
            assert turn.reply["content"] == tokenizer.decode(turn.completion_ids, skip_special_tokens=True)
            assert_own_logprobs(base_model, turn)
    assert gateway.turns()[0].completion_ids == gateway.turns()[1].completion_ids  # the seed is passed on


def test_processed_log_probs_are_those_at_the_temperature_of_sampling(processed_server, tmp_path, base_model):
    engine = VllmEngine(processed_server.name, processed_server.base_url, logprobs="processed")
    with serving(tmp_path, engine, options=PATIENT) as gateway, patient(gateway) as client:
        for temperature in (0.6, 1.0, 1.5, 0.0):
            client.chat.completions.create(model="smollm2", messages=[USER], temperature=temperature, max_tokens=24)
    turns = gateway.turns()
    assert [turn.logprobs_temperature for turn in turns] == [0.6, 1.0, 1.5, 1.0]
    for turn in turns:
        assert_own_logprobs(base_model, turn)


def test_the_end_of_a_reply_is_sampled_and_recorded(vllm_server, tmp_path, base_model):
    with serving(tmp_path, engine_of(vllm_server), options=PATIENT) as gateway, patient(gateway) as client:
        messages = [{"role": "user", "content": "Say just: yes"}]
        reply = client.chat.completions.create(model="smollm2", messages=messages, temperature=0, max_tokens=100)
        assert reply.choices[0].finish_reason == "stop"
        (turn,) = gateway.turns()
        assert turn.completion_ids[-1] == base_model.config.eos_token_id
        assert_own_logprobs(base_model, turn)


def test_what_the_server_refuses_is_said(vllm_server, tmp_path):
    with serving(tmp_path, engine_of(vllm_server), options=PATIENT) as gateway, patient(gateway) as client:
        long = [{"role": "user", "content": "word " * 3000}]
        with pytest.raises(openai.BadRequestError, match="maximum context length"):
            client.chat.completions.create(model="smollm2", messages=long)
        assert gateway.turns() == []


def test_a_client_that_goes_away(vllm_server, tmp_path):
    with serving(tmp_path, engine_of(vllm_server), options=PATIENT) as gateway, patient(gateway) as client:
        messages = [{"role": "user", "content": "Tell me a long story."}]
        stream = client.chat.completions.create(model="smollm2", messages=messages, stream=True, max_tokens=450)
        for chunk in stream:
            if chunk.choices[0].delta.content:
                break
        stream.close()
        wait_for(gateway.turns)
        (turn,) = gateway.turns()
        assert turn.finish_reason == "disconnect"
        assert len(turn.completion_ids) == len(turn.logprobs) < 450
        started = time.monotonic()
        client.chat.completions.create(model="smollm2", messages=[USER], max_tokens=1)
        assert time.monotonic() - started < 10


def test_versions_change_under_load(swapping_server, tmp_path, smollm2, adapter, base_model):
    """Two hundred versions, of which every other one is the adapter: each turn's log-probs are those of its version."""
    torch.manual_seed(1)
    config = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    other = tmp_path / "other"
    get_peft_model(AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32), config).save_pretrained(other)
    folders = [adapter, other]

    async def load(gateway):
        over, told = asyncio.Event(), []
        async with gateway.async_client() as client:

            async def one(place):
                while not over.is_set():
                    stream = (len(told) + place) % 2 == 0
                    answer = await client.chat.completions.create(
                        model="smollm2", messages=[USER], stream=stream, max_tokens=4
                    )
                    chunks = [chunk async for chunk in answer] if stream else [answer]
                    told.append({chunk.system_fingerprint for chunk in chunks})

            async def swap():
                for place in range(1, SWAPS + 1):
                    name = f"v{place:06d}"
                    publish_adapter(gateway.store, name, folders[place % 2])
                    while gateway.gateway.versions.current("default") != name:
                        assert gateway.gateway.versions.problem("default") is None
                        await asyncio.sleep(0.01)
                over.set()

            await asyncio.gather(swap(), one(0), one(1), one(2))
        return told

    with serving(tmp_path, engine_of(swapping_server), options=PATIENT) as gateway:
        gateway.gateway.versions.poll_seconds = 0.02
        started = time.monotonic()
        told = run(load(gateway), seconds=900)
        seconds = time.monotonic() - started
        turns = gateway.turns()
        with openai.OpenAI(base_url=swapping_server.base_url, api_key="none") as vllm:
            base, last = sorted((card.id for card in vllm.models.list()), reverse=True)
            assert base == "smollm2"
            assert last.startswith(f"default-v{SWAPS:06d}@")
    print(f"{len(told)} replies during {SWAPS} swaps in {seconds:.0f} s")
    assert all(len(versions) == 1 for versions in told)
    assert len(turns) == len(told)
    assert len({turn.model_version for turn in turns}) > 10
    models = [PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(smollm2), folder) for folder in folders]
    for turn in turns[:: max(len(turns) // 40, 1)]:
        number = 0 if turn.model_version == "base" else int(turn.model_version[1:])
        assert_own_logprobs(models[number % 2] if number else base_model, turn)
