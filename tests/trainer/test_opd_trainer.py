"""What `OPDTrainer` and `CombineTrainer` train, with which teacher, and what they leave alone."""

import math

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tiny import tiny_llama, tiny_tokenizer
from trainer_harness import (
    SETTINGS,
    ScriptedTeacher,
    alternating_judge,
    always_replies,
    batches_of,
    judge_that,
    logged,
    make_trainer,
    moved,
    prompts,
    snapshot,
)
from trl import GRPOConfig, GRPOTrainer

from trl_openclaw import CombineTrainer, NextState, OPDTrainer, Verdict, Vote
from trl_openclaw.teachers import TEACHERS, ExternalTeacher, FrozenTeacher, LiveTeacher

LORA = {"r": 4, "target_modules": ["q_proj", "v_proj", "gate_proj"]}


@pytest.fixture
def model_dir(tmp_path):
    folder = tmp_path / "tiny"
    tiny_llama().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


class TestEveryBranchTrains:
    @pytest.mark.parametrize("trainer_class", [OPDTrainer, CombineTrainer])
    @pytest.mark.parametrize(
        "config",
        [
            {},
            {"teacher": "live"},
            {"hint_placement": "system"},
            {"logp_gap_clip": None},
            {"num_iterations": 2, "max_steps": 3},
            {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "max_steps": 2},
            {"num_generations": 1, "per_device_train_batch_size": 3},
            {"mask_truncated_completions": True, "max_completion_length": 400},
            {"top_entropy_quantile": 0.5},
            {"gradient_checkpointing": True},
            {"loss_type": "grpo"},
        ],
        ids=str,
    )
    @pytest.mark.filterwarnings("ignore:.*drift")
    def test_moves_every_parameter(self, tmp_path, trainer_class, config):
        trainer = make_trainer(tmp_path, trainer_class, config=config)
        before = snapshot(trainer.model)
        trainer.train()
        assert all(moved(trainer.model, before).values())

    def test_shared_reference_model(self, tmp_path, model_dir):
        trainer = make_trainer(tmp_path, model=model_dir, config={"beta": 0.1})
        assert trainer.teacher.model is trainer.ref_model
        before = snapshot(trainer.model)
        trainer.train()
        assert all(moved(trainer.model, before).values())
        assert "kl" in trainer.state.log_history[0]

    @pytest.mark.parametrize(
        "weights", [{"opd_weight": 0.0}, {"rl_weight": 0.0}, {"rl_weight": 0.3, "opd_weight": 2.0}]
    )
    def test_combine_weights(self, tmp_path, weights):
        trainer = make_trainer(tmp_path, CombineTrainer, config=weights)
        before = snapshot(trainer.model)
        trainer.train()
        assert all(moved(trainer.model, before).values())

    def test_lora_moves_the_adapter_alone(self, tmp_path):
        trainer = make_trainer(tmp_path, peft_config=LoraConfig(**LORA), config={"max_steps": 2})
        before = snapshot(trainer.model)
        trainer.train()
        changed = moved(trainer.model, before)
        assert all(hit for name, hit in changed.items() if "lora_" in name)
        assert not any(hit for name, hit in changed.items() if "lora_" not in name)


class TestTeachers:
    def test_frozen_teacher_of_an_instance_is_a_copy_that_stays(self, tmp_path):
        trainer = make_trainer(tmp_path, config={"max_steps": 2})
        assert isinstance(trainer.teacher, FrozenTeacher)
        assert trainer.teacher.model is not trainer.model
        before = snapshot(trainer.teacher.model)
        trainer.train()
        assert not any(moved(trainer.teacher.model, before).values())
        assert all(not p.requires_grad for p in trainer.teacher.model.parameters())

    def test_frozen_teacher_of_a_path_is_loaded_again(self, tmp_path, model_dir):
        trainer = make_trainer(tmp_path, model=model_dir)
        assert trainer.teacher.model is not trainer.model
        trainer.train()
        assert logged(trainer, "self_test/max_gap")[0] < 1e-4

    def test_sync_ref_model_is_not_a_frozen_teacher(self, tmp_path, model_dir):
        trainer = make_trainer(tmp_path, model=model_dir, config={"beta": 0.1, "sync_ref_model": True})
        assert trainer.teacher.model is not trainer.ref_model

    def test_lora_needs_no_second_copy(self, tmp_path):
        trainer = make_trainer(tmp_path, peft_config=LoraConfig(**LORA), config={"max_steps": 2, "learning_rate": 0.1})
        assert trainer.teacher.model is trainer.model
        batches = batches_of(trainer)
        trainer.train()
        base = trainer.model.unload()
        rows, scores = batches[1], batches[1]["teacher_per_token_logps"]
        assert logged(trainer, "opd/gap_abs_mean")[1] > 0.01  # the adapter has moved away from the teacher
        # The teacher still is the base model: score one hinted row by hand.
        text = "<|im_start|>user\n{}\n\nHint: Be brief.<|im_end|>\n<|im_start|>assistant\n"
        tokenizer = trainer.processing_class
        plain = tokenizer.decode(rows["prompt_ids"][0][rows["prompt_mask"][0].bool()])
        question = plain.split("user\n")[1].split("<|im_end|>")[0]
        prompt_ids = tokenizer(text.format(question))["input_ids"]
        length = int(rows["completion_mask"][0].sum())
        completion = rows["completion_ids"][0][:length]
        ids = torch.tensor([[*prompt_ids, *completion.tolist()]])
        with torch.no_grad():
            dist = base(input_ids=ids).logits[0].log_softmax(-1)
        expected = torch.stack([dist[len(prompt_ids) + t - 1, token] for t, token in enumerate(completion)])
        torch.testing.assert_close(scores[0, :length], expected, atol=1e-4, rtol=1e-4)

    def test_a_trained_adapter_is_part_of_the_initial_policy(self, tmp_path):
        model = get_peft_model(tiny_llama(), LoraConfig(**LORA, init_lora_weights=False))
        trainer = make_trainer(tmp_path, model=model, config={"max_steps": 2, "learning_rate": 0.05})
        initial = {n: p.clone() for n, p in trainer.model.named_parameters() if ".default." in n}
        trainer.train()
        assert logged(trainer, "self_test/max_gap")[0] < 1e-4
        for name, parameter in initial.items():
            reference = trainer.model.get_parameter(name.replace(".default.", ".ref."))
            torch.testing.assert_close(reference, parameter)
            assert not reference.requires_grad
        assert trainer.model.active_adapter == "default"

    def test_live_teacher_is_the_policy_and_warns(self, tmp_path):
        with pytest.warns(UserWarning, match="drift"):
            trainer = make_trainer(tmp_path, config={"teacher": "live"})
        assert isinstance(trainer.teacher, LiveTeacher)
        assert trainer.teacher.model is trainer.model

    def test_a_new_teacher_is_a_class_and_a_line_in_the_dict(self, tmp_path, monkeypatch):
        class Late:
            @classmethod
            def build(cls, trainer, scorer, initial):
                return ScriptedTeacher(lambda row: [-1.0] * len(row.completion_ids))

        monkeypatch.setitem(TEACHERS, "late", Late)
        trainer = make_trainer(tmp_path, config={"teacher": "late"})
        trainer.train()
        assert trainer.teacher.rows

    def test_external_teacher_by_path_and_by_config(self, tmp_path):
        folder = tmp_path / "teacher"
        tiny_llama(seed=1).save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
        for kwargs in ({"teacher_model": str(folder)}, {"config": {"teacher_model_name_or_path": str(folder)}}):
            trainer = make_trainer(tmp_path, judge=None, next_state=None, **kwargs)
            assert isinstance(trainer.teacher, ExternalTeacher)
            trainer.train()
            assert logged(trainer, "opd/gap_abs_mean")[0] > 0.1


class TestUsesOfOneCodePath:
    def test_privileged_context_is_what_the_teacher_alone_sees(self, tmp_path):
        rows = [{**row, "privileged_context": None if i % 2 else "The answer is 4."} for i, row in enumerate(prompts())]
        teacher = ScriptedTeacher(lambda row: [-1.0] * len(row.completion_ids))
        trainer = make_trainer(
            tmp_path, judge=None, next_state=None, data=Dataset.from_list(rows), teacher_model=teacher,
            config={"per_device_train_batch_size": 16, "shuffle_dataset": False},
        )  # fmt: skip
        batches = batches_of(trainer)
        trainer.train()
        assert batches[0]["hint_mask"].tolist() == [True, True, False, False] * 4
        assert logged(trainer, "hint/accepted") == [0.5]
        assert all("Hint: The answer is 4." in trainer.processing_class.decode(row.prompt_ids) for row in teacher.rows)
        assert not {"rewards/judge/mean", "reward", "reward_std"} & set(trainer.state.log_history[0])

    def test_an_external_teacher_without_hints_reads_the_sampled_prompt(self, tmp_path):
        teacher = ScriptedTeacher(lambda row: [-1.0] * len(row.completion_ids))
        trainer = make_trainer(tmp_path, judge=None, next_state=None, teacher_model=teacher)
        batches = batches_of(trainer)
        trainer.train()
        plain = [i[m.bool()].tolist() for i, m in zip(batches[0]["prompt_ids"], batches[0]["prompt_mask"], strict=True)]
        assert [list(row.prompt_ids) for row in teacher.rows] == plain

    def test_binary_rl_asks_for_no_hint_and_runs_no_teacher(self, tmp_path):
        class Judge:
            def __init__(self, hints):
                self.hints = hints

            def without_hints(self):
                return Judge(hints=False)

            async def __call__(self, turn):
                assert not self.hints
                return Verdict.from_votes([Vote(score=1)])

        trainer = make_trainer(tmp_path, CombineTrainer, judge=Judge(hints=True), config={"opd_weight": 0.0})
        batches = batches_of(trainer)
        trainer.train()
        assert trainer.teacher is None
        assert "teacher_per_token_logps" not in batches[0]
        assert logged(trainer, "judge/score/positive") == [1.0]

    def test_standard_text_prompts(self, tmp_path):
        data = Dataset.from_list([{"prompt": "once upon a time"[: 4 + i]} for i in range(8)])
        teacher = ScriptedTeacher(lambda row: [-1.0] * len(row.completion_ids))
        trainer = make_trainer(tmp_path, data=data, teacher_model=teacher)
        trainer.train()
        assert trainer.processing_class.decode(teacher.rows[0].prompt_ids).startswith("Hint: Be brief.\n\nonce")


def ones(completions, **kwargs):
    return [1.0] * len(completions)


class TestRewards:
    def test_raw_scores_are_the_advantages_and_neutral_says_nothing(self, tmp_path):
        judge = alternating_judge(Vote(score=1), Vote(score=-1), Vote(score=0), Vote(failure="timeout"))
        trainer = make_trainer(tmp_path, CombineTrainer, judge=judge, config={"opd_weight": 0.0})
        batches = batches_of(trainer)
        trainer.train()
        assert batches[0]["step_advantages"].squeeze(1).tolist() == [1.0, -1.0, 0.0, 0.0]
        assert batches[0]["tool_mask"].any(1).tolist() == [True, True, False, False]
        assert batches[0]["num_items_in_batch"] == batches[0]["completion_mask"][:2].sum()

    def test_equal_scores_still_teach_without_a_baseline_and_not_with_one(self, tmp_path):
        for baseline, moves in (("none", True), ("group", False)):
            trainer = make_trainer(
                tmp_path, CombineTrainer, judge=judge_that(score=1, hint=None),
                config={"opd_weight": 0.0, "reward_baseline": baseline},
            )  # fmt: skip
            before = snapshot(trainer.model)
            trainer.train()
            assert any(moved(trainer.model, before).values()) is moves
            assert logged(trainer, "frac_reward_zero_std") == [1.0]
            assert logged(trainer, "train_rows/share") == [1.0 if moves else 0.0]

    def test_group_baseline_is_trls(self, tmp_path):
        judge = alternating_judge(Vote(score=1), Vote(score=-1))
        trainer = make_trainer(
            tmp_path,
            CombineTrainer,
            judge=judge,
            config={"opd_weight": 0.0, "reward_baseline": "group", "scale_rewards": "none"},
        )
        batches = batches_of(trainer)
        trainer.train()
        assert batches[0]["step_advantages"].squeeze(1).tolist() == [1.0, -1.0, 1.0, -1.0]

    def test_reward_functions_add_to_the_score_with_their_weights(self, tmp_path):
        def two(completions, **kwargs):
            return [2.0] * len(completions)

        trainer = make_trainer(
            tmp_path, CombineTrainer, judge=judge_that(score=-1, hint=None), reward_funcs=two,
            config={"opd_weight": 0.0, "reward_weights": [0.25]},
        )  # fmt: skip
        batches = batches_of(trainer)
        trainer.train()
        assert batches[0]["step_advantages"].squeeze(1).tolist() == [-0.5] * 4
        assert logged(trainer, "rewards/two/mean") == [2.0]
        assert logged(trainer, "rewards/judge/mean") == [-1.0]

    def test_reward_models_keep_their_processing_class(self, tmp_path):
        trainer = make_trainer(
            tmp_path, CombineTrainer, judge=judge_that(score=-1), reward_funcs=ones,
            reward_processing_classes=[tiny_tokenizer()],
        )  # fmt: skip
        assert len(trainer.reward_processing_classes) == 2

    def test_the_callers_config_is_left_alone(self, tmp_path):
        from trl_openclaw import CombineConfig

        args = CombineConfig(output_dir=str(tmp_path), **SETTINGS, opd_weight=0.0, reward_weights=[0.5])
        for _ in range(2):
            CombineTrainer(
                tiny_llama(), lambda completions, **_: [1.0] * len(completions), args, prompts(),
                processing_class=tiny_tokenizer(), judge=judge_that(), next_state=always_replies,
            )  # fmt: skip
        assert args.reward_weights == [0.5]

    def test_opd_logs_reward_functions_without_training_on_them(self, tmp_path):
        with pytest.warns(UserWarning, match="CombineTrainer"):
            trainer = make_trainer(
                tmp_path,
                judge=judge_that(hint=None),
                reward_funcs=lambda completions, **kwargs: [1.0] * len(completions),
            )
        before = snapshot(trainer.model)
        trainer.train()
        assert not any(moved(trainer.model, before).values())


class TestCost:
    @pytest.mark.parametrize("accumulation", [1, 2])
    def test_no_more_student_forwards_than_stock_grpo(self, tmp_path, accumulation):
        """Outside generation and the self-test, the policy runs once per micro-batch, as in stock GRPO."""
        counts = []
        config = {"gradient_accumulation_steps": accumulation, "max_steps": 2}
        ours = make_trainer(tmp_path / "ours", config={**config, "self_test": False})
        stock = GRPOTrainer(
            tiny_llama(),
            lambda completions, **kwargs: [float(len(c[0]["content"])) for c in completions],
            args=GRPOConfig(output_dir=str(tmp_path / "stock"), **{**SETTINGS, **config}),
            processing_class=tiny_tokenizer(),
            train_dataset=prompts(),
        )
        for trainer in (ours, stock):
            calls = []
            trainer.model.register_forward_pre_hook(
                lambda m, args, kwargs, calls=calls: calls.append(kwargs.get("fused_lm_head", False)), with_kwargs=True
            )
            trainer.train()
            counts.append(sum(calls))
        assert counts == [2 * accumulation] * 2


class TestHousekeeping:
    def test_completions_table_holds_hint_verdict_and_next_state(self, tmp_path):
        import pandas as pd

        trainer = make_trainer(tmp_path, CombineTrainer, config={"log_completions": True})
        trainer.train()
        table = pd.read_parquet(next((tmp_path / "completions").glob("*.parquet")))
        assert table["hint"].tolist() == ["Be brief."] * 4
        assert table["next_state"].tolist() == ["Shorter, please."] * 4
        assert table["verdict"].tolist() == ["negative"] * 4
        assert table["advantage"].tolist() == [-1.0] * 4

    def test_evaluation_runs_the_same_path(self, tmp_path):
        async def satisfied_or_not(turn, row):
            return NextState("Hm.", satisfied=len(turn.reply) % 2 == 0)

        trainer = make_trainer(tmp_path, next_state=satisfied_or_not, eval_dataset=prompts(4))
        metrics = trainer.evaluate()
        entry = trainer.state.log_history[-1]
        assert 0.0 <= entry["eval_next_state/satisfied"] <= 1.0
        assert entry["eval_hint/accepted"] == 1.0
        assert entry["eval_opd/gap_abs_mean"] > 0
        assert math.isfinite(metrics["eval_loss"])

    def test_resume_goes_on_where_it_stopped(self, tmp_path, model_dir):
        make_trainer(
            tmp_path, model=model_dir, config={"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
        ).train()
        trainer = make_trainer(tmp_path, model=model_dir, config={"max_steps": 3, "save_strategy": "no"})
        teacher = snapshot(trainer.teacher.model)
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        assert trainer.state.global_step == 3
        assert not any(moved(trainer.teacher.model, teacher).values())  # the initial weights, not the checkpoint's
        assert (tmp_path / "checkpoint-2" / "model.safetensors").exists()

    @pytest.mark.parametrize(("save_steps", "sampled_at"), [(4, [4]), (3, [3, 7])])
    @pytest.mark.filterwarnings("ignore:.*saves in the middle")
    def test_a_resumed_run_samples_where_the_buffer_begins(self, tmp_path, model_dir, save_steps, sampled_at):
        """Inside a buffer of four steps TRL samples anew, which is why such `save_steps` warn."""
        config = {"num_iterations": 4, "save_strategy": "steps", "save_steps": save_steps, "max_steps": 8}
        make_trainer(tmp_path, model=model_dir, config=config).train()
        trainer = make_trainer(tmp_path, model=model_dir, config=config)
        sampled = []
        before = trainer.before_sampling
        trainer.before_sampling = lambda inputs: sampled.append(trainer.state.global_step) or before(inputs)
        trainer.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{save_steps}"))
        assert sampled == sampled_at

    def test_model_card_names_method_and_paper(self, tmp_path):
        for trainer_class, tag in ((OPDTrainer, "opd"), (CombineTrainer, "combine")):
            trainer = make_trainer(tmp_path, trainer_class)
            trainer.create_model_card(model_name="my-model")
            card = (tmp_path / "README.md").read_text()
            assert "OpenClaw-RL: Train Any Agent Simply by Talking" in card
            assert "2603.10165" in card
            assert f"- {tag}\n" in card
            assert "- trl-openclaw\n" in card

    def test_unused_columns_are_dropped_except_what_feedback_reads(self, tmp_path):
        rows = [{**row, "privileged_context": "4", "next_state": "No.", "other": i} for i, row in enumerate(prompts())]
        seen = []

        async def judge(turn):
            seen.append(turn.next_state.text)
            return Verdict.from_votes([Vote(score=-1)])

        trainer = make_trainer(
            tmp_path, data=Dataset.from_list(rows), judge=judge, next_state=None,
            config={"remove_unused_columns": True, "hint_source": "privileged_context"},
        )  # fmt: skip
        trainer.train()
        assert seen == ["No."] * 4
        assert logged(trainer, "hint/accepted") == [1.0]
