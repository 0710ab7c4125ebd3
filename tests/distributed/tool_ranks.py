"""Run by `test_tool_loop.py` in two processes: one calls tools twice, the other never; sampling is a collective."""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from agent_harness import CALL, agent_trainer
from launch_ranks import take_leave
from trl import GRPOTrainer

RANK = int(os.environ.get("RANK", "0"))
TURNS = [CALL, CALL, "4<|im_end|>"] if RANK == 0 else ["4<|im_end|>"]


def main(folder: str) -> None:
    trainer = agent_trainer(folder, config={"max_steps": 2, "seed": 3, "feedback_timeout": 60.0}, rows=8)
    del trainer._generate_single_turn  # back to the class's own, which asks who samples along
    rows, turns = [], iter(TURNS * 2)

    def sample(self, prompt_ids, *args, **kwargs):
        self.accelerator.gather(torch.tensor([RANK]))  # as a sharded model's forwards would
        rows.append(len(prompt_ids))
        is_filler = len(prompt_ids) == 1
        text = "<|im_end|>" if is_filler else next(turns)
        return [self.tokenizer(text)["input_ids"] for _ in prompt_ids], None

    GRPOTrainer._generate_single_turn = sample
    trainer.train()
    weights = sum(parameter.double().abs().sum().item() for parameter in trainer.model.parameters())
    log = [entry for entry in trainer.state.log_history if "turns/mean" in entry]
    Path(folder, f"rank{RANK}.json").write_text(json.dumps({"rows": rows, "weights": weights, "log": log}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
    take_leave()
