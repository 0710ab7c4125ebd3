"""What a setting may be, declared once per field: a configuration, by hand or from YAML, may hold anything."""

import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any


@dataclass(frozen=True)
class Number:
    """A finite number within bounds; never a boolean, and never text that looks like one.

    Args:
        whole: Whether it must be an integer.
        optional: Whether `None` is fine, too.
        above: What it must be greater than.
        at_least: What it must not be smaller than.
        at_most: What it must not be greater than.
    """

    whole: bool = False
    optional: bool = False
    above: float = -math.inf
    at_least: float = -math.inf
    at_most: float = math.inf

    def check(self, name: str, value: Any) -> None:
        """Refuse a value that is something else.

        Raises:
            ValueError: Naming the setting and what it may be.
        """
        if not (self._holds(value) or (self.optional and value is None)):
            raise ValueError(f"`{name}` must be {self}, got {value!r}.")

    def _holds(self, value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, Integral if self.whole else Real):
            return False
        number = float(value)
        return math.isfinite(number) and self.above < number and self.at_least <= number <= self.at_most

    def __str__(self) -> str:
        bounds = (("greater than", self.above), ("at least", self.at_least), ("at most", self.at_most))
        limits = " and ".join(f"{words} {bound:g}" for words, bound in bounds if math.isfinite(bound))
        kind = "a whole number" if self.whole else "a finite number"
        return f"{kind} {limits}".strip() + (" or None" if self.optional else "")
