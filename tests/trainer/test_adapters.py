"""Adapters of many kinds: what the frozen teacher is without them, and that what is saved is what was trained."""

import peft
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from tiny import tiny_llama
from trainer_harness import LORA, make_trainer, moved, snapshot

TARGETS = LORA["target_modules"]
KINDS = {
    "lora": LoraConfig(**LORA),
    "rslora and dora": LoraConfig(**LORA, use_rslora=True, use_dora=True),
    "orthogonal": LoraConfig(**LORA, init_lora_weights="orthogonal"),
    "pissa": LoraConfig(**LORA, init_lora_weights="pissa"),
    "olora": LoraConfig(**LORA, init_lora_weights="olora"),
    "random": LoraConfig(**LORA, init_lora_weights=False),
    "a head": LoraConfig(**LORA, modules_to_save=["lm_head"]),
    "head and embeddings": LoraConfig(**LORA, modules_to_save=["lm_head", "embed_tokens"]),
    "norms": LoraConfig(**LORA, modules_to_save=["norm", "input_layernorm"]),
    "tokens": LoraConfig(**LORA, trainable_token_indices=[70, 71, 256]),
    "embeddings": LoraConfig(r=4, target_modules=["embed_tokens", "q_proj"]),
    "parameters": LoraConfig(r=4, target_modules=[], target_parameters=["q_proj.weight"]),
    "ia3": peft.IA3Config(target_modules=TARGETS, feedforward_modules=["gate_proj"]),
    "loha": peft.LoHaConfig(r=4, target_modules=TARGETS),
    "fourierft": peft.FourierFTConfig(n_frequency=50, target_modules=TARGETS),
}
"""PiSSA and OLoRA move a part of the base weights into the adapter; "random" and FourierFT do not begin at nothing."""

TIED = ["lora", "a head", "head and embeddings"]
IDS = torch.randint(0, 256, (2, 20), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def logps(model) -> torch.Tensor:
    """As anybody reads them, from the logits."""
    scores = model(input_ids=IDS).logits.log_softmax(-1)
    return scores[:, :-1].gather(-1, IDS[:, 1:, None]).squeeze(-1)


@torch.no_grad()
def fused(model) -> torch.Tensor:
    """As TRL trains them."""
    return model(input_ids=IDS, labels=IDS, fused_lm_head=True).log_probs


@pytest.mark.parametrize(("kind", "tied"), [*((kind, False) for kind in KINDS), *((kind, True) for kind in TIED)])
def test_it_learns_its_teacher_does_not_and_what_is_saved_is_it(tmp_path, kind, tied):
    settings = {"tie_word_embeddings": tied}
    trainer = make_trainer(
        tmp_path, model=tiny_llama(**settings), peft_config=KINDS[kind], config={"max_steps": 2, "learning_rate": 0.02}
    )
    before, first = snapshot(trainer.model), logps(trainer.model)
    trainable = {name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad}
    trainer.train()
    assert {name for name, hit in moved(trainer.model, before).items() if hit} == trainable
    model = trainer.model.eval()
    trained = logps(model)
    assert (trained - first).abs().max() > 0.01
    torch.testing.assert_close(fused(model), trained, atol=1e-5, rtol=0)
    with trainer.teacher.weights():
        torch.testing.assert_close(fused(model), first, atol=1e-5, rtol=0)
        torch.testing.assert_close(logps(model), first, atol=1e-5, rtol=0)
    torch.testing.assert_close(logps(model), trained, atol=0, rtol=0)
    trainer.save_model(str(tmp_path / "saved"))
    saved = {path.name for path in (tmp_path / "saved").iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json"} <= saved
    assert not {"model.safetensors", "ref"} & saved
    names = load_file(tmp_path / "saved" / "adapter_model.safetensors")
    assert not [name for name in names if "ref" in name.split(".")]
    loaded = PeftModel.from_pretrained(tiny_llama(**settings), tmp_path / "saved").eval()
    torch.testing.assert_close(logps(loaded), trained, atol=1e-5, rtol=0)


def test_an_adapter_that_was_trained_before_is_saved_without_its_copy(tmp_path):
    trainer = make_trainer(tmp_path, model=get_peft_model(tiny_llama(), LoraConfig(**LORA, init_lora_weights=False)))
    trainer.save_model(str(tmp_path / "saved"))
    assert not (tmp_path / "saved" / "ref").exists()
    names = load_file(tmp_path / "saved" / "adapter_model.safetensors")
    assert len(names) == sum(parameter.requires_grad for parameter in trainer.model.parameters())
    assert "ref" in trainer.model.peft_config


def test_tokens_of_a_head_that_is_the_embeddings_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"trainable_token_indices.*modules_to_save"):
        make_trainer(tmp_path, model=tiny_llama(tie_word_embeddings=True), peft_config=KINDS["tokens"])


def test_a_beginning_that_cannot_be_repeated_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"'pissa_niter_4'.*Use `init_lora_weights='pissa'`"):
        make_trainer(tmp_path, peft_config=LoraConfig(**LORA, init_lora_weights="pissa_niter_4"))


def test_a_frozen_teacher_of_kasa_is_refused_since_it_cuts_the_base_weights(tmp_path):
    with pytest.raises(ValueError, match="KaSA"):
        make_trainer(tmp_path, peft_config=LoraConfig(**LORA, kasa_config=peft.KasaConfig()))


def test_an_adapter_that_is_spread_already_is_not_copied(tmp_path):
    model = get_peft_model(tiny_llama(), LoraConfig(**LORA))
    next(parameter for parameter in model.parameters() if parameter.requires_grad).ds_tensor = torch.zeros(0)
    with pytest.raises(ValueError, match="spread over processes already"):
        make_trainer(tmp_path, model=model)
