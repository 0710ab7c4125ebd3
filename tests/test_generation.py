"""Rows are announced as they end, with the very ids that TRL keeps of them, and `generate` notices nothing."""

from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import tiny_llama, tiny_tokenizer
from transformers import MaxLengthCriteria, StoppingCriteriaList

from trl_openclaw._trl.generation import RowWatch, announced, watched_generate

EOS, PAD = 256, 257
PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9], [10], [11, 12], [13, 14, 15]]
ENDS = [EOS, 7]
"""Two ids that end a completion; with the bias below rows end at many different steps."""


def sample(model, **settings):
    """Sampled ids `(B, T)` of left-padded prompts."""
    width = max(map(len, PROMPTS))
    torch.manual_seed(3)
    output = model.generate(
        input_ids=torch.tensor([[PAD] * (width - len(ids)) + ids for ids in PROMPTS]),
        attention_mask=torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in PROMPTS]),
        **{
            "do_sample": True,
            "max_new_tokens": 12,
            "eos_token_id": ENDS,
            "pad_token_id": PAD,
            "sequence_bias": [[[EOS], 6.0], [[7], 6.0]],
            **settings,
        },
    )
    return output[:, width:]


def kept(row):
    """What TRL keeps of a row: everything up to the first end token; `None` for a row without one."""
    ends = [at for at, token in enumerate(row) if token in ENDS]
    return row[: ends[0] + 1] if ends else None


def announcements(model, **settings):
    """Sampled ids, and what was announced, in order."""
    found = []
    with watched_generate(model, ENDS, lambda row, ids: found.append((row, ids))):
        output = sample(model, **settings)
    return output, found


# At this temperature no token dominates, so that rows end early, late, and not at all.
@pytest.mark.parametrize("pad", [PAD, EOS])
def test_rows_are_announced_with_what_is_kept_of_them(pad):
    output, found = announcements(tiny_llama(), pad_token_id=pad, temperature=3.0)
    rows = {row: kept(ids) for row, ids in enumerate(output.tolist())}
    early = {row: ids for row, ids in rows.items() if ids and len(ids) < output.size(1)}
    assert dict(found) == early
    assert len(found) == len(early) >= 3
    assert [len(ids) for _, ids in found] == sorted(len(ids) for _, ids in found)
    assert len({len(ids) for _, ids in found}) > 1


def test_the_sampled_ids_are_the_same():
    model = tiny_llama()
    output, found = announcements(model, temperature=3.0)
    assert found
    assert torch.equal(sample(model, temperature=3.0), output)


def test_each_row_is_announced_once_at_the_step_after_its_last():
    found = []
    watch = RowWatch(torch.tensor([[1, 1], [1, 1], [1, 1]]), ENDS, lambda row, ids: found.append((row, ids)))
    steps = [[5, 7, 5], [EOS, PAD, 5], [EOS, 7, 5], [PAD, PAD, EOS]]  # an end token may also serve as padding
    ids = torch.ones(3, 2, dtype=torch.long)
    seen = []
    for step in steps:
        ids = torch.cat([ids, torch.tensor(step)[:, None]], dim=1)
        stop = watch(ids, None)
        assert stop.shape == (3,)
        assert not stop.any()
        seen.append(list(found))
    assert seen == [[], [(1, [7])], [(1, [7]), (0, [5, EOS])], [(1, [7]), (0, [5, EOS])]]


@pytest.mark.parametrize("settings", [{"num_beams": 2, "do_sample": False}, {"num_return_sequences": 2}])
def test_rows_that_are_not_the_prompts_are_not_announced(settings):
    output, found = announcements(tiny_llama(), temperature=3.0, **settings)
    assert kept(output[0].tolist()) or kept(output[1].tolist())
    assert found == []


def test_own_stopping_criteria_keep_their_word():
    model = tiny_llama()
    with watched_generate(model, ENDS, lambda row, ids: None):
        output = sample(model, stopping_criteria=StoppingCriteriaList([MaxLengthCriteria(4 + 2)]))
    assert output.size(1) == 2


def test_an_adapter_is_watched_through_its_own_generate():
    model = get_peft_model(tiny_llama(), LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    assert dict(announcements(model, temperature=3.0)[1]) == dict(announcements(tiny_llama(), temperature=3.0)[1]) != {}


def test_the_model_gets_its_generate_back():
    model = tiny_llama()
    with pytest.raises(ZeroDivisionError), watched_generate(model, ENDS, lambda row, ids: 1 / 0):
        sample(model, temperature=3.0)
    assert "generate" not in vars(model)
    model.generate = own = lambda **kwargs: None
    with watched_generate(model, ENDS, lambda row, ids: None):
        assert model.generate is not own
    assert model.generate is own


PLAIN = {
    "announces_completions": True,
    "use_vllm": False,
    "use_transformers_continuous_batching": False,
    "rollout_func": None,
    "tools": [],
    "environment_factories": None,
    "eos_token_ids": ENDS,
    "on_completion": print,
    "accelerator": SimpleNamespace(unwrap_model=lambda model: model),
}


@pytest.mark.parametrize(
    ("trainer", "images", "fields", "watches"),
    [
        ({}, None, {}, True),
        ({"announces_completions": False}, None, {}, False),
        ({"use_vllm": True}, None, {}, False),
        ({"use_transformers_continuous_batching": True}, None, {}, False),
        ({"rollout_func": print}, None, {}, False),
        ({"tools": [print]}, None, {}, False),
        ({"environment_factories": {None: dict}}, None, {}, False),
        ({"response_template": "x"}, None, {}, False),
        ({"response_schema": {}}, None, {}, False),
        ({}, [["image"]], {}, False),
        ({}, None, {"pixel_values": torch.ones(1)}, False),
    ],
)
def test_only_plain_sampling_of_text_is_watched(trainer, images, fields, watches):
    model, tokenizer = tiny_llama(), tiny_tokenizer()
    for name in ("response_template", "response_schema"):
        if name in trainer:
            setattr(tokenizer, name, trainer[name])
    trainer = SimpleNamespace(**{**PLAIN, **trainer}, tokenizer=tokenizer, model_wrapped=model)
    with announced(trainer, images, fields):
        assert ("generate" in vars(model)) is watches
    assert "generate" not in vars(model)
