"""Imports inside the package go one way, and TRL's private names are used in one place only."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "trl_openclaw"

# Lowest first. A module or subpackage may import itself and what stands on a lower line, nothing on its own line.
ORDER = [
    {"config_file", "cores", "signals"},  # what a command line needs of the system
    {"types", "errors", "calls", "clipping"},  # plain values and text, which everything else speaks in, and callables
    {"prefix_plan", "dropout", "quantized", "trajectories"},  # what rows share, properties of a model, an agent's turns
    {"prefix_passes"},  # in which passes a model runs that
    {"shared_prefix"},  # a model's forward pass that runs what rows have in common once
    {"_trl"},  # TRL's private names, wrapped: knows nothing of what we do with them
    {"lm_head"},  # a model's LM head as tensors
    {"losses", "hints", "scoring", "hint_selection", "leakage", "format_tokens"},  # pure functions of tensors and texts
    {"objectives"},  # losses per position, made from the above
    {"server_client"},  # the connection to a server
    {"chat"},  # asking a chat model there
    {"local_chat"},  # the same for a model in the process, with the types of the above
    {"engine_chat"},  # the same with the engine that samples for a trainer
    {"judges", "next_states", "teachers"},  # where signal comes from, each useful alone
    {"feedback"},  # a next state and a judge for a batch of turns
    {"environments"},  # what an agent acts on, and the users it talks to
    {"rewards"},  # feedback as a plain TRL reward function
    {"trainer"},  # where the signal meets GRPOTrainer
    {"live"},  # traffic as a source of turns, for the trainers
    {"report"},  # what a recipe shows of a run: tables, curves, held-out answers
    {"merge"},  # what becomes of a saved adapter: needs nothing of this package
    {"recipe"},  # what the recipes share: arguments, judges and next states by name, the run itself
    {"__init__"},  # the version and the public names; from further down it would be a circle
    {"cli"},  # launches the recipes; nobody imports it
]
RANK = {unit: rank for rank, units in enumerate(ORDER) for unit in units}

USES_PRIVATE_TRL = {"_trl", "lm_head", "scoring", "teachers", "environments", "trainer"}
PRIVATE_TRL = ("trl.trainer.utils", "trl.models", "trl.kernels")

Import = tuple[int, str, str | None]
"""Line, module, and the name taken from it, `None` when the module itself is imported."""


def imports_of(source: str, module: str) -> Iterator[Import]:
    """All imports that happen at run time, at any depth, relative ones resolved."""
    for node in _run_time_nodes(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".")[: -node.level] if node.level else []
            origin = ".".join([*base, *filter(None, [node.module])])
            yield from ((node.lineno, origin, alias.name) for alias in node.names)


def _run_time_nodes(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for other in child.orelse:
                yield from _run_time_nodes(other)
        else:
            yield from _run_time_nodes(child)


def unit_of(module: str, name: str | None = None) -> str:
    """The part of the package that an import reaches: `trl_openclaw.judges.llm` is in `judges`."""
    parts = module.split(".")
    if len(parts) > 1:
        return parts[1]
    return name if name in RANK else "__init__"


def back_edges(source: str, module: str) -> list[str]:
    """What this module imports from the package that does not stand below it."""
    unit = unit_of(module)
    found = []
    for line, origin, name in imports_of(source, module):
        if origin.split(".")[0] != "trl_openclaw":
            continue
        target = unit_of(origin, name)
        if target != unit and RANK[target] >= RANK[unit]:
            found.append(f"{module}:{line} ({unit}) imports {target}, which does not stand below it in ORDER")
        if target == "_trl" and unit not in USES_PRIVATE_TRL:
            found.append(f"{module}:{line} imports _trl, which only {sorted(USES_PRIVATE_TRL)} may")
    return found


def private_uses(source: str, module: str) -> list[str]:
    """Where a module imports, or reaches by attribute, what TRL keeps private."""
    names = {
        f"{module}:{line}": f"{origin}.{name}" if name else origin
        for line, origin, name in imports_of(source, module)
        if _is_private_trl(f"{origin}.{name}" if name else origin)
    }
    for node in _run_time_nodes(ast.parse(source)):
        if isinstance(node, ast.Attribute) and _is_private_trl(dotted := ast.unparse(node)):
            names[f"{module}:{node.lineno}"] = dotted
    return [f"{place} uses {name}; only _trl may" for place, name in names.items()]


def _is_private_trl(dotted: str) -> bool:
    parts = dotted.split(".")
    if parts[0] != "trl":
        return False
    return any(part.startswith("_") for part in parts) or any(
        dotted == prefix or dotted.startswith(f"{prefix}.") for prefix in PRIVATE_TRL
    )


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)


# Recipes and configs are copied into an installed package, where they are scripts and no part of it.
SHIPPED = {"recipes", "accelerate_configs"}
MODULES = [path for path in sorted(PACKAGE.rglob("*.py")) if path.relative_to(PACKAGE).parts[0] not in SHIPPED]


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_imports_go_one_way(path):
    unit = unit_of(module_name(path))
    assert unit in RANK, f"{unit} needs a place in ORDER"
    assert back_edges(path.read_text(encoding="utf-8"), module_name(path)) == []


@pytest.mark.parametrize("path", [path for path in MODULES if path.parent.name != "_trl"], ids=module_name)
def test_only_one_package_uses_what_trl_keeps_private(path):
    assert private_uses(path.read_text(encoding="utf-8"), module_name(path)) == []


def test_no_unit_stands_twice():
    assert sum(map(len, ORDER)) == len(RANK)


@pytest.mark.parametrize(
    ("module", "source", "count"),
    [
        ("trl_openclaw.losses", "from trl_openclaw.judges import Judge", 1),
        ("trl_openclaw.losses", "def f():\n    import trl_openclaw.trainer.opd_trainer", 1),
        ("trl_openclaw.losses", "from trl_openclaw import Turn", 1),
        ("trl_openclaw.losses", "from trl_openclaw import judges, types", 1),
        ("trl_openclaw.judges.llm", "from ..next_states import Persona", 1),
        ("trl_openclaw.judges.llm", "from .base import Judge\nfrom ..types import Turn", 0),
        ("trl_openclaw.judges.__init__", "from .base import Judge\nfrom trl_openclaw.chat import ChatClient", 0),
        ("trl_openclaw.judges.llm", "from trl_openclaw._trl import x", 1),
        ("trl_openclaw.teachers.local", "from trl_openclaw._trl import x", 0),
        ("trl_openclaw.losses", "if TYPE_CHECKING:\n    from trl_openclaw.trainer import OPDTrainer", 0),
        ("trl_openclaw.losses", "if TYPE_CHECKING:\n    pass\nelse:\n    import trl_openclaw.trainer", 1),
        ("trl_openclaw.cli", "from trl_openclaw.trainer import OPDTrainer\nimport torch", 0),
    ],
)
def test_back_edges_are_seen(module, source, count):
    assert len(back_edges(source, module)) == count


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("from trl import GRPOTrainer, GRPOConfig", 0),
        ("from trl import _secret", 1),
        ("from trl.trainer.utils import pad", 1),
        ("from trl.trainer import utils", 1),
        ("from trl.models import utils", 1),
        ("def f():\n    import trl.models.utils", 1),
        ("import trl\n\ntrl.trainer.utils.pad([])", 1),
        ("if TYPE_CHECKING:\n    from trl.trainer.utils import pad", 0),
        ("from trl.trainer.grpo_trainer import GRPOTrainer\nself._private()", 0),
        ("from trlx import _other", 0),
    ],
)
def test_private_uses_are_seen(source, count):
    assert len(private_uses(source, "trl_openclaw.trainer.opd_trainer")) == count
