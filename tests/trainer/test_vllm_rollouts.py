"""Rollouts by vLLM: the same numbers as by transformers where the log-probs agree, and bounded ratios where not."""

import math

import pytest
import torch
from agent_harness import CALL, agent_trainer
from fixtures_engine import replayed
from tiny import tiny_llama
from trainer_harness import assert_same_steps, batches_of, judge_with_hints, logged, make_trainer, record_gradients

from trl_openclaw import CombineTrainer, OPDConfig, OPDTrainer

VLLM = {"use_vllm": True, "vllm_mode": "colocate"}
METHODS = {
    "opd": (OPDTrainer, {}),
    "combine": (CombineTrainer, {}),
    "one sample a prompt": (OPDTrainer, {"num_generations": 1}),
    "top k": (OPDTrainer, {"opd_loss": "topk_surrogate"}),
    "top k, several hints": (CombineTrainer, {"opd_loss": "topk_reverse_kl", "max_hints": 3}),
    "all tokens": (OPDTrainer, {"opd_loss": "full_divergence"}),
    "used twice": (CombineTrainer, {"num_iterations": 2}),
}


def says_by_prompt(prompt):
    """A completion that depends on the prompt alone."""
    return [65 + len(prompt) % 26] * (len(prompt) % 4 + 2) + [256]


def trained(tmp_path, trainer_class=OPDTrainer, config=None, **kwargs):
    """A trainer after two steps, its generation batches and its gradients."""
    settings = {"max_steps": 2, "seed": 3, "temperature": 1.0, **(config or {})}
    judge = judge_with_hints("Be brief.", "Say it kindly, please.")
    trainer = make_trainer(tmp_path, trainer_class, model=tiny_llama(), judge=judge, config=settings, **kwargs)
    batches, steps = batches_of(trainer), record_gradients(trainer)
    trainer.train()
    return trainer, batches, steps


@pytest.mark.parametrize("name", METHODS)
def test_numbers_are_those_of_transformers(tmp_path, scripted_engine, name):
    trainer_class, config = METHODS[name]
    _, batches, expected = trained(tmp_path / "own", trainer_class, config)
    engine = scripted_engine(replayed(batches, 2))
    trainer, by_vllm, found = trained(tmp_path / "vllm", trainer_class, {**config, **VLLM})
    assert_same_steps(found, expected, rounding=1e-3, least=1e-5)
    for batch, own in zip(by_vllm, batches, strict=True):
        for key in ("prompt_ids", "completion_ids", "completion_mask"):
            assert torch.equal(batch[key], own[key])
        ratio = batch["importance_sampling_ratio"]
        assert ratio.shape == batch["completion_ids"].shape
        torch.testing.assert_close(ratio, torch.ones_like(ratio), atol=1e-4, rtol=0)
    assert max(logged(trainer, "sampling/sampling_logp_difference/max")) < 1e-4
    assert engine.last.syncs == len(batches)


@pytest.mark.parametrize("name", ["opd", "combine", "top k", "top k, several hints", "all tokens"])
def test_what_a_token_adds_is_weighed_by_its_ratio(tmp_path, scripted_engine, name):
    trainer_class, config = METHODS[name]
    found = []
    for shift in (0.0, math.log(2)):
        scripted_engine(says_by_prompt, shift=shift)
        once = {**config, **VLLM, "max_steps": 1, "max_grad_norm": 0.0}
        _, batches, steps = trained(tmp_path / str(shift), trainer_class, once)
        (batch,) = batches
        active = batch["completion_mask"].bool()
        assert batch["importance_sampling_ratio"][active].tolist() == pytest.approx(
            [math.exp(shift)] * int(active.sum()), rel=1e-3
        )
        found.append(steps)
    for alone, doubled in zip(*found, strict=True):
        assert any(gradient.norm() for gradient in alone["gradients"].values())
        for key, gradient in alone["gradients"].items():
            torch.testing.assert_close(doubled["gradients"][key], 2 * gradient, rtol=2e-3, atol=1e-6)


@pytest.mark.parametrize(("shift", "ratio"), [(5.0, 3.0), (-1.0, math.exp(-1.0))])
def test_ratios_are_cut_above_token_by_token(tmp_path, scripted_engine, shift, ratio):
    """Not masked, and not for the sequence: a long completion would be nothing then."""
    scripted_engine(says_by_prompt, shift=shift)
    trainer, (batch, *_), _ = trained(tmp_path, config=VLLM)
    assert (trainer.args.vllm_importance_sampling_mode, trainer.args.vllm_importance_sampling_clip_max) == (
        "token_truncate",
        3.0,
    )
    found = batch["importance_sampling_ratio"][batch["completion_mask"].bool()]
    assert found.tolist() == pytest.approx([ratio] * len(found), rel=1e-3)


def test_a_token_without_a_log_prob_counts_as_it_is(tmp_path, scripted_engine):
    scripted_engine(says_by_prompt, shift=math.log(2), unknown=True)
    _, (batch, *_), steps = trained(tmp_path, config=VLLM)
    assert batch["importance_sampling_ratio"][:, 0].tolist() == [1.0] * 4
    assert batch["importance_sampling_ratio"][:, 1].tolist() == pytest.approx([2.0] * 4, rel=1e-3)
    assert all(math.isfinite(step["loss"]) and step["loss"] for step in steps)


def test_an_empty_completion_is_no_row(tmp_path, scripted_engine):
    said = iter([[], *[[65, 66, 256]] * 99])
    scripted_engine(lambda prompt: next(said))
    trainer, (batch, *_), steps = trained(tmp_path, config=VLLM)
    assert batch["importance_sampling_ratio"][0, 0] == 1.0
    assert logged(trainer, "hint/dropped/empty_completion")[0] == 0.25
    assert all(math.isfinite(step["loss"]) for step in steps)


def test_replies_are_all_judged_though_none_ends_early(tmp_path, scripted_engine):
    scripted_engine(says_by_prompt)
    trainer, _, _ = trained(tmp_path, config=VLLM)
    assert logged(trainer, "feedback/early") == [0.0, 0.0]
    assert logged(trainer, "hint/accepted") == [1.0, 1.0]


def test_tools_answers_have_no_ratio(tmp_path, scripted_engine):
    engine = scripted_engine(None, shift=math.log(2))
    trainer = agent_trainer(tmp_path, config=VLLM)
    del trainer._generate_single_turn
    call, answer = (trainer.processing_class(text)["input_ids"] for text in (CALL, "4<|im_end|>"))
    engine.say = staticmethod(lambda prompt: answer if len(engine.last.prompts) > 4 else call)
    batches = batches_of(trainer)
    trainer.train()
    (batch,) = batches
    sampled = (batch["completion_mask"] * batch["tool_mask"]).bool()
    tools = batch["completion_mask"].bool() & ~sampled
    assert tools.any(dim=1).all()
    ratio = batch["importance_sampling_ratio"]
    assert ratio[tools].tolist() == [1.0] * int(tools.sum())
    assert ratio[sampled].tolist() == pytest.approx([2.0] * int(sampled.sum()), rel=1e-3)
    assert batch["completion_ids"][0][sampled[0]].tolist() == [*call, *answer]
    assert engine.last.prompts[-1][-1] != answer[-1]
    assert logged(trainer, "turns/mean") == [2.0]


def test_defaults_go_to_the_engine(tmp_path, scripted_engine):
    engine = scripted_engine(says_by_prompt)
    make_trainer(tmp_path, config={**VLLM, "vllm_max_model_length": 128})
    wanted = {"mode": "colocate", "max_model_length": 128, "temperature": 1.0, "top_p": 1.0, "logprobs": 0}
    assert wanted.items() <= engine.last.settings.items()


def test_the_modes_that_weigh_whole_sequences_are_a_choice_of_their_own(tmp_path):
    config = OPDConfig(str(tmp_path), use_cpu=True, bf16=False, vllm_importance_sampling_mode="sequence_mask")
    assert config.vllm_importance_sampling_mode == "sequence_mask"
