"""docs/live_learner.md names every check and its settings, with the numbers that hold, and its commands are run."""

import re
from dataclasses import fields
from pathlib import Path

from learner_harness import SETTINGS
from test_readme import commands, placeholders

from trl_openclaw.live.learner import LiveConfig
from trl_openclaw.live.learner.checks import CHECKS
from trl_openclaw.live.learner.probes import load_probes
from trl_openclaw.live.records import TURN_STATES

HERE = Path(__file__).parent
TEXT = (HERE.parents[2] / "docs" / "live_learner.md").read_text(encoding="utf-8")
ROWS = dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", TEXT, re.MULTILINE))


def test_each_check_has_a_row_with_its_settings():
    assert list(ROWS) == list(CHECKS)
    named = set(re.findall(r"`(check_\w+)`", TEXT))
    details = {"check_held_out_turns", "check_held_out_least", "check_replay_turns", "check_reply_tokens"}
    assert named == {one.name for one in fields(LiveConfig) if one.name.startswith("check_")} - details


def test_the_numbers_are_those_of_the_settings():
    config = LiveConfig(bf16=False, use_cpu=True)
    assert f"falls below -{config.check_held_out:g} nats" in ROWS["held_out"]
    assert (
        f"more than {config.check_probes:g} nats per token in this update, or {config.check_probes_total:.1f} in all"
        in (ROWS["plain_questions"])
    )
    assert f"{len(load_probes(None))} plain questions" in ROWS["plain_questions"]
    assert f"more than {config.check_replays:g} nats per token" in ROWS["replays"]
    assert f"more than {config.check_replays_undone:.0%} of them" in ROWS["replays"]
    assert f"`turns_per_step` ({config.turns_per_step})" in TEXT
    assert f"`max_version_lag` ({config.max_version_lag})" in TEXT
    assert f"({config.epsilon:g} and {config.epsilon_high:g})" in TEXT


def test_states_and_settings_exist():
    assert "unusable" in TURN_STATES
    names = {one.name for one in fields(LiveConfig)}
    assert {"token_preferences", "max_engine_gap", "turns_per_step", "max_version_lag"} <= names
    assert SETTINGS.keys() <= names
    assert placeholders(TEXT) == []


def test_a_test_runs_each_command():
    sources = [(HERE / "test_live_recipe.py").read_text(), (HERE.parent / "test_versions_cli.py").read_text()]
    for command in commands(TEXT):
        if command.startswith("trl-openclaw versions"):
            assert f'run(store, "{command.split()[-1]}")' in sources[1], command
        else:
            assert f'"{command}"' in sources[0], command
    assert len(commands(TEXT)) == 3
