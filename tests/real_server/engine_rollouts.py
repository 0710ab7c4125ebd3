"""Run by `test_rollouts.py` with the Python that has vLLM: trains on what a real engine samples, by TRL's own code.

On a CPU three things have to be said, or be left out, here and nowhere else:

- The engine must not compile, which takes minutes, and must keep float32, as the trainer does.
- vLLM's kernels for CPUs keep weights in a form of their own, into which no others can be loaded. Without oneDNN it
  takes torch's, which read them where they are.
- A server is sent weights over NCCL, which needs GPUs. So it stays as it began, and one step is trained.
"""

import asyncio
import json
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.append(sys.argv[1])  # what vLLM's environment lacks, TRL for one, is taken from that of the tests

from datasets import Dataset
from trainer_harness import SETTINGS, batches_of
from trl.generation import vllm_client, vllm_generation
from vllm import _custom_ops

from trl_openclaw import (
    ColocatedJudge,
    CombineConfig,
    CombineTrainer,
    LLMJudge,
    LocalChat,
    OPDConfig,
    OPDTrainer,
    ServerTeacher,
)

ROWS = [
    {"prompt": [{"role": "user", "content": f"Name {n} fruits."}], "privileged_context": "Be brief.", "next_state": "?"}
    for n in ("two", "three", "four", "five")
]


def colocated(folder: str, model: str) -> OPDTrainer:
    """An engine in this process, which is sent the weights before each batch, and judges."""
    vllm_generation.LLM = partial(vllm_generation.LLM, enforce_eager=True, dtype="float32")
    _custom_ops._supports_onednn = False
    settings = {"max_steps": 3, "learning_rate": 1e-4, "vllm_mode": "colocate", "vllm_max_model_length": 256}
    feedback = {"hint_source": "privileged_context", "judge_failure_limit": 1.0, "judge_failure_patience": 99}
    args = OPDConfig(folder, **{**SETTINGS, **settings, **feedback, "use_vllm": True})
    judge = ColocatedJudge(num_votes=2, max_tokens=4)
    return OPDTrainer(model, args=args, train_dataset=Dataset.from_list(ROWS), judge=judge)


def on_server(folder: str, model: str, base_url: str) -> CombineTrainer:
    """A server that generates, and judges and teaches as well."""
    vllm_client.VLLMClient.init_communicator = lambda self, device: None
    vllm_client.VLLMClient.update_named_params = lambda self, metadata, params: [None for _ in params]
    settings = {"vllm_mode": "server", "vllm_server_base_url": base_url.removesuffix("/v1")}
    feedback = {"hint_source": "privileged_context", "judge_failure_limit": 1.0, "judge_failure_patience": 99}
    args = CombineConfig(folder, **{**SETTINGS, **settings, **feedback, "use_vllm": True})
    return CombineTrainer(
        model,
        args=args,
        train_dataset=Dataset.from_list(ROWS),
        judge=LLMJudge("smollm2", base_url, num_votes=1, max_tokens=4),
        teacher_model=ServerTeacher("smollm2", base_url),
    )


def answers(trainer: OPDTrainer) -> list[str]:
    """What the policy says of a question, by the engine and by transformers, after training."""
    trainer.vllm_generation.sync_weights()
    chats = trainer.judge.client, LocalChat(trainer.model, trainer.processing_class)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    return [asyncio.run(chat.complete(question, max_tokens=24)).text for chat in chats]


def main(site_packages: str, mode: str, folder: str, *arguments: str) -> None:
    """Train, and write down what was logged and sampled."""
    trainer = {"colocate": colocated, "server": on_server}[mode](folder, *arguments)
    batches = batches_of(trainer)
    trainer.train()
    found = {
        "log": trainer.state.log_history,
        "completion_ids": [batch["completion_ids"].tolist() for batch in batches],
        "answers": answers(trainer) if mode == "colocate" else None,
    }
    Path(folder, "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
