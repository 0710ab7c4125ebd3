"""How vLLM's answers with `prompt_logprobs` are read, and which rows are asked for together."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..scoring import TeacherRow
from .base import LOGP_TOLERANCE

NO_PROBABILITY = -9999.0
"""What vLLM writes for the logarithm of 0, which JSON has no word for."""


@dataclass(frozen=True)
class RowScores:
    """What a server says of the completion of one row.

    Args:
        logps: Of each token, the log-prob in nats; NaN where the server has none, or not as many likely tokens as it
            should name.
        best: For each, the most likely tokens, the likeliest first.
    """

    logps: list[float]
    best: list[list[int]]


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


def read_answer(content: bytes, rows: Sequence[TeacherRow], topk: int) -> list[RowScores]:
    """What the server's answer says of the completions of `rows`.

    Raises:
        ValueError: If it is not an answer to that; other errors of reading it mean the same.
    """
    answer = json.loads(content, object_hook=_log_prob_alone)
    choices = {choice["index"]: choice.get("prompt_logprobs") for choice in answer["choices"]}
    if choices.keys() != set(range(len(rows))):
        raise ValueError(f"it holds the choices {sorted(choices)}")
    read = []
    for i, row in enumerate(rows):
        if choices[i] is None or len(choices[i]) != row.length:
            got = "none" if choices[i] is None else len(choices[i])
            raise ValueError(f"row {i} has {row.length} tokens, and {got} came back")
        entries = choices[i][len(row.prompt_ids) :]
        found = [_position(entry or {}, token, topk) for entry, token in zip(entries, row.completion_ids, strict=True)]
        read.append(RowScores([logp for logp, _ in found], [best for _, best in found]))
    return read


def _log_prob_alone(found: dict[str, Any]) -> Any:
    """What vLLM says of a token, less rank and text.

    A dict for each would be a hundred thousand objects in a large batch. These make Python search all that a training
    process holds for garbage, which takes longer than reading the answer does.
    """
    return found.get("logprob", found)


def _position(entry: dict[str, float | None], token: int, topk: int) -> tuple[float, list[int]]:
    """A token's log-prob and the `topk` likeliest tokens, from vLLM's entry: of each of some tokens, the log-prob."""
    logps = {int(i): logp for i, logp in entry.items() if logp is not None}
    if (highest := max(logps.values(), default=0.0)) > LOGP_TOLERANCE:
        raise ValueError(
            f"there is a log-prob of {highest:.3g} nats, and none is above 0. Start vLLM with `--logprobs-mode "
            "raw_logprobs`"
        )
    logp = logps.get(token)
    best = sorted(logps, key=logps.__getitem__, reverse=True)[:topk]
    if logp is None or logp <= NO_PROBABILITY or len(best) < topk:
        return float("nan"), [0] * topk
    return float(logp), best
