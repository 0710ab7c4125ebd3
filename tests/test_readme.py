"""The README holds what it says: its commands are run by a test or by CI, its examples compile and its names exist."""

import ast
import importlib
import inspect
import re
import shlex
from pathlib import Path

import pytest

import trl_openclaw

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
CI = ".ci/run"

COMMANDS = {
    "make demo": CI,
    "make test": CI,
    "make test-slow": "tests/test_makefile.py::test_the_long_runs_have_a_target_of_their_own",
    "make lint": CI,
    "accelerate launch recipes/opd.py --config recipes/configs/demo.yaml": (
        "tests/recipes/test_recipes.py::test_demo_reports_before_and_after"
    ),
    "accelerate launch recipes/opd.py --config recipes/configs/opd.yaml": (
        "tests/recipes/test_recipes.py::test_opd_saves_an_adapter_alone"
    ),
    "accelerate launch recipes/rl.py --config recipes/configs/rl.yaml": (
        "tests/recipes/test_recipes.py::test_rl_asks_for_scores_alone"
    ),
    "accelerate launch recipes/combine.py --config recipes/configs/combine.yaml": (
        "tests/recipes/test_recipes.py::test_combine_trains_all_weights_on_both_signals"
    ),
    "trl-openclaw combine --config recipes/configs/combine.yaml": (
        "tests/recipes/test_recipes.py::test_combine_through_our_command"
    ),
    "trl-openclaw merge runs/opd runs/opd-merged": (
        "tests/test_merge.py::test_a_trained_adapter_and_its_card_by_the_command"
    ),
    "accelerate launch recipes/agent.py --config recipes/configs/agent.yaml": (
        "tests/recipes/test_recipes.py::test_agent_logs_every_step_of_its_trajectories"
    ),
    "make live-demo": "tests/live/test_live_docs.py::test_the_demo_is_what_make_runs",
    "trl-openclaw serve": "tests/live/test_live_docs.py::test_the_settings_of_the_gateway_are_there",
    "trl-openclaw live": "tests/live/test_live_docs.py::test_the_settings_of_the_learner_are_there",
    "python benchmarks/draw_trajectory.py --model runs/agent --folder docs/images": (
        "tests/benchmarks/test_draw_trajectory.py::test_runs_and_ends_in_json"
    ),
    "python benchmarks/step_overhead.py": "tests/benchmarks/test_step_overhead.py::test_runs_and_ends_in_json",
    "python benchmarks/profile_step.py": "tests/benchmarks/test_profile_step.py::test_runs_and_ends_in_json",
    "python benchmarks/multi_hint.py": "tests/benchmarks/test_multi_hint.py::test_runs_and_ends_in_json",
    "python benchmarks/turn_scoring.py": "tests/benchmarks/test_turn_scoring.py::test_runs_and_ends_in_json",
    "python benchmarks/gateway.py": "tests/benchmarks/test_gateway.py::test_runs_and_ends_in_json",
    "python benchmarks/live_sessions.py": "tests/benchmarks/test_live_sessions.py::test_runs_and_ends_in_json",
    "python benchmarks/zero3_overhead.py": "tests/benchmarks/test_zero3_overhead.py::test_runs_and_ends_in_json",
    "python benchmarks/server_teacher.py --topk 4 --token-ms 0.1": (
        "tests/benchmarks/test_server_teacher.py::test_runs_and_ends_in_json"
    ),
    "python benchmarks/growth.py --folder docs/images": "tests/benchmarks/test_growth.py::test_runs_and_ends_in_json",
    "python benchmarks/judge_concurrency.py": "tests/benchmarks/test_judge_concurrency.py::test_runs_and_ends_in_json",
    "python benchmarks/judge_concurrency.py --trajectory --turns 8 --votes 1 --delay 0.5": (
        "tests/benchmarks/test_judge_concurrency.py::test_the_turns_of_a_trajectory_are_judged_at_once"
    ),
}
"""A command of the README or of a page in docs/, and what runs it exactly so: a test, which may add what makes it
small, or CI."""

ENVIRONMENT = {"OMP_NUM_THREADS", "OPENAI_API_KEY"}
"""Environment variables that our docs explain. Any other NAME_IN_CAPITALS in running text is a placeholder."""

PROGRAMS = ("make ", "accelerate launch ", "trl-openclaw ", "pip ")


def blocks(text: str, *languages: str) -> list[str]:
    """The fenced code blocks in these languages."""
    fenced = re.findall(r"^```(\w+)[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [code for language, code in fenced if language in languages]


def commands(text: str) -> list[str]:
    """The commands in shell blocks: without comments and prompts, continued lines joined."""
    lines = "\n".join(blocks(text, "bash", "sh", "shell", "console")).replace("\\\n", " ").splitlines()
    words = (shlex.split(re.sub(r"^\s*\$ ", "", line), comments=True) for line in lines)
    return [shlex.join(found) for found in words if found]


def unknown_commands(text: str) -> list[str]:
    return [command for command in commands(text) if command not in COMMANDS]


def unknown_inline_commands(text: str) -> list[str]:
    """Commands inside sentences that are none of ours, nor the beginning of one (a closing `...` is left out)."""
    inline = (" ".join(code.split()) for code in re.findall(r"`([^`]+)`", without_blocks(text)))
    given = [code for code in inline if code.startswith(PROGRAMS)]
    return [code for code in given if not any(f"{command} ".startswith(_beginning(code)) for command in COMMANDS)]


def _beginning(code: str) -> str:
    return f"{code.removesuffix('...').strip()} "


def placeholders(text: str) -> list[str]:
    """What looks like a figure that was to be filled in: `NAME_IN_CAPITALS`, or a long word, outside code and links."""
    prose = re.sub(r"`[^`]+`|\[[^\]]*\]\([^)]*\)", "", without_blocks(text))
    return [name for name in re.findall(r"\b(?:[A-Z]+_[A-Z_]+|[A-Z]{8,}|TODO|TBD)\b", prose) if name not in ENVIRONMENT]


def without_blocks(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def unknown_names(code: str) -> list[str]:
    """What a piece of code imports from this package and does not find there."""
    missing = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "trl_openclaw":
            module = importlib.import_module(node.module)
            missing += [alias.name for alias in node.names if not hasattr(module, alias.name)]
    return missing


def test_every_command_of_the_readme_is_run():
    assert commands(README.read_text()), "The README shows no command at all."
    unknown = unknown_commands(README.read_text())
    assert not unknown, (
        f"No test and no CI step is known to run these commands of README.md: {unknown}. Write a test that runs each "
        "exactly as it stands there, and add it to COMMANDS in tests/test_readme.py."
    )


def test_commands_inside_sentences_are_among_those():
    unknown = unknown_inline_commands(README.read_text())
    assert not unknown, f"README.md names these commands, which nothing runs: {unknown}. See COMMANDS."


def test_no_figure_is_left_to_be_filled_in():
    assert placeholders(README.read_text()) == []


@pytest.mark.parametrize("command", [command for command, runner in COMMANDS.items() if runner != CI])
def test_the_test_that_runs_a_command_is_there_and_holds_it(command):
    path, _, name = COMMANDS[command].partition("::")
    source = (ROOT / path).read_text()
    functions = [n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef) and n.name == name]
    assert functions, f"{COMMANDS[command]} does not exist, but should run {command!r}."
    code = ast.get_source_segment(source, functions[0])
    assert f'"{command}"' in code, f"{COMMANDS[command]} does not run {command!r} as it is written."


@pytest.mark.parametrize("command", [command for command, runner in COMMANDS.items() if runner == CI])
def test_ci_runs_the_make_target(command):
    target = command.removeprefix("make ")
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert re.search(rf"^{command}\b", (ROOT / CI).read_text(), re.MULTILINE)


def test_python_examples_compile_and_their_names_exist():
    examples = blocks(README.read_text(), "python")
    assert examples, "The README shows no Python example."
    for code in examples:
        compile(code, "README.md", "exec")
        assert unknown_names(code) == []
        assert unknown_keywords(code) == []


def unknown_keywords(code: str) -> list[str]:
    """Keywords that a call of one of our public names would not take, as `name(keyword=)`."""
    found = []
    for call in ast.walk(ast.parse(code)):
        ours = getattr(trl_openclaw, call.func.id, None) if _calls_a_name(call) else None
        if ours is None:
            continue
        taken = inspect.signature(ours).parameters
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values()):
            found += [f"{call.func.id}({k.arg}=)" for k in call.keywords if k.arg and k.arg not in taken]
    return found


def _calls_a_name(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name)


def test_how_keywords_are_read():
    assert unknown_keywords("OPDConfig(output_dir='x', logp_gap_clip=1)\nprint(end='')") == []
    assert unknown_keywords("OPDConfig(gap=1)") == ["OPDConfig(gap=)"]


def test_links_to_files_of_this_repository_lead_somewhere():
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", README.read_text())
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_how_running_text_is_read():
    text = """
Set OPENAI_API_KEY, then `make demo`, `make model` or `trl-openclaw
combine`; `accelerate launch recipes/combine.py --config ...`, `trl-openclaw comb ...`, `pip` and `pip install x`.

MEASURED_DEMO, not `MEASURED_CODE`; it takes TESTTIME, see [CONTRIBUTING](CONTRIBUTING.md)

```bash
make nothing  # IN_A_BLOCK
```
"""
    assert unknown_inline_commands(text) == ["make model", "trl-openclaw comb ...", "pip install x"]
    assert placeholders(text) == ["MEASURED_DEMO", "TESTTIME"]


def test_how_commands_are_read():
    text = """
```bash
$ make demo   # the demo

make test PYTEST_ARGS=-x
accelerate launch \\
    recipes/opd.py --config recipes/configs/demo.yaml
```
```python
make nothing
```
```bash
make demo
```
"""
    known = "accelerate launch recipes/opd.py --config recipes/configs/demo.yaml"
    assert commands(text) == ["make demo", "make test PYTEST_ARGS=-x", known, "make demo"]
    assert unknown_commands(text) == ["make test PYTEST_ARGS=-x"]
    assert unknown_names("from trl_openclaw import OPDTrainer, OPDTrainr\nfrom os import nothing") == ["OPDTrainr"]
