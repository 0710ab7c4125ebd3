import asyncio
import contextvars
import functools
import subprocess
import sys
import textwrap
import threading

import pytest

from trl_openclaw import FunctionNextState, LLMJudge, LocalChat, LocalJudge, RuleJudge, UserSimulator
from trl_openclaw.calls import call_in_thread, callable_name, exits_as_errors, is_async_callable, runs_in_process
from trl_openclaw.judges import PromptedJudge


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


@pytest.mark.parametrize(
    ("thing", "name"),
    [
        (plain, "plain"),
        (functools.partial(functools.partial(plain, 1), 2), "plain"),
        (functools.partial(Plain()), "Plain"),
        (Plain().method, "method"),
        (Async, "Async"),
    ],
)
def test_callable_name(thing, name):
    assert callable_name(thing) == name


def test_a_call_in_a_thread_gives_what_the_function_gives():
    current = contextvars.ContextVar("current")
    current.set("the caller's")

    def fn(*args, **kwargs):
        return args, kwargs, current.get(), threading.current_thread()

    args, kwargs, seen, thread = asyncio.run(call_in_thread(fn, 1, two=2))
    assert (args, kwargs, seen) == ((1,), {"two": 2}, "the caller's")
    assert thread.daemon
    assert thread is not threading.main_thread()


@pytest.mark.parametrize("error", [KeyError("gone"), asyncio.CancelledError("x")])
def test_a_call_in_a_thread_raises_what_the_function_raises(error):
    def fn():
        raise error

    async def main():
        with pytest.raises(type(error)) as raised:
            await asyncio.wait_for(call_in_thread(fn), timeout=5)
        assert raised.value is error

    asyncio.run(main())


@pytest.mark.parametrize(
    ("fn", "message"), [(lambda: next(iter([])), "<lambda> raised StopIteration"), (sys.exit, "SystemExit")]
)
def test_what_no_waiting_task_should_get_is_an_error(fn, message):
    with pytest.raises(RuntimeError, match=message):
        asyncio.run(asyncio.wait_for(call_in_thread(fn), timeout=5))


@pytest.mark.parametrize("closed", [False, True])
def test_a_call_that_ends_when_nobody_waits_any_more(closed, monkeypatch):
    troubles = []
    monkeypatch.setattr(threading, "excepthook", troubles.append)
    release = threading.Event()
    threads = []

    def fn():
        threads.append(threading.current_thread())
        release.wait(10)

    async def main():
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: troubles.append(context))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(call_in_thread(fn), timeout=0.1)
        if not closed:
            release.set()
            await asyncio.to_thread(threads[0].join)
            await asyncio.sleep(0)

    asyncio.run(main())
    release.set()
    threads[0].join()
    assert troubles == []


def test_calls_that_hang_leave_room_for_others():
    release = threading.Event()
    barrier = threading.Barrier(40)

    async def main():
        hanging = [asyncio.create_task(call_in_thread(release.wait, 30)) for _ in range(40)]
        await asyncio.gather(*(call_in_thread(barrier.wait, 10) for _ in range(barrier.parties)))
        assert not any(task.done() for task in hanging)
        release.set()

    try:
        asyncio.run(main())
    finally:
        release.set()


def test_a_call_that_hangs_does_not_keep_the_process():
    program = """
        import asyncio, threading
        from trl_openclaw.feedback import collect_feedback
        from trl_openclaw.judges import RuleJudge
        from trl_openclaw.next_states import FunctionNextState
        from trl_openclaw.types import Turn

        def hang(*args):
            threading.Event().wait()

        def answer(turn, row):
            return "x" if turn.completion == "1" else hang()

        feedbacks = asyncio.run(
            collect_feedback(
                [Turn("p", "0"), Turn("p", "1")],
                [{}, {}],
                next_state=FunctionNextState(answer),
                judge=RuleJudge(hang),
                timeout=0.2,
            )
        )
        print([feedback.failure for feedback in feedbacks])
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "['next_state_timeout', 'judge_timeout']"


class Odd(BaseException):
    pass


def in_another_thread(fn):
    thread = threading.Thread(target=fn)
    thread.start()
    thread.join()


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (SystemExit("bye"), "RuntimeError('SystemExit: bye')"),
        (SystemExit(), "RuntimeError('SystemExit')"),
        (KeyboardInterrupt(), "RuntimeError('KeyboardInterrupt')"),
        (Odd("x"), "RuntimeError('Odd: x')"),
        (KeyError("x"), "KeyError('x')"),
        (asyncio.CancelledError(), "CancelledError()"),
        (GeneratorExit(), "GeneratorExit()"),
    ],
)
def test_what_would_end_the_loop_becomes_an_error(error, raised):
    seen = []

    def fn():
        try:
            with exits_as_errors():
                raise error
        except BaseException as caught:
            seen.append(repr(caught))

    in_another_thread(fn)
    assert seen == [raised]


def test_in_the_main_thread_a_keyboard_interrupt_is_the_users():
    with pytest.raises(KeyboardInterrupt), exits_as_errors():
        raise KeyboardInterrupt


class InProcess(Plain):
    runs_in_process = True


CHAT = LocalChat("not loaded")
SERVER = LLMJudge("m", "http://127.0.0.1:1/v1")


@pytest.mark.parametrize(
    ("thing", "expected"),
    [
        (None, False),
        (plain, False),
        (Plain().method, False),
        (functools.partial(plain, 1), False),
        (InProcess(), True),
        (InProcess().method, True),
        (functools.partial(InProcess().method, 1), True),
        (CHAT, True),
        (LocalJudge("not loaded"), True),
        (LocalJudge("not loaded").without_hints(), True),
        (PromptedJudge(CHAT), True),
        (UserSimulator(CHAT, "terse"), True),
        (UserSimulator(LocalJudge("not loaded").client, "terse"), True),
        (RuleJudge(InProcess().method), True),
        (FunctionNextState(InProcess()), True),
        (SERVER, False),
        (UserSimulator(SERVER.client, "terse"), False),
        (RuleJudge(plain), False),
        (FunctionNextState(plain), False),
    ],
)
def test_what_runs_a_model_in_this_process_says_so(thing, expected):
    assert runs_in_process(thing) is expected


def test_a_rule_may_be_marked_by_hand():
    judge = RuleJudge(plain)
    judge.runs_in_process = True
    assert runs_in_process(judge)
