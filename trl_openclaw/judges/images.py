"""Images for judges that see: from content parts to what an OpenAI-compatible server takes."""

import base64
import binascii
import io
import re
import sys
import threading
from collections.abc import Mapping
from typing import Any

MAX_IMAGE_BYTES = 20_000_000
MAX_IMAGE_PIXELS = 50_000_000

IMAGE_TYPES = ("image_url", "image")

_FIRST_BYTES = {b"\x89PNG\r\n\x1a\n": "png", b"\xff\xd8\xff": "jpeg", b"GIF87a": "gif", b"GIF89a": "gif"}
_DATA_URL = re.compile(r"data:image/[\w.+-]+;base64,", re.IGNORECASE)
_FIRST_PLACE, _LAST_PLACE = 0xDC00, 0xDFFF
_PLACE = re.compile(f"([{chr(_FIRST_PLACE)}-{chr(_LAST_PLACE)}])")
# Images are read from their files when first used, which two threads must not do at once.
_ENCODING = threading.Lock()


class UnreadableError(ValueError):
    """Content that a judge cannot be shown."""


class Images:
    """The images of one transcript. In its text each stands as one character that no valid text can hold.

    A text can so be cut anywhere: an image is inside or outside, never in part.

    Args:
        max_images: How many are taken, first come first served.
    """

    def __init__(self, max_images: int):
        self.max_images = min(max_images, _LAST_PLACE - _FIRST_PLACE + 1)
        self._parts: list[dict[str, Any]] = []

    def place(self, part: Mapping[str, Any]) -> str | None:
        """The character for an image, or `None` when there are too many. Raises `UnreadableError`."""
        if len(self._parts) >= self.max_images:
            return None
        self._parts.append(image_part(part))
        return chr(_FIRST_PLACE + len(self._parts) - 1)

    def content(self, text: str, marker: str) -> str | list[dict[str, Any]]:
        """The content of a message: `text` where it holds no image, else parts, images after lines that number them.

        Args:
            text: The prompt with the transcript in it.
            marker: Goes into these lines.
        """
        pieces = _PLACE.split(text)
        if len(pieces) == 1:
            return text
        parts: list[dict[str, Any]] = []
        for number in range(len(pieces) // 2):
            before, place = pieces[2 * number : 2 * number + 2]
            parts.append({"type": "text", "text": f"{before}--- {marker}: image {number + 1}, shown here ---"})
            parts.append(self._parts[ord(place) - _FIRST_PLACE])
        return [*parts, {"type": "text", "text": pieces[-1]}]


def count_images(text: str) -> int:
    """How many images have their place in a text."""
    return len(_PLACE.findall(text))


def image_part(part: Mapping[str, Any]) -> dict[str, Any]:
    """An image as a part of an OpenAI message.

    Args:
        part: `{"type": "image_url", "image_url": {"url": ...}}` (or the URL alone), or
            `{"type": "image", "image": ...}`, with `url` or `base64` as other names for the image. The image is an
            http(s) URL (which the server fetches) or a data: URL, passed on as it is; base64 or bytes of a PNG, JPEG,
            GIF or WebP; or an image of PIL, which becomes a PNG. Paths are not read: what is judged could so have any
            image of this machine sent to the server.

    Returns:
        `{"type": "image_url", "image_url": {"url": ...}}`, with the part's `detail` where it has one.

    Raises:
        UnreadableError: When it is none of these, or larger than 20 MB or 50 million pixels.
    """
    keys = ("image_url",) if part.get("type") == "image_url" else ("image", "url", "base64", "path")
    found: Any = next((part[key] for key in keys if part.get(key) is not None), None)
    detail = None
    if isinstance(found, Mapping):
        found, detail = found.get("url"), found.get("detail")
    shown = {"url": _url(found)} | ({"detail": detail} if isinstance(detail, str) else {})
    return {"type": "image_url", "image_url": shown}


def _url(image: Any) -> str:
    if isinstance(image, str):
        _check_size(len(image) * 3 // 4)
        if image[:8].lower().startswith(("http://", "https://")):
            return image
        data = _DATA_URL.match(image)
        encoded = _as_data_url(_decode(image[data.end() :] if data else image))
        return image if data else encoded
    if isinstance(image, bytes | bytearray | memoryview):
        return _as_data_url(bytes(image))
    if "PIL.Image" in sys.modules and isinstance(image, sys.modules["PIL.Image"].Image):
        return _as_data_url(_as_png(image))
    raise UnreadableError(
        "it holds no image" if image is None else f"an image cannot be given as {type(image).__name__}"
    )


def _decode(text: str) -> bytes:
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise UnreadableError(
            "it is neither an http(s) or data: URL nor base64; paths are not read, so open the file and give its bytes"
        ) from error


def _as_data_url(data: bytes) -> str:
    _check_size(len(data))
    kind = next((kind for start, kind in _FIRST_BYTES.items() if data.startswith(start)), None)
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        kind = "webp"
    if kind is None:
        raise UnreadableError("its bytes are not a PNG, JPEG, GIF or WebP; open other formats with PIL")
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def _as_png(image: Any) -> bytes:
    if image.width * image.height > MAX_IMAGE_PIXELS:
        raise UnreadableError(f"it has {image.width} x {image.height} pixels, more than {MAX_IMAGE_PIXELS:,} in all")
    file = io.BytesIO()
    try:
        with _ENCODING:
            plain = image.mode in ("1", "L", "LA", "P", "RGB", "RGBA")
            (image if plain else image.convert("RGB")).save(file, "PNG")
    except Exception as error:  # whatever a broken file makes its decoder raise
        raise UnreadableError(f"PIL cannot write it as a PNG ({type(error).__name__}: {error})") from error
    return file.getvalue()


def _check_size(num_bytes: int) -> None:
    if num_bytes > MAX_IMAGE_BYTES:
        raise UnreadableError(f"it has {num_bytes:,} bytes, more than {MAX_IMAGE_BYTES:,}")
