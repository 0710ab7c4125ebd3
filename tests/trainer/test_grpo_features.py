"""Tools, environments, local judges and rollouts: what GRPOTrainer takes keeps working around a teacher."""

import time

import pytest
import torch
from agent_harness import CALL, Doubler, double, script_completions, tool_tokenizer
from datasets import Dataset
from tiny import tiny_llama, tiny_tokenizer
from trainer_harness import SETTINGS, ScriptedTeacher, always_replies, batches_of, judge_that, logged, make_trainer

from trl_openclaw import CombineConfig, CombineTrainer, LocalJudge, OPDConfig, OPDTrainer


@pytest.mark.parametrize("source", ["tools", "environment_factory"])
def test_a_tool_trajectory_is_scored_whole_and_tool_tokens_are_left_alone(tmp_path, source):
    teacher = ScriptedTeacher(lambda row: [-1.0] * len(row.completion_ids))
    kwargs = {"tools": [double]} if source == "tools" else {"environment_factory": Doubler}
    trainer = OPDTrainer(
        model=tiny_llama(max_position_embeddings=4096),
        args=OPDConfig(output_dir=str(tmp_path), **{**SETTINGS, "max_completion_length": 400}),
        processing_class=tool_tokenizer(),
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": "2?"}]}] * 4),
        judge=judge_that(hint="Say four."),
        next_state=always_replies,
        teacher_model=teacher,
        **kwargs,
    )
    script_completions(trainer, [CALL, "4<|im_end|>"])
    batches = batches_of(trainer)
    trainer.train()
    batch = batches[0]
    assert logged(trainer, "tools/call_frequency") == [1.0]
    assert logged(trainer, "hint/accepted") == [1.0]
    ids, mask = batch["completion_ids"][0], batch["tool_mask"][0].bool()
    decode = trainer.processing_class.decode
    assert "<tool_response>\n4\n</tool_response>" in decode(ids)
    assert "tool_response" not in decode(ids[mask])
    assert decode(ids[mask]) == CALL + "4<|im_end|>"
    # The teacher scored the trajectory as sampled, after a prompt with the same tools and the hint in it.
    assert list(teacher.rows[0].completion_ids) == ids.tolist()
    hinted = decode(teacher.rows[0].prompt_ids)
    assert '"name": "double"' in hinted
    assert "Hint: Say four." in hinted
    assert ("(double it)" in hinted) is (source == "environment_factory")


def test_turns_in_an_environment_wait_for_the_reward_call(tmp_path):
    """Other reward functions may still change what a next state is made of, and nobody is ahead of them."""
    order = []

    async def judge(turn):
        order.append("judge")
        return await judge_that()(turn)

    def reward(completions, **kwargs):
        time.sleep(0.2)
        order.append("reward")
        return [0.0] * len(completions)

    def score(row):
        order.append("teacher")
        return [-1.0] * len(row.completion_ids)

    rows = [{"prompt": [{"role": "user", "content": "2?"}], "privileged_context": "4"}] * 4
    trainer = CombineTrainer(
        model=tiny_llama(max_position_embeddings=4096),
        args=CombineConfig(
            output_dir=str(tmp_path), hint_source="privileged_context", **{**SETTINGS, "max_completion_length": 400}
        ),
        reward_funcs=reward,
        processing_class=tool_tokenizer(),
        train_dataset=Dataset.from_list(rows),
        judge=judge,
        next_state=always_replies,
        teacher_model=ScriptedTeacher(score),
        environment_factory=Doubler,
    )
    script_completions(trainer, [CALL, "4<|im_end|>"])
    trainer.train()
    assert order == ["reward", *["judge"] * 8, *["teacher"] * 4]


@pytest.mark.parametrize("trainer_class", [OPDTrainer, CombineTrainer])
def test_the_policy_may_be_its_own_judge(tmp_path, trainer_class):
    """A random model gives no verdict that can be read; asking it must not disturb what is trained."""
    model = tiny_llama(max_position_embeddings=4096)
    judge = LocalJudge(model, tiny_tokenizer(), num_votes=1, max_tokens=4)
    trainer = make_trainer(tmp_path, trainer_class, model=model, judge=judge)
    trainer.train()
    failures = [logged(trainer, f"judge/vote_failed/{kind}")[0] for kind in ("unparseable", "truncated")]
    assert sum(failures) == 1.0
    assert trainer.model.training


def test_a_frozen_model_may_be_the_local_judge(tmp_path):
    judge = LocalJudge(tiny_llama(5, max_position_embeddings=4096), tiny_tokenizer(), num_votes=2, max_tokens=4)
    trainer = make_trainer(tmp_path, judge=judge)
    trainer.train()
    assert logged(trainer, "judge/vote/failed") == [1.0]


def test_old_log_probs_of_trl_are_used_when_there_are_any(tmp_path):
    """With several iterations the advantage is measured against the sampling policy, not against the moving one."""
    trainer = make_trainer(
        tmp_path, teacher_model=ScriptedTeacher(lambda row: [-1.0] * len(row.completion_ids)),
        config={"num_iterations": 3, "max_steps": 3, "logp_gap_clip": None, "learning_rate": 1e-2},
    )  # fmt: skip
    seen = []
    advantages = trainer.token_advantages
    trainer.token_advantages = lambda *args: seen.append(advantages(*args)) or seen[-1]
    trainer.train()
    assert len(seen) == 3
    for later in seen[1:]:  # rows are shuffled once per generation batch and stay in place after that
        torch.testing.assert_close(seen[0], later)
