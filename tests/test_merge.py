"""`trl-openclaw merge`: what is written computes what base model and adapter did, without PEFT, or is not written."""

import json
import shlex

import peft
import pytest
import torch
from huggingface_hub import ModelCard
from peft import LoraConfig, get_peft_model
from tiny import tiny_llama, tiny_tokenizer
from trainer_harness import LORA, make_trainer
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_openclaw import cli, merge
from trl_openclaw.merge import NOTE, merge_adapter

ADAPTERS = {
    "lora": LoraConfig(**LORA),
    "dora": LoraConfig(**LORA, use_dora=True),
    "pissa": LoraConfig(**LORA, init_lora_weights="pissa"),
    "a head": LoraConfig(**LORA, modules_to_save=["lm_head"]),
    "head and embeddings": LoraConfig(**LORA, modules_to_save=["lm_head", "embed_tokens"]),
    "tokens": LoraConfig(**LORA, trainable_token_indices=[5, 7]),
    "parameters": LoraConfig(r=4, target_modules=[], target_parameters=["q_proj.weight"]),
    "ia3": peft.IA3Config(target_modules=LORA["target_modules"], feedforward_modules=[]),
}
IDS = torch.arange(40).view(2, 20) * 6


def base_model(tmp_path, **overrides) -> str:
    folder = tmp_path / "base"
    tiny_llama(**overrides).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def adapter_of(base: str, config, folder):
    """A saved adapter as training might have left it, and what the model with it computes."""
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).eval()
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape) * 0.05)
    model.save_pretrained(folder)
    return logps(model)


@torch.no_grad()
def logps(model) -> torch.Tensor:
    return model(input_ids=IDS).logits.log_softmax(-1)


@pytest.mark.parametrize(("kind", "tied"), [*((kind, False) for kind in ADAPTERS), ("lora", True), ("a head", True)])
def test_the_merged_model_computes_the_same_without_peft(tmp_path, kind, tied):
    base = base_model(tmp_path, tie_word_embeddings=tied)
    expected = adapter_of(base, ADAPTERS[kind], tmp_path / "adapter")
    assert (expected - logps(AutoModelForCausalLM.from_pretrained(base))).abs().max() > 0.01
    gap = merge_adapter(tmp_path / "adapter", tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert type(merged) is type(tiny_llama())
    assert gap < 1e-4
    torch.testing.assert_close(logps(merged), expected, atol=1e-4, rtol=0)
    assert not list((tmp_path / "merged").glob("adapter*"))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "merged")
    assert tokenizer.chat_template == tiny_tokenizer().chat_template
    assert tokenizer("hi").input_ids == tiny_tokenizer()("hi").input_ids


def test_a_trained_adapter_and_its_card_by_the_command(tmp_path, monkeypatch, capsys):
    """In half precision: the base model's dtype is the merged one's, unless another is asked for."""
    monkeypatch.chdir(tmp_path)
    command = "trl-openclaw merge runs/opd runs/opd-merged"
    base = base_model(tmp_path)
    AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).save_pretrained(base)
    trainer = make_trainer("runs/opd", model=base, peft_config=LoraConfig(**LORA), config={"max_steps": 2})
    trainer.train()
    trainer.save_model()
    trainer.create_model_card(tags=["lora", "peft", "base_model:adapter:x"])
    _, *given = shlex.split(command)
    assert cli.main(given) == 0
    assert "Merged model saved to runs/opd-merged" in capsys.readouterr().out
    assert AutoModelForCausalLM.from_pretrained("runs/opd-merged", dtype="auto").dtype == torch.bfloat16
    assert cli.main(["merge", "runs/opd", "precise", "--dtype", "float32"]) == 0
    assert AutoModelForCausalLM.from_pretrained("precise", dtype="auto").dtype == torch.float32
    before, card = (ModelCard.load(f"{folder}/README.md") for folder in ("runs/opd", "runs/opd-merged"))
    assert {"lora", "peft", "base_model:adapter:x"} <= set(before.data.tags)
    assert set(card.data.tags) == set(before.data.tags) - {"lora", "peft", "base_model:adapter:x"}
    assert card.data.library_name == "transformers"
    assert NOTE in card.text
    assert NOTE not in before.text
    assert 'model="runs/opd-merged"' in card.text


def test_without_a_card_there_is_a_short_one(tmp_path):
    adapter_of(base_model(tmp_path), ADAPTERS["lora"], tmp_path / "adapter")
    (tmp_path / "adapter" / "README.md").unlink()
    merge_adapter(tmp_path / "adapter", tmp_path / "merged")
    card = ModelCard.load(tmp_path / "merged" / "README.md")
    assert "`base`, trained. " + NOTE in card.text
    assert card.data.library_name == "transformers"


def test_another_base_model_by_name(tmp_path):
    base = base_model(tmp_path)
    adapter_of(base, ADAPTERS["lora"], tmp_path / "adapter")
    config = tmp_path / "adapter" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": None}))
    with pytest.raises(ValueError, match=r"does not name its base model.*--base"):
        merge_adapter(tmp_path / "adapter", tmp_path / "merged")
    merge_adapter(tmp_path / "adapter", tmp_path / "merged", base=base)


@pytest.mark.parametrize(("base", "asked"), [(None, "named at v1"), ("other", "other at None")])
def test_the_revision_is_that_of_the_model_that_the_adapter_names(tmp_path, monkeypatch, base, asked):
    class Hub:
        @staticmethod
        def from_pretrained(name, revision, **_):
            raise OSError(f"{name} at {revision}")

    LoraConfig(**LORA, base_model_name_or_path="named", revision="v1").save_pretrained(tmp_path / "adapter")
    monkeypatch.setattr(merge, "AutoConfig", Hub)
    with pytest.raises(OSError, match=f"^{asked}$"):
        merge_adapter(tmp_path / "adapter", tmp_path / "merged", base=base)


class TestRefused:
    def refuse(self, tmp_path, said, config=ADAPTERS["lora"], **overrides):
        adapter_of(base_model(tmp_path, **overrides), config, tmp_path / "adapter")
        with pytest.raises(ValueError, match=said):
            merge_adapter(tmp_path / "adapter", tmp_path / "merged")
        assert not (tmp_path / "merged").exists()

    def test_what_would_compute_something_else(self, tmp_path):
        """An adapter of embeddings that are the head's weights, too, but not the head's adapter."""
        config = LoraConfig(r=4, target_modules=["embed_tokens"])
        self.refuse(tmp_path, "computes something else", config, tie_word_embeddings=True)

    def test_adapters_that_are_no_change_of_weights(self, tmp_path):
        self.refuse(tmp_path, "PROMPT_TUNING", peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))

    def test_quantised_weights(self, tmp_path):
        base = base_model(tmp_path)
        adapter_of(base, ADAPTERS["lora"], tmp_path / "adapter")
        config = tmp_path / "base" / "config.json"
        quantised = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
        config.write_text(json.dumps(json.loads(config.read_text()) | quantised))
        with pytest.raises(ValueError, match=r"quantised.*--base"):
            merge_adapter(tmp_path / "adapter", tmp_path / "merged")

    def test_a_base_model_of_another_size(self, tmp_path):
        adapter_of(base_model(tmp_path), ADAPTERS["lora"], tmp_path / "adapter")
        other = base_model(tmp_path / "other", intermediate_size=48)
        with pytest.raises(ValueError, match=r"^`.*adapter` does not fit `.*other/base`.* with `--base`\.$"):
            merge_adapter(tmp_path / "adapter", tmp_path / "merged", base=other)
        assert not (tmp_path / "merged").exists()

    def test_a_truncated_adapter(self, tmp_path):
        adapter_of(base_model(tmp_path), ADAPTERS["lora"], tmp_path / "adapter")
        file = tmp_path / "adapter" / "adapter_model.safetensors"
        file.write_bytes(file.read_bytes()[:-100])
        with pytest.raises(ValueError, match=r"^The weights of `.*adapter` are damaged: "):
            merge_adapter(tmp_path / "adapter", tmp_path / "merged")

    def test_a_folder_that_exists(self, tmp_path):
        (tmp_path / "merged").mkdir()
        (tmp_path / "merged" / "mine").write_text("")
        with pytest.raises(ValueError, match="exists"):
            merge_adapter(tmp_path / "adapter", tmp_path / "merged")
        assert (tmp_path / "merged" / "mine").exists()

    def test_no_adapter_at_all_is_one_line(self, tmp_path, capsys):
        with pytest.raises(SystemExit) as ended:
            cli.main(["merge", base_model(tmp_path), str(tmp_path / "merged")])
        assert ended.value.code == 2
        *_, said = capsys.readouterr().err.strip().split("\n")
        assert said.startswith("trl-openclaw merge: error: ")
        assert "holds no adapter" in said
