"""Checks on what a trainer was given: columns, and where hints come from."""

from typing import Any

from ..judges.base import Judge


def check_columns(train_dataset: Any, eval_dataset: Any, environment_factory: Any) -> None:
    """Refuse a dataset without prompts, naming the columns it has.

    Raises:
        ValueError: If a dataset lacks the column `prompt` and no environment supplies it.
    """
    if environment_factory is not None:
        return
    evals = eval_dataset if isinstance(eval_dataset, dict) else {"eval_dataset": eval_dataset}
    for name, dataset in {"train_dataset": train_dataset, **evals}.items():
        columns = getattr(dataset, "column_names", None)
        if columns is not None and "prompt" not in columns:
            raise ValueError(
                f"`{name}` needs a column `prompt` (text, or a list of messages with `role` and `content`); it has "
                f"{', '.join(map(repr, columns)) or 'no columns'}."
            )


def resolve_hint_source(wanted: str, judge: Judge | None, teacher_model: Any, train_dataset: Any) -> str:
    """Where the teacher's extra knowledge comes from: `"judge"`, `"privileged_context"` or `"none"`.

    Args:
        wanted: `OPDConfig.hint_source`.

    Raises:
        ValueError: If what is wanted is not there, if nothing is there, or if `"auto"` would have to choose.
    """
    has_column = "privileged_context" in (getattr(train_dataset, "column_names", None) or ())
    if wanted == "auto":
        if judge is not None and has_column:
            raise ValueError(
                "There is a `judge` and a `privileged_context` column: set `hint_source` to 'judge' or "
                "'privileged_context'."
            )
        if judge is not None:
            return "judge"
        if has_column:
            return "privileged_context"
        if teacher_model is not None:
            return "none"
        raise ValueError(
            "The teacher would know nothing that the student does not. Pass a `judge` (hints from next states), a "
            "dataset column `privileged_context` (OPCD), or a `teacher_model` (classic on-policy distillation)."
        )
    if wanted == "judge" and judge is None:
        raise ValueError("`hint_source='judge'` needs a `judge`.")
    if wanted == "privileged_context" and train_dataset is not None and not has_column:
        raise ValueError("`hint_source='privileged_context'` needs a dataset column `privileged_context`.")
    if wanted == "none" and teacher_model is None:
        raise ValueError(
            "`hint_source='none'` needs a `teacher_model`: a self-teacher without a hint agrees with the student."
        )
    return wanted
