"""The self-test: without a hint, the teacher must agree with the student about the same tokens.

If it does not, every advantage would be made of that difference, so training is refused and the cause is named.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from accelerate.logging import get_logger
from torch import nn

from .._trl import SeamGRPOTrainer
from ..dropout import largest_dropout
from ..errors import SelfTestError
from ..scoring import TeacherRow
from ..teachers import LiveTeacher, LocalTeacher, ServerTeacher
from .ask_teacher import ask_teacher

if TYPE_CHECKING:
    from .opd_trainer import OPDTrainer

logger = get_logger(__name__)

ROWS = 2
"""Rows that are compared."""

TOLERANCE_FLOAT32 = 1e-4
TOLERANCE_HALF = 0.05
OUTLIER = 20
"""How many times the tolerance a single token may differ: rounding has a long tail, and a real fault is everywhere."""


@dataclass(frozen=True)
class SelfTestResult:
    """Largest and mean absolute log-prob difference (nats) over all processes, and the tolerance of the mean."""

    max_gap: float
    mean_gap: float
    tolerance: float


class SelfTest:
    """Compares teacher and student before the first step, once.

    Args:
        trainer: The trainer.
        due: Whether there is anything to compare.
    """

    def __init__(self, trainer: "OPDTrainer", due: bool):
        self.trainer, self.due = trainer, due

    def __call__(self, batch: dict[str, torch.Tensor], prompts: list) -> None:
        """Run it on a generation batch, the first one of a training. A collective.

        Where the teacher does not hold the student's weights at this moment, the student itself is asked as a teacher
        would be.

        Args:
            batch: The generation batch of this rank.
            prompts: Its prompts.
        """
        trainer = self.trainer
        if not self.due or trainer.mode == "eval":  # an evaluation runs without the student's dropout
            return
        teacher: LocalTeacher | ServerTeacher = LiveTeacher(trainer, trainer.scorer)
        given, at_start = trainer.teacher, trainer.state.global_step == 0
        if at_start and isinstance(given, LocalTeacher | ServerTeacher) and given.same_weights_at_start:
            teacher = given
        result = run_self_test(trainer, teacher, batch, prompts, trainer.args.self_test_tolerance)
        self.due = False
        trainer.record_metric("self_test/max_gap", result.max_gap)
        if isinstance(teacher, ServerTeacher):
            trainer.record_metric("teacher/server_gap", result.mean_gap)
        logger.info(
            f"Self-test passed: without a hint, teacher and student differ by {result.mean_gap:.2g} nats in the mean "
            f"(accepted {result.tolerance:g}) and {result.max_gap:.2g} at most."
        )


def run_self_test(
    trainer: SeamGRPOTrainer,
    teacher: LocalTeacher | ServerTeacher,
    batch: dict[str, torch.Tensor],
    prompts: list,
    tolerance: float | None,
) -> SelfTestResult:
    """Score the first rows of a fresh batch as student and as teacher, and compare. A collective.

    Args:
        trainer: The trainer, ready to train.
        teacher: A teacher that holds the student's weights at this moment.
        batch: The generation batch of this rank.
        prompts: The prompts of this rank, to be rendered anew.
        tolerance: Accepted mean difference in nats; `None` for the default of the precision in use.

    Raises:
        SelfTestError: On every rank, when the difference is above the tolerance.
    """
    sampled = [ids[mask.bool()].tolist() for ids, mask in zip(batch["prompt_ids"], batch["prompt_mask"], strict=True)]
    rendered = [list(ids) for ids in trainer.tokenize_prompts(prompts)]
    rows = slice(0, ROWS)
    lengths = batch["completion_mask"][rows].sum(1).tolist()
    completions = [ids[:n].tolist() for ids, n in zip(batch["completion_ids"][rows], lengths, strict=True)]
    student = trainer.student_logps(batch, rows)
    temperatures = batch["row_temperature"].tolist() if "row_temperature" in batch else [1.0] * len(rendered)
    asked = [
        TeacherRow(ids, completion, temperature)
        for ids, completion, temperature in zip(rendered[rows], completions, temperatures[rows], strict=True)
        if completion
    ]
    # A longer neighbour pads the rows, so a model whose positions shift under padding is found out here.
    longest = max((len(ids) for ids in rendered[rows]), default=0) + 7
    longest = min(longest, (teacher.max_length or longest + 1) - 1)
    neighbour = TeacherRow([trainer.pad_token_id] * longest, [trainer.pad_token_id])
    scores = ask_teacher(teacher, [*asked, neighbour], trainer.accelerator)
    kept = [i for i, completion in enumerate(completions) if completion]
    gaps = [
        (scores.per_token_logps[j, : lengths[i]] - student[i, : lengths[i]].float()).abs() for j, i in enumerate(kept)
    ]
    gap = torch.cat([*gaps, student.new_zeros(1, dtype=torch.float32)]).nan_to_num(float("inf"))
    same_prompt = all(a == b for a, b in zip(sampled, rendered, strict=True))
    local = torch.tensor(
        [gap.max().item(), gap.sum().item(), gap.numel() - 1, not same_prompt],
        device=batch["completion_ids"].device,
    )
    world = trainer.accelerator.gather(local).view(-1, 4)
    if tolerance is None:
        tolerance = TOLERANCE_HALF if isinstance(teacher, ServerTeacher) else default_tolerance(trainer)
    result = SelfTestResult(
        max_gap=world[:, 0].max().item(),
        mean_gap=(world[:, 1].sum() / world[:, 2].sum().clamp(min=1)).item(),
        tolerance=tolerance,
    )
    if world[:, 3].any() or result.mean_gap > tolerance or result.max_gap > OUTLIER * tolerance:
        raise SelfTestError(_explain(trainer, teacher, result, sampled, rendered))
    return result


def default_tolerance(trainer: SeamGRPOTrainer) -> float:
    """The accepted difference in nats: tight in float32, where only the order of sums differs, loose in half."""
    half = trainer.accelerator.mixed_precision in ("bf16", "fp16", "fp8") or _dtype(trainer.model).itemsize < 4
    return TOLERANCE_HALF if half else TOLERANCE_FLOAT32


def _explain(trainer, teacher, result: SelfTestResult, sampled, rendered) -> str:
    causes = []
    for row, (a, b) in enumerate(zip(sampled, rendered, strict=True)):
        if a != b:
            at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            causes.append(
                f"template or tokenizer: rendering the prompt of row {row} again gives {len(b)} ids where {len(a)} "
                f"were sampled from, first different at position {at}. Check `chat_template_kwargs`, the chat template "
                "and, with a `rollout_func`, how it renders prompts"
            )
            break
    dropout = largest_dropout(trainer.model)
    if trainer.model.training and dropout > 0:
        causes.append(f"dropout: the student trains with p={dropout:g}. Set `disable_dropout=True`")
    if isinstance(teacher, ServerTeacher):
        causes.append(
            f"weights: {teacher.where} has loaded {teacher.facts.root!r}, as the policy has, but perhaps another "
            "revision of it, quantized it, or the policy was trained since. If they differ on purpose, raise "
            "`self_test_tolerance`, or pass `same_weights_at_start=False` to the `ServerTeacher`"
        )
    else:
        if _dtype(teacher.model) != _dtype(trainer.model):
            causes.append(f"dtype: the teacher is {_dtype(teacher.model)}, the student {_dtype(trainer.model)}")
        unwrapped = trainer.accelerator.unwrap_model(teacher.model)
        temperature = getattr(unwrapped, "scoring_temperature", trainer.temperature)
        if temperature != trainer.temperature:
            causes.append(f"temperature: the teacher scores at {temperature}, the student at {trainer.temperature}")
    if not causes:
        causes.append(
            "weights or kernels: none of template, tokenizer, dropout, dtype and temperature differs, so the teacher's "
            "weights are not the student's (an adapter initialisation that changes the base weights?), padding shifts "
            "this model's positions, or kernels disagree. If the difference is known to be numerical, raise "
            "`self_test_tolerance`"
        )
    return (
        f"Self-test failed: without a hint, teacher and student differ by {result.mean_gap:.3g} nats on the same "
        f"tokens (up to {result.max_gap:.3g}; accepted mean {result.tolerance:g}). What differs: {'; '.join(causes)}."
    )


def _dtype(model: nn.Module) -> torch.dtype:
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
