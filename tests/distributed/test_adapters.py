"""What is saved of an adapter in two processes: that alone, and the model that was trained, with PEFT and merged."""

import json
from pathlib import Path

import pytest
import torch
from launch_ranks import run_script
from peft import PeftModel
from safetensors.torch import load_file
from tiny import tiny_llama, tiny_tokenizer
from transformers import AutoModelForCausalLM

from trl_openclaw.merge import merge_adapter

SCRIPT = Path(__file__).with_name("adapter_ranks.py")
IDS = torch.arange(40).view(2, 20) * 6


@torch.no_grad()
def logps(model) -> torch.Tensor:
    scores = model(input_ids=IDS).logits.log_softmax(-1)
    return scores[:, :-1].gather(-1, IDS[:, 1:, None]).squeeze(-1)


@pytest.mark.parametrize(
    ("engine", "teacher"),
    [
        pytest.param("multi_gpu", "ema", marks=pytest.mark.slow),
        pytest.param("zero2", "frozen", marks=pytest.mark.slow),
        ("zero3", "ema"),
        ("fsdp2", "ema"),
        pytest.param("zero3", "frozen", marks=pytest.mark.slow),
        pytest.param("fsdp2", "frozen", marks=pytest.mark.slow),
    ],
)
def test_the_adapter_alone_is_saved_and_computes_what_was_trained(tmp_path, engine, teacher):
    base = tmp_path / "base"
    tiny_llama().save_pretrained(base)
    tiny_tokenizer().save_pretrained(base)
    status = run_script(SCRIPT, [str(tmp_path), str(base), teacher], tmp_path, 2, engine)
    assert status == 0, (tmp_path / "stderr0").read_text()[-3000:]
    saved = {path.name for path in (tmp_path / "saved").iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json"} <= saved
    assert saved <= {
        *("adapter_model.safetensors", "adapter_config.json", "README.md", "training_args.bin"),
        *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
    }
    names = load_file(tmp_path / "saved" / "adapter_model.safetensors")
    assert len(names) == 2 * 2 * 2 + 1  # two factors of two layers in each of two blocks, and the head
    first, second = (torch.tensor(json.loads((tmp_path / f"rank{rank}.json").read_text())) for rank in range(2))
    torch.testing.assert_close(first, second, atol=1e-6, rtol=0)
    assert (first - logps(tiny_llama())).abs().max() > 0.01
    loaded = PeftModel.from_pretrained(tiny_llama(), tmp_path / "saved").eval()
    torch.testing.assert_close(logps(loaded), first, atol=1e-5, rtol=0)
    merge_adapter(tmp_path / "saved", tmp_path / "merged")
    torch.testing.assert_close(
        logps(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")), first, atol=1e-4, rtol=0
    )
