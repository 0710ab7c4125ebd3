"""What the trainers log about the steps of trajectories. All are collectives."""

import inspect
import re
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather_object

from ..calls import exits_as_errors
from .turns import turn_masks

if TYPE_CHECKING:
    from .opd_trainer import OPDTrainer

_WORD = re.compile(r"[\w-]{1,40}")
_VERDICTS = re.compile(r"environment/verdict/.*")
_STEP_TURNS = re.compile(r"steps/\d+/turns")

LOGGED_STEPS = 16
"""Steps of a trajectory that have metrics of their own; later ones count in all others."""


def record_steps(trainer: "OPDTrainer", batch: dict[str, Any], rewards: torch.Tensor) -> None:
    """Log how many turns there are, and for each step of the first `LOGGED_STEPS` how the turns there fared.

    | key | mean over | is |
    |---|---|---|
    | `turns/mean` | rows | turns of a row |
    | `turns/unmatched` | rows | 1 where messages and tokens do not tell the same turns |
    | `steps/<t>/turns` | rows | 1 where there is a turn t |
    | `steps/<t>/judge_score` | turns t with a score | the judge's score |
    | `steps/<t>/reward` | turns t with a reward | outcome plus score, before any baseline |
    | `steps/<t>/hint_accepted` | turns t | 1 where the teacher has scored it |
    | `environment/verdict/<word>` | rows | 1 where the environment's `verdict` is that word (or `failed`, `other`) |

    Args:
        trainer: The trainer.
        batch: The generation batch, with what the teacher knows of it where there is one.
        rewards (`(B, S)`): What each turn is rewarded with, NaN where there is nothing.
    """
    turns, device = trainer.turns, trainer.accelerator.device
    exists = turns.table([1.0] * len(turns.turns)).to(device)
    counts = torch.tensor([len(turns.turns), turns.unmatched, turns.rows], dtype=torch.float64, device=device)
    total, unmatched, rows = trainer.accelerator.gather(counts).view(-1, 3).sum(0).tolist()
    trainer.record_metric("turns/mean", total / rows)
    trainer.record_metric("turns/unmatched", unmatched / rows)
    numbers = enumerate(count for _, count in _column_sums(trainer, exists))
    shares = {f"steps/{step}/turns": count / rows for step, count in numbers if count}
    trainer.record_shares(shares, _STEP_TURNS, of="turns/mean")
    tables = {"judge_score": turns.table(trainer.turn_scores()).to(device), "reward": rewards}
    if "teacher_mask" in batch:
        masks = turn_masks(batch["turn_index"], turns.num_steps)
        tables["hint_accepted"] = (masks & batch["teacher_mask"].unsqueeze(1)).any(dim=2).float() * exists
    for name, table in tables.items():
        for step, (number, count) in enumerate(_column_sums(trainer, table)):
            if count:
                trainer.record_metric(f"steps/{step}/{name}", number / count)
    if trainer.has_environment:
        _record_verdicts(trainer)


def _column_sums(trainer: "OPDTrainer", table: torch.Tensor) -> list[list[float]]:
    """Sum and number of what stands in each of the first columns of all processes' tables `(B, S)`, NaN aside."""
    sums = torch.zeros(LOGGED_STEPS, 2, dtype=torch.float64, device=table.device)
    shown = table[:, :LOGGED_STEPS].double()
    sums[: shown.size(1)] = torch.stack([shown.nansum(dim=0), (~shown.isnan()).sum(dim=0)], dim=1)
    return trainer.accelerator.gather(sums).view(-1, LOGGED_STEPS, 2).sum(0).tolist()


def _record_verdicts(trainer: "OPDTrainer") -> None:
    """Log in what state the environments were left, as far as they say so in a word."""
    local = [_verdict(environment) for environment in trainer.environments]
    found = gather_object(local)
    if all(verdict is None for verdict in found):
        return
    trainer.record_column("environment_verdict", local)
    counts = Counter(str(verdict) for verdict in found)
    shares = {f"environment/verdict/{verdict}": count / len(found) for verdict, count in counts.items()}
    trainer.record_shares(shares, _VERDICTS, of="turns/mean")


def _verdict(environment: Any) -> str | None:
    """The word; `None` of an environment that has none, `other` for what is no word."""
    if inspect.getattr_static(environment, "verdict", None) is None:
        return None
    try:
        with exits_as_errors():
            verdict = environment.verdict
    except Exception:
        return "failed"
    return verdict if verdict is None or (isinstance(verdict, str) and _WORD.fullmatch(verdict)) else "other"
