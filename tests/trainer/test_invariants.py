"""The invariants of the design, each on a real trainer with a tiny model."""

import pytest
import torch
from tiny import tiny_llama
from trainer_harness import (
    ScriptedTeacher,
    alternating_judge,
    batches_of,
    judge_that,
    logged,
    make_trainer,
    moved,
    prompts,
    record_gradients,
    snapshot,
)
from trl.trainer.utils import add_fused_lm_head

from trl_openclaw import CombineTrainer, Verdict, Vote
from trl_openclaw.errors import SelfTestError
from trl_openclaw.trainer import read_hints
from trl_openclaw.trainer.hint_rows import HintCandidates

BLANK = "  "
HINT, NO_HINT = Vote(score=-1, hint="Be brief."), Vote(score=-1)


class TestTokenIdentity:
    def test_the_sampled_ids_are_scored_and_trained(self, tmp_path):
        teacher = ScriptedTeacher(lambda row: [-1.0] * len(row.completion_ids))
        trainer = make_trainer(tmp_path, teacher_model=teacher)
        sampled, batches = [], batches_of(trainer)
        generate = trainer._generate_single_turn

        def recording(*args, **kwargs):
            ids, logps = generate(*args, **kwargs)
            sampled.extend(map(list, ids))
            return ids, logps

        trainer._generate_single_turn = recording
        trainer.train()
        assert [list(row.completion_ids) for row in teacher.rows] == sampled
        batch = batches[0]
        trained = [
            ids[mask.bool()].tolist()
            for ids, mask in zip(batch["completion_ids"], batch["completion_mask"], strict=True)
        ]
        assert trained == sampled

    def test_ids_that_decoding_would_change_survive(self, tmp_path):
        # Bytes that are no valid UTF-8 decode to a replacement character and come back as other ids.
        broken = [0xC3 % 256, 0x28, 200, 256]

        def rollout(prompts, trainer):
            ids = trainer.tokenize_prompts(prompts)
            return {
                "prompt_ids": ids,
                "completion_ids": [list(broken) for _ in prompts],
                "logprobs": [[-1.0] * len(broken) for _ in prompts],
            }

        teacher = ScriptedTeacher(lambda row: [-1.0] * len(row.completion_ids))
        trainer = make_trainer(tmp_path, teacher_model=teacher, rollout_func=rollout)
        trainer.train()
        assert teacher.rows
        assert all(list(row.completion_ids) == broken for row in teacher.rows)

    def test_the_teacher_reads_the_prompt_with_the_hint_in_it(self, tmp_path):
        teacher = ScriptedTeacher(lambda row: [-1.0] * len(row.completion_ids))
        trainer = make_trainer(tmp_path, teacher_model=teacher, judge=judge_that(hint="Be brief."))
        batches = batches_of(trainer)
        trainer.train()
        plain = [
            ids[m.bool()].tolist() for ids, m in zip(batches[0]["prompt_ids"], batches[0]["prompt_mask"], strict=True)
        ]
        for row, ids in zip(teacher.rows, plain, strict=True):
            text = trainer.processing_class.decode(row.prompt_ids)
            assert text.replace("\n\nHint: Be brief.", "") == trainer.processing_class.decode(ids)
            assert "Hint: Be brief.<|im_end|>" in text


class TestSelfTest:
    def test_live_teacher_without_a_hint_gives_no_advantage(self, tmp_path, monkeypatch):
        # A hint of which nothing is left in the prompt: the live teacher sees just what the student saw.
        trainer = make_trainer(
            tmp_path, config={"teacher": "live", "hint_source": "privileged_context"},
            data=make_privileged(BLANK), judge=None, next_state=None,
        )  # fmt: skip
        monkeypatch.setattr(read_hints, "find_hints", lambda *_: HintCandidates((BLANK,)))
        trainer.train()
        assert logged(trainer, "hint/accepted") == [1.0]
        assert logged(trainer, "opd/gap_abs_max")[0] < 1e-4
        assert logged(trainer, "self_test/max_gap")[0] < 1e-4

    def test_refuses_dropout_by_name(self, tmp_path):
        model = tiny_llama(attention_dropout=0.5)
        trainer = make_trainer(tmp_path, model=model, config={"disable_dropout": False})
        with pytest.raises(SelfTestError, match=r"dropout: the student trains with p=0\.5.*disable_dropout=True"):
            trainer.train()
        # The advice helps, whether dropout is a module or a plain number as in Llama's attention.
        make_trainer(tmp_path, model=tiny_llama(attention_dropout=0.5)).train()

    def test_an_evaluation_before_the_first_step_does_not_stand_in_for_it(self, tmp_path):
        trainer = make_trainer(
            tmp_path,
            model=tiny_llama(attention_dropout=0.5),
            eval_dataset=prompts(4),
            config={"disable_dropout": False, "eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True},
        )
        with pytest.raises(SelfTestError, match="dropout"):
            trainer.train()

    def test_refuses_a_template_that_renders_differently(self, tmp_path):
        trainer = make_trainer(tmp_path)
        tokenize = trainer.tokenize_prompts
        trainer.tokenize_prompts = lambda prompts: [ids[:-1] for ids in tokenize(prompts)]
        with pytest.raises(SelfTestError, match="template or tokenizer"):
            trainer.train()

    def test_refuses_another_temperature_by_name(self, tmp_path):
        trainer = make_trainer(tmp_path, config={"temperature": 0.7})
        cool = tiny_llama()
        add_fused_lm_head(cool, temperature=1.0)
        cool.scoring_temperature = 1.0
        trainer.teacher.model = cool
        with pytest.raises(SelfTestError, match=r"temperature: the teacher scores at 1\.0, the student at 0\.7"):
            trainer.train()

    def test_refuses_another_precision_by_name(self, tmp_path):
        trainer = make_trainer(tmp_path)
        trainer.teacher.model.to(torch.bfloat16)
        with pytest.raises(SelfTestError, match=r"dtype: the teacher is torch\.bfloat16, the student torch\.float32"):
            trainer.train()

    def test_refuses_other_weights(self, tmp_path):
        trainer = make_trainer(tmp_path)
        with torch.no_grad():
            trainer.teacher.model.lm_head.weight.mul_(1.1)
        with pytest.raises(SelfTestError, match="weights or kernels"):
            trainer.train()

    @pytest.mark.parametrize("kind", ["autocast", "bfloat16 weights"])
    def test_half_precision_passes_and_a_wrong_temperature_does_not(self, tmp_path, kind):
        half = {"bf16": True, "temperature": 0.7}
        for right in (True, False):
            model = tiny_llama() if kind == "autocast" else tiny_llama().to(torch.bfloat16)
            trainer = make_trainer(tmp_path, model=model, config=half)
            if right:
                trainer.train()
                assert len(logged(trainer, "self_test/max_gap")) == 1
                continue
            cool = tiny_llama().to(model.dtype)
            add_fused_lm_head(cool, temperature=1.0)
            cool.scoring_temperature = 1.0
            trainer.teacher.model = cool
            with pytest.raises(SelfTestError, match="temperature"):
                trainer.train()

    def test_can_be_switched_off(self, tmp_path):
        trainer = make_trainer(tmp_path, config={"self_test": False})
        with torch.no_grad():
            trainer.teacher.model.lm_head.weight.mul_(1.1)
        trainer.train()
        assert not logged(trainer, "self_test/max_gap")


def make_privileged(*contexts):
    from datasets import Dataset

    rows = [contexts[i % len(contexts)] for i in range(8)]
    return Dataset.from_list(
        [
            {"prompt": [{"role": "user", "content": "hi" * (i % 4 + 1)}], "privileged_context": c}
            for i, c in enumerate(rows)
        ]
    )


class TestNoSignalNoGradient:
    @pytest.mark.parametrize("loss_type", ["dapo", "grpo", "bnpo", "dr_grpo", "cispo", "sapo", "luspo"])
    def test_a_batch_without_hints_has_no_loss_and_no_gradient(self, tmp_path, loss_type):
        trainer = make_trainer(tmp_path, judge=judge_that(hint=None), config={"loss_type": loss_type})
        steps, before = record_gradients(trainer), snapshot(trainer.model)
        trainer.train()
        assert steps[0]["loss"] == 0.0
        assert all((gradient == 0).all() for gradient in steps[0]["gradients"].values())
        assert not any(moved(trainer.model, before).values())
        assert logged(trainer, "hint/accepted") == [0.0]
        assert logged(trainer, "hint/dropped/no_hint") == [1.0]

    @pytest.mark.parametrize("beta", [0.0, 0.1])
    @pytest.mark.parametrize("loss_type", ["dapo", "grpo", "bnpo", "dr_grpo", "cispo", "sapo", "luspo"])
    def test_rows_without_a_hint_change_neither_loss_nor_normaliser(self, tmp_path, loss_type, beta):
        """The gradient of four rows, two of them hinted, is that of the two hinted rows alone."""
        model_dir = tmp_path / "model"
        tiny_llama().save_pretrained(model_dir)
        trainer = make_trainer(
            tmp_path,
            model=str(model_dir),
            judge=alternating_judge(HINT, NO_HINT),
            config={"loss_type": loss_type, "beta": beta},
        )
        batches = batches_of(trainer)
        steps = record_gradients(trainer)
        with torch.no_grad():  # so that the KL term is not zero
            for parameter in trainer.model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.01)
        trainer._self_test.due = False
        initial = snapshot(trainer.model)
        trainer.train()
        batch = batches[0]
        keep = batch["hint_mask"]
        assert keep.tolist() == [True, False, True, False]
        half = {k: v[keep] if isinstance(v, torch.Tensor) and v.ndim else v for k, v in batch.items()}
        half["row_scale"] = torch.tensor(1.0)
        half["num_items_in_batch"] = half["completion_mask"].sum()
        trainer.model.load_state_dict(initial, strict=False)
        trainer.model.zero_grad()
        loss = trainer._compute_loss(trainer.model, half)
        loss.backward()
        assert loss.item() == pytest.approx(steps[0]["loss"], rel=1e-4, abs=1e-7)
        for name, parameter in trainer.model.named_parameters():
            torch.testing.assert_close(parameter.grad, steps[0]["gradients"][name], atol=1e-6, rtol=1e-3)

    def test_rows_without_a_hint_keep_their_reward_in_combine(self, tmp_path):
        trainer = make_trainer(tmp_path, CombineTrainer, judge=alternating_judge(HINT, NO_HINT))
        batches, seen = batches_of(trainer), []
        advantages = trainer.token_advantages
        trainer.token_advantages = lambda inputs, old: seen.append((inputs, advantages(inputs, old))) or seen[-1][1]
        trainer.train()
        inputs, tokens = seen[0]
        assert tokens.isfinite().all()
        unhinted = ~inputs["hint_mask"].unsqueeze(1) & inputs["completion_mask"].bool()
        assert (tokens[unhinted] == -1.0).all()
        assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())
        assert batches[0]["tool_mask"].bool().equal(batches[0]["completion_mask"].bool())
        assert batches[0]["step_advantages"].squeeze(1).tolist() == [-1.0] * 4


class TestDirection:
    @pytest.mark.parametrize("sign", [1.0, -1.0])
    def test_raising_the_teacher_raises_the_student(self, tmp_path, sign):
        """A teacher that likes the sampled tokens better (or worse) moves the student the same way."""
        live = {}

        def logps(row):
            ids = torch.tensor([[*row.prompt_ids, *row.completion_ids]])
            with torch.no_grad():
                dist = live["model"](input_ids=ids).logits[0].log_softmax(-1)
            start = len(row.prompt_ids)
            return [dist[start + t - 1, token].item() + sign for t, token in enumerate(row.completion_ids)]

        trainer = make_trainer(
            tmp_path, judge=None, next_state=None, teacher_model=ScriptedTeacher(logps), config={"learning_rate": 1e-4}
        )
        live["model"] = trainer.model
        batches = batches_of(trainer)
        trainer.train()
        batch = batches[0]
        mask = batch["completion_mask"].bool()
        before = batch["teacher_per_token_logps"][mask] - sign
        after = trainer.student_logps(batch, slice(0, 4))[mask]
        assert (sign * (after - before)).mean() > 0


class TestPaddingAndOtherRows:
    def test_a_rows_teacher_scores_do_not_depend_on_its_neighbours(self, tmp_path):
        scores = []
        for size in (100, 400):  # one row and four
            trainer = make_trainer(tmp_path / str(size), config={"teacher_token_budget": size})
            batches = batches_of(trainer)
            trainer.train()
            scores.append(batches[0]["teacher_per_token_logps"])
        torch.testing.assert_close(scores[0], scores[1], atol=1e-5, rtol=1e-5, equal_nan=True)

    def test_micro_batches_give_the_gradient_of_the_whole(self, tmp_path):
        gradients = []
        for size, accumulation in ((8, 1), (2, 4)):
            trainer = make_trainer(
                tmp_path / str(size),
                judge=judge_that(),
                config={
                    "per_device_train_batch_size": size,
                    "gradient_accumulation_steps": accumulation,
                    "max_grad_norm": 0.0,
                },
            )
            steps = record_gradients(trainer)
            trainer.train()
            gradients.append(steps[-1]["gradients"])
        for name, gradient in gradients[0].items():
            torch.testing.assert_close(gradient, gradients[1][name], atol=1e-6, rtol=1e-3)


class TestNoInventedNumbers:
    def test_a_missing_teacher_log_prob_moves_nothing(self, tmp_path):
        """A teacher that knows only each first token trains each first token alone."""
        teacher = ScriptedTeacher(lambda row: [-0.1] + [float("nan")] * (len(row.completion_ids) - 1))
        trainer = make_trainer(tmp_path, teacher_model=teacher, next_state=None, judge=None)
        seen = []
        advantages = trainer.token_advantages
        trainer.token_advantages = lambda *args: seen.append(advantages(*args)) or seen[-1]
        trainer.train()
        assert (seen[0][:, 0] != 0).all()
        assert (seen[0][:, 1:] == 0).all()

    def test_a_token_without_a_teacher_score_is_not_in_the_normaliser(self, tmp_path):
        """Of four rows one is scored whole, one in its first token, one not at all and one has no hint."""
        scored = {
            0: lambda n: [-1.0] * n,
            1: lambda n: [-1.0] + [float("nan")] * (n - 1),
            2: lambda n: [float("nan")] * n,
        }
        calls = iter(range(100))
        teacher = ScriptedTeacher(lambda row: scored[next(calls)](len(row.completion_ids)))
        judge = alternating_judge(HINT, HINT, HINT, NO_HINT)
        trainer = make_trainer(tmp_path, teacher_model=teacher, judge=judge)
        batches = batches_of(trainer)
        trainer.train()
        batch = batches[0]
        lengths = batch["completion_mask"].sum(1)
        assert (batch["completion_mask"] * batch["tool_mask"]).sum(1).tolist() == [lengths[0], 1, 0, 0]
        assert batch["num_items_in_batch"] == lengths[0] + 1
        assert logged(trainer, "hint/accepted") == [0.5]
        assert logged(trainer, "hint/dropped/no_teacher_score") == [0.25]
        assert logged(trainer, "teacher/missing_tokens") == [
            pytest.approx((lengths[1] - 1).item() / (lengths[0] + lengths[1]).item())
        ]

    def test_failures_ties_and_neutral_are_told_apart(self, tmp_path):
        tie, neutral, failed = [Vote(score=1), Vote(score=-1)], [Vote(score=0)], [Vote(failure="timeout")]
        votes = [tie, neutral, failed, [Vote(score=1)]]
        calls = iter(range(100))

        async def judge(turn):
            return Verdict.from_votes(votes[next(calls) % 4])

        trainer = make_trainer(tmp_path, CombineTrainer, judge=judge, config={"opd_weight": 0.0})
        batches = batches_of(trainer)
        trainer.train()
        for kind in ("tied", "neutral", "failed", "positive"):
            assert logged(trainer, f"judge/score/{kind}") == [0.25]
        assert batches[0]["tool_mask"].any(dim=1).sum() == 1  # only the one with a score that says something
