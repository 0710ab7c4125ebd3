"""A row of the data set that an environment cannot use, found in the middle of a run.

An error would end one process while the others wait for it, so the rollout begins all the same and counts for nothing.
"""

import warnings
from typing import Any, Final

from ..types import ToolResult

UNUSABLE: Final = "unusable_row"
"""The verdict of such a rollout."""


def warn_of_row(environment: Any, error: Exception) -> str:
    """Warn of the row, once for each problem, and give back the problem."""
    name = type(environment).__name__
    warnings.warn(f"`{name}` cannot use a row, whose rollouts get no reward: {error}", stacklevel=3)
    return str(error)


def answer_for_row(problem: str) -> ToolResult:
    """What a tool answers in such a rollout."""
    return ToolResult(f"This task cannot be used. Nothing was run. {problem}", info={"verdict": UNUSABLE})
