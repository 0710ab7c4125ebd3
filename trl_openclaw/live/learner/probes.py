"""Plain questions with answers that any chat model should go on finding likely."""

import json
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import LearnerError
from .measure import Item
from .rendering import render

if TYPE_CHECKING:
    from .trainer import LiveTrainer

SHIPPED = "general.jsonl"


@dataclass(frozen=True)
class Probe:
    """A question.

    Args:
        question: As a user might put it.
        answer: A good answer.
        wordings: The same question in other words.
    """

    question: str
    answer: str
    wordings: tuple[str, ...] = ()


def load_probes(path: str | None) -> list[Probe]:
    """The probes of a JSONL file; those that ship without one.

    Raises:
        LearnerError: If a line is something else.
    """
    file = Path(path) if path is not None else resources.files(__package__) / "probes" / SHIPPED
    try:
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        probes = [Probe(one["question"], one["answer"], tuple(one.get("wordings", ()))) for one in lines]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LearnerError(f"`check_probe_file`: {file} cannot be read as questions and answers: {error!r}.") from error
    if not probes:
        raise LearnerError(f"`check_probe_file`: {file} has no questions.")
    return probes


def prompt_of(trainer: "LiveTrainer", question: str) -> list[int]:
    """The ids of a question, up to where the answer begins."""
    return render(trainer, [{"role": "user", "content": question}])


def probe_items(trainer: "LiveTrainer", probes: list[Probe], *, wordings: bool) -> list[Item]:
    """The answers, after the questions or after the same questions in other words."""
    items = []
    for number, probe in enumerate(probes):
        answer = trainer.tokenizer(probe.answer, add_special_tokens=False)["input_ids"]
        ids = [*answer, trainer.eos_token_ids[0]]
        asked = probe.wordings if wordings else (probe.question,)
        kind = "wording" if wordings else "probe"
        items += [
            Item(f"{kind}/{number}/{place}", prompt_of(trainer, question), ids) for place, question in enumerate(asked)
        ]
    return items
