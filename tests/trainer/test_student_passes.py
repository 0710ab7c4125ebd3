"""What is run once: the student where TRL needs no second pass, the teacher and the reference where they are one."""

import itertools

import pandas as pd
import pytest
import torch
from peft import LoraConfig
from tiny import tiny_llama, tiny_tokenizer
from torch.nn import functional as F
from trainer_harness import (
    HINTS,
    LORA,
    SETTINGS,
    always_replies,
    assert_same_steps,
    judge_with_hints,
    logged,
    make_trainer,
    micro_batches_of,
    prompts,
    record_gradients,
    rollout_by_prompt,
    snapshot,
)
from trl import GRPOConfig, GRPOTrainer

from trl_openclaw import CombineTrainer, Verdict, Vote
from trl_openclaw.lm_head import TokenStates
from trl_openclaw.scoring import TeacherRow
from trl_openclaw.trainer.comparison import Student

WORDS = ("About", "Without", "Beside")
OBJECTIVES = [
    {"opd_loss": "topk_surrogate"},
    {"opd_loss": "topk_surrogate", "topk_support": "teacher", "logp_gap_clip": None},
    {"opd_loss": "topk_reverse_kl", "topk_support": "overlap", "topk": 40},
    {"opd_loss": "full_divergence"},
    {"opd_loss": "full_divergence", "divergence": "jsd", "jsd_beta": 0.3, "hint_selection": "token"},
]
ALIGNED = {
    "one batch": {},
    "accumulated": {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2},
    "used twice before a step": {"gradient_accumulation_steps": 4, "steps_per_generation": 2, "num_iterations": 2},
}
MOVING = {
    "two iterations": {"num_iterations": 2},
    "several steps": {"steps_per_generation": 2, "gradient_accumulation_steps": 1},
    "half a batch a step": {"gradient_accumulation_steps": 2, "steps_per_generation": 4},
}
SHAPES = {**ALIGNED, **MOVING}
NEEDS_STUDENT = [{"hint_selection": "sequence"}, {"hint_selection": "token"}, *OBJECTIVES]
COUNTED = {"max_steps": 4, "self_test": False}


def other_model(folder) -> str:
    tiny_llama(seed=1).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


async def judge_about_prompt(turn):
    """Hints of their own for every prompt."""
    hints = [f"{word} {turn.prompt[0]['content']}." for word in WORDS]
    return Verdict.from_votes([Vote(score=-1, hint=hint) for hint in hints])


def forwards_of(trainer) -> list[bool]:
    """Whether each forward pass of the policy had a gradient."""
    seen = []
    trainer.model.register_forward_pre_hook(lambda *_: seen.append(torch.is_grad_enabled()))
    return seen


class TestPasses:
    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize("objective", [{}, *NEEDS_STUDENT], ids=str)
    def test_the_policy_runs_as_often_as_in_stock_grpo(self, tmp_path, objective, shape):
        config = {**objective, **COUNTED, **SHAPES[shape]}
        trainer = make_trainer(tmp_path, judge=judge_with_hints(*HINTS), rollout_func=rollout_by_prompt, config=config)
        stock = GRPOTrainer(
            tiny_llama(),
            lambda completions, **_: [float(i) for i in range(len(completions))],
            GRPOConfig(str(tmp_path), **{**SETTINGS, **SHAPES[shape], "max_steps": 4}),
            train_dataset=prompts(),
            processing_class=tiny_tokenizer(),
            rollout_func=rollout_by_prompt,
        )
        stock.tokenize_prompts = trainer.tokenize_prompts  # for the rollout
        ours, theirs = forwards_of(trainer), forwards_of(stock)
        trainer.train()
        stock.train()
        assert ours == theirs
        assert trainer.scores_old_policy == (shape in MOVING) == (False in theirs)
        steps = 4 * config.get("gradient_accumulation_steps", 1)
        assert ours.count(True) == steps

    def test_an_evaluation_too_needs_one_pass_only(self, tmp_path):
        trainer = make_trainer(
            tmp_path, judge=judge_with_hints(*HINTS), rollout_func=rollout_by_prompt, eval_dataset=prompts(4),
            config={"opd_loss": "topk_surrogate", **COUNTED},
        )  # fmt: skip
        seen = forwards_of(trainer)
        trainer.evaluate()
        assert len(seen) == 1  # one batch of four rows
        assert "eval_opd/overlap" in trainer.state.log_history[0]


def explicitly(trainer):
    """Have the trainer score the student in a pass of its own, right after the batch was sampled."""

    def score(batch):
        rows = [
            TeacherRow(prompt[keep.bool()].tolist(), completion[mask.bool()].tolist())
            for prompt, keep, completion, mask in zip(
                *(batch[f"{part}_{kind}"] for part in ("prompt", "completion") for kind in ("ids", "mask")), strict=True
            )
        ]
        found = trainer.scorer.score(trainer.model, rows, topk=trainer.args.topk, keep_states=True)
        missing = batch["completion_ids"].size(1) - found.mask.size(1)
        hidden, best = (F.pad(x, (0, 0, 0, missing)) for x in (found.states.hidden, found.topk_ids))
        mask = batch["teacher_mask"]
        logps = F.pad(found.per_token_logps, (0, missing))
        return Student(TokenStates(hidden, batch["completion_ids"], logps, found.states.head)[mask], best[mask])

    trainer.reads_old_policy = False
    if trainer._teaching.lessons.uses_student:
        trainer._teaching.old_policy.take = score
    trainer.adds_token_losses = trainer.objective is not None


class TestSameAsAnExplicitPass:
    CASES = [
        (objective, shape, most, tuning)
        for (objective, shape), most, tuning in zip(
            itertools.product([*NEEDS_STUDENT, {"opd_loss": "topk_surrogate", "reward_scale": 1.5}], SHAPES),
            itertools.cycle([3, 1, 3, 3, 1]),
            itertools.cycle([{}, {}, {"peft": True}, {"beta": 0.1}, {}, {"peft": True, "beta": 0.1}, {}]),
            strict=False,
        )
    ]  # fmt: skip

    @pytest.mark.parametrize(("objective", "shape", "max_hints", "tuning"), CASES, ids=str)
    def test_losses_gradients_and_logs(self, tmp_path, objective, shape, max_hints, tuning):
        tuning = dict(tuning)
        runs = []
        for way in ("implicit", "explicit"):
            kwargs = {"model": other_model(tmp_path / "model")}
            if tuning.get("peft"):
                kwargs["peft_config"] = LoraConfig(**LORA)
            trainer = make_trainer(
                tmp_path, judge=judge_with_hints(*HINTS), rollout_func=rollout_by_prompt, **kwargs,
                config={
                    **objective, **COUNTED, **SHAPES[shape], "max_hints": max_hints, "beta": tuning.get("beta", 0.0),
                    "learning_rate": 0.05, "optim": "sgd", "max_grad_norm": 0.0,
                },
            )  # fmt: skip
            if way == "explicit":
                explicitly(trainer)
            steps = record_gradients(trainer)
            trainer.train()
            names = ("opd/overlap", "leak/repeats_hint", "opd/gap_mean", "opd/loss", "hint/candidates")
            runs.append((steps, {name: logged(trainer, name) for name in names}))
        (implicit, logs), (explicit, other_logs) = runs
        assert len(implicit) == len(explicit) > 0
        assert_same_steps(implicit, explicit, 1e-4)
        for name, values in logs.items():
            assert values == pytest.approx(other_logs[name], rel=1e-4, abs=1e-5), name


@pytest.mark.parametrize("options", [{}, {"reward_scale": 1.5, "teacher": "live"}], ids=str)
def test_a_batch_that_was_given_up_leaves_nothing_behind(tmp_path, options):
    """A reward function fails once, after TRL's pass over the sampled batch; then training begins anew."""
    config = {"opd_loss": "topk_surrogate", "num_iterations": 2, "max_steps": 4, "optim": "sgd", **options}
    runs = []
    for fails in ([], [RuntimeError("broken")]):

        def reward(completions, fails=fails, **kwargs):
            if fails:
                raise fails.pop()
            return [float(i) for i in range(len(completions))]

        trainer = make_trainer(
            tmp_path, CombineTrainer, judge=judge_with_hints(*HINTS), rollout_func=rollout_by_prompt,
            reward_funcs=reward, config=config,
        )  # fmt: skip
        if fails:
            with pytest.raises(RuntimeError, match="broken"):
                trainer.train()
        trainer.train()
        runs.append((logged(trainer, "loss"), logged(trainer, "opd/overlap"), snapshot(trainer.model)))
    fresh, again = runs
    assert len(fresh[0]) == 4
    assert any(fresh[0])
    assert again[0] == pytest.approx(fresh[0], abs=1e-5)
    assert again[1] == pytest.approx(fresh[1])
    torch.testing.assert_close(again[2], fresh[2])


class TestLogsOfAChoiceThatComesLate:
    """Micro-batches are shuffled and compared one by one; what is logged is by row, and of the whole batch."""

    SHAPE = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "log_completions": True}

    @pytest.mark.parametrize("extra", [{}, {"num_iterations": 2}], ids=str)
    @pytest.mark.parametrize("objective", [NEEDS_STUDENT[0], NEEDS_STUDENT[2]], ids=str)
    def test_the_table_shows_each_row_its_own_hint(self, tmp_path, objective, extra):
        config = {**objective, **self.SHAPE, **extra, "max_steps": 2}
        trainer = make_trainer(tmp_path, judge=judge_about_prompt, rollout_func=rollout_by_prompt, config=config)
        micro_batches = micro_batches_of(trainer)
        trainer.train()
        for step in (1, 2):
            table = pd.read_parquet(tmp_path / "completions" / f"completions_0000{step}.parquet")
            assert len(table) == 8
            for prompt, hint in zip(table["prompt"], table["hint"], strict=True):
                assert hint.endswith(f" {prompt[0]['content']}.")
        found = {}
        for batch in micro_batches[-4:]:
            columns = batch["row_index"], batch["hint_choice"].squeeze(1), batch["hint_overlap"].nanmean(1)
            found |= {row: known for row, *known in zip(*(column.tolist() for column in columns), strict=True)}
        assert len(found) == 8
        assert len({choice for choice, _ in found.values()}) > 1
        for row, (choice, overlap) in found.items():
            assert table["hint"][row].split(" ")[0] == WORDS[choice]
            assert table["hint_overlap"][row] == pytest.approx(overlap)

    def test_the_table_of_an_evaluation_smaller_than_a_generation_batch(self, tmp_path):
        config = {**self.SHAPE, "opd_loss": "topk_surrogate", "per_device_eval_batch_size": 2}
        trainer = make_trainer(
            tmp_path, judge=judge_about_prompt, rollout_func=rollout_by_prompt, eval_dataset=prompts(2), config=config
        )
        trainer.evaluate()
        table = pd.read_parquet(tmp_path / "completions" / "completions_00000.parquet")
        assert len(table) == 4
        assert all(hint.split(" ")[0] in WORDS for hint in table["hint"])

    def test_the_overlap_is_that_of_the_whole_batch(self, tmp_path):
        found = []
        for shape in ({"per_device_train_batch_size": 8}, self.SHAPE):
            config = {"opd_loss": "topk_surrogate", **shape}
            trainer = make_trainer(tmp_path, judge=judge_about_prompt, rollout_func=rollout_by_prompt, config=config)
            trainer.train()
            found.append(logged(trainer, "opd/overlap"))
        assert len(found[0]) == 1
        assert found[0] == pytest.approx(found[1])

    def test_no_tensor_of_the_candidates_outlives_the_comparison(self, tmp_path):
        trainer = make_trainer(tmp_path, judge=judge_with_hints(*HINTS), config={"opd_loss": "topk_surrogate"})
        batches = micro_batches_of(trainer)
        trainer.train()
        assert not [name for name in batches[0] if name.startswith(("candidate_", "reference_"))]
        assert trainer._teaching._record is None


class TestOneReferencePass:
    def rows_asked(self, trainer) -> list[int]:
        """How many rows each call of the teacher's and the reference's models has."""
        asked, score = [], trainer.scorer.score
        trainer.scorer.score = lambda model, rows, **wanted: asked.append(len(rows)) or score(model, rows, **wanted)
        return asked

    def trained(self, tmp_path, config, **kwargs):
        """The rows that were asked, and the micro-batches."""
        trainer = make_trainer(
            tmp_path, rollout_func=rollout_by_prompt, next_state=always_replies, config={**COUNTED, **config}, **kwargs
        )
        asked, batches = self.rows_asked(trainer), micro_batches_of(trainer)
        trainer.train()
        return asked, batches

    @pytest.mark.parametrize("reference", ["initial", "unhinted_teacher"])
    @pytest.mark.parametrize("loss", ["sampled_token", "topk_surrogate"])
    def test_a_reference_that_is_the_teacher_is_asked_with_it(self, tmp_path, loss, reference):
        config = {"opd_loss": loss, "reward_scale": 1.5, "opd_reference": reference}
        asked, _ = self.trained(tmp_path, config)
        assert asked == [8] * 4  # four hinted rows and four plain ones

    def test_a_teacher_that_reads_no_hint_is_not_asked_for_itself(self, tmp_path):
        config = {"reward_scale": 1.5, "control": "unhinted_teacher"}
        asked, batches = self.trained(tmp_path, config)
        assert asked == [4] * 4
        assert "extrapolation" not in batches[0]

    @pytest.mark.parametrize("peft", [False, True])
    def test_trls_own_reference_pass_will_do(self, tmp_path, peft):
        """With `beta` TRL scores the plain prompts with the initial policy anyway."""
        seen = {}
        for beta in (0.0, 0.1):
            kwargs = {"model": other_model(tmp_path / "model")}
            if peft:
                kwargs["peft_config"] = LoraConfig(**LORA)
            config = {"reward_scale": 1.5, "beta": beta, "max_steps": 1}
            asked, batches = self.trained(tmp_path, config, **kwargs)
            seen[beta] = batches[0]
            assert asked == [8 if beta == 0 else 4]
        mask = seen[0.1]["teacher_mask"]
        for name in ("extrapolation", "teacher_per_token_logps"):
            torch.testing.assert_close(seen[0.1][name][mask], seen[0.0][name][mask], atol=1e-4, rtol=1e-4)
        assert (seen[0.1]["extrapolation"][mask] != 0).any()

    def test_but_not_where_it_is_another_model_or_moves(self, tmp_path):
        path = other_model(tmp_path / "model")
        config = {"reward_scale": 1.5, "beta": 0.1, "max_steps": 1}
        asked, _ = self.trained(tmp_path, {**config, "opd_reference": path}, model=path)
        assert asked == [4, 4]
        moving = {"sync_ref_model": True, "ref_model_sync_steps": 1}
        asked, _ = self.trained(tmp_path, {**config, **moving}, model=path)
        assert asked == [8]
