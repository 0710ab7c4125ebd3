"""In place of TRL's `VLLMGeneration`: an engine that says what it is told, with the policy's log-probs or others."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trl.trainer import grpo_trainer

Say = Callable[[Sequence[int]], list[int]]


class ScriptedEngine:
    """Takes the place of TRL's `VLLMGeneration`; one of its making is `last`.

    Args:
        model: The policy, whose log-probs its own are.
        settings: What TRL tells it beside.
    """

    last: "ScriptedEngine"
    say: Say
    """From the ids of a prompt to those of a completion."""
    shift = 0.0
    """Nats by which its log-probs are below the policy's."""
    lent: Any = None
    """Taken for its `vllm.LLM`."""
    unknown = False
    """Whether it has no log-prob of a completion's first token."""

    def __init__(self, model, accelerator, processing_class, **settings):
        self.model, self.settings = model, settings
        window = settings["max_model_length"] or model.config.max_position_embeddings
        engine = SimpleNamespace(model_config=SimpleNamespace(max_model_len=window))
        self.llm = self.lent or SimpleNamespace(llm_engine=engine)
        info = {"model_config": {"logprobs_mode": "processed_logprobs"}}
        self.vllm_client = SimpleNamespace(get_server_info=lambda: info)
        self.syncs = 0
        self.prompts: list[list[int]] = []
        type(self).last = self

    def sync_weights(self) -> None:
        """Count."""
        self.syncs += 1

    def generate(self, prompts, images, num_generations, profiler=None):
        """As `VLLMGeneration.generate` does, in lists: ids, and for each token a list with its log-prob."""
        self.prompts += prompts
        completions = [type(self).say(ids) for ids in prompts]
        logprobs = [self._logprobs(*row) for row in zip(prompts, completions, strict=True)]
        return prompts, completions, logprobs, None

    @torch.no_grad()
    def _logprobs(self, prompt: list[int], completion: list[int]) -> list[list[float | None]]:
        if not completion:
            return []
        logits = self.model(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
        found = logits.float().log_softmax(-1)[range(len(completion)), completion] - self.shift
        return [[None if self.unknown and not at else logp] for at, logp in enumerate(found.tolist())]


@pytest.fixture
def scripted_engine(monkeypatch) -> Callable[..., type[ScriptedEngine]]:
    """Puts an engine in TRL's place, given what it says and more of its attributes."""

    def put(say: Say, **attributes) -> type[ScriptedEngine]:
        engine = type("Engine", (ScriptedEngine,), {"say": staticmethod(say), **attributes})
        monkeypatch.setattr(grpo_trainer, "VLLMGeneration", engine)
        return engine

    return put


def replayed(batches: list[dict], num_generations: int) -> Say:
    """Says again what was sampled in some generation batches, prompt by prompt and in the same order."""
    said: dict[tuple[int, ...], list[list[int]]] = {}
    for batch in batches:
        for row in range(len(batch["prompt_ids"])):
            prompt = tuple(batch["prompt_ids"][row][batch["prompt_mask"][row].bool()].tolist())
            ids = batch["completion_ids"][row][batch["completion_mask"][row].bool()].tolist()
            said.setdefault(prompt, []).append(ids)
    return lambda prompt: said[tuple(prompt)].pop(0)
