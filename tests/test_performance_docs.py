"""docs/performance.md: a test runs each of its commands, and it names every metric of the split."""

from pathlib import Path

from test_readme import commands, placeholders, unknown_commands

from trl_openclaw.trainer import step_profile

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
SCRIPTS = ("profile_step", "multi_hint", "turn_scoring", "step_overhead", "growth")


def test_each_script_has_its_command():
    assert [command.split()[1] for command in commands(TEXT)] == [f"benchmarks/{name}.py" for name in SCRIPTS]


def test_a_test_runs_each_command():
    """As those of the README: `COMMANDS` names the test, which `test_readme` looks up."""
    assert unknown_commands(TEXT) == []


def test_no_figure_is_left_to_be_filled_in():
    assert placeholders(TEXT) == []


def test_the_metrics_are_those_of_the_docstring():
    for line in step_profile.__doc__.splitlines():
        if line.startswith("| `step_seconds/") and "total" not in line:
            assert line in TEXT
    assert f"`{step_profile.PEAK_MEMORY}`" in TEXT
