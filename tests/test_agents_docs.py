"""docs/agents.md: its commands are run, its examples work, and it names every setting, metric and reason."""

import re
import subprocess
import sys
from pathlib import Path

from test_readme import blocks, commands, placeholders, unknown_commands, unknown_keywords, unknown_names

from trl_openclaw import cli
from trl_openclaw.environments import Limits
from trl_openclaw.trainer import step_records

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
    headings = {re.sub(r"[^\w -]", "", line.lstrip("# ")).lower().replace(" ", "-") for line in TEXT.splitlines()}
    assert [anchor for anchor in re.findall(r"\]\(#([^)]+)\)", TEXT) if anchor not in headings] == []


def test_the_metrics_are_those_of_the_docstring():
    rows = [line.strip() for line in step_records.record_steps.__doc__.splitlines() if line.strip().startswith("| `")]
    assert len(rows) == 7
    assert [row for row in rows if row not in TEXT] == []
    assert f"first {step_records.LOGGED_STEPS} count" in TEXT.replace("\n", " ")


def test_the_settings_of_the_recipe_are_there():
    recipe = cli.load_recipe(ROOT / "recipes" / "agent.py")
    assert [name for name in (*recipe.TOOL_TEMPLATES, *recipe.ENVIRONMENTS) if f"`{name}`" not in TEXT] == []
    own = recipe.AgentArguments.__annotations__
    assert [name for name in own if f"| `{name}` |" not in TEXT] == []


def test_the_limits_are_the_sandbox_s():
    limits = Limits()
    assert f"| {limits.memory_mb} MiB |" in TEXT
    assert f"| {limits.file_mb} MiB, {limits.disk_mb} MiB, {limits.files:,} files |" in TEXT
    assert f"{limits.processes} (code: 16) at a time" in TEXT
    assert f"{limits.seconds:g} s (code: 5 s for all tests)" in TEXT
    assert f"{limits.output_chars:,} characters" in TEXT
