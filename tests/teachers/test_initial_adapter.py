"""An adapter that came with the policy is copied, so that the teacher keeps what it was."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import tiny_llama

from trl_openclaw.teachers.weights import keep_initial_adapter


def policy(name: str = "default"):
    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    return get_peft_model(tiny_llama(), config, adapter_name=name)


def pairs(model):
    names = [name for name, _ in model.named_parameters() if ".default." in name]
    assert names
    return [(model.get_parameter(name), model.get_parameter(name.replace(".default.", ".ref."))) for name in names]


def test_the_copy_is_equal_frozen_and_not_in_use():
    model = policy()
    keep_initial_adapter(model)
    assert model.active_adapter == "default"
    for trained, kept in pairs(model):
        assert torch.equal(trained, kept)
        assert trained.data_ptr() != kept.data_ptr()
        assert trained.requires_grad
        assert not kept.requires_grad


def test_an_adapter_in_training_must_not_have_the_copys_name():
    with pytest.raises(ValueError, match=r"names the frozen copy\. Rename it"):
        keep_initial_adapter(policy("ref"))
