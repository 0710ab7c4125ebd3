import functools

import pytest

from trl_openclaw.calls import is_async_callable


async def coroutine(*args):
    return args


def plain(*args):
    return coroutine(*args)


class Async:
    async def __call__(self, *args):
        return args

    async def method(self):
        return self


class Plain:
    def __call__(self, *args):
        return coroutine(*args)

    def method(self):
        return self


@pytest.mark.parametrize(
    ("thing", "expected"),
    [
        (coroutine, True),
        (Async(), True),
        (Async().method, True),
        (functools.partial(coroutine, 1), True),
        (functools.partial(functools.partial(Async(), 1), 2), True),
        (functools.partial(Async().method), True),
        (plain, False),
        (lambda *args: coroutine(*args), False),
        (Plain(), False),
        (Plain().method, False),
        (functools.partial(plain, 1), False),
        (functools.partial(Plain()), False),
        (Async, False),
        (len, False),
        (None, False),
        ("text", False),
    ],
)
def test_is_async_callable(thing, expected):
    assert is_async_callable(thing) is expected
