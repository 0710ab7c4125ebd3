"""QLoRA on a CPU: an adapter of 4-bit weights learns from each self-teacher, is saved, loaded again, and merged."""

import warnings

import pytest
import torch
from peft import LoraConfig, PeftModel
from tiny import tiny_llama, tiny_tokenizer
from trainer_harness import LORA, logged, make_trainer, moved, snapshot
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from trl_openclaw.merge import merge_adapter
from trl_openclaw.quantized import keep_unpacked

pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: pip install 'trl-openclaw[quantization]'")

IDS = torch.arange(40).view(2, 20) * 6


@pytest.fixture
def base(tmp_path) -> str:
    folder = tmp_path / "base"
    tiny_llama(hidden_size=64, intermediate_size=128).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def four_bit() -> BitsAndBytesConfig:
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)


def qlora_trainer(folder, base: str, **config):
    settings = {"max_steps": 2, "learning_rate": 0.02, "model_init_kwargs": {"dtype": torch.float32}, **config}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`teacher='live'`")
        return make_trainer(
            folder, model=base, quantization_config=four_bit(), peft_config=LoraConfig(**LORA), config=settings
        )


@torch.no_grad()
def logps(model) -> torch.Tensor:
    return model.eval()(input_ids=IDS).logits.log_softmax(-1)


@pytest.mark.parametrize("teacher", ["frozen", "ema", "live"])
def test_an_adapter_learns_from_each_teacher_and_is_found_again(tmp_path, base, teacher):
    """After an evaluation, too: bitsandbytes would pack the weights in it, and a packed one has no gradient."""
    trainer = qlora_trainer(tmp_path / "out", base, teacher=teacher)
    assert trainer.model.get_base_model().model.layers[0].self_attn.q_proj.weight.quant_state.quant_type == "nf4"
    before, first = snapshot(trainer.model), logps(trainer.model)
    trainable = {name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad}
    trainer.evaluate(trainer.train_dataset)
    trainer.train()
    changed = {name for name, hit in moved(trainer.model, before).items() if hit}
    assert {name for name in changed if ".teacher." not in name} == trainable
    assert logged(trainer, "self_test/max_gap")[0] < 1e-4
    if teacher == "frozen":
        with trainer.teacher.weights():
            torch.testing.assert_close(logps(trainer.model), first, atol=1e-5, rtol=0)
    if teacher == "ema":  # TRL keeps the adapter in bfloat16, which has no room for small steps of the average
        assert {parameter.dtype for name, parameter in trainer.model.named_parameters() if name in trainable} == {
            torch.bfloat16
        }
        assert {average.dtype for average in trainer.teacher._masters.values()} == {torch.float32}
    trained = logps(trainer.model)
    assert (trained - first).abs().max() > 0.01
    trainer.save_model(str(tmp_path / "saved"))
    assert not (tmp_path / "saved" / "model.safetensors").exists()
    quantised = AutoModelForCausalLM.from_pretrained(base, quantization_config=four_bit(), dtype=torch.float32)
    loaded = PeftModel.from_pretrained(quantised, tmp_path / "saved")
    keep_unpacked(loaded)
    for name, parameter in loaded.named_parameters():
        if "lora" in name:  # in which PEFT does not load it, but in which it was trained
            parameter.data = parameter.data.bfloat16()
    torch.testing.assert_close(logps(loaded), trained, atol=1e-5, rtol=0)


def test_a_resumed_run_goes_on_with_its_average(tmp_path, base):
    """But for rounding: PEFT loads an adapter in float32 that was trained in bfloat16."""
    settings = {"teacher": "ema", "teacher_ema_rate": 0.3, "save_strategy": "steps", "save_steps": 1, "max_steps": 3}
    whole = qlora_trainer(tmp_path / "out", base, **settings)
    whole.train()
    resumed = qlora_trainer(tmp_path / "out", base, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    for name, average in whole.teacher._masters.items():
        torch.testing.assert_close(resumed.teacher._masters[name], average, atol=1e-3, rtol=0, msg=name)


def test_it_is_merged_into_the_weights_that_were_quantised(tmp_path, base):
    trainer = qlora_trainer(tmp_path / "out", base)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    merge_adapter(tmp_path / "saved", tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    expected = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "saved")
    torch.testing.assert_close(logps(merged), logps(expected), atol=1e-4, rtol=0)
