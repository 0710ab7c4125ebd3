"""Shortening text so that head and tail stay: the one place where text that is read by others is cut."""

import unicodedata
from collections.abc import Callable, Sequence

_LONGEST_CHARACTER = 32
"""Code points that are looked at to find where a character begins. Longer ones are made to make reading slow."""


def clip(text: str, max_chars: int, note: Callable[[str], str] | None = None) -> str:
    """The text, or its head and tail with a note between them that says how much was left out.

    Args:
        text: Any text.
        max_chars: How many characters of `text` are kept at most; the note comes on top. 0 leaves the note alone.
        note: Makes the note, which gets a line of its own, from what is left out. Defaults to
            `[1234 characters (56 lines) left out here]`.

    Returns:
        `text` itself when it is not longer than `max_chars`. Else about one half of `max_chars` from either end, a
        little less where a letter with its accents, or an emoji made of several, would be cut in two.
    """
    if max_chars < 0:
        raise ValueError(f"`max_chars` must be at least 0, got {max_chars}.")
    if len(text) <= max_chars:
        return text
    stop, start = max_chars - max_chars // 2, len(text) - max_chars // 2
    stop = next((at for at in range(stop, stop - _LONGEST_CHARACTER, -1) if _may_cut(text, at)), stop)
    start = next((at for at in range(start, start + _LONGEST_CHARACTER) if _may_cut(text, at)), start)
    missing = text[stop:start]
    said = note(missing) if note else f"[{left_out(missing)}]"
    return "\n".join(part for part in (text[:stop], said, text[start:]) if part)


def left_out(text: str) -> str:
    """What is missing, in words: `1234 characters (56 lines) left out here`, lines only where a line end is."""
    lines = text.count("\n")
    counted = f" ({lines} line{'s' * (lines != 1)})" if lines else ""
    return f"{len(text)} character{'s' * (len(text) != 1)}{counted} left out here"


def divide(lengths: Sequence[int], total: int) -> list[int]:
    """Divide `total` among texts so that short ones stay whole and long ones share what is left."""
    shares = list(lengths)
    left = total
    for done, index in enumerate(sorted(range(len(lengths)), key=lambda i: lengths[i])):
        shares[index] = min(lengths[index], left // (len(lengths) - done))
        left -= shares[index]
    return shares


def _may_cut(text: str, at: int) -> bool:
    """Whether a character, as people see it, ends before `at`."""
    if not 0 < at < len(text):
        return True
    before, after = text[at - 1], text[at]
    joined = (
        unicodedata.category(after) in ("Mn", "Mc", "Me")
        or "\u200d" in (before, after)  # joins emoji
        or "\U0001f3fb" <= after <= "\U0001f3ff"  # colours of skin
        or "\U000e0020" <= after <= "\U000e007f"  # letters of regional flags
        or ("\U0001f1e6" <= before <= "\U0001f1ff" and "\U0001f1e6" <= after <= "\U0001f1ff")
        or ("\ud800" <= before <= "\udbff" and "\udc00" <= after <= "\udfff")
        or (before, after) == ("\r", "\n")
    )
    return not joined
