"""The file of tests: which tests it has, run one by one, with assertions that say what they got."""

import ast
import builtins
import linecache
import sys
import types
from collections.abc import Callable
from functools import partial
from typing import Any

from .wire import MAX_REPR, NAME, short


class Failed(AssertionError):
    """An assertion of the tests that does not hold."""

    def __init__(self, source: str, got: object, expected: object, message: object):
        super().__init__(source if message is None else f"{source}: {short(message)}")
        self.facts = {"source": source, "got": got, "expected": expected}


class Explain(ast.NodeTransformer):
    """Rewrites assertions so that they say what they got, and what they expected."""

    def visit_Assert(self, node: ast.Assert) -> list[ast.stmt]:
        source, test = ast.unparse(node.test), node.test
        condition: ast.expr
        swapped = False
        if isinstance(test, ast.Compare) and len(test.ops) == 1:
            swapped = not has_call(test.left) and has_call(test.comparators[0])
            values = [test.left, test.comparators[0]]
            names = [ast.Name("_got_", ast.Load()), ast.Name("_expected_", ast.Load())]
            condition = ast.Compare(names[0], test.ops, [names[1]])
            equal = isinstance(test.ops[0], ast.Eq | ast.Is)
        else:
            values, names, equal = [test], [ast.Name("_got_", ast.Load())], False
            condition = names[0]
        stores = ast.Tuple([ast.Name(name.id, ast.Store()) for name in names], ast.Store())
        loads = ast.Tuple(values, ast.Load())
        shown: list[ast.expr] = [ast.Call(ast.Name("_short_", ast.Load()), [name], []) for name in names]
        if swapped:
            shown.reverse()
        expected = shown[1] if equal and len(shown) == 2 else ast.Constant(None)
        arguments = [ast.Constant(source), shown[0], expected, node.msg or ast.Constant(None)]
        failure = ast.Raise(ast.Call(ast.Name("_Failed_", ast.Load()), arguments, []), None)
        new = [ast.Assign([stores], loads), ast.If(ast.UnaryOp(ast.Not(), condition), [failure], [])]
        return [ast.fix_missing_locations(ast.copy_location(statement, node)) for statement in new]


def has_call(node: ast.AST) -> bool:
    """Whether an expression calls something."""
    return any(isinstance(inner, ast.Call) for inner in ast.walk(node))


def has_assertion(node: ast.AST) -> bool:
    """Whether something in a statement may fail a test."""
    return any(isinstance(inner, ast.Assert | ast.Raise) for inner in ast.walk(node))


def bound_names(body: list[ast.stmt]) -> set[str]:
    """The names that these statements bind, those inside of their functions and classes aside."""
    found, nodes = set(), list[ast.AST](body)
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
            continue
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        nodes += ast.iter_child_nodes(node)
    return found


class Tests:
    """The tests of a file, each counted for itself: its functions `test_*`, and its statements that assert something.

    A statement asserts if there is an assertion in it, as in a loop, or if it calls a function of the file that has
    one. A file with neither is one test. Where `entry_point` is given and the file has a function `check` that it does
    not call itself, that is called with the entry point.
    """

    def __init__(self, source: str, entry_point: str | None):
        self.tree = ast.parse(source, "tests.py")
        self.entry_point = entry_point
        linecache.cache["tests.py"] = (len(source), None, source.splitlines(True), "tests.py")
        body = self.tree.body
        self.functions = [n for n in body if isinstance(n, ast.FunctionDef) and n.name.startswith("test")]
        checks = any(isinstance(node, ast.FunctionDef) and node.name == "check" for node in body)
        called = any(isinstance(n, ast.Expr) and has_call(n) and ast.unparse(n).startswith("check(") for n in body)
        self.check = entry_point if checks and not called else None
        self.asserting = {n.name for n in body if isinstance(n, ast.FunctionDef) and has_assertion(n)}
        count = sum(bool(self._name(node)) for node in body) + len(self.functions) + bool(self.check)
        self.whole = not count
        self.total = count or 1

    def names_wanted(self) -> set[str | None]:
        """The names that the tests use and do not make themselves: those the code is asked for."""
        used = {n.id for n in ast.walk(self.tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
        used -= bound_names(self.tree.body)
        return {name for name in used if not name.startswith("_") and name not in dir(builtins)} | {self.entry_point}

    def run(self, found: dict[str, Any], test: Callable[[str, Callable[[], object]], bool]) -> None:
        """Run them all in the order of the file, functions last.

        Args:
            found: The code's names. Tests see those that they ask for, never in place of a builtin or of a name that
                they bind themselves; `from solution import *` neither.
            test: Runs one and says whether it passed. What has no name is no test but what tests need.
        """
        wanted = self.names_wanted()
        module = sys.modules[NAME] = types.ModuleType(NAME)
        module.__dict__.update({name: value for name, value in found.items() if name not in dir(builtins)})
        bound = bound_names(self.tree.body)
        module.__dict__["__all__"] = [n for n in module.__dict__ if not n.startswith("_") and n not in bound]
        space: dict[str, Any] = {"__name__": "tests", "_short_": short, "_Failed_": Failed}
        space |= {name: value for name, value in found.items() if name in wanted}
        if self.whole:
            test("the tests", partial(self._execute, self.tree.body, space))
            return
        for node in self.tree.body:
            name = self._name(node)
            if not test(name, partial(self._execute, [node], space)) and not name:
                return  # what the tests need is not there
        for function in self.functions:
            test(function.name, space[function.name])
        if self.check:
            test("check", partial(space["check"], space[self.check]))

    def _name(self, node: ast.stmt) -> str:
        """What a statement is called as a test; nothing for one that only sets up what tests need."""
        if isinstance(node, ast.Assert):
            return ast.unparse(node.test)[:MAX_REPR]
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            return ""
        called = {n.func.id for n in ast.walk(node) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
        asserts = has_assertion(node) or called & self.asserting
        return ast.unparse(node).partition("\n")[0][:MAX_REPR] if asserts else ""

    @staticmethod
    def _execute(nodes: list[ast.stmt], space: dict[str, Any]) -> None:
        tree = ast.fix_missing_locations(Explain().visit(ast.Module(list(nodes), [])))
        exec(compile(tree, "tests.py", "exec"), space)
