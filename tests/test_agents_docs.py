"""docs/agents.md: its commands are run, its examples work, and it names every setting, metric and reason."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import datasets
import pytest
from test_readme import blocks, commands, placeholders, unknown_commands, unknown_keywords, unknown_names
from transformers import training_args
from trl import GRPOTrainer

import trl_openclaw
from trl_openclaw import cli
from trl_openclaw.environments import Limits, conversation
from trl_openclaw.environments import code as code_environment
from trl_openclaw.environments.bad_rows import UNUSABLE
from trl_openclaw.feedback import feedback_metrics
from trl_openclaw.trainer import step_records
from trl_openclaw.trainer.hint_rows import DROP_REASONS
from trl_openclaw.trajectories import UNANSWERED_CALL, UNREAD_CALL

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "agents.md"
TEXT = PAGE.read_text(encoding="utf-8")
EXAMPLES = blocks(TEXT, "python")


def test_a_test_runs_each_command():
    assert len(commands(TEXT)) == 2
    assert unknown_commands(TEXT) == []


def test_no_figure_is_left_to_be_filled_in():
    assert [name for name in placeholders(TEXT) if name != "LOGGED_STEPS"] == []


def test_examples_use_names_and_keywords_that_exist():
    assert len(EXAMPLES) == 3
    for code in EXAMPLES:
        compile(code, PAGE.name, "exec")
        assert unknown_names(code) == []
        assert unknown_keywords(code) == []


@pytest.mark.parametrize("example", [code for code in EXAMPLES if "Trainer(" in code])
def test_examples_build_what_the_trainers_take(example, monkeypatch, tmp_path):
    """They are run up to the trainer, which would fetch a model; on a GPU, as far as the config can tell."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    monkeypatch.setattr(training_args, "is_torch_bf16_gpu_available", lambda: True)
    built = []
    for name in ("OPDTrainer", "CombineTrainer"):
        parents = (getattr(trl_openclaw, name), GRPOTrainer)
        taken = {keyword for parent in parents for keyword in inspect.signature(parent).parameters}
        monkeypatch.setattr(trl_openclaw, name, lambda _taken=taken, **given: built.append(given.keys() - _taken))
    exec(example, {"dataset": None})
    assert built == [set()]


def test_the_example_of_a_wrapped_environment_prints_what_the_page_says(tmp_path):
    (code,) = (code for code in EXAMPLES if "__main__" in code)
    (tmp_path / "my_module.py").write_text(code, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, tmp_path / "my_module.py"],
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert f"It prints `{done.stdout.strip()}`" in TEXT


def test_links_lead_somewhere():
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", TEXT)
    assert [target for target in targets if not (PAGE.parent / target).exists()] == []
    anchors = re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", TEXT)
    assert [anchor for page, anchor in anchors if anchor not in headings(PAGE.parent / page if page else PAGE)] == []


def headings(page: Path) -> set[str]:
    """The anchors of a page."""
    lines = page.read_text(encoding="utf-8").splitlines()
    titles = (line.lstrip("# ") for line in lines if line.startswith("#"))
    return {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}


def test_the_metrics_are_those_of_the_docstring():
    rows = [line.strip() for line in step_records.record_steps.__doc__.splitlines() if line.strip().startswith("| `")]
    assert len(rows) == 7
    assert [row for row in rows if row not in TEXT] == []
    assert f"first {step_records.LOGGED_STEPS} count" in TEXT.replace("\n", " ")


@pytest.mark.parametrize("module", [step_records, conversation], ids=lambda module: module.__name__)
def test_what_is_logged_is_there(module):
    names = re.findall(r'(?<!r)"((?:turns|steps|environment|conversation)/[^"]+)"', inspect.getsource(module))
    assert len(names) >= 2
    for name in names:  # what stands in braces stands on the page as `<t>`, or filled in
        pattern = re.sub(r"\\{\w+\\}", r"<?\\w+>?", re.escape(name))
        assert re.search(f"`{pattern}`", TEXT), name


def test_what_goes_wrong_is_called_as_in_the_code():
    dropped = re.findall(r"`hint/dropped/(\w+)`", TEXT)
    assert dropped
    assert set(dropped) <= set(DROP_REASONS)
    counted = re.findall(r"`((?:feedback|next_state)/[\w/]+)", TEXT)
    assert counted
    assert [name for name in counted if not any(known.startswith(name) for known in feedback_metrics([]))] == []
    said = [text.removesuffix(" ...") for text in re.findall(r'"(The tool call [^"]+)"', TEXT)]
    assert len(said) == 2
    assert said[0] == UNREAD_CALL
    assert UNANSWERED_CALL.startswith(said[1])
    assert f"the verdict `{UNUSABLE}`" in TEXT


def test_the_settings_of_the_recipe_are_there():
    recipe = cli.load_recipe(ROOT / "recipes" / "agent.py")
    assert [name for name in (*recipe.TOOL_TEMPLATES, *recipe.ENVIRONMENTS) if f"`{name}`" not in TEXT] == []
    own = recipe.AgentArguments.__annotations__
    assert [name for name in own if f"| `{name}` |" not in TEXT] == []


def test_the_limits_are_the_sandbox_s():
    limits = Limits()
    assert f"| {limits.memory_mb} MiB |" in TEXT
    assert f"| {limits.file_mb} MiB, {limits.disk_mb} MiB, {limits.files:,} files |" in TEXT
    of_code = code_environment._LIMITS
    assert f"{limits.processes} (code: {of_code.processes}) at a time" in TEXT
    assert f"{limits.seconds:g} s (code: {of_code.seconds:g} s for all tests)" in TEXT
    assert f"{limits.output_chars:,} characters" in TEXT
