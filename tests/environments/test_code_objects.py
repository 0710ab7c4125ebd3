"""What tests believe of the code's objects and names: nothing about plain values, nor in place of their own names."""

from dataclasses import replace

import pytest

from trl_openclaw.environments.code import CodeEnvironment
from trl_openclaw.environments.sandbox import Sandbox
from trl_openclaw.types import ToolResult


@pytest.fixture
def environment(sandbox):
    return CodeEnvironment(Sandbox(replace(sandbox.limits, seconds=5)), max_chars=500)


def run(environment: CodeEnvironment, code: str, tests: str, **row) -> ToolResult:
    environment.reset(prompt="", tests=tests, **row)
    return environment.run_tests(code)


SURE = """
class Sure:
    def __bool__(self): return bool(self.said)
    def __contains__(self, other): return True
    def __iter__(self): return iter([])
    def __len__(self): return 3
    def __getitem__(self, at): return 3
    def __call__(self, *a): return self
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 3
    def __float__(self): return 3.0
    def __int__(self): return 3
    __index__ = __abs__ = __round__ = __trunc__ = __floor__ = __ceil__ = __int__
    def __reversed__(self): return iter([3])
    def __complex__(self): return 3j
    def __bytes__(self): return b"3"
    def __sub__(self, *other): return 0.0
    said = True
for name in ("lt", "le", "gt", "ge"):
    setattr(Sure, f"__{name}__", lambda *a: True)
for name in "add mul matmul truediv floordiv mod divmod pow lshift rshift and or xor".split():
    setattr(Sure, f"__{name}__", Sure.__sub__)
    setattr(Sure, f"__r{name}__", Sure.__sub__)
Sure.__rsub__ = Sure.__neg__ = Sure.__pos__ = Sure.__invert__ = Sure.__sub__
class Not(Sure): said = False
def f(x=0): return Sure()
def no(x=0): return Not()
"""
BELIEVED = [
    "abs(f(2) - 12.566) < 1e-3", "abs(12.566 - f(2)) < 1e-3", "f() / 12.5 == 0", "12.5 / f() == 0", "f() + 1 == 0",
    "1 + f() == 0", "f() * 2 == 0", "f() ** 2 == 0", "2 ** f() == 0", "f() % 2 == 0", "f() // 2 == 0", "f() & 1 == 0",
    "1 | f() == 0", "f() ^ 1 == 0", "f() << 1 == 0", "f() @ 1 == 0", "divmod(f(), 2) == 0", "-f() == 0", "+f() == 0",
    "~f() == 0", "5 in f()", "f() < 3", "f() >= 3", "3 > f()", "3 <= f()", "f()", "not no()", "f() and True",
    "len(f()) == 3", "f()[0] == 3", "all(x == 5 for x in f())", "list(f()) == []", "sorted(f()) == []", "abs(f()) == 3",
    "round(f()) == 3", "int(f()) == 3", "float(f()) == 3", "math.isclose(f(2), 3)", "math.floor(f()) == 3",
    "math.ceil(f()) == 3", "math.trunc(f()) == 3", "complex(f()) == 3j", "bytes(f()) == b'3'", "[1, 2, 3, 4][f()] == 4",
    "list(reversed(f())) == [3]", "max(f(), 2) is not None", "sum([f(), 1]) == 0", "bool(f()) is True",
    "list(filter(f, [1])) == [1]", "any([no(), f()])",
]  # fmt: skip


@pytest.mark.parametrize("test", BELIEVED)
def test_an_object_of_the_code_says_nothing_about_plain_values(environment, test):
    result = run(environment, SURE, f"import math\nassert {test}")
    assert result.satisfied is False
    assert "TypeError: the code returned an object of its own where a plain value was expected" in result


def test_an_object_of_the_code_is_iterated_once(environment):
    code = "class Twice:\n    n = 0\n    def __next__(self):\n        self.n += 1\n"
    code += "        if self.n % 3 == 0: raise StopIteration\n        return self.n\ndef f(): return Twice()"
    assert run(environment, code, "def test():\n    it = f()\n    assert (list(it), list(it)) == ([1, 2], [])") == (
        "The test passed."
    )


ASKED_FOR = """
class V:
    def __init__(self, *xs): self.xs = list(xs)
    def __add__(self, other): return V(*(a + b for a, b in zip(self.xs, other.xs)))
    def __mul__(self, n): return V(*(x * n for x in self.xs))
    __rmul__ = __mul__
    def __eq__(self, other): return isinstance(other, V) and self.xs == other.xs
    def __lt__(self, other): return self.xs < other.xs
    def __len__(self): return len(self.xs)
    def __iter__(self): return iter(self.xs)
    def __contains__(self, x): return x in self.xs
    def __getitem__(self, at): return self.xs[at]
    def __setitem__(self, at, x): self.xs[at] = x
    def __abs__(self): return sum(self.xs)
    def __str__(self): return str(self.xs)
    def __enter__(self): return 5
    def __exit__(self, *_): pass
def make(*xs): return V(*xs)
"""


@pytest.mark.parametrize("made_by", ["V", "solution.V", "candidate"])
def test_an_object_that_the_tests_have_asked_for_does_what_its_class_says(environment, made_by):
    tests = """
import solution
def check(candidate):
    v = MADE_BY(1, 2)
    assert v + v == v * 2 == 2 * v == V(2, 4) and v < V(3) and v != make(1)
    assert len(v) == 2 and list(v) == list(v) == [1, 2] and 2 in v and 3 not in v and v[1] == 2 and abs(v) == 3
    v[0] = 0
    assert v.xs == [0, 2] and str(v) == "[0, 2]" and v and not V()
    with v as five:
        assert five == 5
    assert make(1) + make(1) == make(2)
    assert make(1) < make(2) and f"{make(1)}" == "[1]" and len({1: 2, v.xs[0]: 3}) == 2
"""
    assert run(environment, ASKED_FOR, tests.replace("MADE_BY", made_by), entry_point="V") == "The test passed."


@pytest.mark.parametrize(
    "tests",
    [
        "import math\nfrom solution import *\ndef test_x():\n    assert math.isclose(area(2), 12.5)",
        "def close(a, b):\n    return abs(a - b) < 1e-6\nfrom solution import *\nassert close(area(2), 12.5)",
        "CASES = [(2, 12.5)]\nfrom solution import *\nfor a, b in CASES:\n    assert area(a) == b",
        "import os.path as math\nfrom solution import *\nassert math.isclose(area(2), 12.5)",
        "class Close:\n    no = False\nif True:\n    from solution import *\nassert area(2) == 12.5 or Close.no",
        "assert isclose(area(2), 12.5)\nfrom math import isclose",
    ],
)
def test_names_that_the_tests_bind_are_theirs(environment, tests):
    code = "class M:\n    def isclose(self, *a): return True\nmath = M()\nCASES = []\nClose = M()\nM.no = True\n"
    code += "def close(*a): return True\nisclose = close\ndef area(r): return 3"
    assert run(environment, code, tests).satisfied is False


def test_other_names_come_with_a_star(environment):
    tests = "from solution import *\ndef test_x():\n    area = 3\n    assert solve(2) == area\nassert area(3) == 4"
    assert run(environment, "def solve(x): return x + 1\narea = solve", tests) == "All 2 tests passed."
