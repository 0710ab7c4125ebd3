"""Two steps of each teacher and each objective in bfloat16, and what the second one took.

Of a model of a real one's shape on a GPU, or of a tiny one on a CPU: nothing but sizes and device differ.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from agent_harness import CALL, agent_trainer
from datasets import Dataset
from peft import LoraConfig
from tiny import tiny_tokenizer
from trainer_harness import HINTS, LORA, judge_with_hints, make_trainer
from transformers import Qwen3Config, Qwen3ForCausalLM

from trl_openclaw import CombineTrainer, OPDTrainer


@dataclass(frozen=True)
class Scale:
    """Where the steps run, and how large they are.

    Args:
        device: `"cpu"` or `"cuda"`.
        model: Settings of the model's config.
        prompt: Characters of a prompt, which are tokens.
        completion: Tokens of a completion.
    """

    device: str
    model: dict[str, int]
    prompt: int
    completion: int


TINY = Scale(
    "cpu",
    {
        "vocab_size": 259,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    },
    prompt=16,
    completion=6,
)

REAL = Scale(
    "cuda",
    {
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    prompt=256,
    completion=32,
)
"""A model of the shape of Qwen3-0.6B."""

PRECISIONS = {"bfloat16": torch.bfloat16, "autocast": torch.float32}
"""What the weights are kept in. `bf16` is on either way, which for float32 means autocast alone."""


@dataclass(frozen=True)
class Case:
    """What is trained.

    Args:
        config: Settings of the trainer.
        trainer_class: `OPDTrainer` or `CombineTrainer`.
        lora: Whether an adapter is trained.
        other_teacher: Whether the teacher is another model.
        calls_tool: Whether each completion is a tool call, its answer and a last turn. What the policy samples is then
            scripted, since random weights call no tools.
    """

    config: dict[str, Any] = field(default_factory=dict)
    trainer_class: type[OPDTrainer] = OPDTrainer
    lora: bool = False
    other_teacher: bool = False
    calls_tool: bool = False


AVERAGE = {"teacher": "ema", "teacher_ema_rate": 0.5}

TEACHERS = {
    "frozen, adapter off": Case(lora=True),
    "live": Case({"teacher": "live"}),
    "ema": Case(AVERAGE),
    "ema of an adapter": Case(AVERAGE, lora=True),
    "another model": Case(other_teacher=True),
}

OBJECTIVES = {
    "sampled_token, frozen": Case(),
    "topk_surrogate": Case({"opd_loss": "topk_surrogate"}),
    "topk_reverse_kl": Case({"opd_loss": "topk_reverse_kl"}),
    "full_divergence": Case({"opd_loss": "full_divergence"}),
    "G-OPD": Case({"reward_scale": 1.5}),
    "combine, 3 hints": Case({"hint_selection": "sequence"}, CombineTrainer),
    "turns with a tool": Case({"hint_placement": "turn"}, CombineTrainer, calls_tool=True),
}
"""Each with the frozen teacher of full training."""

CASES = {
    **{(name, "bfloat16"): case for name, case in {**OBJECTIVES, **TEACHERS}.items()},
    **{(name, "autocast"): case for name, case in OBJECTIVES.items()},
    ("ema", "autocast"): TEACHERS["ema"],
}
"""By name and precision. Of the teachers only an average has anything to do with the precision of the weights."""


def model_of(scale: Scale, dtype: torch.dtype, seed: int = 0) -> Qwen3ForCausalLM:
    """A model with random weights whose logits are a nat or two apart at any size."""
    torch.manual_seed(seed)
    spread = 1 / scale.model["hidden_size"] ** 0.5
    config = Qwen3Config(
        **scale.model,
        initializer_range=spread,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=256,
        pad_token_id=257,
        bos_token_id=None,
    )
    with torch.device(scale.device):
        return Qwen3ForCausalLM(config).to(dtype).eval()


def trainer_of(case: Case, precision: str, scale: Scale, folder: Path) -> OPDTrainer:
    """The trainer of a case. Prompts come in pairs, so that they are shared; each row has three hints."""
    dtype = PRECISIONS[precision]
    prompts = [{"prompt": [{"role": "user", "content": chr(97 + i) * scale.prompt}]} for i in range(8)]
    given: dict[str, Any] = {
        "model": model_of(scale, dtype),
        "judge": judge_with_hints(*HINTS),
        "config": {
            "max_steps": 2,
            "learning_rate": 0.01,  # a bfloat16 weight of 1, as norms have, takes no smaller steps
            "bf16": True,
            "use_cpu": scale.device == "cpu",
            "temperature": 0.7,
            **case.config,
        },
    }
    if case.lora:
        given["peft_config"] = LoraConfig(**LORA)
    if case.other_teacher:
        given |= {"teacher_model": model_of(scale, dtype, seed=1), "teacher_processing_class": tiny_tokenizer()}
    if case.calls_tool:
        texts = [CALL, "4<|im_end|>"] * 2
        given["train_dataset"] = Dataset.from_list(prompts)
        return agent_trainer(folder, case.trainer_class, texts, **given)
    given["config"] |= {"max_completion_length": scale.completion}
    return make_trainer(folder, case.trainer_class, data=Dataset.from_list(prompts), **given)


def measured(name: str, precision: str, trainer: OPDTrainer) -> dict[str, Any]:
    """Train, and tell what the second step took: the first one also runs the self-test, and what is compiled once."""
    if trainer.accelerator.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    trainer.train()
    *_, last = (entry for entry in trainer.state.log_history if "grad_norm" in entry)
    return {
        "case": name,
        "device": trainer.accelerator.device.type,
        "precision": precision,
        "step_seconds": last["step_seconds/total"],
        "peak_gib": last["memory/peak_gib"],
        "loss": last["loss"],
        "gap": last["opd/gap_abs_mean"],
    }


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The lines of a table of what `measured` found, with memory as torch allocated it, on a CPU as it was resident."""
    width = max(len(row["case"]) for row in rows)
    return [
        f"{'case':{width}}  precision  step s  peak GiB     loss     gap",
        *(
            f"{row['case']:{width}}  {row['precision']:9}  {row['step_seconds']:6.2f}  {row['peak_gib']:8.2f}  "
            f"{row['loss']:7.3f}  {row['gap']:6.3f}"
            for row in rows
        ),
    ]
