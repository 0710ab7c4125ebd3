"""Where a second model's weights come from, and what may not change behind a frozen teacher's back."""

from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig
from tiny import tiny_llama
from trainer_harness import SETTINGS, make_trainer

from trl_openclaw import OPDConfig
from trl_openclaw.teachers import InitialWeights, weights


def initial_weights(tmp_path, **config):
    args = OPDConfig(output_dir=str(tmp_path), **{**SETTINGS, **config})
    return InitialWeights.before_training(tiny_llama(), args, None)


@pytest.mark.parametrize(
    ("settings", "copied"),
    [
        ({}, True),
        ({"beta": 0.1}, False),  # shares TRL's reference model
        ({"beta": 0.1, "sync_ref_model": True}, True),
        ({"teacher": "ema"}, True),
        ({"teacher": "ema", "beta": 0.1}, True),  # a teacher that moves shares nothing
        ({"teacher": "live"}, False),
        ({"teacher": "live", "reward_scale": 1.5}, True),  # the reference is the initial policy
        ({"teacher": "live", "reward_scale": 1.5, "beta": 0.1}, False),
        ({"teacher": "live", "reward_scale": 1.5, "opd_reference": "unhinted_teacher"}, False),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:`teacher='live'`")
def test_model_in_memory_is_copied_only_where_something_needs_it(tmp_path, settings, copied):
    assert (initial_weights(tmp_path, **settings).copy is not None) == copied


@pytest.mark.filterwarnings("ignore:`teacher='live'`")
def test_initial_reference_beside_a_live_teacher_is_the_policy_before_training(tmp_path):
    trainer = make_trainer(tmp_path, config={"teacher": "live", "reward_scale": 1.5, "max_steps": 2})
    before = [p.detach().clone() for p in trainer.model.parameters()]
    reference = trainer._teaching.lessons.reference
    trainer.train()
    assert any((a != b).any() for a, b in zip(before, trainer.model.parameters(), strict=True))
    for kept, was in zip(reference.model.parameters(), before, strict=True):
        torch.testing.assert_close(kept, was)


def test_bias_beside_an_adapter_is_refused_since_it_stays_when_the_adapter_is_off(tmp_path):
    model = tiny_llama(attention_bias=True)
    adapter = LoraConfig(r=2, target_modules=["q_proj"], bias="all")
    with pytest.raises(ValueError, match=r"frozen teacher.*bias.*outside of the adapter"):
        make_trainer(tmp_path, model=model, peft_config=adapter)


def trainer_of(processes: int, **fsdp) -> SimpleNamespace:
    """What `load_beside` looks at, in one of several processes and perhaps with FSDP's settings."""
    state = SimpleNamespace(fsdp_plugin=SimpleNamespace(**fsdp))
    return SimpleNamespace(
        args=SimpleNamespace(model_init_kwargs=None, trust_remote_code=False),
        accelerator=SimpleNamespace(num_processes=processes, state=state),
        is_fsdp_enabled=bool(fsdp),
        model=tiny_llama(),
    )


@pytest.mark.parametrize(("processes", "spread"), [(1, False), (2, False), (2, True)])
def test_a_second_model_is_not_spread_over_the_gpus_of_other_processes(monkeypatch, processes, spread):
    given = {}
    monkeypatch.setattr(weights, "create_model_from_path", lambda path, **kwargs: given.update(kwargs))
    fsdp = {"cpu_ram_efficient_loading": False} if spread else {}
    weights.load_beside(trainer_of(processes, **fsdp), "somewhere")
    assert given.get("device_map", "as TRL chooses") == ("as TRL chooses" if processes == 1 else None)


def test_a_second_model_that_fsdp_would_leave_empty_is_refused():
    with pytest.raises(ValueError, match="fsdp_cpu_ram_efficient_loading"):
        weights.load_beside(trainer_of(2, cpu_ram_efficient_loading=True), "somewhere")
