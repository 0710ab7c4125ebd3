"""Gateway, learner and a real vLLM server as processes of their own, one of which is killed while it answers."""

import asyncio
import sys
from contextlib import contextmanager, suppress

import openai
import pytest
from live.gateway_harness import wait_for
from peft import PeftModel
from real_server.own_logprobs import assert_own_logprobs
from transformers import AutoModelForCausalLM

from recipes.live_demo.person import Person
from recipes.live_demo.services import Service
from trl_openclaw import PERSONAS
from trl_openclaw.live.records import DEFAULT_USER
from trl_openclaw.live.store import STORE_FILE, Store

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1200)]

QUESTION = {"role": "user", "content": "Name a fruit."}
LONG = {"role": "user", "content": "Tell me a long story."}
NEVER_OLD = "1000"
RAW_GAP = 0.01
"""Nats. Engine and learner both compute in float32."""


@contextmanager
def started(name, folder, *arguments):
    service = Service(name, [sys.executable, "-m", "trl_openclaw.cli", *map(str, arguments)], folder)
    try:
        yield service
    finally:
        service.stop()


class Talk:
    """Conversations through the official client, one after another."""

    def __init__(self, url):
        self.url, self.whole, self.errors = url, [], []

    def one(self, number):
        async def talk():
            async with openai.AsyncOpenAI(base_url=self.url, api_key="any", max_retries=0, timeout=300) as client:
                return await Person(client, "smollm2", PERSONAS["one-sentence"]).talk(f"What is {number} for?")

        session = asyncio.run(talk())
        self.whole += session.turn_ids
        self.errors += session.errors

    def until(self, reached, most=60):
        for number in range(most):
            if reached():
                return
            self.one(number)
        raise AssertionError(f"{most} conversations were not enough; errors: {self.errors}")

    def answers(self):
        """The version that answers, if one does."""
        with suppress(openai.OpenAIError):
            return self.version()
        return None

    def version(self):
        """The version that answers now."""
        with openai.OpenAI(base_url=self.url, api_key="any", max_retries=0, timeout=300) as client:
            reply = client.chat.completions.create(
                model="smollm2", messages=[QUESTION], max_tokens=2, extra_headers={"X-Turn-Type": "side"}
            )
        return reply.system_fingerprint


def killed_while_it_answers(server, url):
    """Kill the server in the middle of a reply, and start it anew; how many pieces came, and what the client got."""
    pieces, error = 0, None
    with openai.OpenAI(base_url=url, api_key="any", max_retries=0, timeout=300) as client:
        try:
            for _ in client.chat.completions.create(model="smollm2", messages=[LONG], stream=True, max_tokens=900):
                pieces += 1
                if pieces == 5:
                    server.kill()
        except openai.OpenAIError as caught:
            error = caught
    server.start()
    server.wait()
    return pieces, error


def test_it_learns_and_outlives_its_engine(swapping_server, tmp_path, smollm2):
    serve = (
        *("serve", "--engine", "vllm", "--model", "smollm2", "--engine-url", swapping_server.base_url, "--port", 0),
        *("--live-dir", tmp_path, "--judge", "recipes.live_demo.reactions.read_reaction"),
        *("--max-tokens", 24, "--temperature", 0.7),
    )
    learn = (
        *("live", "--accelerate_config", "single", "--config", "live", "--live_dir", tmp_path),
        *("--model_name_or_path", smollm2, "--engine_model", "smollm2", "--lora_r", 8, "--lora_alpha", 16),
        *("--turns_per_step", 4, "--max_version_lag", NEVER_OLD, "--max_updates", 2, "--max_engine_gap", RAW_GAP),
        *("--check_replay_turns", 4, "--check_reply_tokens", 8),
    )
    with started("gateway", tmp_path, *serve) as gateway, started("learner", tmp_path, *learn) as learner:
        talk = Talk(gateway.wait_for(r"OPENAI_BASE_URL=(\S+)")[1])
        talk.until(lambda: talk.version() == "v000001")
        pieces, error = killed_while_it_answers(swapping_server, talk.url)
        assert pieces >= 5
        assert error is not None
        # The learner has not waited for the engine, and may be further by now.
        wait_for(lambda: talk.answers() in ("v000001", "v000002"), seconds=60, what="a version that learned")
        talk.until(lambda: not learner.running)
        learner.check()
        wait_for(lambda: talk.answers() == "v000002", seconds=60, what="the second version")
    store = Store(tmp_path / STORE_FILE)
    kept = {turn.turn_id: turn for turn in store.all_turns(DEFAULT_USER)}
    assert talk.errors == []
    assert [turn_id for turn_id in talk.whole if turn_id not in kept] == []
    trained = [turn for turn in kept.values() if turn.state == "trained"]
    assert len(trained) == 8
    assert {turn.use.version for turn in trained} == {"v000001", "v000002"}
    versions = store.versions(DEFAULT_USER)
    assert [one.version for one in versions] == ["v000001", "v000002"]
    (cut,) = [turn for turn in kept.values() if turn.messages == [LONG]]
    assert cut.state == "unusable"
    base, folders = AutoModelForCausalLM.from_pretrained(smollm2), {one.version: one.path for one in versions}
    for turn in kept.values():
        if turn.model_version == "base" and turn.completion_ids:
            assert_own_logprobs(base, turn)
    for version, folder in folders.items():
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(smollm2), folder)
        told = [turn for turn in kept.values() if turn.model_version == version and turn.completion_ids]
        assert told
        for turn in told:
            assert_own_logprobs(model, turn)
