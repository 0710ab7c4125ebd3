"""Settings that cannot be honoured are refused, naming the field and what to use instead."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from trainer_harness import SETTINGS
from trl import GRPOConfig

from trl_openclaw import CombineConfig, OPDConfig


def build(tmp_path, config_class=CombineConfig, **settings):
    return config_class(output_dir=str(tmp_path), **{**SETTINGS, **settings})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"importance_sampling_level": "sequence"}, "Use `importance_sampling_level='token'`"),
        ({"loss_type": "vespo"}, "destroys token-level credit. Use `loss_type='dapo'`"),
        ({"use_liger_kernel": True}, "use_kernels"),
        ({"teacher": "emma"}, "`teacher` must be one of frozen, live, ema, got 'emma'"),
        ({"hint_source": "oracle"}, "`hint_source` must be one of auto, judge, privileged_context, none"),
        ({"hint_placement": "assistant"}, "`hint_placement` must be one of user, system"),
        ({"hint_template": "no place for it"}, "{hint}"),
        ({"logp_gap_clip": 0.0}, "`logp_gap_clip` must be a finite number greater than 0 or None, got 0.0"),
        ({"logp_gap_clip": -1.0}, "`logp_gap_clip` must be"),
        ({"logp_gap_clip": "1.0"}, "`logp_gap_clip` must be a finite number greater than 0 or None, got '1.0'"),
        ({"self_test_tolerance": 0.0}, "`self_test_tolerance` must be a finite number greater than 0"),
        ({"self_test_tolerance": True}, "`self_test_tolerance` must be a finite number greater than 0"),
        ({"self_test": "no"}, "`self_test` must be True or False, got 'no'"),
        ({"teacher_token_budget": 0}, "`teacher_token_budget` must be a whole number at least 1 or None, got 0"),
        ({"teacher_token_budget": 1.5}, "`teacher_token_budget` must be a whole number at least 1 or None, got 1.5"),
        ({"teacher_model_name_or_path": Path("x")}, "`teacher_model_name_or_path` must be text"),
        ({"feedback_timeout": 0.0}, "`feedback_timeout` must be a finite number greater than 0, got 0.0"),
        ({"feedback_timeout": None}, "`feedback_timeout` must be a finite number greater than 0, got None"),
        ({"feedback_timeout": 1800.0}, "must stay below `ddp_timeout`"),
        ({"feedback_concurrency": 0}, "`feedback_concurrency` must be a whole number at least 1"),
        ({"feedback_concurrency": 1.5}, "`feedback_concurrency` must be a whole number at least 1"),
        ({"judge_failure_patience": 0}, "`judge_failure_patience` must be a whole number at least 1"),
        ({"judge_failure_patience": True}, "`judge_failure_patience` must be a whole number at least 1, got True"),
        ({"judge_failure_limit": 0.0}, "`judge_failure_limit` must be a finite number greater than 0 and at most 1"),
        ({"judge_failure_limit": 1.5}, "`judge_failure_limit` must be a finite number greater than 0 and at most 1"),
        ({"reward_weights": [1.0, float("nan")]}, "`reward_weights[1]` must be a finite number, got nan"),
        ({"reward_weights": [float("inf")]}, "`reward_weights[0]` must be a finite number, got inf"),
        ({"reward_weights": ["1"]}, "`reward_weights[0]` must be a finite number, got '1'"),
        ({"reward_weights": 1.0}, "`reward_weights` must be a list of numbers, got 1.0"),
        ({"teacher": "live", "teacher_model_name_or_path": "x"}, "name two teachers"),
        ({"loss_type": "grpo", "entropy_coef": 0.01}, "Use `loss_type='dapo'` together with an entropy bonus"),
        ({"reward_baseline": "batch"}, "`reward_baseline` must be one of none, group"),
        ({"rl_weight": -1.0}, "`rl_weight` must be a finite number at least 0, got -1.0"),
        ({"rl_weight": 0.0, "opd_weight": 0.0}, "nothing to train on"),
        ({"reward_baseline": "group", "num_generations": 1}, "compares the completions of one prompt"),
        ({"logp_gap_clip": float("nan")}, "`logp_gap_clip` must be a finite number"),
        ({"self_test_tolerance": float("nan")}, "`self_test_tolerance` must be a finite number"),
        ({"rl_weight": float("nan")}, "`rl_weight` must be a finite number"),
        ({"opd_weight": float("inf")}, "`opd_weight` must be a finite number"),
        ({"opd_weight": True}, "`opd_weight` must be a finite number"),
        ({"rl_weight": "1"}, "`rl_weight` must be a finite number"),
        ({"torch_compile": True}, "`torch_compile=True` is not supported"),
        ({"generation_kwargs": {"temperature": 0.5}}, "Use the field `temperature`"),
        ({"opd_weight": 0.0, "teacher": "live"}, "no teacher runs"),
        ({"opd_weight": 0.0, "hint_source": "judge"}, "no hint is asked for"),
        ({"opd_weight": 0.0, "opd_loss": "topk_surrogate"}, "leave `opd_loss` alone"),
        ({"opd_weight": 0.0, "reward_scale": 1.5, "control": "random_hint"}, "`reward_scale` and `control` alone"),
        ({"rl_weight": 0.0, "reward_baseline": "group"}, "leave `reward_baseline` alone"),
        ({"multi_objective_aggregation": "normalize_then_sum"}, "Use `reward_baseline='group'`"),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.filterwarnings("ignore")
def test_refused(tmp_path, settings, message):
    with pytest.raises(ValueError) as error:
        build(tmp_path, **settings)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "settings",
    [
        {"logp_gap_clip": 1, "judge_failure_limit": 1, "feedback_timeout": np.float32(5)},
        {"logp_gap_clip": None, "self_test_tolerance": None, "teacher_token_budget": None},
        {"teacher_token_budget": np.int64(2), "rl_weight": 0, "opd_weight": 2},
        {"reward_weights": [-1, 0.5]},
        {"reward_weights": (1.0,)},
    ],
    ids=str,
)
def test_accepted(tmp_path, settings):
    config = build(tmp_path, **settings)
    assert {name: getattr(config, name) for name in settings} == settings


def test_every_number_of_our_own_is_checked():
    own = dataclasses.fields(CombineConfig)
    inherited = {field.name for field in dataclasses.fields(GRPOConfig)}
    numeric = {f.name for f in own if f.type in (int, float, int | None, float | None) and f.name not in inherited}
    assert numeric == set(CombineConfig._NUMBERS)


def test_one_generation_is_accepted_and_stays_a_plain_number(tmp_path):
    config = build(tmp_path, OPDConfig, num_generations=1, per_device_train_batch_size=1)
    assert type(config.num_generations) is int
    assert config.num_generations == 1


def test_grpos_own_checks_still_run_with_one_generation(tmp_path):
    with pytest.raises(ValueError, match="vllm_importance_sampling_clip_min"):
        build(tmp_path, num_generations=1, vllm_importance_sampling_clip_min=5.0)
    with pytest.raises(ValueError, match="divisible"):
        build(tmp_path, OPDConfig, num_generations=3)


@pytest.mark.parametrize(
    "settings", [{"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.1}, {"repetition_penalty": 1.1}], ids=str
)
def test_sampling_that_biases_the_ratio_warns(tmp_path, settings):
    with pytest.warns(UserWarning, match=f"`{next(iter(settings))}`.*biases the ratio"):
        build(tmp_path, **settings)


@pytest.mark.parametrize(
    ("settings", "multiple"),
    [
        ({"num_iterations": 4, "save_steps": 6}, 4),
        ({"steps_per_generation": 4, "save_steps": 2}, 4),
        ({"steps_per_generation": 4, "gradient_accumulation_steps": 2, "save_steps": 3}, 2),
        ({"steps_per_generation": 3, "gradient_accumulation_steps": 2, "save_steps": 4}, 3),
        ({"num_iterations": 4, "save_steps": 8}, None),
        ({"num_iterations": 4, "save_steps": 0.1}, None),
        ({"num_iterations": 4, "save_steps": 6, "save_strategy": "no"}, None),
        ({"steps_per_generation": 4, "gradient_accumulation_steps": 4, "save_steps": 3}, None),
        ({"steps_per_generation": 4, "gradient_accumulation_steps": 2, "save_steps": 2}, None),
    ],
    ids=str,
)
def test_checkpoints_inside_a_generation_buffer_warn(tmp_path, recwarn, settings, multiple):
    build(tmp_path, **{"save_strategy": "steps", **settings})
    found = [str(w.message) for w in recwarn if "saves in the middle of sampled batches" in str(w.message)]
    assert len(found) == (multiple is not None)
    assert all(f"Use a multiple of {multiple}." in message for message in found)


@pytest.mark.filterwarnings("error::FutureWarning")
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, True),
        ({"gradient_checkpointing": False}, False),
        ({"gradient_checkpointing_kwargs": {"use_reentrant": False}}, True),
        ({"activation_checkpointing": False}, False),
    ],
)
def test_checkpointing_goes_by_either_name_and_does_not_warn(tmp_path, settings, expected):
    args = OPDConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **settings)
    assert args.gradient_checkpointing is expected
    assert args.activation_checkpointing is expected
    assert args.activation_checkpointing_kwargs == settings.get("gradient_checkpointing_kwargs")


def test_every_field_of_grpo_is_there_and_only_the_documented_defaults_differ(tmp_path):
    ours = {f.name: f.default for f in dataclasses.fields(CombineConfig)}
    differing = {f.name for f in dataclasses.fields(GRPOConfig) if ours[f.name] != f.default}
    assert differing == {
        "learning_rate",
        "epsilon_high",
        "disable_dropout",
        "logging_nan_inf_filter",
        "vllm_importance_sampling_mode",
    }


def test_every_field_has_help_and_a_line_in_the_docstring():
    for config_class in (OPDConfig, CombineConfig):
        inherited = {
            f.name
            for base in config_class.__mro__[1:]
            if dataclasses.is_dataclass(base)
            for f in dataclasses.fields(base)
        }
        for field in dataclasses.fields(config_class):
            if field.name not in inherited:
                assert field.metadata["help"], field.name
                assert f"{field.name} (`" in config_class.__doc__, field.name
