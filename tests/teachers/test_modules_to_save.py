"""`modules_to_save`: trained and saved with the adapter, and not what a frozen teacher sees."""

import torch
from peft import LoraConfig
from safetensors.torch import load_file
from tiny import tiny_llama
from trainer_harness import LORA, make_trainer


def test_the_head_is_trained_and_saved_and_the_frozen_teacher_has_the_first_one(tmp_path):
    first = tiny_llama().lm_head.weight.detach().clone()
    trainer = make_trainer(tmp_path, peft_config=LoraConfig(**LORA, modules_to_save=["lm_head"]))
    trainer.train()
    head = trainer.model.get_base_model().lm_head
    trained = head.modules_to_save["default"].weight
    assert not torch.equal(trained, first)
    with trainer.teacher.weights():
        assert torch.equal(head.original_module.weight, first)
        ids = torch.arange(8).unsqueeze(0)
        expected = tiny_llama()(ids, labels=ids).loss
        assert torch.allclose(trainer.model(ids, labels=ids).loss, expected, atol=1e-5)
    trainer.save_model(str(tmp_path / "saved"))
    saved = load_file(tmp_path / "saved" / "adapter_model.safetensors")
    assert torch.equal(saved["base_model.model.lm_head.weight"], trained)
    assert not (tmp_path / "saved" / "model.safetensors").exists()
