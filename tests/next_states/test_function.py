import asyncio
import functools
import threading
import time

import pytest

from trl_openclaw.next_states import FunctionNextState
from trl_openclaw.types import NextState, Turn

TURN = Turn("p", "c")


def ask(fn, row=None):
    return asyncio.run(FunctionNextState(fn)(TURN, row or {}))


class AsyncCallable:
    async def __call__(self, turn, row):
        return "async"


async def async_fn(turn, row):
    return NextState("ok", role="tool")


def test_text_next_state_and_none():
    assert ask(lambda turn, row: turn.completion + row["x"], {"x": "!"}) == NextState("c!")
    state = NextState("passed", role="tool", satisfied=True)
    assert ask(lambda turn, row: state) is state
    assert ask(lambda turn, row: None) is None


def test_async_forms():
    assert ask(async_fn).role == "tool"
    assert ask(AsyncCallable()).text == "async"
    assert ask(functools.partial(async_fn)).text == "ok"
    assert ask(lambda turn, row: async_fn(turn, row)).text == "ok"


def test_a_plain_function_leaves_the_loop_free():
    async def main():
        gone = asyncio.create_task(FunctionNextState(lambda turn, row: time.sleep(0.3))(TURN, {}))
        start = time.perf_counter()
        await asyncio.sleep(0.01)
        free = time.perf_counter() - start
        await gone
        return free

    assert asyncio.run(main()) < 0.2
    where = []
    ask(lambda turn, row: where.append(threading.current_thread()))
    assert where[0] is not threading.main_thread()


def test_an_async_function_runs_on_the_loop():
    async def fn(turn, row):
        return threading.current_thread().name

    assert ask(fn).text == threading.current_thread().name


@pytest.mark.parametrize("value", [3, {"role": "user", "content": "x"}, ["x"], True])
def test_other_types_are_refused_by_name(value):
    def checker(turn, row):
        return value

    with pytest.raises(TypeError, match=f"checker must give a str, a NextState or None, got {type(value).__name__}"):
        ask(checker)


def test_errors_come_through():
    with pytest.raises(ZeroDivisionError):
        ask(lambda turn, row: 1 / 0)


def test_stop_iteration_does_not_hang():
    async def main():
        await asyncio.wait_for(FunctionNextState(lambda turn, row: next(iter([])))(TURN, {}), timeout=2)

    with pytest.raises(RuntimeError, match="StopIteration"):
        asyncio.run(main())


def test_not_callable():
    with pytest.raises(TypeError, match="callable"):
        FunctionNextState("text")
