"""What the learner takes from the store, what it leaves there, and what it refuses."""

import os
import signal
import threading
import time
import warnings
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import trl
from learner_harness import (
    SETTINGS,
    USER,
    logps_of,
    make_learner,
    make_turn,
    open_store,
    record,
    states,
)
from peft import PeftModel
from tiny import CHATML, tiny_llama, tiny_tokenizer

from trl_openclaw.errors import LearnerError, StoreBusyError, StoreFullError
from trl_openclaw.live.canonical import turn_hashes
from trl_openclaw.live.learner import LiveConfig, LiveTrainer
from trl_openclaw.live.learner.lock import only_learner
from trl_openclaw.live.learner.rendering import matching_prompt, render
from trl_openclaw.live.learner.snapshot import trained_tensors
from trl_openclaw.types import Verdict, Vote

TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {}}}]
TOOL_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools[0]['function']['name'] }}{{ mood }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] or '' }}"
    "{% for call in message.get('tool_calls') or [] %}{{ call['function']['arguments'] | tojson }}{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def add(store, turn, verdict=None, answer="Shorter, please.") -> str:
    """Record a turn, with a verdict."""
    store.record_turn(turn, turn_hashes(turn.messages, turn.reply))
    store.add_next_state(turn.turn_id, [{"role": "user", "content": answer}])
    if verdict is not None:
        store.add_verdict(turn.turn_id, verdict)
    return turn.turn_id


BAD = Verdict.from_votes([Vote(score=-1, hint="Be brief.")])


# What is trained


def test_an_update_becomes_a_published_version(tmp_path, capsys):
    store = open_store(tmp_path)
    ids, held = record(store, range(5)), record(store, range(5, 7), held_out=True)
    learner = make_learner(tmp_path, max_updates=1)
    learner.train()
    assert states(store, ids) == ["trained"] * 4 + ["ready"]
    assert states(store, held) == ["held_out"] * 2
    assert store.published_version(USER) == "v000001"
    (version,) = store.versions(USER)
    assert version.parent == "base"
    assert [event.event for event in version.events] == ["checked", "published"]
    (batch,) = learner.progress.batches.items()
    assert store.show(USER, ids[0]).use.batch_id == batch[0]
    assert capsys.readouterr().out.count("Version v000001 is published") == 1
    # The folder is an adapter that gives the weights in training.
    loaded = PeftModel.from_pretrained(tiny_llama(), version.path)
    turn = store.show(USER, ids[0])
    now = logps_of(loaded, list(turn.prompt_ids), list(turn.completion_ids))
    assert now != pytest.approx(turn.logprobs, abs=1e-3)
    with torch.no_grad():
        here = logps_of(learner.model.eval(), list(turn.prompt_ids), list(turn.completion_ids))
    assert now == pytest.approx(here, abs=1e-5)


def test_replies_whose_tail_was_cut_are_counted_and_warned_of(tmp_path):
    store = open_store(tmp_path)
    record(store, range(3))
    record(store, range(3, 4), sampling={"temperature": 1.0, "top_p": 0.5})
    learner = make_learner(tmp_path, max_updates=1)
    with pytest.warns(UserWarning, match="`top_p` below 1"):
        learner.train()
    assert learner.state.log_history[0]["live/top_p_share"] == 0.25


@pytest.mark.parametrize("opd_loss", ["sampled_token", "topk_surrogate", "full_divergence"])
def test_token_scores_are_what_was_said_of_the_sampled_tokens(tmp_path, opd_loss):
    store = open_store(tmp_path)
    bad = record(store, [0, 1], score=-1, hints=("Be brief.", "Short."))  # of which the longest is taught
    good = record(store, [2, 3], score=1, hints=())
    make_learner(tmp_path, max_updates=1, opd_loss=opd_loss).train()
    for turn_id, score in [(bad[0], -1), (good[0], 1)]:
        turn, found = store.show(USER, turn_id), store.token_scores(turn_id)
        assert found.student == pytest.approx(turn.logprobs)
        assert list(found.tokens) == [tiny_tokenizer().decode([i]) for i in turn.completion_ids]
        assert len(found.prefers) == len(turn.completion_ids)
        if score == 1:
            assert found.advantages == pytest.approx([1.0] * len(turn.completion_ids))
            assert all(value != value for value in found.teacher)  # no teacher, and not 0
            assert all(entry[0][1] is None for entry in found.prefers)
            continue
        hinted = [{"role": "user", "content": turn.messages[0]["content"] + "\n\nHint: Be brief."}]
        ids = tiny_tokenizer().apply_chat_template(hinted, add_generation_prompt=True)["input_ids"]
        teacher = logps_of(tiny_llama(), ids, list(turn.completion_ids))
        assert found.teacher == pytest.approx(teacher, abs=1e-4)
        for entry, advantage, t, s in zip(found.prefers, found.advantages, teacher, turn.logprobs, strict=True):
            assert advantage == pytest.approx(-1 + max(-1.0, min(1.0, t - s)), abs=1e-4)
            assert 1 <= len(entry) <= 2
            assert all(0 <= p <= 1 for _, *ps in entry for p in ps)
            assert entry[0][1] == max(p for _, p, _ in entry)  # the teacher's first choice stands first
            assert entry[-1][2] == max(p for *_, p in entry)  # and the student's last


def test_preferences_are_the_best_tokens_of_both(tmp_path):
    store = open_store(tmp_path)
    (turn_id, *_) = record(store, range(4))
    make_learner(tmp_path, max_updates=1).train()
    turn, found = store.show(USER, turn_id), store.token_scores(turn_id)
    ids = torch.tensor([[*turn.prompt_ids, *turn.completion_ids]])
    with torch.no_grad():
        logits = tiny_llama()(ids).logits[0, len(turn.prompt_ids) - 1 : -1].softmax(-1)
    best, chosen = logits.max(-1)
    for entry, p, token in zip(found.prefers, best.tolist(), chosen.tolist(), strict=True):
        assert entry[-1][0] == tiny_tokenizer().decode([token])
        assert entry[-1][2] == pytest.approx(p, abs=1e-4)


def test_a_user_without_turns_is_told_who_has_some(tmp_path, capsys):
    record(open_store(tmp_path), range(4))
    learner = make_learner(tmp_path, user="ann", max_updates=1)
    learner.stopping = True
    learner.train()
    assert f"This user has no turns yet; there are turns of {USER!r} (`user`)." in capsys.readouterr().out


def test_the_default_learning_rate_is_one_for_adapters(tmp_path):
    open_store(tmp_path)
    assert LiveConfig(live_dir=str(tmp_path), bf16=False, use_cpu=True).learning_rate == 1e-4
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        make_learner(tmp_path, learning_rate=1e-4)
    assert not [warning for warning in found if "learning_rate" in str(warning.message)]


def test_turns_of_like_length_are_trained_together(tmp_path):
    store = open_store(tmp_path)
    turns = [store.show(USER, turn_id) for turn_id in record(store, [0, 3, 1, 2])]  # the longest, 3, comes second
    learner = make_learner(tmp_path, max_updates=1, per_device_train_batch_size=2)
    widths = []

    def count(_module, args):
        if torch.is_grad_enabled():
            widths.append(args[0].size(1))

    learner.model.get_input_embeddings().register_forward_pre_hook(count)
    learner.train()
    prompts = sorted(len(turn.prompt_ids) for turn in turns)
    reply = max(len(turn.completion_ids) for turn in turns)
    assert widths == [prompts[1] + reply, prompts[3] + reply]
    assert prompts[1] < prompts[2]


def test_preferences_cost_one_pass_of_the_teacher(tmp_path):
    passes = {}
    for preferences in (False, True):
        record(open_store(tmp_path / str(preferences)), range(4))
        learner = make_learner(tmp_path / str(preferences), max_updates=1, token_preferences=preferences)
        passes[preferences] = counted = []
        score = learner.scorer.score
        learner.scorer.score = lambda model, rows, _s=score, _c=counted, **wanted: (
            _c.append(rows) or _s(model, rows, **wanted)
        )
        learner.train()
    assert len(passes[True]) == len(passes[False]) + 1


def test_without_preferences_no_further_pass_is_made(tmp_path):
    store = open_store(tmp_path)
    (turn_id, *_) = record(store, range(4))
    learner = make_learner(tmp_path, max_updates=1, token_preferences=False)
    calls, score = [], learner.scorer.score
    learner.scorer.score = lambda *args, **kwargs: calls.append(kwargs) or score(*args, **kwargs)
    learner.train()
    assert store.token_scores(turn_id).prefers is None
    assert not any(kwargs.get("keep_states") for kwargs in calls)


def test_hints_as_people_edited_them_and_corrections_reach_the_teacher(tmp_path):
    store = open_store(tmp_path)
    edited, *_ = record(store, [0, 1], hints=("Be brief.",))
    store.edit_hint(USER, edited, ["Say it kindly."])
    corrected = add(store, make_turn(2, tiny_llama()))
    store.add_feedback(USER, corrected, -1, "Name the river.", "key")
    thumb = make_turn(3, tiny_llama())  # nothing followed it, but somebody liked it
    store.record_turn(thumb, turn_hashes(thumb.messages, thumb.reply))
    store.add_feedback(USER, thumb.turn_id, 1, None, "other key")
    learner = make_learner(tmp_path, max_updates=1)
    seen, begin = {}, learner.notes.begin

    def watching(rows):
        seen.update({one.turn.turn_id: chosen.hint for one, chosen in zip(rows, learner.chosen_hints, strict=True)})
        begin(rows)

    learner.notes.begin = watching
    learner.train()
    assert seen[edited] == "Say it kindly."
    assert seen[corrected] == "Name the river."
    assert seen[thumb.turn_id] is None
    assert store.token_scores(thumb.turn_id).advantages == pytest.approx([1.0] * len(thumb.completion_ids))


# How prompts are rendered


def make_tool_turn(number: int, **fields):
    """A turn whose prompt has tools and a call, rendered as an engine would: arguments as values."""
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": f"add {number}"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "1", "tool_call_id": "1"},
    ]
    rendered = [
        {"role": "user", "content": f"add {number}"},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]},
        {"role": "tool", "content": "1"},
    ]
    prompt_ids = tiny_tokenizer().apply_chat_template(
        rendered, tools=TOOLS, chat_template=TOOL_TEMPLATE, add_generation_prompt=True, mood="!"
    )["input_ids"]
    values = {"tools": TOOLS, "sampling": {"chat_template_kwargs": {"mood": "!"}}, "prompt_ids": prompt_ids, **fields}
    return make_turn(number, tiny_llama(), messages=messages, **values)


def test_hinted_prompts_have_the_tools_and_template_settings_of_their_turn(tmp_path):
    store = open_store(tmp_path)
    ids = [add(store, make_tool_turn(i), BAD) for i in range(3)]
    plain = make_turn(3, tiny_llama())
    ids.append(add(store, plain, BAD))
    learner = make_learner(tmp_path, max_updates=1)
    learner.processing_class.chat_template = TOOL_TEMPLATE
    contexts, begin = [], learner.notes.begin

    def watching(rows):
        contexts.extend((one.turn, chosen.context_ids) for one, chosen in zip(rows, learner.chosen_hints, strict=True))
        begin(rows)

    learner.notes.begin = watching
    learner.train()
    assert states(store, ids) == ["trained"] * 4
    tokenizer = tiny_tokenizer()
    hint = tokenizer("\n\nHint: Be brief.")["input_ids"]
    for turn, context in contexts:
        at = next(i for i in range(len(context)) if context[i : i + len(hint)] == hint)
        assert tuple(context[:at] + context[at + len(hint) :]) == turn.prompt_ids  # the hint is all that differs
    assert "add!" in tokenizer.decode(contexts[0][1])


def test_a_prompt_that_cannot_be_rendered_again_is_set_aside(tmp_path, caplog):
    store = open_store(tmp_path)
    ids = record(store, range(5))
    other = make_turn(5, tiny_llama(), prompt_ids=[1, 2, 3])
    unrendered = add(store, other, BAD)
    long = add(store, make_turn(6, tiny_llama(), messages=[{"role": "user", "content": "long " * 20}]), BAD)
    later = record(store, [7, 8, 9])
    learner = make_learner(tmp_path, max_updates=2, max_turn_tokens=80)
    learner.train()
    assert states(store, [*ids, *later]) == ["trained"] * 8
    assert states(store, [unrendered, long]) == ["unusable"] * 2
    assert store.set_aside_counts(USER) == {"other_template": 1, "too_long": 1}
    assert "2 turns cannot be trained and were set aside: 1 other_template, 1 too_long." in caplog.text


def test_if_no_prompt_can_be_rendered_again_the_learner_refuses_and_keeps_the_turns(tmp_path):
    store = open_store(tmp_path)
    ids = record(store, range(4))
    learner = make_learner(tmp_path, max_updates=1)
    learner.processing_class.chat_template = TOOL_TEMPLATE.replace("user", "human").replace("<|im_end|>", "")
    with pytest.raises(LearnerError, match=r"None of 4 turns can be trained \(other_template\)"):
        learner.train()
    assert states(store, ids) == ["ready"] * 4


def test_ids_beyond_the_vocabulary_are_refused(tmp_path):
    store = open_store(tmp_path)
    turn = make_turn(4, tiny_llama())
    turn = type(turn)(**{**vars(turn), "completion_ids": (*turn.completion_ids[:-1], 999)})
    broken, ids = add(store, turn, BAD), record(store, range(4))
    make_learner(tmp_path, max_updates=1).train()
    assert states(store, [broken, *ids]) == ["unusable", *["trained"] * 4]
    assert store.set_aside_counts(USER) == {"other_vocabulary": 1}


DATED_TEMPLATE = "<|im_start|>system\nToday is {{ strftime_now('%d %b %Y') }}.<|im_end|>\n" + CHATML


@pytest.mark.parametrize("off", [-1, 0, 1])
def test_a_template_that_prints_the_date_is_given_that_of_the_turn(tmp_path, off):
    """Engine and learner may live in two time zones, and the turn is three days old."""
    store, tokenizer = open_store(tmp_path), tiny_tokenizer()
    recorded = datetime.now() - timedelta(days=3)
    day = (recorded + timedelta(days=off)).strftime("%d %b %Y")
    tokenizer.chat_template = DATED_TEMPLATE.replace("{{ strftime_now('%d %b %Y') }}", day)
    ids = []
    for number in range(4):
        messages = [{"role": "user", "content": f"hi {number}"}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        turn = make_turn(number, tiny_llama(), messages=messages, prompt_ids=prompt)
        store.record_turn(turn, turn_hashes(turn.messages, turn.reply), created=recorded.timestamp())
        store.add_next_state(turn.turn_id, [{"role": "user", "content": "Shorter, please."}])
        store.add_verdict(turn.turn_id, BAD)
        ids.append(turn.turn_id)
    learner = make_learner(tmp_path, max_updates=1)
    learner.processing_class.chat_template = DATED_TEMPLATE
    learner.train()
    assert states(store, ids) == ["trained"] * 4
    hinted = [learner.processing_class.decode(one.context_ids) for one in learner.chosen_hints]
    assert len(hinted) == 4
    assert all(f"Today is {day}." in text and "Be brief." in text for text in hinted)


def test_trls_templates_are_told_another_date_and_nothing_else():
    folder = Path(trl.__file__).parent / "chat_templates"
    dated = [text for path in folder.glob("*.jinja") if "strftime_now" in (text := path.read_text())]
    assert dated
    for template in dated:
        renders = SimpleNamespace(processing_class=tiny_tokenizer(), chat_template=template, chat_template_kwargs={})
        now, then = datetime.now(), datetime(2020, 3, 4)
        plain, same, other = (
            renders.processing_class.decode(render(renders, [{"role": "user", "content": "hi"}], clock=clock))
            for clock in (None, now, then)
        )
        assert same == plain
        assert any(day in other for day in ("2020-03-04", "04 Mar 2020"))


def test_messages_that_no_template_takes_match_nothing():
    class Plain:
        processing_class, chat_template, chat_template_kwargs = tiny_tokenizer(), None, {}

    turn = make_turn(0, tiny_llama())
    assert matching_prompt(Plain, turn) == (turn.messages, None)
    strange = type(turn)(**{**vars(turn), "messages": [{"role": "user"}]})
    assert matching_prompt(Plain, strange) is None


# What it refuses


def test_turns_of_another_model_stop_it_and_stay(tmp_path):
    store = open_store(tmp_path)
    ids = record(store, range(4))
    learner = make_learner(tmp_path, max_updates=1, engine_model="another")
    with pytest.raises(LearnerError, match="recorded from the model 'tiny', not from 'another'"):
        learner.train()
    assert states(store, ids) == ["ready"] * 4


def test_log_probs_that_these_weights_cannot_have_given_stop_it(tmp_path):
    store = open_store(tmp_path)
    ids = record(store, range(4), model=tiny_llama(seed=5))
    with pytest.raises(LearnerError, match=r"log-probs of version base differ by .* nats in the mean"):
        make_learner(tmp_path, max_updates=1, max_engine_gap=0.5).train()
    assert states(store, ids) == ["ready"] * 4
    assert store.versions(USER) == []


def strange(number):
    """A turn whose ids are not those that were sampled."""
    turn = make_turn(number, tiny_llama())
    ids = tuple(32 + (one + 40) % 90 for one in turn.completion_ids)
    return replace(turn, completion_ids=ids, logprobs=(-0.01,) * len(ids))


def test_a_turn_with_other_ids_is_set_aside_and_the_rest_is_trained(tmp_path):
    store = open_store(tmp_path)
    wrong = add(store, strange(9), BAD)
    ids = record(store, range(4))
    make_learner(tmp_path, max_updates=1).train()
    assert states(store, [wrong, *ids]) == ["unusable", *["trained"] * 4]
    assert store.set_aside_counts(USER) == {"other_logprobs": 1}


def test_a_turn_of_an_earlier_version_with_other_ids_is_set_aside_and_one_that_lags_is_not(tmp_path):
    store = open_store(tmp_path)
    first = record(store, range(4))
    make_learner(tmp_path, max_updates=1).train()
    wrong, late = add(store, strange(9), BAD), record(store, range(4, 8))
    make_learner(tmp_path, max_updates=2, max_engine_gap=1e-3).train()
    assert states(store, [wrong, *first, *late]) == ["unusable", *["trained"] * 8]


def test_one_strange_turn_a_step_is_set_aside_and_two_in_a_row_stop_it(tmp_path):
    store, alone = open_store(tmp_path), {"turns_per_step": 1, "per_device_train_batch_size": 1}
    wrong, (right,) = add(store, strange(9), BAD), record(store, [0])
    make_learner(tmp_path, max_updates=1, **alone).train()
    assert states(store, [wrong, right]) == ["unusable", "trained"]
    more = [add(store, replace(strange(number), model_version="v000001"), BAD) for number in (10, 11, 12)]
    with pytest.raises(LearnerError, match="for 1 of 1 turns by more than 1"):
        make_learner(tmp_path, max_updates=2, **alone).train()
    assert states(store, more) == ["unusable", "ready", "ready"]


def test_a_second_learner_is_refused_in_one_line(tmp_path):
    store = open_store(tmp_path)
    record(store, range(4))
    learner = make_learner(tmp_path, max_updates=1)
    with (
        only_learner(tmp_path / "learner-default.lock", USER),
        pytest.raises(LearnerError, match=rf"Another learner \(process {os.getpid()}\) already trains user 'default'"),
    ):
        learner.train()
    assert store.ready_count(USER, 4) == 4
    learner.train()  # free again
    assert store.published_version(USER) == "v000001"


def test_users_do_not_stand_in_each_others_way(tmp_path):
    store = open_store(tmp_path)
    record(store, range(4), user="a/../b")
    with only_learner(tmp_path / "learner-default.lock", USER):
        make_learner(tmp_path, max_updates=1, user="a/../b").train()
    assert store.published_version("a/../b") == "v000001"
    assert store.published_version(USER) == "base"
    assert (tmp_path / "adapters" / "a%2F%2E%2E%2Fb" / "v000001").is_dir()


def test_full_weights_another_start_and_a_named_checkpoint_are_refused(tmp_path):
    with pytest.raises(ValueError, match="Live training publishes adapters: pass `peft_config`"):
        LiveTrainer(
            model=tiny_llama(),
            args=LiveConfig(live_dir=str(tmp_path), **SETTINGS),
            processing_class=tiny_tokenizer(),
        )
    with pytest.raises(ValueError, match="`init_lora_weights='pissa'` changes the base weights"):
        make_learner(tmp_path, lora={"init_lora_weights": "pissa"})
    with pytest.raises(ValueError, match="goes on from its own last checkpoint"):
        make_learner(tmp_path).train(resume_from_checkpoint=True)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            {"temperature": 0.7},
            "`temperature` must be 1.0 in live training: each turn is trained at",
        ),
        ({"num_generations": 2}, "`num_generations` must be 1"),
        ({"max_steps": 5}, "use `max_updates`"),
        ({"log_completions": True}, "`log_completions` must be False"),
        ({"save_steps": 2}, "saves a checkpoint after every step"),
        ({"save_total_limit": 1}, "`save_total_limit` must be at least 2"),
        ({"turns_per_step": 5}, r"`turns_per_step=5` must be a multiple of `per_device_train_batch_size` \(2\)"),
        ({"gradient_accumulation_steps": 3}, "follows from `turns_per_step` and is 2 here, not 3"),
        ({"steps_per_generation": 4}, "`steps_per_generation` follows from `turns_per_step`"),
        ({"hint_source": "privileged_context"}, "hints come from the store"),
        ({"check_length": [3, 1]}, "`check_length` must be two rising numbers"),
        ({"max_version_lag": -1}, "`max_version_lag` must be a whole number at least 0"),
    ],
)
def test_settings_that_mean_nothing_here_are_refused(setting, message):
    with pytest.raises(ValueError, match=message):
        LiveConfig(**{**SETTINGS, **setting})


# Waiting and ending


def in_background(do):
    thread = threading.Thread(target=do)
    thread.start()
    return thread


def test_it_waits_and_says_how_many_turns_are_ready(tmp_path):
    store = open_store(tmp_path)
    record(store, range(2))
    learner = make_learner(tmp_path, max_updates=1)
    said, looks, wait = [], [], learner._wait

    def watching(waiting):
        looks.append(waiting.ready)
        if len(looks) in (3, 6):  # the same number is not said twice
            record(store, [len(looks)])
        wait(waiting)

    learner._wait = watching
    learner.accelerator.print = lambda line, **_: said.append(line)
    learner.train()
    assert looks == [2, 2, 2, 3, 3, 3]
    waits = [line for line in said if "waiting" in line]
    assert waits == ["2/4 turns ready, waiting for feedback", "3/4 turns ready, waiting for feedback"]
    assert "generates: the gateway's engine, and nothing is sampled here" in said
    assert store.published_version(USER) == "v000001"


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_cleanly_while_it_waits(tmp_path, signum):
    store = open_store(tmp_path)
    record(store, range(6))
    learner = make_learner(tmp_path)
    before = signal.getsignal(signum)

    def later():
        while store.published_version(USER) == "base":
            time.sleep(0.05)
        time.sleep(0.3)
        os.kill(os.getpid(), signum)

    thread = in_background(later)
    learner.train()
    thread.join()
    assert signal.getsignal(signum) is before
    assert store.ready_count(USER, 4) == 2
    assert store.open_batches(USER) == []
    assert (tmp_path / "checkpoints" / "default" / "checkpoint-1" / "live_batches.json").is_file()


def test_a_signal_in_the_middle_of_an_update_lets_it_end(tmp_path):
    store = open_store(tmp_path)
    ids = record(store, range(8))
    learner = make_learner(tmp_path)
    step = learner.training_step

    def training_step(*args, **kwargs):
        if not learner.stopping:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(*args, **kwargs)

    learner.training_step = training_step
    learner.train()
    assert states(store, ids) == ["trained"] * 4 + ["ready"] * 4
    assert store.published_version(USER) == "v000001"


def test_an_error_in_the_middle_of_an_update_gives_the_turns_back(tmp_path):
    store = open_store(tmp_path)
    ids = record(store, range(4))
    learner = make_learner(tmp_path, max_updates=1)

    def broken(*args, **kwargs):
        raise KeyboardInterrupt

    learner.training_step = broken
    with pytest.raises(KeyboardInterrupt):
        learner.train()
    assert states(store, ids) == ["ready"] * 4


def test_a_disk_that_fills_up_loses_nothing_and_trains_nothing_twice(tmp_path, monkeypatch):
    store = open_store(tmp_path)
    ids = record(store, range(8))

    def full(*args, **kwargs):
        raise StoreFullError("no room is left.")

    learner = make_learner(tmp_path, max_updates=1)
    learner.desk.store._store.publish = full  # its checkpoint is whole by then
    with pytest.raises(StoreFullError):
        learner.train()
    assert states(store, ids) == ["claimed"] * 4 + ["ready"] * 4
    learner = make_learner(tmp_path, max_updates=2)
    with monkeypatch.context() as patch:
        patch.setattr("trl_openclaw.live.learner.updates.mark_whole", full)
        with pytest.raises(StoreFullError):
            learner.train()
    assert store.published_version(USER) == "v000001"
    assert states(store, ids) == ["trained"] * 4 + ["claimed"] * 4
    make_learner(tmp_path, max_updates=2).train()
    assert states(store, ids) == ["trained"] * 8
    assert [[event.event for event in version.events][-1] for version in store.versions(USER)] == [
        "published",
        "rejected",
        "published",
    ]


def test_max_updates_counts_those_of_earlier_runs(tmp_path):
    store = open_store(tmp_path)
    record(store, range(12))
    make_learner(tmp_path, max_updates=1).train()
    make_learner(tmp_path, max_updates=2).train()
    make_learner(tmp_path, max_updates=2).train()
    assert [version.version for version in store.versions(USER)] == ["v000001", "v000002"]
    assert store.ready_count(USER, 4) == 4


def test_a_busy_store_is_waited_for(tmp_path, caplog):
    store = open_store(tmp_path)
    ids = record(store, range(4))
    learner = make_learner(tmp_path, max_updates=1)
    inner = learner.desk.store._store
    calls, end_batch = [], inner.end_batch

    def busy(*args, **kwargs):
        calls.append(args)
        if len(calls) == 1:
            raise StoreBusyError("the store is in use by another process.")
        return end_batch(*args, **kwargs)

    inner.end_batch = busy
    learner.train()
    assert states(store, ids) == ["trained"] * 4
    assert "is in use by another process. The learner waits." in caplog.text


# Old turns, and versions that people choose


def test_turns_from_too_many_versions_ago_expire(tmp_path):
    store = open_store(tmp_path)
    ids = record(store, range(8))
    learner = make_learner(tmp_path, max_updates=2, max_version_lag=1)
    learner.train()
    assert states(store, ids) == ["trained"] * 8
    assert [log["live/lag_mean"] for log in learner.state.log_history if "loss" in log] == [0.0, 1.0]
    old = record(store, range(8, 12))  # sampled by the base model, two versions ago by now
    fresh = record(store, range(12, 16), model_version="v000002", model=tiny_llama())
    make_learner(tmp_path, max_updates=3, max_version_lag=1, max_engine_gap=None).train()
    assert states(store, old) == ["expired"] * 4
    assert states(store, fresh) == ["trained"] * 4


def test_it_goes_on_from_the_version_that_somebody_went_back_to(tmp_path, capsys):
    store = open_store(tmp_path)
    record(store, range(8))
    make_learner(tmp_path, max_updates=2).train()
    assert store.roll_back(USER) == "v000001"
    record(store, range(8, 12))
    learner = make_learner(tmp_path, max_updates=3)
    seen, begin = [], learner.updates.on_step_begin

    def watching(*args, **kwargs):
        begin(*args, **kwargs)
        seen.append(learner.updates._before.weights)

    learner.updates.on_step_begin = watching
    learner.train()
    assert "Going on from version v000001, which was published by hand." in capsys.readouterr().out
    assert [v.parent for v in store.versions(USER)] == ["base", "v000001", "v000001"]
    assert store.published_version(USER) == "v000003"
    first = PeftModel.from_pretrained(tiny_llama(), store.versions(USER)[0].path)
    expected = dict(first.named_parameters())
    for name, tensor in seen[0].items():
        assert torch.equal(tensor, expected[name]), name


def test_it_goes_back_to_the_base_model_as_well(tmp_path):
    store = open_store(tmp_path)
    record(store, range(4))
    learner = make_learner(tmp_path, max_updates=2)
    begin, seen = learner.updates.on_step_begin, []

    def watching(*args, **kwargs):
        begin(*args, **kwargs)
        seen.append(learner.updates._before)
        if len(seen) == 1:
            in_background(later)

    def later():
        own = open_store(tmp_path)
        while own.published_version(USER) == "base":
            time.sleep(0.02)
        own.roll_back(USER, "base")
        record(own, range(4, 8))

    learner.updates.on_step_begin = watching
    learner.train()
    assert [v.parent for v in store.versions(USER)] == ["base", "base"]
    for name, tensor in seen[0].weights.items():
        assert torch.equal(tensor, seen[1].weights[name]), name
    assert seen[1].optimizer["state"] == {}


def test_a_version_is_not_published_over_one_that_somebody_chose_meanwhile(tmp_path):
    store = open_store(tmp_path)
    ids = record(store, range(8))
    make_learner(tmp_path, max_updates=1).train()
    learner = make_learner(tmp_path, max_updates=2)
    step = learner.training_step

    def training_step(*args, **kwargs):
        if store.published_version(USER) == "v000001":
            store.roll_back(USER)
        return step(*args, **kwargs)

    learner.training_step = training_step
    learner.train()
    assert store.published_version(USER) == "base"
    events = store.versions(USER)[-1].events
    assert events[-1].event == "rejected"
    assert events[-1].detail["reason"] == "another version was published before this one could be"
    assert states(store, ids) == ["trained"] * 4 + ["ready"] * 4
    assert list(learner.progress.batches.values()) == ["v000001"]


@pytest.mark.parametrize("moment", ["training_step", "_save_checkpoint"])
@pytest.mark.parametrize("how", ["turn deleted", "all deleted", "opted out"])
def test_what_people_withdraw_during_a_step_is_in_no_version(tmp_path, how, moment):
    store = open_store(tmp_path)
    ids = record(store, range(4))
    learner = make_learner(tmp_path, max_updates=1)
    before = {name: tensor.clone() for name, tensor in learner.initial_weights.items()}
    step, stopped = getattr(learner, moment), []

    def withdrawing(*args, **kwargs):
        if not stopped:
            stopped.append(True)
            learner.stopping = True
            if how == "turn deleted":
                store.delete(USER, turn_id=ids[1])
            elif how == "all deleted":
                store.delete(USER)
            else:
                store.opt_out(USER)
        return step(*args, **kwargs)

    setattr(learner, moment, withdrawing)
    learner.train()
    assert list(Path(learner.args.output_dir).glob("checkpoint-*")) == []
    (version,) = store.versions(USER)
    assert version.events[-1].event == "rejected"
    assert version.events[-1].detail["reason"].startswith("turns it was trained on were deleted")
    assert not Path(version.path).exists()
    after = {"turn deleted": "ready", "opted out": "opted_out"}.get(how)
    assert {turn.state for turn in store.all_turns(USER)} == ({after} if after else set())
    assert learner.progress.batches == {}
    for name, tensor in trained_tensors(learner).items():
        assert torch.equal(tensor, before[name]), name


def test_old_adapter_folders_are_removed(tmp_path):
    store = open_store(tmp_path)
    record(store, range(12))
    make_learner(tmp_path, max_updates=3, keep_versions=2).train()
    assert sorted(path.name for path in (tmp_path / "adapters" / "default").iterdir()) == ["v000002", "v000003"]
