"""The comparison of arms: every arm is a setting that its recipe takes, and finished runs make the table."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import arms
from trl_openclaw.recipe import parse_recipe_args

DEMO = {"learning_rate": 2e-5, "per_device_train_batch_size": 16, "logp_gap_clip": 1.0, "num_generations_eval": 2}


@pytest.mark.parametrize("arm", arms.ARMS)
def test_every_arm_is_the_demo_with_its_own_settings(arm, tmp_path, monkeypatch):
    script, *options = arms.recipe_command(arm, 5, 3, tmp_path)
    parser = importlib.import_module(script.removesuffix(".py").replace("/", ".")).make_parser()
    monkeypatch.chdir(arms.ROOT)
    monkeypatch.setattr(sys, "argv", [script, *options])
    script_args, training_args, _, _ = parse_recipe_args(parser)
    assert {name: getattr(training_args, name) for name in DEMO} == DEMO
    assert (training_args.seed, training_args.max_steps, training_args.eval_steps) == (5, 3, 3)
    assert Path(script_args.report_dir) == tmp_path / f"{arm}-5-3"
    for name, value in arms.ARMS[arm][1].items():
        assert getattr(training_args, name) == value
    assert getattr(training_args, "opd_weight", 1.0) == (0.0 if arm == "rl_only" else 1.0)


def test_finished_runs_are_not_run_again_and_make_the_table(tmp_path, monkeypatch, capsys):
    def no_run(*args, **kwargs):
        raise AssertionError("ran again")

    monkeypatch.setattr(subprocess, "run", no_run)
    for arm, values in {"sampled_token": [0.5, 0.75], "rl_only": [0.25, 0.0]}.items():
        for seed, after in enumerate(values):
            folder = tmp_path / f"{arm}-{seed}-8"
            folder.mkdir()
            summary = {"before": {"satisfied": 0.1}, "after": {"satisfied": after}}
            (folder / "summary.json").write_text(json.dumps(summary))
    arguments = ["--arms", "sampled_token", "rl_only", "--seeds", "0", "1", "--folder", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["arms.py", *arguments])
    arms.main()
    lines = capsys.readouterr().out.strip().splitlines()
    assert json.loads(lines[-1]) == {
        "sampled_token": {"mean": 0.625, "runs": [0.5, 0.75]},
        "rl_only": {"mean": 0.125, "runs": [0.25, 0.0]},
    }
    assert "before training: 0.10" in lines[0]


def test_a_run_that_fails_stops_the_comparison(tmp_path, monkeypatch):
    monkeypatch.setattr(arms, "recipe_command", lambda *_: ["recipes/no_such_recipe.py"])
    with pytest.raises(subprocess.CalledProcessError):
        arms.run("sampled_token", 1, 1, tmp_path)
