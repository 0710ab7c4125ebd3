import asyncio
import threading
import time

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from trl_openclaw import local_chat
from trl_openclaw.errors import ChatError, JudgeUnavailableError
from trl_openclaw.feedback import collect_feedback
from trl_openclaw.judges import LocalJudge
from trl_openclaw.local_chat import LocalChat
from trl_openclaw.types import NextState, Turn

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}|{% endif %}"
WINDOW = 256


@pytest.fixture(scope="module")
def tokenizer():
    """One token per byte, and an end token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {char: index for index, char in enumerate(alphabet)} | {"</s>": len(alphabet)}
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="</s>")
    fast.chat_template = TEMPLATE
    return fast


@pytest.fixture
def model(tokenizer):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=WINDOW,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    return LlamaForCausalLM(config).eval()


class Spy:
    """Notes the calls of `model.generate` and can put an answer of its own into each row."""

    def __init__(self, model, answer=None):
        self.calls, self.answer, self.generate = [], answer, model.generate
        self.together, self.most_together, self.lock = 0, 0, threading.Lock()
        model.generate = self

    def __call__(self, **kwargs):
        with self.lock:
            self.together += 1
            self.most_together = max(self.most_together, self.together)
        try:
            self.calls.append(kwargs)
            output = self.generate(**kwargs)
            if self.answer is None:
                return output
            ids = self.answer(kwargs)[: kwargs["max_new_tokens"]]
            return torch.cat([kwargs["input_ids"], torch.tensor([ids] * len(output))], dim=1)
        finally:
            with self.lock:
                self.together -= 1


def ended(tokenizer, text):
    return [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]


def user(text):
    return [{"role": "user", "content": text}]


def ask(chat, *texts, max_tokens=4, temperature=None):
    async def go():
        asked = (chat.complete(user(text), max_tokens=max_tokens, temperature=temperature) for text in texts)
        return await asyncio.gather(*asked, return_exceptions=True)

    return asyncio.run(go())


def test_concurrent_questions_share_batches(model, tokenizer):
    spy = Spy(model, lambda kwargs: ended(tokenizer, "ok"))
    replies = ask(LocalChat(model, tokenizer, max_batch=8), *(f"question {'x' * n}" for n in range(20)))
    assert [reply.text for reply in replies] == ["ok"] * 20
    assert [len(call["input_ids"]) for call in spy.calls] == [8, 8, 4]
    assert spy.most_together == 1


def test_rows_with_other_settings_go_into_other_batches(model, tokenizer):
    spy = Spy(model, lambda kwargs: ended(tokenizer, "ok"))
    chat = LocalChat(model, tokenizer)

    async def go():
        return await asyncio.gather(
            *(chat.complete(user("q"), max_tokens=4 + n % 2, temperature=0.5 * (n % 2)) for n in range(6))
        )

    assert len(asyncio.run(go())) == 6
    assert [(len(c["input_ids"]), c["max_new_tokens"], c["do_sample"]) for c in spy.calls] == [
        (3, 4, False),
        (3, 5, True),
    ]


def test_a_greedy_row_of_a_batch_is_what_it_is_alone(model, tokenizer):
    texts = ["a", "a longer question than the first", "mid length"]
    alone = []
    for text in texts:
        ids = torch.tensor([tokenizer(text + "|")["input_ids"]])
        out = model.generate(input_ids=ids, max_new_tokens=12, do_sample=False, pad_token_id=0)
        alone.append(out[0, ids.shape[1] :].tolist())
    # Whichever token comes up as the eighth ends the row, so that there is a text to compare.
    ends = [row[7] for row in alone]
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, *ends]
    replies = ask(LocalChat(model, tokenizer), *texts, max_tokens=12)
    for reply, row in zip(replies, alone, strict=True):
        stop = next(index for index, token in enumerate(row) if token in ends)
        assert reply.text == tokenizer.decode(row[:stop]).strip()


@pytest.mark.parametrize("temperature", [None, 0.0, 0.9])
def test_the_random_state_is_left_alone(model, tokenizer, temperature):
    before = torch.get_rng_state()
    ask(LocalChat(model, tokenizer), "a", "b", temperature=temperature)
    assert torch.equal(torch.get_rng_state(), before)


def test_sampling_differs_between_batches_and_repeats_with_the_seed(model, tokenizer):
    def sampled():
        torch.manual_seed(7)
        spy = Spy(model)
        outputs = []
        generate, spy.generate = spy.generate, None
        spy.generate = lambda **kwargs: outputs.append(generate(**kwargs)) or outputs[-1]
        ask(LocalChat(model, tokenizer, max_batch=1), "q", "q", "q", temperature=1.5)
        model.generate = generate
        return [tuple(output[0].tolist()) for output in outputs]

    first, second = sampled(), sampled()
    assert first == second
    assert len(set(first[:3])) == 3


def test_the_model_is_left_as_it_was(model, tokenizer):
    model.train()
    model.model.layers[0].eval()
    model.gradient_checkpointing_enable()
    model.config.use_cache = False
    seen = []
    spy = Spy(model, lambda kwargs: seen.append(model.training) or ended(tokenizer, "ok"))
    before = [module.training for module in model.modules()]
    ask(LocalChat(model, tokenizer), "q")
    assert seen == [False]
    assert spy.calls[0]["use_cache"]
    assert [module.training for module in model.modules()] == before
    assert model.is_gradient_checkpointing
    assert model.config.use_cache is False


@pytest.mark.parametrize("kind", [RuntimeError, SystemExit])
def test_the_model_is_left_as_it_was_after_a_failure(model, tokenizer, kind):
    def broken(kwargs):
        raise kind("out of luck")

    Spy(model, broken)
    model.train()
    before = torch.get_rng_state()
    chat = LocalChat(model, tokenizer)
    (error,) = ask(chat, "q")
    assert isinstance(error, ChatError)
    assert (error.kind, "out of luck" in str(error)) == ("error", True)
    assert model.training
    assert torch.equal(torch.get_rng_state(), before)
    (again,) = ask(chat, "q")
    assert again.kind == "error"


def test_no_gradients_are_kept(model, tokenizer):
    grad = []
    Spy(model, lambda kwargs: grad.append(torch.is_grad_enabled()) or ended(tokenizer, "ok"))
    ask(LocalChat(model, tokenizer), "q")
    assert grad == [False]


def test_an_answer_without_an_end_gets_more_room_once(model, tokenizer):
    spy = Spy(model, lambda kwargs: ended(tokenizer, "six...") if kwargs["max_new_tokens"] > 4 else [0, 1, 2, 3])
    (reply,) = ask(LocalChat(model, tokenizer), "q", max_tokens=4)
    assert reply.text == "six..."
    assert [call["max_new_tokens"] for call in spy.calls] == [4, 16]


@pytest.mark.parametrize("endless", ["no end in sight", "<think>on and on"])
def test_the_second_time_it_is_truncated(model, tokenizer, endless):
    ids = ended(tokenizer, endless) if "think" in endless else [5] * 100
    spy = Spy(model, lambda kwargs: ids)
    (error,) = ask(LocalChat(model, tokenizer), "q", max_tokens=20)
    assert error.kind == "truncated"
    assert len(spy.calls) == 2


def test_thinking_is_dropped(model, tokenizer):
    Spy(model, lambda kwargs: ended(tokenizer, "<think>hm</think> yes"))
    (reply,) = ask(LocalChat(model, tokenizer), "q", max_tokens=64)
    assert reply.text == "yes"


def test_a_prompt_longer_than_the_window_fails_alone(model, tokenizer):
    spy = Spy(model, lambda kwargs: ended(tokenizer, "ok"))
    short, long = ask(LocalChat(model, tokenizer), "q", "x" * WINDOW)
    assert short.text == "ok"
    assert (long.kind, f"window of {WINDOW}" in str(long)) == ("error", True)
    assert len(spy.calls) == 1


def test_room_is_limited_by_the_window(model, tokenizer):
    spy = Spy(model, lambda kwargs: [5] * 100)
    (error,) = ask(LocalChat(model, tokenizer), "x" * (WINDOW - 11), max_tokens=50)
    assert error.kind == "truncated"
    assert {call["max_new_tokens"] for call in spy.calls} == {10}


def test_those_who_left_do_not_hold_up_the_rest(model, tokenizer):
    spy = Spy(model, lambda kwargs: ended(tokenizer, "ok"))
    chat = LocalChat(model, tokenizer, max_batch=1)

    async def go():
        gone = [asyncio.create_task(chat.complete(user("gone"), max_tokens=4)) for _ in range(3)]
        await asyncio.sleep(0)
        for task in gone:
            task.cancel()
        return await chat.complete(user("here"), max_tokens=4)

    assert asyncio.run(go()).text == "ok"
    assert len(spy.calls) == 1


class Steps:
    """Counts a model's forward passes and makes each take its time; shows whether any is under way."""

    def __init__(self, model, seconds=0.05):
        self.count, self.seconds, self.started = 0, seconds, threading.Event()
        model.register_forward_hook(self)

    def __call__(self, *_):
        self.count += 1
        self.started.set()
        time.sleep(self.seconds)


@pytest.mark.parametrize("count", [1, 4])  # less than a batch, and more than one
def test_after_the_deadline_the_policy_is_free_to_train(model, tokenizer, count):
    model.config.max_position_embeddings = 100_000
    model.train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    random_state = torch.get_rng_state()
    steps = Steps(model)
    judge = LocalJudge(model, tokenizer, num_votes=3, temperature=1.0, max_tokens=2000, max_batch=4)
    turns = [Turn("hi", f"reply {i}", NextState("no")) for i in range(count)]

    async def go():
        feedbacks = await collect_feedback(turns, [{}] * count, next_state=None, judge=judge, timeout=1.0)
        # Still inside the event loop, whose end would wait for all its threads.
        before = steps.count
        assert before >= 1
        assert [module.training for module in model.modules()] == modes
        assert torch.equal(torch.get_rng_state(), random_state)
        await asyncio.sleep(0.3)
        assert steps.count == before
        return feedbacks

    began = time.perf_counter()
    assert [feedback.failure for feedback in asyncio.run(go())] == ["judge_timeout"] * count
    assert time.perf_counter() - began < 10  # 2000 steps would take 100 s


def test_who_leaves_others_behind_does_not_wait_and_does_not_stop_them(model, tokenizer):
    steps = Steps(model)
    chat = LocalChat(model, tokenizer)

    async def go():
        stays = asyncio.create_task(chat.complete(user("q"), max_tokens=10))
        leaves = asyncio.create_task(chat.complete(user("q"), max_tokens=10))
        await asyncio.to_thread(steps.started.wait)
        leaves.cancel()
        await asyncio.wait([leaves])
        assert steps.count < 10
        with pytest.raises(ChatError) as error:
            await stays
        return error.value

    assert asyncio.run(go()).kind == "truncated"
    assert steps.count == 10 + 40


def test_a_batch_abandoned_before_its_turn_never_touches_the_model(model, tokenizer):
    spy = Spy(model)
    chat = LocalChat(model, tokenizer)

    async def go():
        with local_chat._GENERATING:
            task = asyncio.create_task(chat.complete(user("q"), max_tokens=4))
            while not chat._working or chat._waiting:
                await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.sleep(0.05)
            assert not task.done()
        await asyncio.wait([task])

    asyncio.run(go())
    assert spy.calls == []


def test_two_chats_never_generate_at_once(model, tokenizer):
    """They share the process's random state, whose copies would be restored in the wrong order."""
    spy = Spy(model, lambda kwargs: time.sleep(0.1) or ended(tokenizer, "ok"))
    chats = [LocalChat(model, tokenizer) for _ in range(3)]
    before = torch.get_rng_state()

    async def go():
        return await asyncio.gather(*(chat.complete(user("q"), max_tokens=4, temperature=1.0) for chat in chats))

    assert len(asyncio.run(go())) == 3
    assert (len(spy.calls), spy.most_together) == (3, 1)
    assert torch.equal(torch.get_rng_state(), before)


def test_it_works_from_one_event_loop_after_another(model, tokenizer):
    Spy(model, lambda kwargs: ended(tokenizer, "ok"))
    chat = LocalChat(model, tokenizer)
    assert [ask(chat, "q")[0].text for _ in range(3)] == ["ok"] * 3


def test_a_model_from_a_path(model, tokenizer, tmp_path):
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    chat = LocalChat(str(tmp_path))
    asyncio.run(chat.check())
    assert ask(chat, "q")[0].kind == "truncated"
    assert chat.model == str(tmp_path)


class TestCheck:
    def test_a_usable_model(self, model, tokenizer):
        asyncio.run(LocalChat(model, tokenizer).check())

    def test_a_missing_path_is_named(self, tmp_path):
        with pytest.raises(JudgeUnavailableError, match="nowhere"):
            asyncio.run(LocalChat(str(tmp_path / "nowhere")).check())

    def test_no_tokenizer(self, model):
        with pytest.raises(JudgeUnavailableError, match="tokenizer"):
            asyncio.run(LocalChat(model).check())

    def test_no_chat_template(self, model, tokenizer):
        bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, eos_token="</s>")
        with pytest.raises(JudgeUnavailableError, match="chat template"):
            asyncio.run(LocalChat(model, bare).check())

    def test_weights_spread_over_processes(self, model, tokenizer):
        next(model.parameters()).ds_id = 1
        with pytest.raises(JudgeUnavailableError, match="ZeRO-3"):
            asyncio.run(LocalChat(model, tokenizer).check())


def test_a_wrapped_model_is_unwrapped(model, tokenizer):
    Spy(model, lambda kwargs: ended(tokenizer, "ok"))
    wrapper = torch.nn.Module()
    wrapper.module = model
    assert ask(LocalChat(wrapper, tokenizer), "q")[0].text == "ok"


def test_settings():
    with pytest.raises(ValueError, match="max_batch"):
        LocalChat("m", max_batch=0)


def test_a_local_judge_asks_all_votes_in_one_batch(model, tokenizer):
    model.config.max_position_embeddings = 100_000
    spy = Spy(model, lambda kwargs: ended(tokenizer, "no idea"))
    turn = Turn("hi", "hello", NextState("thanks"))
    verdict = asyncio.run(LocalJudge(model, tokenizer, num_votes=3, temperature=1.0, max_tokens=16)(turn))
    assert [(v.failure, v.hint_failure) for v in verdict.votes] == [("unparseable", "unparseable")] * 3
    assert [len(call["input_ids"]) for call in spy.calls] == [3]
