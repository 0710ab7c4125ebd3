"""The presets: each trains for two steps through its recipe, and is still the method that it is named after."""

import itertools
import json
import math
import re
import sys
from pathlib import Path

import datasets
import pytest
from tiny import tiny_llama, tiny_tokenizer

from trl_openclaw import CombineTrainer, OPDTrainer, cli
from trl_openclaw.config_file import read_config_file
from trl_openclaw.hint_selection import OVERLAP_RULES, SUPPORTS, TEXT_RULES
from trl_openclaw.objectives import DIVERGENCES, OBJECTIVES
from trl_openclaw.recipe import run_script
from trl_openclaw.teachers import TEACHERS
from trl_openclaw.trainer.controls import CONTROLS

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "recipes" / "configs"
TRAINERS = {"opd": OPDTrainer, "combine": CombineTrainer}
ROWS, STEPS, TOKENS = 4, 2, 6

OPENCLAW = {
    "logp_gap_clip": 1.0, "max_hints": 3, "teacher": "frozen", "rl_weight": 1.0, "opd_weight": 1.0,
    "reward_baseline": "none", "epsilon": 0.2, "epsilon_high": 0.28, "beta": 0.0, "learning_rate": 1e-5,
    "temperature": 0.6, "loss_type": "grpo",
}  # fmt: skip
METHODS = {
    "openclaw_v1": {**OPENCLAW, "opd_loss": "sampled_token", "hint_selection": "longest"},
    "openclaw_v2": {
        **OPENCLAW, "opd_loss": "topk_surrogate", "hint_selection": "sequence", "topk": 4, "topk_support": "student",
    },
    "sdpo": {
        "opd_loss": "topk_reverse_kl", "topk": 20, "topk_support": "student", "teacher": "ema",
        "teacher_ema_rate": 0.01, "num_generations": 8,
    },
    "sdft": {
        "opd_loss": "full_divergence", "divergence": "reverse_kl", "teacher": "ema", "teacher_ema_rate": 0.01,
        "hint_source": "privileged_context",
    },
    "opcd": {
        "opd_loss": "topk_reverse_kl", "topk": 256, "topk_support": "student", "teacher": "frozen",
        "hint_source": "privileged_context", "hint_placement": "system",
    },
    "gopd": {
        "opd_loss": "sampled_token", "hint_source": "none", "reward_scale": 1.25, "opd_reference": "initial",
        "logp_gap_clip": None,
    },
}  # fmt: skip
"""What makes a preset what it is."""

PAPERS = {
    "openclaw_v1": "2603.10165",
    "openclaw_v2": "2603.10165",
    "sdpo": "2601.20802",
    "sdft": "2601.19897",
    "opcd": "2602.12275",
    "gopd": "2602.12125",
}
SAMPLES = {"openclaw_v1": 16, "openclaw_v2": 16, "sdpo": 32 * 8, "sdft": 32, "opcd": 128, "gopd": 64}
"""Samples a step on one device."""

HINTS = ["Be brief.", "Be brief, and do not use any list.", "One sentence, please."]


def opening_comment(name: str) -> str:
    """The lines before the first setting, without their `#`."""
    lines = (CONFIGS / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    return "\n".join(line.removeprefix("#").strip() for line in itertools.takewhile(lambda s: s.startswith("#"), lines))


def recipe_of(name: str) -> str:
    """The recipe in the command that the opening comment gives."""
    command = rf"accelerate launch recipes/(\w+)\.py --config recipes/configs/{name}\.yaml"
    return re.findall(command, opening_comment(name))[0]


@pytest.fixture
def tiny_folder(tmp_path):
    """Saves a tiny model and its tokenizer, as `from_pretrained` reads them."""

    def save(name: str, seed: int) -> Path:
        folder = tmp_path / name
        tiny_llama(seed, max_position_embeddings=2048).save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
        return folder

    return save


@pytest.fixture
def rows(tmp_path) -> Path:
    """A dataset's folder, with what only the teacher reads."""
    folder = tmp_path / "data"
    folder.mkdir()
    lines = [
        {"prompt": [{"role": "user", "content": "hi" * (i % 3 + 1)}], "privileged_context": "Say hello back."}
        for i in range(8)
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture
def train(tmp_path, tiny_folder, chat_server, monkeypatch):
    """Runs a preset's recipe in this process, with what a CPU and a tiny model need on top of it."""
    hints = itertools.cycle(HINTS)

    def judge_or_user(messages) -> str:
        marker = re.search(r"The marker is (\w+)\.", messages[-1]["content"])
        if marker is None:
            return "Shorter, please."
        return f"VERDICT-{marker[1]}: -1\nHINT-{marker[1]}: {next(hints)}\nEND-{marker[1]}"

    def run(name: str, **more) -> OPDTrainer:
        preset, recipe = read_config_file(CONFIGS / f"{name}.yaml"), recipe_of(name)
        chat_server.script = judge_or_user
        chat_server.models = [preset.get("judge_model")]
        options = {
            "model_name_or_path": tiny_folder("student", 0),
            "dtype": "float32",
            "judge_base_url": chat_server.base_url,
            "output_dir": tmp_path / "out",
            "max_steps": STEPS,
            "warmup_steps": 0,
            "per_device_train_batch_size": max(ROWS, preset["num_generations"]),
            "gradient_accumulation_steps": 1,
            "max_completion_length": TOKENS,
            "generation_kwargs": json.dumps({"min_new_tokens": TOKENS}),
            "use_cpu": "true",
            "bf16": "false",
            "gradient_checkpointing": "false",
            "dataloader_pin_memory": "false",
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": "true",
            **more,
        }
        assert not options.keys() & METHODS[name].keys()
        script = ROOT / "recipes" / f"{recipe}.py"
        given = [str(part) for option, value in options.items() for part in (f"--{option}", value)]
        monkeypatch.chdir(ROOT)
        monkeypatch.setattr(sys, "argv", [str(script), "--config", str(CONFIGS / f"{name}.yaml"), *given])
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
        return run_script(watched(TRAINERS[recipe]), cli.load_recipe(script).make_parser())

    return run


def watched(trainer_class):
    """The trainer, which remembers what its parameters were before training."""

    class Watched(trainer_class):
        def train(self, *args, **kwargs):
            self.before = {name: p.detach().clone() for name, p in self.model.named_parameters() if p.requires_grad}
            return super().train(*args, **kwargs)

    return Watched


def assert_trained_as_named(trainer, name) -> list[dict]:
    """Every trainable parameter moved, all numbers are finite, the method is the preset's. Returns the log's steps."""
    for field, value in METHODS[name].items():
        assert getattr(trainer.args, field) == value, field
    after = dict(trainer.model.named_parameters())
    assert trainer.before
    assert [name for name, before in trainer.before.items() if before.equal(after[name])] == []
    log = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    assert len(log) == STEPS
    for entry in log:
        assert math.isfinite(entry["loss"])
        assert 0 < entry["grad_norm"] < math.inf
        assert entry["hint/accepted"] > 0
    return log


def test_openclaw_v1_trains_on_the_longest_hint(train):
    trainer = train("openclaw_v1")
    for entry in assert_trained_as_named(trainer, "openclaw_v1"):
        assert entry["hint/candidates"] == 1.0  # chosen by its text, before the teacher scores
        assert "opd/loss" not in entry  # the loss is TRL's own
        assert entry["rewards/judge/mean"] == -1.0


def test_openclaw_v2_scores_every_hint_and_chooses_by_overlap(train):
    trainer = train("openclaw_v2")
    for entry in assert_trained_as_named(trainer, "openclaw_v2"):
        assert entry["hint/candidates"] > 1.0
        assert 0.0 < entry["opd/overlap"] <= 1.0
        assert entry["opd/loss"] != 0
        assert entry["rewards/judge/mean"] == -1.0


def test_sdpo_follows_the_policy_slowly_and_asks_no_server(train, chat_server):
    trainer = train("sdpo")
    for entry in assert_trained_as_named(trainer, "sdpo"):
        assert entry["opd/loss"] > 0
    assert_teacher_moved_a_little(trainer)
    assert chat_server.count == 0


def test_sdft_learns_from_demonstrations(train, rows):
    trainer = train("sdft", dataset_name=rows)
    for entry in assert_trained_as_named(trainer, "sdft"):
        assert entry["opd/loss"] > 0
        assert "opd/overlap" not in entry  # the student did not score the batch for a choice among one
        assert entry["hint/accepted"] == 1.0
    assert_teacher_moved_a_little(trainer)


def test_opcd_learns_what_the_system_prompt_does(train, rows):
    trainer = train("opcd", dataset_name=rows)
    for entry in assert_trained_as_named(trainer, "opcd"):
        assert entry["opd/loss"] > 0
        assert entry["hint/accepted"] == 1.0


def test_gopd_learns_from_a_larger_teacher_without_hints(train, rows, tiny_folder):
    teacher = tiny_folder("teacher", 1)
    trainer = train("gopd", dataset_name=rows, teacher_model_name_or_path=teacher)
    for entry in assert_trained_as_named(trainer, "gopd"):
        assert entry["hint/accepted"] == 1.0
        assert entry["opd/gap_abs_max"] > 1.0
        assert entry["opd/clipped"] == 0.0


def assert_teacher_moved_a_little(trainer):
    """The average is neither what the policy was nor what it is now."""
    teacher = trainer.teacher
    now = dict(teacher.model.named_parameters())
    moved = 0
    for own, source in teacher.sources.items():
        if source in trainer.before:
            way = (now[source] - trainer.before[source]).abs().max()
            assert 0 < (now[own] - trainer.before[source]).abs().max() < 0.1 * way
            moved += 1
    assert moved == len(trainer.before)


@pytest.mark.parametrize("name", METHODS)
def test_opens_with_its_paper_its_command_and_what_is_different(name):
    comment = opening_comment(name)
    assert f"arXiv {PAPERS[name]}" in comment
    assert "Deviations:\n- " in comment
    assert recipe_of(name) in TRAINERS


@pytest.mark.parametrize("name", METHODS)
def test_samples_a_step(name):
    preset = read_config_file(CONFIGS / f"{name}.yaml")
    assert preset["per_device_train_batch_size"] * preset["gradient_accumulation_steps"] == SAMPLES[name]


@pytest.mark.parametrize(
    "choices", [OBJECTIVES, DIVERGENCES, SUPPORTS, OVERLAP_RULES, TEXT_RULES, TEACHERS, CONTROLS, METHODS]
)
def test_the_page_on_objectives_names_every_choice(choices):
    page = (ROOT / "docs" / "objectives.md").read_text(encoding="utf-8")
    assert [choice for choice in choices if f"`{choice}`" not in page] == []
