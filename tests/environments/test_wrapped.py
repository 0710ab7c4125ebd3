"""An environment in a process of its own: the same tools, and nothing that it does reaches the trainer."""

import inspect
import os
import pickle
import signal
import struct
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from sandbox_harness import gone
from toy_environments import Counter, Forger, Plain, Slow, Unstartable

from trl_openclaw.environments.wrapped import EnvironmentFailedError, wrap_environment
from trl_openclaw.types import NextState

Wrapped = wrap_environment(Counter, arguments={"start": 10}, timeout=20)


@pytest.fixture(scope="module")
def shared():
    return Wrapped()


@pytest.fixture
def environment(shared):
    shared.reset(prompt="one")
    return shared


def impatient(environment, seconds: float = 0.5):
    """The same environment with little patience from here on."""
    environment._worker.timeout = seconds
    return environment


@pytest.fixture(autouse=True)
def _patient(shared):
    yield
    shared._worker.timeout = 20


def functions(thing: type) -> dict:
    found = inspect.getmembers(thing, predicate=inspect.isfunction)
    return {name: function for name, function in found if not name.startswith("_")}


def test_the_class_has_the_same_tools():
    assert Wrapped.__name__ == "Counter"
    assert functions(Wrapped).keys() == functions(Counter).keys()
    for name, function in functions(Counter).items():
        wrapped = functions(Wrapped)[name]
        assert (wrapped.__name__, wrapped.__doc__) == (name, function.__doc__)
        assert inspect.signature(wrapped) == inspect.signature(function)


def test_trl_makes_the_same_schemas():
    from transformers.utils import get_json_schema

    for name in ("add", "wait", "judge"):
        assert get_json_schema(getattr(Wrapped(), name)) == get_json_schema(getattr(Counter(), name))


def test_calls_go_to_another_process(environment):
    assert environment.reset(prompt="two") == "Row two."
    answer = environment.add(amount=2, times=3)
    assert answer.startswith("It is 16 in process ")
    assert f"process {os.getpid()}." not in answer
    assert environment.wait(0.01) == "waited"
    assert environment.get_reward() == 16.0
    assert environment.next_state == NextState("The count is 16.", role="tool", satisfied=True, info={"n": 16})
    assert environment.count == 16


def test_a_tool_result_keeps_what_it_knows(environment):
    result = environment.judge()
    assert (str(result), result.satisfied, result.info) == ("Wrong.", False, {"wish": "Do better."})


def test_pictures_are_passed_on(environment):
    pytest.importorskip("PIL")
    text, image = environment.picture()
    assert text == {"type": "text", "text": "See:"}
    assert image["image"].getpixel((1, 1)) == (255, 0, 0)


def test_an_environment_without_reward_or_next_state():
    environment = wrap_environment(Plain)()
    assert not hasattr(type(environment), "get_reward")
    assert environment.reset() is None
    assert environment.act() == 5
    assert environment.next_state is None
    assert not hasattr(environment, "anything")


@pytest.mark.parametrize(("how", "said"), [("raise", "KeyError: 'missing'"), ("exit", "SystemExit: 3")])
def test_a_tool_that_raises(environment, how, said):
    result = environment.misbehave(how)
    assert (str(result), result.satisfied) == (said, False)
    assert result.info == {"ended": "raised", "wish": said}
    assert environment.add(1).startswith("It is 11")


def test_wrong_arguments_are_a_clear_answer(environment):
    assert "unexpected keyword argument 'much'" in environment.add(much=1)


def test_a_tool_that_hangs_is_cut_and_the_next_reset_starts_anew(environment):
    assert environment.misbehave("nothing else").info["ended"] == "raised"
    result = impatient(environment).misbehave("hang")
    assert result == "Stopped after 0.5 s without an answer. The environment has ended."
    assert (result.satisfied, result.info) == (None, {"ended": "timeout"})
    assert environment.add(1) == result
    assert environment.get_reward() is None
    assert environment.next_state == NextState(str(result), role="tool", info={"ended": "timeout"})
    environment._worker.timeout = 20
    assert environment.reset(prompt="three") == "Row three."
    assert environment.add(1).startswith("It is 11")


def test_the_children_of_a_tool_that_hangs_go_with_it(environment):
    was_there = False
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(impatient(environment, 4).misbehave, "hang with a child")
        while not asked.done():
            was_there |= not gone("child-of-counter", seconds=0.05)
    assert was_there
    assert gone("child-of-counter")


def test_a_worker_that_dies(environment):
    result = environment.misbehave("die")
    assert str(result).startswith("The environment's process has ended by itself")
    assert (result.satisfied, result.info) == (None, {"ended": "died"})
    assert environment.reset(prompt="four") == "Row four."


def test_a_worker_that_died_unseen_is_replaced(environment):
    environment._worker.process.kill()
    assert environment.reset(prompt="five") == "Row five."


def test_megabytes_printed_do_not_matter(capfd):
    environment = Wrapped()
    environment.reset()
    assert environment.misbehave("print") == "printed"
    assert capfd.readouterr() == ("", "")


def test_a_long_answer_is_cut(environment):
    answer = environment.misbehave("answer much")
    assert answer.startswith("headx")
    assert answer.endswith("xtail")
    assert "left out here" in answer
    assert len(answer) < 21_000


@pytest.mark.parametrize("how", ["answer an object", "answer a function"])
def test_answers_that_are_code_are_not_read(environment, how):
    result = environment.misbehave(how)
    assert result.info["ended"] == "raised"
    assert environment.add(1).startswith("It is 11")


class Touch:
    """Its pickle makes a file where it is read."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def dotted(path: Path) -> bytes:
    """A pickle that comes to `os.mkdir` through a module of PIL."""
    text = [b"\x8c" + bytes([len(part)]) + part for part in (b"PIL.Image", b"os.mkdir", str(path).encode())]
    return b"\x80\x04" + text[0] + text[1] + b"\x93" + text[2] + b"\x85R."


@pytest.mark.parametrize("kind", ["pickle", "dotted", "no answer", "a word of the trainer's", "no sentence"])
def test_answers_that_the_worker_forges_run_nothing_and_end_it(tmp_path, kind):
    import PIL.Image  # noqa: F401 (a trainer has it)

    place = tmp_path / "made"
    data = {
        "pickle": pickle.dumps(Touch(place)),
        "dotted": dotted(place),
        "no answer": b'{"dict": []}',
        "a word of the trainer's": b'{"tuple": ["timeout", "x"]}',
        "no sentence": b'{"tuple": ["raised", 5]}',
    }[kind]
    environment = wrap_environment(Forger)()
    environment.reset()
    result = environment.write(framed(data))
    assert (result.satisfied, result.info) == (None, {"ended": "died"})
    assert "an answer that cannot be read" in result
    assert not place.exists()


def framed(data: bytes) -> bytes:
    return struct.pack("!I", len(data)) + data


FOREVER = {
    "its first byte": (b"\0", 100.0, 1),
    "its length": (struct.pack("!I", 10), 100.0, 1),
    "byte after byte": (b"\0\0\1\0", 0.3, 200),
}


@pytest.mark.parametrize("name", FOREVER)
def test_an_answer_that_begins_and_never_ends_is_cut(name):
    environment = wrap_environment(Forger, timeout=1)()
    environment.reset()
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(environment.write, *FOREVER[name])
        try:
            result = call.result(timeout=15)
        finally:
            environment._worker.process and environment._worker.process.kill()
    assert result.info == {"ended": "timeout"}
    assert environment._worker.process is None


def test_a_question_that_is_not_read_is_cut():
    environment = wrap_environment(Forger, timeout=1)()
    environment.reset()
    assert environment.write(framed(b'{"tuple": ["value", "before its time"]}')) == "before its time"
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(environment.write, b"x" * (8 << 20))
        try:
            result = call.result(timeout=15)
        finally:
            environment._worker.process and environment._worker.process.kill()
    assert result.info == {"ended": "timeout"}


def test_an_answer_that_is_too_long_is_not_read():
    environment = wrap_environment(Forger)()
    environment.reset()
    result = environment.write(struct.pack("!I", 2**31))
    assert result.info == {"ended": "died"}
    assert "it has 2048 MiB" in result


@pytest.mark.parametrize("name", ["verdict", "next_state"])
def test_what_the_trainer_looks_for_is_there_without_asking(environment, name):
    assert isinstance(inspect.getattr_static(environment, name), property)


def test_a_verdict_is_the_environments_or_how_it_ended(environment):
    assert environment.verdict == "begun"
    environment.misbehave("die")
    assert environment.verdict == "died"
    assert wrap_environment(Counter)().verdict == "ended"
    plain = wrap_environment(Plain)()
    plain.reset()
    assert plain.verdict is None


def test_who_has_given_up_waiting_takes_no_answer_of_another():
    environment = wrap_environment(Slow)()
    environment.reset()
    with ThreadPoolExecutor(1) as pool:
        given_up = pool.submit(getattr, environment, "next_state")
        time.sleep(0.3)
        assert environment.reset() == "Begun."
        assert environment.act() == "done"
        assert given_up.result() == NextState("late")


def test_what_was_asked_before_an_interrupt_answers_nothing_after_it():
    environment = wrap_environment(Slow)()
    environment.reset()
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(KeyboardInterrupt):
            _ = environment.next_state
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert environment.act() == "The environment has ended."
    assert environment.reset() == "Begun."


def test_before_reset():
    environment = Wrapped()
    assert environment.add(1) == "The environment was not reset yet."
    assert environment.get_reward() is None


def test_a_reset_that_fails_is_tried_again_and_then_an_error(environment):
    with pytest.raises(EnvironmentFailedError, match=r"`Counter.reset` failed: ValueError: no such row"):
        environment.reset(refuse=True)


def test_an_environment_that_cannot_be_made():
    with pytest.raises(EnvironmentFailedError, match="could not be made: RuntimeError: no licence"):
        wrap_environment(Unstartable)().reset()


def test_workers_end_with_the_environment():
    environment = wrap_environment(Plain)()
    environment.reset()
    process = psutil.Process(environment._worker.process.pid)
    del environment
    assert not process.is_running()


TRAINER = """
import sys
sys.path[:0] = [".", "tests"]
from toy_environments import Counter
from trl_openclaw.environments import wrap_environment
if __name__ == "__main__":
    environment = wrap_environment(Counter)()
    environment.reset()
    print(environment._worker.process.pid, flush=True)
    environment.misbehave("hang")
"""


def test_workers_end_with_a_trainer_that_is_killed(tmp_path):
    (tmp_path / "trainer.py").write_text(TRAINER)
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, tmp_path / "trainer.py"], cwd=root, stdout=subprocess.PIPE, text=True
    ) as trainer:
        worker = psutil.Process(int(trainer.stdout.readline()))
        time.sleep(0.1)
        trainer.send_signal(signal.SIGKILL)
    worker.wait(timeout=20)


def test_what_cannot_be_wrapped_is_refused():
    class Local(Plain):
        pass

    with pytest.raises(ValueError, match="top level"):
        wrap_environment(Local)
    with pytest.raises(ValueError, match="must be a class"):
        wrap_environment(Plain())
    with pytest.raises(ValueError, match="has no `reset`"):
        wrap_environment(dict)
