"""Values as data: what goes through as it is, and that reading what somebody else wrote runs nothing."""

import json
import math
import pickle

import pytest

from trl_openclaw.environments.plain_data import pack, unpack
from trl_openclaw.types import NextState, ToolResult

VALUES = [
    None, True, 0, -(10**50), 1.5, math.inf, "", "\u00e9\ud800", b"\x00x", [1, [2]], (1, (2,)), {1, 2}, frozenset([3]),
    {"a": {1: (2,)}, (1, 2): None}, NextState("s", role="tool", satisfied=True, info={"n": 1}),
    NextState([{"type": "text", "text": "t"}]),
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_values_go_through_as_they_are(value):
    got = unpack(pack(value))
    assert (got, type(got)) == (value, type(value))


def test_a_tool_result_keeps_what_it_knows():
    got = unpack(pack(ToolResult("Wrong.", satisfied=False, info={"wish": "Better."})))
    assert (type(got), got, got.satisfied, got.info) == (ToolResult, "Wrong.", False, {"wish": "Better."})


def test_subclasses_become_what_they_are_kinds_of():
    class Much(int):
        pass

    class Text(str):
        def __str__(self):
            return "another"

    got = unpack(pack([Much(3), Text("x")]))
    assert got == [3, "x"]
    assert [type(item) for item in got] == [int, str]


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr"])
def test_images_go_through(mode):
    images = pytest.importorskip("PIL.Image")
    sent = images.new("RGB", (3, 2), "red").convert(mode)
    got = unpack(pack(sent))
    assert isinstance(got, images.Image)
    assert (got.size, got.convert("RGB").tobytes()) == (sent.size, sent.convert("RGB").tobytes())
    assert got.mode == (mode if mode not in ("CMYK", "YCbCr") else "RGB")


def test_an_image_that_is_too_large_is_refused_on_both_sides(monkeypatch):
    images = pytest.importorskip("PIL.Image")
    packed = pack(images.new("L", (30, 40)))
    monkeypatch.setattr("trl_openclaw.environments.plain_data._MAX_PIXELS", 1199)
    with pytest.raises(ValueError, match="an image of 30 x 40"):
        unpack(packed)
    with pytest.raises(ValueError, match="an image of 30 x 40"):
        pack(images.new("L", (30, 40)))


@pytest.mark.parametrize(
    "value",
    [object(), [len], {"a": type}, NextState("x", role="system"), NextState(5)],
    ids=lambda value: repr(value)[:9],
)
def test_other_values_are_not_written(value):
    with pytest.raises((TypeError, ValueError)):
        pack(value)


def circle() -> list:
    found: list = []
    found.append(found)
    return found


def test_a_circle_is_not_written():
    with pytest.raises(RecursionError):
        pack(circle())


class Runs:
    """Its pickle runs code where it is read."""

    def __reduce__(self):
        return exec, ("raise SystemExit",)


DOTTED = b"\x80\x04\x8c\x09PIL.Image\x8c\x09os.system\x93\x8c\x04true\x85R."
FORGED = {
    "a pickle": pickle.dumps(Runs()),
    "a pickle of a dotted name": DOTTED,
    "nothing": b"",
    "no text": b"\xff",
    "no JSON": b"{",
    "a bare list": b"[1]",
    "an unknown kind": b'{"object": 3}',
    "a builtin": b'{"exec": "raise SystemExit"}',
    "two kinds": b'{"list": [], "tuple": []}',
    "no kind": b"{}",
    "a list that is none": b'{"list": 5}',
    "an unhashable key": b'{"dict": [[{"list": []}, 1]]}',
    "a deep nest": b'{"list": [' * 100_000 + b"]}" * 100_000,
    "a number that takes for ever": b"9" * 1_000_000,
    "a verdict that is none": b'{"ToolResult": ["x", 1, {"dict": []}]}',
    "a result without facts": b'{"ToolResult": ["x", true, null]}',
    "a state of a system": b'{"NextState": ["x", "system", null, {"dict": []}]}',
    "a state of numbers": b'{"NextState": [5, "tool", null, {"dict": []}]}',
    "an image that is a file's name": b'{"image": "/etc/passwd"}',
    "an image of another format": b'{"image": "R0lGODdhAQABAIEAAAAAAAAAAAAAAAAAACwAAAAAAQABAAAIBAABBAQAOw=="}',
}


@pytest.mark.parametrize("name", FORGED)
def test_what_was_forged_is_not_read(name):
    with pytest.raises(ValueError, match="no plain data"):
        unpack(FORGED[name])


def test_everything_written_is_json():
    assert json.loads(pack([1, {"a": (2,)}])) == {"list": [1, {"dict": [["a", {"tuple": [2]}]]}]}
