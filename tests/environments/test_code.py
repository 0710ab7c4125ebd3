"""Real unit tests against an agent's code: what is counted, what is said, and that the code cannot forge either."""

import asyncio
import json
from dataclasses import replace

import pytest

from trl_openclaw.environments.code import CodeEnvironment, check_tests, without_fences
from trl_openclaw.environments.sandbox import Limits, Sandbox
from trl_openclaw.errors import SandboxError
from trl_openclaw.judges.outcome import OutcomeJudge
from trl_openclaw.types import NextState, Turn

GOOD = "def add(a, b):\n    return a + b\n"
TESTS = """
from math import inf

assert add(1, 2) == 3

def test_negative():
    for a, b in [(-1, -2), (-5, 5)]:
        assert add(a, b) == a + b

def test_texts():
    assert add("a", "b") == "ab", "texts are joined"

def test_refuses():
    try:
        add(None, 1)
    except TypeError:
        pass
    else:
        raise AssertionError("no error")
"""


@pytest.fixture
def environment(sandbox):
    made = CodeEnvironment(Sandbox(replace(sandbox.limits, seconds=5)), max_chars=500)
    made.reset(prompt="Write `add`.", tests=TESTS)
    return made


def run(environment: CodeEnvironment, code: str, tests: str = "", **row):
    if tests:
        environment.reset(prompt="", tests=tests, **row)
    return environment.run_tests(code)


def headline(text: str) -> str:
    return text.partition("\n")[0]


# --- what is counted and said ---------------------------------------------------------------------------------------


def test_all_pass(environment):
    result = run(environment, GOOD)
    assert result == "All 4 tests passed."
    assert result.satisfied is True
    assert result.info == {"verdict": "solved", "passed": 4, "total": 4, "ended": "finished"}
    assert (environment.verdict, environment.get_reward()) == ("solved", 1.0)
    assert environment.next_state == NextState("All 4 tests passed.", role="tool", satisfied=True, info=result.info)


def test_some_fail(environment):
    result = run(environment, "def add(a, b):\n    print('hello')\n    return a + abs(b)\n")
    lines = result.splitlines()
    assert lines[:4] == [
        "2 of 4 tests passed.",
        "First failure, in test_negative: add(a, b) == a + b",
        "It got 1, expected -3.",
        "The last call was add(-1, -2).",
    ]
    assert lines[4:6] == ["Output of the code:", "hello"]
    assert result.satisfied is False
    wish = "`add(a, b) == a + b` must hold: expected -3, but got 1, after the call of `add(-1, -2)`."
    assert result.info["wish"] == wish
    assert (environment.verdict, environment.get_reward()) == ("failed", 0.0)
    assert (environment.next_state.text, environment.next_state.satisfied) == ("2 of 4 tests passed.", False)


def test_an_error_in_the_code_is_shown_where_it_is(environment):
    result = run(environment, "def add(a, b):\n    return helper(a) / 0\n\ndef helper(a):\n    return a\n")
    assert "ZeroDivisionError: division by zero" in result
    assert 'File "solution.py", line 2, in add\n    return helper(a) / 0' in result
    assert "judge.py" not in result
    assert result.info["wish"].endswith("but `add(1, 2)` raised ZeroDivisionError: division by zero.")


async def _judged(result) -> tuple:
    state = NextState(str(result), role="tool", satisfied=result.satisfied, info=result.info)
    verdict = await OutcomeJudge()(Turn("p", "c", state))
    return verdict.score, verdict.hints


@pytest.mark.parametrize(("code", "score"), [(GOOD, 1), (GOOD.replace("+", "-"), -1)])
def test_the_outcome_judge_takes_score_and_hint(environment, code, score):
    result = run(environment, code)
    got, hints = asyncio.run(_judged(result))
    assert got == score
    assert hints == (() if score == 1 else (result.info["wish"],))


@pytest.mark.parametrize(
    ("code", "verdict", "said"),
    [
        ("def add(a, b:", "not_loaded", "The code could not be loaded: SyntaxError: '(' was never closed"),
        ("import nothing_like_it", "not_loaded", "The code could not be loaded: ModuleNotFoundError: No module named"),
        ("import sys\nsys.exit(0)", "not_loaded", "The code could not be loaded: SystemExit: 0"),
        ("1 / 0", "not_loaded", "The code could not be loaded: ZeroDivisionError: division by zero"),
        ("\0", "not_loaded", "The code could not be loaded: "),
        ("(" * 5000, "not_loaded", "The code could not be loaded: "),
        ("def other(): pass", "failed", "0 of 4 tests passed."),
        (f"{GOOD}\nassert False", "not_loaded", "The code could not be loaded: AssertionError"),
    ],
)
def test_code_that_does_not_load(environment, code, verdict, said):
    result = run(environment, code)
    assert headline(result).startswith(said)
    assert (environment.verdict, result.satisfied, environment.get_reward()) == (verdict, False, 0.0)
    assert result.info["wish"]


def test_the_entry_point_must_be_there(environment):
    result = run(environment, "def plus(a, b): return a + b", TESTS, entry_point="add")
    assert headline(result) == "The code could not be loaded: it does not define `add`."


@pytest.mark.parametrize(
    "code", ["def add(a, b):\n    print('begun')\n    while True: pass", "print('begun')\nimport time\ntime.sleep(60)"]
)
def test_code_that_takes_too_long(sandbox, code):
    environment = CodeEnvironment(Sandbox(replace(sandbox.limits, seconds=1.5)))
    environment.reset(tests=TESTS)
    result = run(environment, code)
    assert headline(result).startswith("Stopped after 1.5 s.")
    assert "begun" in result
    assert (environment.verdict, result.satisfied, result.info["ended"]) == ("timeout", False, "timeout")
    assert "must finish" in result.info["wish"]


def test_code_that_takes_too_much_memory(environment):
    result = run(environment, "def add(a, b):\n    return [0] * 10**9\n")
    assert "MemoryError" in result
    assert result.satisfied is False


def test_megabytes_of_output_are_cut(environment):
    result = run(
        environment, f"import sys\nprint('head' + 'x' * 10**7 + 'tail')\nsys.stderr.write('e' * 10**7)\n{GOOD}"
    )
    assert result.satisfied is True
    assert "headx" in result
    assert "left out" in result
    assert len(result) < 1500


@pytest.mark.parametrize(
    "code", ["```python\n" + GOOD + "```", "```\n" + GOOD, "Here it is:\n\n```py\n" + GOOD + "```\nIt adds.", GOOD]
)
def test_fences_are_taken_off(code):
    assert without_fences(code) == GOOD


def test_a_fence_inside_code_stays():
    code = 'def add(a, b):\n    """\n```\nadd(1, 2)\n```\n"""\n    return a + b\n'
    assert without_fences(code) == code


@pytest.mark.parametrize("code", [None, 5, ["x"], "", "  \n", "```python\n```", "x" * 200_000])
def test_code_that_is_none(environment, code):
    result = environment.run_tests(code)
    assert (environment.verdict, result.satisfied, environment.get_reward()) == ("no_code", False, 0.0)
    assert result.startswith("`code`")


def test_never_run(environment):
    state = environment.next_state
    assert (environment.verdict, environment.get_reward(), state.satisfied) == ("not_run", 0.0, False)
    assert "run_tests" in state.info["wish"]


def test_reset_forgets(environment):
    run(environment, GOOD)
    environment.reset(prompt="", tests=TESTS)
    assert environment.verdict == "not_run"


def test_a_sandbox_that_fails_is_no_score(environment, monkeypatch):
    def fail(*_, **__):
        raise SandboxError("no more processes")

    monkeypatch.setattr(Sandbox, "run", fail)
    result = run(environment, GOOD)
    assert result == "The tests could not be run: no more processes"
    assert (result.satisfied, environment.get_reward()) == (None, None)
    assert environment.next_state.satisfied is None


# --- what tests can do ----------------------------------------------------------------------------------------------

RICH = """
import decimal
from dataclasses import dataclass
from collections import namedtuple

class Stack:
    def __init__(self, items=()): self.items = list(items)
    def push(self, item): self.items.append(item)
    def pop(self): return self.items.pop()
    def __len__(self): return len(self.items)
    def __eq__(self, other): return isinstance(other, Stack) and self.items == other.items

class TooFew(ValueError): pass

def sort(items): items.sort()
def count(n):
    for i in range(n): yield i
def echo(value): return value
def named(): return namedtuple("P", "x y")(1, 2)
def fail(): raise TooFew("few")
LIMIT = 10
"""


def test_values_objects_and_errors_pass_between_tests_and_code(environment):
    tests = """
import solution
from decimal import Decimal
from fractions import Fraction
from solution import Stack, count

for value in (None, True, 0, -1, 10**400, 1.5, "é\\ud800", b"x", bytearray(b"y"), [1, [2]], (1, (2,)), {1: (2,)},
              {(1, 2): {3}}, frozenset([1]), 1j, range(3), Decimal("1.10"), Fraction(1, 3), float("inf")):
    assert solution.echo(value) == value and type(solution.echo(value)) is type(value), value
items = [3, 1, 2]
sort(items)
assert items == [1, 2, 3]
assert list(count(3)) == [0, 1, 2]
assert named() == (1, 2)
assert LIMIT == 10

stack = Stack([1])
stack.push({"a": 1})
assert len(stack) == 2 and stack.pop() == {"a": 1}
assert stack == Stack([1]) and stack != Stack([2]) and isinstance(stack, Stack) and not isinstance(3, Stack)
assert stack.items == [1]

def test_errors():
    for wrong, kind in ((fail, ValueError), (lambda: stack.missing, AttributeError), (Stack().pop, IndexError)):
        try:
            wrong()
        except kind:
            continue
        assert False, kind
"""
    result = run(environment, RICH, tests)
    assert result == "All 9 tests passed.", result


def test_what_cannot_be_passed_is_said(environment):
    result = run(environment, "def f(g): return g(1)", "assert f(lambda x: x) == 1")
    assert "a function cannot be passed to the code" in result


def test_a_check_is_called_with_the_entry_point(environment):
    check = "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(2, 2) == 4\n"
    assert run(environment, GOOD, check, entry_point="add") == "The test passed."
    assert run(environment, GOOD, check + "check(add)\n") == "The test passed."
    assert run(environment, GOOD.replace("+", "*"), check, entry_point="add").satisfied is False


def test_tests_that_need_what_is_not_there_fail(environment):
    result = run(environment, GOOD, "import not_there\nassert add(1, 2) == 3\nassert add(1, 1) == 2")
    assert result.splitlines()[:2] == [
        "0 of 2 tests passed.",
        "First failure, in the tests' own setup: import not_there",
    ]


@pytest.mark.parametrize(
    ("tests", "why"),
    [
        (None, "needs `tests`"),
        ("", "needs `tests`"),
        (5, "needs `tests`"),
        ("def test_x(:", "is no Python"),
        ("def test_x(fixture):\n    assert fixture", "takes arguments"),
        ("class TestX:\n    def test_y(self): assert f()", "use plain functions"),
        ("async def test_x():\n    assert f()", "use plain functions"),
        ("f()", "asserts nothing"),
        ("assert f()\nreturn", "is no Python"),
        ("assert f()\0", "is no Python"),
        ("assert " + "(" * 5000, "is no Python"),
        ("assert " + "-" * 100_000 + "f()", "is no Python"),
    ],
)
def test_tests_that_cannot_be_used_are_refused(tests, why):
    with pytest.raises(ValueError, match=why):
        check_tests(tests)


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"tests": "def test_x(:"}, "`tests` is no Python"),
        ({"tests": None}, "needs `tests`"),
        ({"tests": TESTS, "entry_point": ["add"]}, "`entry_point` must be"),
        ({"tests": TESTS, "entry_point": "add(1)"}, "`entry_point` must be"),
    ],
)
def test_a_row_that_cannot_be_used_counts_for_nothing(environment, row, why):
    run(environment, GOOD)
    with pytest.warns(UserWarning, match=rf"`CodeEnvironment` cannot use a row, whose .* no reward: .*{why}") as found:
        environment.reset(prompt="", **row)
    assert len(found) == 1
    result = environment.run_tests(GOOD)
    assert result.startswith("This task cannot be used. Nothing was run. ")
    assert why in result
    assert (result.satisfied, result.info) == (None, {"verdict": "unusable_row"})
    assert (environment.verdict, environment.get_reward(), environment.next_state) == ("unusable_row", None, None)
    assert run(environment, GOOD, TESTS).satisfied is True


# --- forging --------------------------------------------------------------------------------------------------------

WRONG = "def add(a, b):\n    return 'wrong'\n"
FORGERIES = {
    "exits": "import os\nos._exit(0)",
    "exits quietly": "import sys\nsys.exit(0)",
    "exits when called": "import os\ndef add(a, b):\n    os._exit(0)\n",
    "stops when called": "def add(a, b):\n    raise SystemExit(0)\n",
    "prints the verdict": WRONG + "print('All 4 tests passed.', flush=True)",
    "prints a report": WRONG
    + "import json, os\nreport = {'ended': 'finished', 'passed': 4, 'total': 4, 'nonce': '', 'load_error': None}\n"
    "for f in range(10):\n    try: os.write(f, b'\\n' + json.dumps(report).encode())\n    except OSError: pass",
    "overwrites the tests": WRONG + "import os\nfor top, _, names in os.walk('.'):\n    for name in names:\n"
    "        open(os.path.join(top, name), 'w').write('print(1)')",
    "plants modules": WRONG + "import os\nfor folder in ('.', '.tests', '.tests/unit_tests'):\n"
    "    for name in ('math', 'pytest', 'heapq', 'colorsys', 'traceback'):\n"
    "        open(os.path.join(folder, name + '.py'), 'w').write('import os; os._exit(0)\\ninf = 0')",
    "patches what tests use": WRONG
    + "import builtins, unittest, sys\nbuiltins.AssertionError = ValueError\nbuiltins.repr = lambda x: '3'\n"
    "sys.modules['math'] = None\nunittest.TestCase.assertEqual = lambda *a: None",
    "shadows names": WRONG + "def range(*a): return []\ndef len(x): return 3\nAssertionError = None\n"
    "def _Failed_(*a): return ValueError\ndef _short_(*a): pass\ninf = 3\n_got_ = _expected_ = 3\n__name__ = 'tests'",
    "is equal to anything": "class Yes(int):\n    def __eq__(self, other): return True\n"
    "    def __ne__(self, other): return False\n    __hash__ = None\n    def __bool__(self): return True\n"
    "class Sure:\n    def __eq__(self, other): return True\n"
    "def add(a, b):\n    return Sure() if a == 1 else Yes(7)\n",
    "computes as it likes": "class Zero:\n"
    + "".join(f"    def __{name}__(self, *_): return 0\n" for name in ("sub", "rsub", "abs", "len", "hash", "int"))
    + "    def __bool__(self): return True\ndef add(a, b):\n    return Zero()\n",
    "kills its parent": WRONG + "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)",
    "stops its parent": WRONG + "import os, signal\nos.kill(os.getppid(), signal.SIGSTOP)",
    "kills everything": WRONG + "import os, signal\nos.kill(-1, signal.SIGKILL)",
    "looks at its parent": WRONG + "import os\nfor name in ('mem', 'fd/1', 'environ'):\n"
    "    open(f'/proc/{os.getppid()}/{name}', 'r+b').write(b'All 4 tests passed.')",
    "talks on every file": WRONG
    + "import os\nfor f in range(3, 60):\n    try: os.write(f, b'{\"value\": 3}\\n' * 50)\n"
    "    except OSError: pass",
    "closes every file": WRONG + "import os\nos.closerange(0, 60)",
}


@pytest.mark.parametrize("name", FORGERIES)
def test_the_verdict_cannot_be_forged(sandbox, name):
    environment = CodeEnvironment(Sandbox(replace(sandbox.limits, seconds=1.5)))
    environment.reset(tests=TESTS)
    result = run(environment, FORGERIES[name])
    assert result.satisfied is False, result
    assert environment.get_reward() == 0.0
    assert not headline(result).startswith("All")


def test_a_test_that_hides_the_end_of_the_code_does_not_pass(environment):
    tests = "def test_x():\n    try:\n        f()\n    except:\n        pass\n    else:\n        raise AssertionError\n"
    assert run(environment, "def f(): raise ValueError", tests).satisfied is True
    result = run(environment, "import os\ndef f(): os._exit(0)")
    assert (result.satisfied, result.info["passed"]) == (False, 0)


def test_an_object_that_is_equal_to_everything_is_equal_to_no_plain_value(environment):
    code = "class Sure:\n    def __eq__(self, other): return True\n    def __ne__(self, other): return False\n"
    code += "class Yes(int, Sure):\n    pass\ndef f(): return Sure()\ndef g(): return Yes(7)"
    result = run(environment, code, "assert f() == 3\nassert 3 == f()\nassert not f() != 3\nassert g() == 3")
    assert (result.satisfied, result.info["passed"]) == (False, 0)


def test_names_of_the_code_never_take_the_place_of_builtins(environment):
    code = "def f(): return [1]\ndef len(x): return 3\ndef sum(x): return 6"
    tests = "from solution import *\ndef test_x():\n    assert len(f()) == 3 and sum(f()) == 6"
    assert run(environment, code, tests).satisfied is False


def test_modules_that_the_code_plants_are_not_imported_by_the_tests(environment):
    plant = "def f():\n    for d in ('.', '.tests'):\n        open(d + '/planted.py', 'w').write('x = 1')\n"
    tests = "f()\ndef test_x():\n    import planted\n    assert planted.x == 1"
    result = run(environment, plant, tests)
    assert result.satisfied is False
    assert "No module named 'planted'" in result


def test_the_tests_are_nowhere_to_be_read(environment):
    code = "import os\ndef f():\n    return [open(t + '/' + n).read() for t, _, ns in os.walk('.') for n in ns]"
    tests = "found = f()\ndef test_x():\n    assert found and not any('unguessable' in text for text in found)"
    assert run(environment, code, tests).satisfied is True


def test_a_row_is_read_by_trl_as_it_is():
    from transformers.utils import get_json_schema

    schema = get_json_schema(CodeEnvironment(Sandbox(Limits())).run_tests)
    assert json.loads(json.dumps(schema))["function"]["parameters"]["required"] == ["code"]


ZERO = "def f(x): return 0\n"


@pytest.mark.parametrize(
    ("tests", "passed", "total"),
    [
        ("assert f(0) == 0\nfor i in range(5):\n    assert f(i) == i * i\n", 1, 2),
        ("def check(g):\n    assert g(2) == 4\nassert f(0) == 0\ncheck(f)\n", 1, 2),
        ("assert f(0) == 0\nif True:\n    assert f(2) == 4\nassert f(0) == 0\n", 2, 3),
        ("assert f(0) == 0\nexpected = f(1) + undefined\n", 1, 1),
    ],
    ids=["a loop", "a function that is called", "a condition, and what comes after it", "set-up"],
)
def test_assertions_anywhere_in_the_file_count(environment, tests, passed, total):
    result = run(environment, ZERO, tests)
    assert result.satisfied is False
    assert environment.verdict == "failed"
    assert environment.get_reward() == 0.0
    assert (result.info["passed"], result.info["total"]) == (passed, total)
    assert result.info["wish"]
    assert not headline(result).startswith(("All", "The test passed"))


def test_they_pass_for_code_that_is_right(environment):
    tests = "def check(g):\n    assert g(2) == 4\nfor i in range(5):\n    assert f(i) == i * i\ncheck(f)\n"
    assert run(environment, "def f(x): return x * x\n", tests) == "All 2 tests passed."
