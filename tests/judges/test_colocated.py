"""The policy judges itself by the engine that samples for it; a real one does in `real_server/test_rollouts.py`."""

import asyncio
import re
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from tiny import tiny_tokenizer
from trainer_harness import logged, make_trainer

from trl_openclaw import ColocatedJudge, CombineTrainer, UserSimulator
from trl_openclaw.errors import ChatError, JudgeUnavailableError
from trl_openclaw.trainer.roles import roles

VLLM = {"use_vllm": True, "vllm_mode": "colocate"}
MARKER = re.compile(r"VERDICT-(\w+):")


class Engine:
    """As much of `vllm.LLM` as is asked; it always says the same, or -1 and a hint where a verdict is asked for."""

    def __init__(self, text="Shorter.", finish_reason="stop", window=4096):
        self.text, self.finish_reason = text, finish_reason
        self.llm_engine = SimpleNamespace(model_config=SimpleNamespace(max_model_len=window))
        self.calls = []

    def get_tokenizer(self):
        return tiny_tokenizer()

    def generate(self, prompts, sampling_params, use_tqdm):
        assert not use_tqdm
        self.calls.append((prompts, sampling_params))
        texts = [self.answer(tiny_tokenizer().decode(prompt["prompt_token_ids"])) for prompt in prompts]
        return [
            SimpleNamespace(outputs=[SimpleNamespace(text=text, finish_reason=self.finish_reason)]) for text in texts
        ]

    def answer(self, question):
        asked = MARKER.search(question)
        return "VERDICT-{0}: -1\nHINT-{0}: Be brief.\nEND-{0}".format(asked[1]) if asked else self.text


@pytest.fixture(autouse=True)
def vllm(monkeypatch):
    """A module of that name, which has what is imported of it."""
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=SimpleNamespace))


def complete(judge, text="hi", **settings):
    return asyncio.run(judge.client.complete([{"role": "user", "content": text}], **settings))


def test_asks_the_engine_with_ids_and_its_own_seeds():
    judge = ColocatedJudge(num_votes=2)
    judge.client.engine = engine = Engine("Yes.")

    async def ask():
        question = [{"role": "user", "content": "hi"}]
        return await asyncio.gather(*[judge.client.complete(question, max_tokens=7, temperature=0.5) for _ in range(2)])

    assert [reply.text for reply in asyncio.run(ask())] == ["Yes.", "Yes."]
    (call,) = engine.calls
    prompts, params = call
    text = tiny_tokenizer().decode(prompts[0]["prompt_token_ids"])
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert [(one.max_tokens, one.temperature) for one in params] == [(7, 0.5)] * 2
    assert params[0].seed != params[1].seed


def test_an_engine_is_asked_by_one_thread_at_a_time():
    class Slow(Engine):
        inside = threading.Semaphore(1)

        def generate(self, *args, **kwargs):
            assert self.inside.acquire(blocking=False), "`vllm.LLM` is not made for two threads"
            time.sleep(0.2)
            self.inside.release()
            return super().generate(*args, **kwargs)

    judges = [ColocatedJudge(), ColocatedJudge()]
    engine = Slow()
    for judge in judges:
        judge.client.engine = engine

    async def ask():
        question = [{"role": "user", "content": "hi"}]
        return await asyncio.gather(*[judge.client.complete(question, max_tokens=7) for judge in judges])

    assert [reply.text for reply in asyncio.run(ask())] == ["Shorter."] * 2
    assert len(engine.calls) == 2


def test_an_answer_that_was_cut_is_asked_for_with_more_room():
    judge = ColocatedJudge()
    judge.client.engine = engine = Engine("Ye", finish_reason="length")
    with pytest.raises(ChatError, match="did not end within 20 tokens"):
        complete(judge, max_tokens=5)
    assert [params[0].max_tokens for _, params in engine.calls] == [5, 20]


def test_a_question_that_does_not_fit_is_not_asked():
    judge = ColocatedJudge()
    judge.client.engine = engine = Engine(window=20)
    with pytest.raises(ChatError, match="does not fit the model's window of 20"):
        complete(judge, "hi" * 30, max_tokens=5)
    assert engine.calls == []


def test_without_a_trainer_there_is_no_engine():
    with pytest.raises(JudgeUnavailableError, match="no trainer has lent its engine"):
        asyncio.run(ColocatedJudge().check())


def test_the_trainer_lends_its_engine(tmp_path, scripted_engine):
    engine = Engine()
    scripted_engine(lambda prompt: [65, 66, 256], lent=engine)
    judge = ColocatedJudge(num_votes=1)
    simulator = UserSimulator(judge.client, "I dislike lists.")
    trainer = make_trainer(tmp_path, CombineTrainer, judge=judge, next_state=simulator, config=VLLM)
    said = "the policy as it is now, by the engine that generates"
    assert {name: roles(trainer)[name] for name in ("judges", "plays the user")} == {
        "judges": said,
        "plays the user": said,
    }
    trainer.train()
    asked = sum(len(prompts) for prompts, _ in engine.calls)
    assert asked == 8  # for four replies, what the user says, and a verdict
    assert logged(trainer, "feedback/failed/judge_failed") == [0.0]
    assert logged(trainer, "feedback/early") == []  # it is busy while it samples


@pytest.mark.parametrize(
    "config",
    [
        {},
        {**VLLM, "vllm_mode": "server"},
        {**VLLM, "vllm_enable_sleep_mode": True},
        {**VLLM, "vllm_tensor_parallel_size": 2},
    ],
    ids=str,
)
def test_an_engine_that_cannot_be_lent_is_refused(tmp_path, scripted_engine, config):
    scripted_engine(lambda prompt: [65, 256])
    with pytest.raises(ValueError, match=r"`ColocatedJudge` asks the engine.*Or serve the model"):
        make_trainer(tmp_path, judge=ColocatedJudge(), config=config)


def test_it_is_given_text_only():
    with pytest.raises(ValueError, match="gives its model text only"):
        ColocatedJudge(reads_images=True)
