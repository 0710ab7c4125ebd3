"""Values as JSON, between the process of the tests and the process of the code."""

import builtins
import decimal
import fractions
from typing import Any

NAME = "solution"
"""The module that the code is."""

MAX_REPR = 300
_PLAIN: tuple[type, ...] = (bool, int, float, str)


def short(value: object) -> str:
    """The `repr` of a value, within bounds."""
    try:
        text = repr(value)
    except Exception as error:
        text = f"<{type(value).__name__} whose repr raises {type(error).__name__}>"
    return text if len(text) <= MAX_REPR else f"{text[: MAX_REPR // 2]}...{text[-MAX_REPR // 2 :]}"


def changeable(value: object) -> bool:
    """Whether a call may have changed this argument in place."""
    return isinstance(value, list | dict | set | bytearray)


class Wire:
    """Turns values into JSON and back. Objects with no plain form become numbers: `keep` and `find` say how."""

    def keep(self, value: object) -> dict[str, Any]:
        raise TypeError(f"a {type(value).__name__} cannot be passed to the code; use numbers, texts, lists and dicts")

    def find(self, text: dict[str, Any]) -> Any:
        raise ValueError("an object where a plain value belongs")

    def encode(self, value: Any) -> Any:
        if value is None or type(value) in _PLAIN:
            return value
        for kind in _PLAIN:
            if isinstance(value, kind):  # a subclass
                return kind(value)
        for kind in (list, tuple, set, frozenset):
            if isinstance(value, kind):
                return {kind.__name__: [self.encode(item) for item in value]}
        if isinstance(value, dict):
            return {"dict": [[self.encode(key), self.encode(item)] for key, item in value.items()]}
        if isinstance(value, bytes | bytearray):
            return {"bytearray" if isinstance(value, bytearray) else "bytes": value.hex()}
        if isinstance(value, complex):
            return {"complex": [value.real, value.imag]}
        if isinstance(value, range):
            return {"range": [value.start, value.stop, value.step]}
        if (name := type(value).__name__) in ("Decimal", "Fraction"):
            return {name: str(value)}
        return self.keep(value)

    def decode(self, text: Any) -> Any:
        if isinstance(text, list):
            raise ValueError("a list that does not say what it is")
        if not isinstance(text, dict):
            return text
        ((name, inner),) = text.items()
        if name in ("list", "tuple", "set", "frozenset"):
            return getattr(builtins, name)([self.decode(item) for item in inner])
        if name == "dict":
            return {self.decode(key): self.decode(item) for key, item in inner}
        if name in ("bytes", "bytearray"):
            return getattr(builtins, name).fromhex(inner)
        if name in ("complex", "range"):
            return getattr(builtins, name)(*inner)
        if name in ("Decimal", "Fraction"):
            return {"Decimal": decimal.Decimal, "Fraction": fractions.Fraction}[name](inner)
        return self.find(text)
