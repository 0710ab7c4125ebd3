"""Reading a judge's answer: tolerant to form, strict to value.

Answer lines carry a marker that the judge was given for this one call. Text under judgement cannot know it, so no line
without it counts, whatever it says. Anything but a clear -1, 0 or 1 raises; nothing is guessed.
"""

import re
import unicodedata

from ..errors import ParseError
from ..hints import unquote

_DASHES = "-‐‑‒–—―−⁃➖﹣－"
_OPENERS = r"[\s*_`\"'“”‘’«»„「『$~{(\[<|]"
_CLOSERS = r"[\s*_`\"'“”‘’«»」』$~})\]>|]"
# A LaTeX command counts as wrapping only where it opens a brace, as in \boxed{-1}.
_OPEN = rf"(?:{_OPENERS}|\\[(\[]|\\[a-z]+\s*(?=\{{))*"
_CLOSE = rf"(?:{_CLOSERS}|\\[)\]])*"
_VALUE = re.compile(rf"{_OPEN}([+-]?)\s*([01])(?:\.0*)?{_CLOSE}(.*)", re.DOTALL)
_NUMBER = re.compile(r"(?<![\w.])[+-]?\s*\d+(?:\.\d+)?")
# After a value: only signs that change nothing about it, or a remark that is set off and holds no further number.
_REMARK = re.compile(r"[^\w%+/=]*|(?:[.,;:!。(\[]|-|because\b)\D*", re.DOTALL)
_CONDITION = re.compile(r"\W*(?:if|when|whenever|for|means|or|unless|otherwise)\b|\s*=")
_NEXT_KEY = re.compile(r',\s*"[^"\d]*"\s*:.*', re.DOTALL)

_NO_HINT = re.compile(
    r"(?:none|n/a|na|null|nil|nothing|no (?:useful |specific |clear |further )?hints?)"
    r"(?: (?:needed|necessary|required|available|applicable|found|given|to give))?(?: ?[.,:;(—–-].*)?",
    re.IGNORECASE | re.DOTALL,
)
_EMPHASIS = re.compile(r"\*\*((?:(?!\*\*).)+)\*\*", re.DOTALL)


def parse_score(text: str, marker: str) -> int:
    """The score of the last line `VERDICT-<marker>: <score>`.

    Args:
        text: The judge's answer, without thinking.
        marker: The marker that this judge was given.

    Returns:
        -1, 0 or 1. Raises `ParseError("unparseable")` when no such line holds one of them. A line that restates the
        options is passed over; a line with any other value is not, because it is what the judge meant to say.
    """
    plain = _plain(text)
    tags = list(_tag(r"(verdict|hint|end)", marker.lower()).finditer(plain))
    for index in reversed(range(len(tags))):
        if tags[index][1] != "verdict":
            continue
        stop = tags[index + 1].start() if index + 1 < len(tags) else len(plain)
        field = _field(plain[tags[index].end() : stop])
        score = None if field is None else _read(field)
        if score is not None:
            return score
        if field is None or _is_restatement(field):
            continue
        raise ParseError("unparseable", f"The judge's verdict is not -1, 0 or 1: {field.strip()[:80]!r}.")
    raise ParseError("unparseable", "The judge's answer holds no verdict line.")


def parse_hint(text: str, marker: str, max_chars: int) -> str | None:
    """The hint between the last `HINT-<marker>:` and the `END-<marker>` after it.

    Args:
        text: The judge's answer, without thinking.
        marker: The marker that this judge was given.
        max_chars: Longest hint accepted, in characters. There is no shortest: a few characters say a lot in Chinese.

    Returns:
        The hint, or `None` when the judge says that there is none to give. Raises `ParseError` with kind
        `"unparseable"`, `"unterminated"` or `"too_long"`.
    """
    openings = list(_tag("hint", marker, rf"{_CLOSERS}*[:：](?:[*_`]+(?=\s))?").finditer(text))
    if not openings:
        raise ParseError("unparseable", "The judge's answer holds no hint line.")
    rest = text[openings[-1].end() :]
    end = _tag("(verdict|end)", marker).search(rest)
    # Marks right before the end tag belong to the tag: "**END-ab12**".
    content = _unquote(rest[: end.start()].rstrip("*_`") if end else rest)
    if _NO_HINT.fullmatch(content.strip(" \n.!()[]<>*_`\"'")):
        return None
    # A verdict line before the end, or the marker loose in the text, means that another answer line was swallowed.
    if end is None or end[1].lower() != "end" or marker.lower() in content.lower():
        raise ParseError("unterminated", "The judge's hint has no end marker.")
    if not content or re.fullmatch(r"<[^<>]*>", content):
        raise ParseError("unparseable", "The judge left the hint empty, or left its placeholder in.")
    if len(content) > max_chars:
        raise ParseError("too_long", f"The judge's hint has {len(content)} characters, more than {max_chars}.")
    return content


def _tag(name: str, marker: str, after: str = "") -> re.Pattern[str]:
    """An answer tag in any case and with any dash. Underscores around it are emphasis, so `\\b` would not do."""
    pattern = rf"(?<![^\W_]){name}\s*[{_DASHES}_]\s*{re.escape(marker)}(?![^\W_]){after}"
    return re.compile(pattern, re.IGNORECASE)


def _plain(text: str) -> str:
    """Lower case, one kind of dash, ASCII digits and compatibility forms, no invisible characters."""
    # Dashes first: compatibility normalisation knows only some of them.
    text = "".join("-" if char in _DASHES else char for char in text)
    text = unicodedata.normalize("NFKC", text)
    chars = (str(unicodedata.decimal(c)) if c.isdecimal() else "-" if c in _DASHES else c for c in text)
    text = "".join(char for char in chars if unicodedata.category(char) != "Cf").lower()
    # Long runs of spaces, which models do write, would make the patterns slow.
    return re.sub(r"[^\S\n]+", " ", text)


def _field(after: str) -> str | None:
    """What stands for the value after a tag, or `None` when the tag is only mentioned."""
    line, _, below = after.partition("\n")
    match = re.match(rf"{_CLOSE}[:=]", line)
    if not match:
        # Without a colon only a value right after the tag counts: "VERDICT-ab12 -1".
        return line if re.match(rf"{_CLOSERS}+[+-]?\d", line) else None
    field = line[match.end() :]
    if re.fullmatch(_CLOSE, field):
        # Display maths stands on lines of its own.
        field = next((under for under in below.splitlines() if not re.fullmatch(_OPEN, under)), "")
    return field


def _read(field: str) -> int | None:
    """The score that a field states, or `None`."""
    match = _VALUE.match(field)
    if not match:
        return None
    sign, digit, rest = match.groups()
    rest = _NEXT_KEY.sub("", rest)
    if _CONDITION.match(rest) or not _REMARK.fullmatch(rest):
        return None
    return -int(digit) if sign == "-" else int(digit)


def _is_restatement(field: str) -> bool:
    """Whether a field lists the options ("1, 0 or -1"), or ties a value to a condition ("+1 if good")."""
    numbers = [number.replace(" ", "").lstrip("+") for number in _NUMBER.findall(field)]
    if not numbers or any(number not in ("-1", "0", "1") for number in numbers):
        return False
    value = _VALUE.match(field)
    return len(set(numbers)) > 1 or bool(value and _CONDITION.match(value[3]))


def _unquote(content: str) -> str:
    """`content` without surrounding space, and without emphasis or quotation marks that wrap it whole."""
    emphasised = _EMPHASIS.fullmatch(content.strip())
    return unquote(emphasised[1] if emphasised else content)
