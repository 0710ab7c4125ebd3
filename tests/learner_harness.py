"""Recorded turns of a tiny model, and learners that train on them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from tiny import tiny_llama, tiny_tokenizer

from trl_openclaw.live.canonical import turn_hashes
from trl_openclaw.live.learner import LiveConfig, LiveTrainer
from trl_openclaw.live.records import NewTurn
from trl_openclaw.live.store import Store
from trl_openclaw.live.store_turns import is_held_out
from trl_openclaw.types import Verdict, Vote

USER = "default"
MODEL = "tiny"
END = 256
LORA = {"r": 4, "target_modules": ["q_proj", "v_proj", "gate_proj"]}
SETTINGS = {
    "turns_per_step": 4,
    "per_device_train_batch_size": 2,
    "learning_rate": 1e-2,
    "bf16": False,
    "use_cpu": True,
    "gradient_checkpointing": False,
    "report_to": "none",
    "disable_tqdm": True,
    "engine_model": MODEL,
    "poll_seconds": 0.02,
    "check_reply_tokens": 6,
    "check_probes": None,
    "check_probes_total": None,
    "check_held_out": None,
    "check_replays": None,
    "check_length": None,
    "check_entropy": None,
    "check_repetition": None,
}
"""All checks off: tests switch on what they are about."""


def open_store(folder: Path) -> Store:
    """The store of a live folder."""
    return Store(folder / "store.db")


def reply_of(model: Any, prompt_ids: list[int], seed: int, tokens: int = 6) -> tuple[list[int], list[float]]:
    """A sampled reply that ends, and its log-probs under the model."""
    generator = torch.Generator().manual_seed(seed)
    length = 2 + seed % (tokens - 1)
    ids = torch.randint(32, 127, (length,), generator=generator).tolist()
    ids.append(END)
    return ids, logps_of(model, prompt_ids, ids)


@torch.no_grad()
def logps_of(model: Any, prompt_ids: list[int], ids: list[int], temperature: float = 1.0) -> list[float]:
    """Log-probs of a reply under a model."""
    logits = model(torch.tensor([[*prompt_ids, *ids]])).logits[0, len(prompt_ids) - 1 : -1]
    return (logits / temperature).log_softmax(-1).gather(1, torch.tensor(ids).unsqueeze(1)).squeeze(1).tolist()


def turn_id_of(number: int, held_out: bool = False) -> str:
    """An id that is held out, or is not."""
    ids = (f"chatcmpl-{number:08d}{i:024x}" for i in range(1000))
    return next(one for one in ids if is_held_out(one) == held_out)


def make_turn(number: int, model: Any, *, held_out: bool = False, **fields: Any) -> NewTurn:
    """A turn as the gateway would record it."""
    messages = fields.pop("messages", [{"role": "user", "content": "hi" * (number % 4 + 1) + str(number)}])
    tools = fields.get("tools")
    tokenizer = tiny_tokenizer()
    prompt_ids = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, return_dict=True)
    prompt = fields.pop("prompt_ids", prompt_ids["input_ids"])
    ids, logprobs = reply_of(model, prompt, number)
    turn_id = turn_id_of(number, held_out)
    values = {
        "turn_id": turn_id,
        "user": USER,
        "session_id": turn_id,
        "parent": None,
        "kind": "main",
        "side_reason": None,
        "messages": messages,
        "tools": None,
        "reply": {"role": "assistant", "content": tokenizer.decode(ids[:-1])},
        "finish_reason": "stop",
        "prompt_ids": tuple(prompt),
        "completion_ids": tuple(ids),
        "logprobs": tuple(logprobs),
        "sampling": {"temperature": 1.0},
        "model": MODEL,
        "model_version": "base",
        **fields,
    }
    return NewTurn(**values)


def record(
    store: Store,
    numbers: Any,
    *,
    model: Any = None,
    score: int | None = -1,
    hints: tuple[str, ...] = ("Be brief.",),
    answer: str = "Shorter, please.",
    recorded_model: str = MODEL,
    **fields: Any,
) -> list[str]:
    """Record turns with a next state and a verdict; returns their ids."""
    model = tiny_llama() if model is None else model
    found = []
    for number in numbers:
        turn = make_turn(number, model, **fields)
        turn = replace(turn, model=recorded_model)
        store.record_turn(turn, turn_hashes(turn.messages, turn.reply))
        store.add_next_state(turn.turn_id, [{"role": "user", "content": answer}])
        votes = [Vote(score=score, hint=hint) for hint in hints] or [Vote(score=score)]
        store.add_verdict(turn.turn_id, Verdict.from_votes(votes))
        found.append(turn.turn_id)
    return found


def make_learner(folder: Path, model: Any = None, **config: Any) -> LiveTrainer:
    """A learner on a tiny model, with `config` on top of `SETTINGS`."""
    lora = {**LORA, **config.pop("lora", {})}
    return LiveTrainer(
        model=tiny_llama() if model is None else model,
        args=LiveConfig(live_dir=str(folder), **{**SETTINGS, **config}),
        processing_class=tiny_tokenizer(),
        peft_config=LoraConfig(**lora),
    )


def states(store: Store, turn_ids: list[str]) -> list[str]:
    """What has become of turns."""
    return [store.show(USER, turn_id).state for turn_id in turn_ids]
