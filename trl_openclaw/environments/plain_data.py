"""Values as data: JSON in which nothing but values of a few known kinds can be written, so that reading runs no code.

A process that is not trusted writes it, the trainer reads it. Pickle would let the writer choose what the reader calls.
"""

import base64
import io
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

from ..types import NextState, ToolResult

_MAX_PIXELS = 1 << 26
_IMAGE_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")  # of PNG; others become RGB


def pack(value: Any) -> bytes:
    """Write a value.

    Args:
        value: `None`, a number, a text, bytes, a list, tuple, set or dict of such, a `ToolResult`, a `NextState` or a
            PIL image, which becomes PNG.

    Raises:
        TypeError: It is, or holds, something else.
    """
    return json.dumps(_encode(value)).encode("ascii")


def unpack(data: bytes) -> Any:
    """Read what `pack` has written.

    Raises:
        ValueError: It was written by something else.
    """
    try:
        return _decode(json.loads(data.decode("ascii")))
    except Exception as error:  # whatever a writer of bad faith provokes
        raise ValueError(f"no plain data ({type(error).__name__}: {str(error)[:200]})") from None


def _encode(value: Any) -> Any:
    if isinstance(value, ToolResult):
        return {"ToolResult": [str.__str__(value), value.satisfied, _encode(dict(value.info))]}
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value) if kind is not str else str.__str__(value)
    if value is None:
        return None
    for group in (list, tuple, set, frozenset):
        if isinstance(value, group):
            return {group.__name__: [_encode(item) for item in value]}
    if isinstance(value, Mapping):
        return {"dict": [[_encode(key), _encode(item)] for key, item in value.items()]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": base64.b64encode(value).decode("ascii")}
    if isinstance(value, NextState):
        fields = [_encode(value.content), value.role, value.satisfied, _encode(dict(value.info))]
        _next_state(fields)  # what cannot be read is refused where it is made
        return {"NextState": fields}
    images = sys.modules.get("PIL.Image")  # without it there are none
    if images is not None and isinstance(value, images.Image):
        return {"image": base64.b64encode(_png(value)).decode("ascii")}
    raise TypeError(f"a {type(value).__name__} cannot be passed on; return text, numbers, lists or dicts")


def _decode(text: Any) -> Any:
    if text is None or isinstance(text, bool | int | float | str):
        return text
    ((name, inner),) = text.items()
    return _READERS[name](inner)


def _decode_all(inner: Any) -> list[Any]:
    return [_decode(item) for item in _a(list, inner)]


def _a(kind: Any, value: Any) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"a {type(value).__name__} in the wrong place")
    return value


def _tool_result(inner: Any) -> ToolResult:
    text, satisfied, info = inner
    return ToolResult(_a(str, text), satisfied=_a(bool | None, satisfied), info=_a(dict, _decode(info)))


def _next_state(inner: Any) -> NextState:
    content, role, satisfied, info = inner
    if role not in ("user", "tool"):
        raise ValueError(f"a role {role!r}")
    content = _a(str | list | tuple, _decode(content))
    return NextState(content, role=role, satisfied=_a(bool | None, satisfied), info=_a(dict, _decode(info)))


def _bytes(inner: Any) -> bytes:
    return base64.b64decode(_a(str, inner), validate=True)


def _png(image: Any) -> bytes:
    _check_size(image)
    file = io.BytesIO()
    (image if image.mode in _IMAGE_MODES else image.convert("RGB")).save(file, "PNG")
    return file.getvalue()


def _image(inner: Any) -> Any:
    from PIL import Image

    with Image.open(io.BytesIO(_bytes(inner)), formats=["PNG"]) as file:
        _check_size(file)
        return file.copy()


def _check_size(image: Any) -> None:
    if image.width * image.height > _MAX_PIXELS:
        raise ValueError(f"an image of {image.width} x {image.height}, above {_MAX_PIXELS >> 20} million pixels")


_READERS: dict[str, Callable[[Any], Any]] = {
    "list": _decode_all,
    "tuple": lambda inner: tuple(_decode_all(inner)),
    "set": lambda inner: set(_decode_all(inner)),
    "frozenset": lambda inner: frozenset(_decode_all(inner)),
    "dict": lambda inner: {_decode(key): _decode(item) for key, item in _a(list, inner)},
    "bytes": _bytes,
    "ToolResult": _tool_result,
    "NextState": _next_state,
    "image": _image,
}
