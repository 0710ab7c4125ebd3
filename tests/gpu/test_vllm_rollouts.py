"""Rollouts by a real vLLM engine on a GPU, which is sent the weights before each batch."""

import importlib.util
import math

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from trainer_harness import SETTINGS, logged

from trl_openclaw import ColocatedJudge, CombineConfig, CombineTrainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM: the extra `vllm`"),
]

ROWS = [
    {"prompt": [{"role": "user", "content": f"Name {n} fruits."}], "privileged_context": "Be brief.", "next_state": "?"}
    for n in ("two", "three", "four", "five")
]
COLOCATED = {
    "use_vllm": True,
    "vllm_mode": "colocate",
    "vllm_gpu_memory_utilization": 0.2,
    "vllm_max_model_length": 512,
    "max_completion_length": 64,
    "max_steps": 3,
    "bf16": True,
    "use_cpu": False,
    "hint_source": "privileged_context",
    "judge_failure_limit": 1.0,
    "judge_failure_patience": 99,
}


@pytest.mark.parametrize("adapter", [False, True], ids=["all weights", "an adapter"])
def test_the_engine_follows_the_policy(tmp_path, smollm2, capsys, adapter):
    settings = {**SETTINGS, **COLOCATED, "learning_rate": 1e-3 if adapter else 1e-4}
    trainer = CombineTrainer(
        str(smollm2),
        args=CombineConfig(str(tmp_path), **settings),
        train_dataset=Dataset.from_list(ROWS),
        judge=ColocatedJudge(num_votes=1, max_tokens=64),
        peft_config=LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM") if adapter else None,
    )
    trainer.train()
    printed = capsys.readouterr().out
    assert "(vLLM, in this process)" in printed
    assert "judges: the policy as it is now, by the engine that generates" in printed
    gaps = logged(trainer, "sampling/sampling_logp_difference/mean")
    with capsys.disabled():
        print(f"\nsampling_logp_difference/mean: {gaps}, seconds of a step: {logged(trainer, 'step_seconds/total')}")
    assert len(gaps) == 3
    assert max(gaps) < 0.1  # bfloat16; the policy moves by more than that
    assert all(math.isfinite(loss) and loss for loss in logged(trainer, "loss"))
    assert logged(trainer, "hint/accepted") == [1.0] * 3
