"""Next states that are no messages, as text: what a terminal shows, and what stands on a screen.

The text may be hostile. It is never executed, and the time to read it grows with its length only.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from ..clipping import clip, divide, left_out
from ..types import valid_text

__all__ = ["clip", "gui_view", "terminal_view"]

# Escape sequences. Strings such as window titles end at a line end too, so that an unclosed one hides one line only.
_ESCAPE = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?"  # colours, cursor, erasing
    r"|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c)?"  # titles, links, device strings
    r"|\x1b[ -/]*[0-~]?"  # character sets and single commands
)
_ERASE_RIGHT, _ERASE_LINE = "\x1b", "\x9b"  # stand for erasing once the escape sequences are gone
_ERASURES = {"\x1b[K": _ERASE_RIGHT, "\x1b[0K": _ERASE_RIGHT, "\x1b[2K": _ERASE_LINE}
_LINE_ENDS = re.compile(r"[\x0b\x0c\x85]")
_PLAIN = re.compile(r"[\w.:/#%+-]{1,200}")
_CONTROL = re.compile(r"[\x00-\x08\x0d-\x1f\x7f-\x9f]")

_ROLES = ("role", "type", "control_type", "tag", "class_name", "class")
_NAMES = ("name", "label", "title", "text", "content_description", "description")
_CHILDREN = ("children", "nodes", "elements")
_FOCUS = ("focused", "is_focused", "has_focus")
_SAID_WHEN_FALSE = {"enabled", "visible", "checked", "selected", "expanded", "pressed"}
_MAX_ELEMENTS, _MAX_DEPTH, _MAX_FOCUSED = 10_000, 100, 3
_MAX_READ, _MAX_FLAGS, _MAX_ITEMS, _MAX_FIELD = 100, 20, 8, 200  # attributes, those shown, items of one, characters


def terminal_view(stdout: str, stderr: str = "", exit_code: int | None = None, *, max_chars: int = 4000) -> str:
    """What a command printed, as its reader sees it in a terminal.

    Colours and other escape sequences are gone; what a carriage return or a backspace went over shows its last state,
    so a progress bar is one line; other control characters are dropped. Moves to other lines and clearing the screen
    are not followed: what was printed there is shown.

    Args:
        stdout: What the command printed.
        stderr: What it printed as errors.
        exit_code: Its exit code, where there is one.
        max_chars: How many characters of the two outputs together are kept. Each that is too long keeps its head and
            its tail. Headings, and the notes that say how much was cut, come on top.

    Returns:
        The exit code's line first, so that nothing the command prints can stand before it; then the output; then, under
        the line `stderr:`, the errors. A command that prints nothing shows `(nothing was printed)`.
    """
    shown = [_on_screen(stdout), _on_screen(stderr)]
    rooms = divide([len(text) for text in shown], max_chars)
    out, err = (clip(text, room) for text, room in zip(shown, rooms, strict=True))
    lines = [] if exit_code is None else [f"exit code: {exit_code}"]
    lines += [out] if out else []
    lines += ["stderr:", err] if err else []
    return "\n".join(lines if out or err else [*lines, "(nothing was printed)"])


def _on_screen(text: str) -> str:
    text = _ESCAPE.sub(lambda found: _ERASURES.get(found[0].replace("\x9b", "\x1b["), ""), valid_text(text))
    lines = _LINE_ENDS.sub("\n", text).split("\n")
    return _CONTROL.sub("", "\n".join(map(_last_state, lines))).strip("\n")


def _last_state(line: str) -> str:
    """A line after all its carriage returns: later writing covers earlier, which shows on behind it."""
    if not any(mark in line for mark in ("\r", "\b", _ERASE_RIGHT, _ERASE_LINE)):
        return line
    shown: list[str] = []
    width = 0
    for written in reversed(line.split("\r")):
        row = _written(written.rpartition(_ERASE_LINE)[2])
        shown.append(row[width:])
        width = max(width, len(row))
        if _ERASE_RIGHT in written or _ERASE_LINE in written:
            break  # what was there before is gone
    return "".join(shown).rstrip()


def _written(text: str) -> str:
    """What was written without a carriage return, after its backspaces and erasures to the right."""
    if "\b" not in text:
        return text.replace(_ERASE_RIGHT, "")
    cells: list[str] = []
    at = 0
    for char in text:
        if char == "\b":
            at = max(at - 1, 0)
        elif char == _ERASE_RIGHT:
            del cells[at:]
        else:
            cells[at : at + 1] = char
            at += 1
    return "".join(cells)


def gui_view(state: Any, *, max_chars: int = 8000) -> str:
    """What stands on a screen, from an accessibility tree or a list of elements: one element a line, indented.

    Elements are mappings as browsers and agents' frameworks give them, with `role`, `name`, `value`, `children` and
    whatever else (`focused`, `checked`, `bounds`), plain or wrapped as in `{"role": {"value": "button"}}`. A line reads
    `button "Send" = "value" [focused, not enabled, level=2]`. Texts are quoted, so that none can pass for a line or
    a flag of its own.

    Args:
        state: A mapping, a sequence of such, or a text that is taken as it is.
        max_chars: How many characters of the elements' lines are kept. If they are more, head and tail stay. The note
            that says how much was cut, and the lines of the focused elements, come on top.

    Returns:
        The text. The focused elements (three at most) come first, under `focused:`, so that they stay whatever is cut.
        Cycles, what is nested deeper than 100 levels and what follows the first 10,000 elements is left out and said to
        be; so is what would make a line long (200 characters of a name, 20 flags).
    """
    if isinstance(state, str):
        return clip(_on_screen(state), max_chars) or "(nothing on the screen)"
    lines: list[str] = []
    focused: list[str] = []
    for depth, element in _walk(state):
        line = _describe(element)
        if isinstance(element, Mapping) and len(focused) < _MAX_FOCUSED and _has_focus(element):
            focused.append(f"focused: {line}")
        lines.append("  " * depth + line)
    if not lines:
        return "(nothing on the screen)"
    return "\n".join([*focused, clip("\n".join(lines), max_chars)])


class _Remark(str):
    """A line of ours among the elements."""


def _walk(state: Any) -> Iterator[tuple[int, Any]]:
    """The elements in order, with their depth. A list is no element: its items stand where it stands."""
    levels: list[tuple[int, int, Iterator[Any]]] = [(0, 0, iter([state]))]  # depth, id of the owner, what is left
    count = 0
    while levels:
        depth, _, items = levels[-1]
        try:
            node = next(items)
        except StopIteration:
            levels.pop()
            continue
        if count == _MAX_ELEMENTS:
            yield 0, _Remark(f"(more than {_MAX_ELEMENTS} elements: the rest is left out)")
            return
        count += 1
        is_list = _is_list(node)
        if node is not None and not is_list and not _is_wrapper(node):
            yield depth, node
        inner = node if is_list else _children(node)
        if inner is None:
            continue
        if any(owner == id(node) for _, owner, _ in levels):
            yield depth + 1, _Remark("(contains itself: not repeated)")
        elif len(levels) > _MAX_DEPTH:
            yield depth + 1, _Remark("(nested too deep: left out)")
        else:
            below = depth if is_list or _is_wrapper(node) else depth + 1
            levels.append((below, id(node), iter(inner)))


def _is_list(node: Any) -> bool:
    return isinstance(node, Sequence) and not isinstance(node, str | bytes)


def _is_wrapper(node: Any) -> bool:
    """Whether a mapping only holds the elements, as in `{"nodes": [...]}`."""
    return isinstance(node, Mapping) and len(node) == 1 and _children(node) is not None


def _children(node: Any) -> Iterable[Any] | None:
    found = _first(node, _CHILDREN) if isinstance(node, Mapping) else None
    if isinstance(found, Mapping):
        return found.values()
    return found if _is_list(found) and found else None


def _describe(element: Any) -> str:
    """An element as one line."""
    if isinstance(element, _Remark):
        return element
    if not isinstance(element, Mapping):
        return _quoted(element)
    role, name, value = _plain(_first(element, _ROLES)), _plain(_first(element, _NAMES)), _plain(element.get("value"))
    parts = [_word(role) if isinstance(role, str) and role else "element"]
    parts += [] if _is_missing(name) else [_quoted(name)]
    parts += [] if _is_missing(value) else [f"= {_quoted(value)}"]
    flags = list(islice(_flags(element), _MAX_FLAGS + 1))
    if len(flags) > _MAX_FLAGS:
        flags[-1] = "more"
    return " ".join(parts) + (f" [{', '.join(flags)}]" if flags else "")


def _flags(element: Mapping[Any, Any]) -> Iterator[str]:
    """Everything an element says beyond role, name and value; what is false or empty is mostly not worth saying."""
    shown = {_key(element, keys) for keys in (_ROLES, _NAMES, _CHILDREN, ("value",))}
    for key, value in _attributes(element):
        value = _plain(value)
        if key in shown or not isinstance(key, str) or key == "childIds":
            continue
        if value is True:
            yield _word(key)
        elif value is False and key.removeprefix("is_") in _SAID_WHEN_FALSE:
            yield f"not {_word(key)}"
        elif value is False or _is_missing(value):
            continue
        elif isinstance(value, Mapping):
            yield f"{_word(key)}=({_some(f'{_bare(name)} {_bare(inner)}' for name, inner in value.items())})"
        elif _is_list(value):
            yield f"{_word(key)}=({_some(map(_bare, value))})"
        else:
            yield f"{_word(key)}={_bare(value)}"


def _attributes(element: Mapping[Any, Any]) -> Iterator[tuple[Any, Any]]:
    """An element's keys and values; a browser's own trees keep some in `properties`, a list of names and values."""
    for key, value in islice(element.items(), _MAX_READ):
        if key == "properties" and _is_list(value) and all(isinstance(item, Mapping) for item in value[:_MAX_READ]):
            yield from ((item.get("name"), item.get("value")) for item in value[:_MAX_READ])
        else:
            yield key, value


def _has_focus(element: Mapping[Any, Any]) -> bool:
    return any(key in _FOCUS and _plain(value) is True for key, value in _attributes(element))


def _key(element: Mapping[Any, Any], keys: tuple[str, ...]) -> str | None:
    return next((key for key in keys if not _is_missing(element.get(key))), None)


def _first(element: Mapping[Any, Any], keys: tuple[str, ...]) -> Any:
    key = _key(element, keys)
    return None if key is None else element[key]


def _plain(value: Any) -> Any:
    return value["value"] if isinstance(value, Mapping) and "value" in value else value


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value)


def _quoted(value: Any) -> str:
    return json.dumps(_field(value), ensure_ascii=False) if isinstance(value, str) else _bare(value)


def _bare(value: Any) -> str:
    """A value as it stands among an element's flags. Values of other types are named, never asked to print."""
    if isinstance(value, str):
        return value if _PLAIN.fullmatch(value) else _quoted(value)
    if isinstance(value, int | float) and abs(value) < 1e15:
        return str(value)
    return f"({type(value).__name__})"


def _some(texts: Iterable[str]) -> str:
    """The first eight of them."""
    shown = list(islice(texts, _MAX_ITEMS + 1))
    return ", ".join(shown if len(shown) <= _MAX_ITEMS else [*shown[:-1], "..."])


def _word(text: str) -> str:
    """A role or the name of a flag: no spaces, and no signs that mean something in a line."""
    return re.sub(r"[^\w.-]+", "_", text[:_MAX_FIELD])


def _field(text: str) -> str:
    """A text that fits into a line."""
    return " ".join(_on_screen(clip(text, _MAX_FIELD, lambda missing: f"... {left_out(missing)} ...")).split())
