"""How vLLM's answers with `prompt_logprobs` are read, and which rows are asked for together."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..scoring import TeacherRow
from .base import LOGP_TOLERANCE

NO_PROBABILITY = -9999.0
"""What vLLM writes for the logarithm of 0, which JSON has no word for."""


@dataclass(frozen=True)
class Position:
    """What a server says of one sampled token.

    Args:
        logp: Its log-prob in nats; NaN where the server has none, or not as many likely tokens as it should name.
        best: The most likely tokens, the likeliest first.
    """

    logp: float
    best: list[int]

    @classmethod
    def of(cls, entry: dict[str, Any], token: int, topk: int) -> "Position":
        """Read vLLM's entry: of each of some tokens, by id, the log-prob."""
        logps = {int(i): about["logprob"] for i, about in entry.items() if about["logprob"] is not None}
        if (highest := max(logps.values(), default=0.0)) > LOGP_TOLERANCE:
            raise ValueError(
                f"there is a log-prob of {highest:.3g} nats, and none is above 0. Start vLLM with `--logprobs-mode "
                "raw_logprobs`"
            )
        logp = logps.get(token)
        best = sorted(logps, key=lambda i: -logps[i])[:topk]
        if logp is None or logp <= NO_PROBABILITY or len(best) < topk:
            return cls(float("nan"), [0] * topk)
        return cls(float(logp), best)


def groups_of(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Which rows go into one request: neighbours, of `budget` tokens together at most. One of length 0 goes nowhere."""
    groups: list[list[int]] = []
    room = 0
    for i, length in enumerate(lengths):
        if not length:
            continue
        if not groups or length > room:
            groups.append([])
            room = budget
        groups[-1].append(i)
        room -= length
    return groups


def read_answer(answer: Any, rows: Sequence[TeacherRow], topk: int) -> list[list[Position]]:
    """What the server's answer says of the completions of `rows`, position by position.

    Raises:
        ValueError: If it is not an answer to that; other errors of reading it mean the same.
    """
    choices = {choice["index"]: choice.get("prompt_logprobs") for choice in answer["choices"]}
    if choices.keys() != set(range(len(rows))):
        raise ValueError(f"it holds the choices {sorted(choices)}")
    read = []
    for i, row in enumerate(rows):
        if choices[i] is None or len(choices[i]) != row.length:
            got = "none" if choices[i] is None else len(choices[i])
            raise ValueError(f"row {i} has {row.length} tokens, and {got} came back")
        entries = choices[i][len(row.prompt_ids) :]
        read.append(
            [Position.of(entry or {}, token, topk) for entry, token in zip(entries, row.completion_ids, strict=True)]
        )
    return read
