"""What a model in this process says of a recorded turn, next to what the server said."""

from typing import Any

import torch

from trl_openclaw.live.records import NewTurn

TOLERANCE = 2e-3
"""Nats, in float32."""


@torch.no_grad()
def assert_own_logprobs(model: Any, turn: NewTurn) -> None:
    """What was recorded is what a model in this process says of the same ids, at the temperature that is recorded."""
    prompt, ids = list(turn.prompt_ids), list(turn.completion_ids)
    logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1] / turn.logprobs_temperature
    own = logits.log_softmax(-1).gather(1, torch.tensor(ids).unsqueeze(1)).squeeze(1)
    assert (own - torch.tensor(turn.logprobs)).abs().max() < TOLERANCE
