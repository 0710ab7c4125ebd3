"""Each turn at the temperature of its own log-probs, and models and teachers that cannot do that."""

from dataclasses import replace

import pytest
import torch
from learner_harness import USER, logps_of, make_learner, make_turn, open_store, record, states
from peft import LoraConfig, get_peft_model
from tiny import tiny_llama
from transformers import Gemma2Config, Gemma2ForCausalLM

from trl_openclaw._trl.forward import takes_row_temperatures
from trl_openclaw.live.canonical import turn_hashes
from trl_openclaw.types import Verdict, Vote

BAD = Verdict.from_votes([Vote(score=-1, hint="Be brief.")])


def add(store, number, temperature, model=None):
    """A turn that was sampled and recorded at a temperature."""
    model = tiny_llama() if model is None else model
    turn = make_turn(number, model)
    logps = logps_of(model, list(turn.prompt_ids), list(turn.completion_ids), temperature)
    turn = replace(turn, logprobs=tuple(logps), sampling={"temperature": 9, "logprobs_temperature": temperature})
    store.record_turn(turn, turn_hashes(turn.messages, turn.reply))
    store.add_next_state(turn.turn_id, [{"role": "user", "content": "Shorter, please."}])
    store.add_verdict(turn.turn_id, BAD)
    return turn.turn_id


def test_everything_that_is_kept_of_a_token_is_at_its_temperature(tmp_path):
    store = open_store(tmp_path)
    ids = [add(store, number, temperature) for number, temperature in enumerate((0.4, 1.0, 1.6, 2.0))]
    learner = make_learner(tmp_path, max_updates=1, max_engine_gap=1e-3, check_replays=0.1)
    learner.train()
    assert states(store, ids) == ["trained"] * 4
    (log,) = [entry for entry in learner.state.log_history if "live/engine_gap" in entry]
    assert log["live/engine_gap"] < 1e-4
    for turn_id, temperature in zip(ids, (0.4, 1.0, 1.6, 2.0), strict=True):
        turn, scores = store.show(USER, turn_id), store.token_scores(turn_id)
        assert turn.logprobs_temperature == temperature
        assert list(scores.student) == pytest.approx(list(turn.logprobs), abs=1e-5)
        with torch.no_grad():
            logits = tiny_llama()(torch.tensor([[*turn.prompt_ids, *turn.completion_ids]])).logits[0]
        own = (logits[len(turn.prompt_ids) - 1 : -1] / temperature).softmax(-1)
        for place, entries in enumerate(scores.prefers):
            assert entries[-1][2] == pytest.approx(own[place].max().item(), abs=1e-3)


def test_a_turn_recorded_at_another_temperature_than_it_says_is_found_out(tmp_path):
    store = open_store(tmp_path)
    ids = [add(store, number, 1.0) for number in range(4)]
    turn = make_turn(5, tiny_llama())
    turn = replace(turn, sampling={"logprobs_temperature": 0.3})  # its log-probs are those at 1
    store.record_turn(turn, turn_hashes(turn.messages, turn.reply))
    store.add_verdict(turn.turn_id, BAD)
    more = record(store, range(6, 10))
    make_learner(tmp_path, max_updates=2, max_engine_gap=0.1, learning_rate=1e-6, max_version_lag=9).train()
    assert states(store, [*ids, turn.turn_id, *more]) == [*["trained"] * 4, "unusable", *["trained"] * 4]
    assert store.set_aside_counts(USER) == {"other_logprobs": 1}


def test_where_rows_can_have_no_temperature_of_their_own_such_turns_are_set_aside(tmp_path):
    store = open_store(tmp_path)
    cold, ids = add(store, 9, 0.5), record(store, range(4))
    learner = make_learner(tmp_path, max_updates=1)
    assert learner.read.takes_temperature
    learner.read = replace(learner.read, takes_temperature=False)
    learner.train()
    assert states(store, [cold, *ids]) == ["unusable", *["trained"] * 4]
    assert store.set_aside_counts(USER) == {"temperature": 1}


def gemma(**config):
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return Gemma2ForCausalLM(Gemma2Config(vocab_size=64, num_key_value_heads=1, head_dim=8, **sizes, **config))


def test_heads_that_take_row_temperatures():
    assert takes_row_temperatures(tiny_llama())
    assert takes_row_temperatures(get_peft_model(tiny_llama(), LoraConfig(r=2, target_modules=["q_proj"])))
    assert takes_row_temperatures(gemma(final_logit_softcapping=None))
    assert not takes_row_temperatures(gemma(final_logit_softcapping=30.0))
    biased = tiny_llama()
    biased.lm_head.bias = torch.nn.Parameter(torch.zeros(259))
    assert not takes_row_temperatures(biased)
