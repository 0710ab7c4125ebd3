"""Run by `test_adapters.py`: an adapter and a head beside it are trained and saved, and what they compute is told."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from launch_ranks import take_leave
from peft import LoraConfig
from trainer_harness import always_replies, judge_that, make_trainer, rollout_by_prompt
from two_ranks import RANK, WITH_DEEPSPEED, WITH_FSDP, prepare_engine

IDS = torch.arange(40).view(2, 20) * 6


def main(folder: str, base: str, teacher: str) -> None:
    trainer = make_trainer(
        Path(folder, "out"),
        model=base,
        judge=judge_that(),
        next_state=always_replies,
        rollout_func=rollout_by_prompt,
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"]),
        config={
            "max_steps": 2,
            "learning_rate": 0.02,
            "per_device_train_batch_size": 2,
            "teacher": teacher,
            **({"use_cpu": False, "ddp_backend": "gloo"} if WITH_DEEPSPEED or WITH_FSDP else {}),
        },
    )
    trainer.train()
    trainer.model_wrapped.eval()
    with torch.no_grad():
        logps = trainer.model_wrapped(input_ids=IDS, labels=IDS, fused_lm_head=True).log_probs
    trainer.save_model(str(Path(folder, "saved")))
    Path(folder, f"rank{RANK}.json").write_text(json.dumps(logps.tolist()))


if __name__ == "__main__":
    prepare_engine()
    main(*sys.argv[1:])
    take_leave()
