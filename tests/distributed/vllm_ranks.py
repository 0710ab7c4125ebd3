"""Run by `test_vllm_server.py` in two processes: TRL deals out what a server sampled, while one process calls tools."""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from agent_harness import CALL, agent_trainer, tool_tokenizer
from datasets import Dataset
from launch_ranks import take_leave
from trainer_harness import batches_of
from trl.generation import vllm_generation

RANK = int(os.environ["RANK"])
TOOLS = "two calls"
"""What the prompts say whose rows call the tool twice; the others call none."""


class Client:
    """In place of TRL's `VLLMClient`: what it samples tells for which prompt it did."""

    def __init__(self, tokenizer):
        self.tokenizer, self.asked = tokenizer, []

    def get_server_info(self):
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def update_named_params(self, metadata, params):
        assert [name for name, _ in params] == [name for name, _, _ in metadata]

    def reset_prefix_cache(self):
        pass

    def init_communicator(self, device):
        pass

    def generate(self, prompts, features, n, **sampling):
        self.asked.append(len(prompts) * n)
        said = [self.tokenizer(self.answer(ids))["input_ids"] for ids in prompts for _ in range(n)]
        return {"prompt_ids": prompts, "completion_ids": said, "logprobs": [[[-1.0]] * len(ids) for ids in said]}

    def answer(self, ids):
        text = self.tokenizer.decode(ids)
        if TOOLS in text and text.count("<tool_response>") < 2:
            return CALL
        row = text.partition("row ")[2][:1]
        return f"I am {row}.<|im_end|>"


def main(folder: str) -> None:
    """Train two steps, and write down what each row was given."""
    rows = [f"row {row}" + (f", {TOOLS}" if row in "ace" else "") for row in "abcdefgh"]
    client = None

    def connect(**settings):
        nonlocal client
        client = Client(tokenizer)
        return client

    vllm_generation.is_vllm_available = lambda: True
    vllm_generation.VLLMClient = connect
    tokenizer = tool_tokenizer()
    trainer = agent_trainer(
        folder,
        config={"use_vllm": True, "vllm_mode": "server", "max_steps": 2, "seed": 3, "num_generations": 1},
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": row}]} for row in rows]),
    )
    del trainer._generate_single_turn  # back to the class's own
    batches = batches_of(trainer)
    trainer.train()
    found = []
    for batch in batches:
        for at in range(len(batch["prompt_ids"])):
            prompt = trainer.tokenizer.decode(batch["prompt_ids"][at])
            said = trainer.tokenizer.decode(batch["completion_ids"][at])
            calls = said.count("<tool_call>")
            found.append([prompt.partition("row ")[2][:1], said.partition("I am ")[2][:1], calls, TOOLS in prompt])
    asked = client.asked if client is not None else None
    Path(folder, f"rank{RANK}.json").write_text(json.dumps({"rows": found, "asked": asked}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
    take_leave()
