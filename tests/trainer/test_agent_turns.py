"""Each turn of a trajectory has its own verdict, hint, teacher context and reward."""

import asyncio

import pytest
import torch
from agent_harness import CALL, Doubler, agent_trainer, call, double, tool_tokenizer
from datasets import Dataset
from trainer_harness import (
    ScriptedTeacher,
    batches_of,
    judge_that,
    logged,
    micro_batches_of,
    moved,
    rollout_by_prompt,
    snapshot,
)

from trl_openclaw import CombineTrainer, NextState, OPDTrainer, Verdict, Vote
from trl_openclaw.lm_head import LMHead
from trl_openclaw.scoring import TeacherScores
from trl_openclaw.trajectories import UNREAD_CALL
from trl_openclaw.types import ToolResult

EIGHT_TURNS = [*(call(x) for x in range(7)), "It is 12.<|im_end|>"]
THREE_TURNS = [call(2), call(4), "8<|im_end|>"]


def by_step(*verdicts):
    """A judge that knows what it thinks of each step."""

    async def judge(turn):
        return verdicts[turn.step]

    return judge


def says(score=None, hint=None, *votes):
    return Verdict.from_votes([Vote(score, hint=hint), *votes])


def asked_rows(trainer):
    """All rows that the trainer has scored by a local model."""
    seen, score = [], trainer.scorer.score

    def recording(model, rows, **wanted):
        seen.extend(rows)
        return score(model, rows, **wanted)

    trainer.scorer.score = recording
    return seen


def flat_teacher(logp=-1.0):
    return ScriptedTeacher(lambda row: [logp] * len(row.completion_ids))


def spans(batch, row=0):
    """The tokens of each turn of a row."""
    steps = batch["turn_index"][row]
    return [steps == step for step in range(int(steps.max()) + 1)]


class TestJudging:
    def test_every_turn_is_judged_by_what_followed_it(self, tmp_path):
        seen = []

        async def judge(turn):
            seen.append(turn)
            return says(1)

        trainer = agent_trainer(tmp_path, texts=THREE_TURNS, judge=judge)
        trainer.train()
        assert len(seen) == 12
        own = sorted((turn for turn in seen if turn is not None), key=lambda turn: turn.step)
        first, second, last = own[0], own[4], own[8]
        assert (first.next_state, second.next_state) == (NextState("4", "tool"), NextState("8", "tool"))
        assert last.next_state.text == "Shorter, please."  # the provider answers the last turn alone
        assert [len(turn.prompt) for turn in (first, second, last)] == [1, 3, 5]
        assert last.prompt[3]["tool_calls"][0]["function"]["arguments"] == {"x": 4}
        assert last.reply == "8"

    def test_all_turns_of_all_rows_are_judged_at_once(self, tmp_path):
        running = most = 0

        async def judge(turn):
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.05)
            running -= 1
            return says(1)

        agent_trainer(tmp_path, texts=EIGHT_TURNS, judge=judge, config={"max_completion_length": 1200}).train()
        assert most == 32

    def test_metrics_of_the_steps(self, tmp_path):
        judge = by_step(says(1, "a"), says(-1), says(None))
        trainer = agent_trainer(tmp_path, CombineTrainer, THREE_TURNS, judge=judge)
        trainer.train()
        (log,) = (entry for entry in trainer.state.log_history if "turns/mean" in entry)
        assert (log["turns/mean"], log["turns/unmatched"]) == (3.0, 0.0)
        assert [log[f"steps/{step}/hint_accepted"] for step in range(3)] == [1.0, 0.0, 0.0]
        assert (log["steps/0/judge_score"], log["steps/1/judge_score"]) == (1.0, -1.0)
        assert "steps/2/judge_score" not in log
        assert [log.get(f"steps/{step}/reward") for step in range(3)] == [1.0, -1.0, None]
        assert log["steps/2/turns"] == 1.0
        assert "steps/3/turns" not in log

    def test_columns_tell_the_steps_of_a_row(self, tmp_path):
        judge = by_step(says(1, "first"), says(-1), says(1, "third"))
        trainer = agent_trainer(tmp_path, CombineTrainer, THREE_TURNS, judge=judge, config={"log_completions": True})
        trainer.train()
        extra = trainer._logs["extra"]
        assert extra["hint"][0] == "[0] first\n[2] third"
        assert extra["hint_drop"][0] == "[1] no_hint"
        assert extra["judge_score"][0] == pytest.approx(1 / 3)
        assert extra["next_state"][0].startswith("[0] 4\n[1] 8\n[2] Shorter")


class TestTeacher:
    @pytest.mark.parametrize("placement", ["user", "system", "turn"])
    def test_a_turn_is_scored_after_its_own_hint_and_the_turns_before_it(self, tmp_path, placement):
        teacher, judge = flat_teacher(), by_step(says(-1, "one"), says(-1, "two"), says(-1, "three"))
        trainer = agent_trainer(
            tmp_path, texts=THREE_TURNS, judge=judge, teacher_model=teacher, config={"hint_placement": placement}
        )
        batches = batches_of(trainer)
        trainer.train()
        batch, decode = batches[0], trainer.processing_class.decode
        ids = batch["completion_ids"][0]
        assert len(teacher.rows) == 12
        for step, (row, own, hint) in enumerate(
            zip(teacher.rows[:3], spans(batch), ["one", "two", "three"], strict=True)
        ):
            assert list(row.completion_ids) == ids[own].tolist()
            context = decode(row.prompt_ids)
            assert [word for word in ("one", "two", "three") if f"Hint: {word}" in context] == [hint]
            before = decode(ids[: int(own.nonzero()[0])])
            at = context.index("Hint: ")
            if placement == "turn" and not step:
                assert "<|im_start|>user\n2?\n\nHint: one<|im_end|>" in context  # as the user said it
            if placement == "turn":
                assert context[at:] == f"Hint: {hint}<|im_end|>\n<|im_start|>assistant\n"
            elif step:
                assert context.endswith(before)
            if placement == "turn" and step:
                plain = before.removesuffix("<|im_start|>assistant\n")
                assert context[:at].endswith(plain + "<|im_start|>user\n")

    def test_scores_land_on_their_own_turn_and_tools_get_none(self, tmp_path):
        teacher = ScriptedTeacher(lambda row: [-float(len(row.prompt_ids))] * len(row.completion_ids))
        judge = by_step(says(-1, "one"), says(-1), says(-1, "three, longer"))
        trainer = agent_trainer(tmp_path, texts=THREE_TURNS, judge=judge, teacher_model=teacher)
        batches = batches_of(trainer)
        trainer.train()
        batch = batches[0]
        contexts = [len(row.prompt_ids) for row in teacher.rows[:2]]
        first, second, third = spans(batch)
        scores = batch["teacher_per_token_logps"][0]
        assert (scores[first] == -contexts[0]).all()
        assert (scores[third] == -contexts[1]).all()
        taught = first | third
        assert scores[~taught].isnan().all()
        assert batch["teacher_mask"][0].equal(taught)
        assert (batch["tool_mask"] * batch["completion_mask"])[0].bool().equal(taught)  # the second has no signal
        assert second.any()
        assert batch["num_items_in_batch"] == 4 * taught.sum()

    def test_turns_under_one_hint_in_one_place_are_read_once(self, tmp_path):
        teacher = ScriptedTeacher(lambda row: [-float(i) for i in range(len(row.completion_ids))])
        trainer = agent_trainer(tmp_path, texts=THREE_TURNS, judge=judge_that(hint="same"), teacher_model=teacher)
        batches = batches_of(trainer)
        trainer.train()
        assert len(teacher.rows) == 4
        assert list(teacher.rows[0].completion_ids) == batches[0]["completion_ids"][0].tolist()
        own, scores = batches[0]["turn_index"][0] >= 0, batches[0]["teacher_per_token_logps"][0]
        assert scores[own].equal(-own.nonzero().squeeze(1).float())
        assert scores[~own].isnan().all()

    @pytest.mark.parametrize("placement", ["user", "turn"])
    def test_shared_or_not_the_numbers_are_those_of_single_rows(self, tmp_path, placement):
        """The policy's own frozen copy as teacher: each turn against the model run on that turn alone."""
        hints = by_step(*(says(-1, f"number {step}") for step in range(8)))
        found = []
        for sharing in (False, True):
            trainer = agent_trainer(
                tmp_path, texts=EIGHT_TURNS, judge=hints,
                config={"hint_placement": placement, "prefix_sharing": sharing, "max_completion_length": 1200},
            )  # fmt: skip
            rows, batches = asked_rows(trainer), batches_of(trainer)
            trainer.train()
            found.append(batches[0]["teacher_per_token_logps"])
        torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5, equal_nan=True)
        model, batch = trainer.teacher.model, batches[0]
        taught = [row for row in rows if "Hint" in trainer.processing_class.decode(row.prompt_ids)][:8]
        for row, own in zip(taught, spans(batch), strict=True):
            ids = torch.tensor([[*row.prompt_ids, *row.completion_ids]])
            with torch.no_grad():
                logits = type(model).forward(model, input_ids=ids).logits
            logps = logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1)[-len(row.completion_ids) :]
            torch.testing.assert_close(found[1][0][own], logps, atol=1e-4, rtol=1e-4)

    @pytest.mark.parametrize("placement", ["user", "turn"])
    def test_an_unhinted_teacher_reads_no_hint_before_any_turn(self, tmp_path, placement):
        teacher, judge = flat_teacher(), by_step(*(says(-1, hint) for hint in ("one", "two", "three")))
        trainer = agent_trainer(
            tmp_path, texts=THREE_TURNS, judge=judge, teacher_model=teacher,
            config={"hint_placement": placement, "control": "unhinted_teacher"},
        )  # fmt: skip
        batches = batches_of(trainer)
        trainer.train()
        assert all("Hint" not in trainer.processing_class.decode(row.prompt_ids) for row in teacher.rows)
        assert batches[0]["teacher_mask"].equal(batches[0]["turn_index"] >= 0)

    def test_a_hint_that_does_not_fit_costs_its_own_turn(self, tmp_path):
        judge = by_step(says(-1, "one"), says(-1, "x" * 5000), says(-1, "three"))
        trainer = agent_trainer(tmp_path, texts=THREE_TURNS, judge=judge)
        batches = batches_of(trainer)
        trainer.train()
        assert logged(trainer, "hint/dropped/too_long") == [pytest.approx(1 / 3)]
        first, _, third = spans(batches[0])
        assert batches[0]["teacher_mask"][0].equal(first | third)

    @pytest.mark.parametrize("config", [
        {"opd_loss": "topk_surrogate"}, {"opd_loss": "topk_reverse_kl"}, {"opd_loss": "full_divergence"},
        {"hint_selection": "sequence"}, {"hint_selection": "token", "num_iterations": 2},
        {"reward_scale": 1.5}, {"reward_scale": 1.5, "opd_reference": "unhinted_teacher"},
        {"control": "random_hint"}, {"control": "raw_next_state"}, {"control": "unhinted_teacher"},
        {"loss_type": "grpo"},
    ])  # fmt: skip
    @pytest.mark.parametrize("placement", ["user", "turn"])
    def test_every_variant_trains_on_turns(self, tmp_path, config, placement):
        verdicts = [
            Verdict.from_votes([Vote(-1, hint=f"{word} {step}") for word in ("a", "bb", "c")]) for step in range(3)
        ]
        trainer = agent_trainer(
            tmp_path, CombineTrainer, THREE_TURNS * 2, judge=by_step(*verdicts),
            config={"hint_placement": placement, "max_steps": 2, **config},
        )  # fmt: skip
        before = snapshot(trainer.model)
        trainer.train()
        assert all(moved(trainer.model, before).values())
        assert logged(trainer, "hint/accepted")[0] == 1.0


class TestHintChoice:
    def test_each_turn_has_the_candidate_that_agrees_best_with_the_student_there(self, tmp_path, monkeypatch):
        """The teacher agrees with the student under one hint in the first turn, and under the other in the second."""
        verdicts = [
            Verdict.from_votes([Vote(-1, hint=f"good {when}, {step}") for when in ("first", "later")])
            for step in range(2)
        ]
        best, worst = torch.tensor([7, 9]), torch.tensor([1, 2])
        decode = tool_tokenizer().decode

        class Teacher(ScriptedTeacher):
            def score(self, rows, topk):
                found = super().score(rows)
                ids = torch.zeros(*found.per_token_logps.shape, topk, dtype=torch.long)
                for i, row in enumerate(rows):
                    context = decode(row.prompt_ids)
                    good = "good later" if "<tool_response>\n4" in context else "good first"
                    ids[i] = best if good in context else worst
                return TeacherScores(found.per_token_logps, found.mask, ids)

        teacher = Teacher(
            lambda row: [-2.0 if "good later" in decode(row.prompt_ids) else -1.0] * len(row.completion_ids)
        )
        monkeypatch.setattr(LMHead, "topk", lambda self, hidden, k: best.expand(len(hidden), k))
        trainer = agent_trainer(
            tmp_path, judge=by_step(*verdicts), teacher_model=teacher,
            config={"hint_selection": "sequence", "topk": 2},
        )  # fmt: skip
        micro = micro_batches_of(trainer)
        trainer.train()
        first, second = spans(micro[0])
        scores = micro[0]["teacher_per_token_logps"][0]
        assert (scores[first] == -1.0).all()
        assert (scores[second] == -2.0).all()
        assert micro[0]["hint_choice"].tolist() == [[0, 1]] * 4
        assert trainer._logs["extra"]["hint"][0] == "[0] good first, 0\n[1] good later, 1"

    def test_a_candidate_that_misses_a_token_of_one_turn_can_still_be_chosen_in_another(self, tmp_path):
        verdicts = [Verdict.from_votes([Vote(-1, hint=f"{name} {step}") for name in "ab"]) for step in range(2)]
        decode = tool_tokenizer().decode

        class Teacher(ScriptedTeacher):
            def score(self, rows, topk):
                found = super().score(rows)
                ids = torch.zeros(*found.per_token_logps.shape, topk, dtype=torch.long)
                return TeacherScores(found.per_token_logps, found.mask, ids)

        def logps(row):
            missing = float("nan") if "a 1" in decode(row.prompt_ids) else -1.0
            return [missing, *[-1.0] * (len(row.completion_ids) - 1)]

        trainer = agent_trainer(
            tmp_path, judge=by_step(*verdicts), teacher_model=Teacher(logps), config={"hint_selection": "sequence"}
        )
        micro = micro_batches_of(trainer)
        trainer.train()
        assert micro[0]["hint_choice"].tolist() == [[0, 1]] * 4
        assert micro[0]["teacher_per_token_logps"][0][micro[0]["turn_index"][0] >= 0].isfinite().all()


class TestRewards:
    def test_a_steps_reward_is_the_outcome_and_its_mean_vote(self, tmp_path):
        judge = by_step(says(1, None, Vote(1), Vote(-1)), says(-1), says(None))
        trainer = agent_trainer(
            tmp_path, CombineTrainer, THREE_TURNS, judge=judge, config={"opd_weight": 0.0, "rl_weight": 2.0},
            reward_funcs=[lambda completions, **kwargs: [0.25] * len(completions)],
        )  # fmt: skip
        batches, micro = batches_of(trainer), micro_batches_of(trainer)
        trainer.train()
        expected = [1 / 3 + 0.25, -1 + 0.25, 0.25]
        assert batches[0]["step_advantages"][0].tolist() == pytest.approx(expected)
        for own, value in zip(spans(micro[0]), expected, strict=True):
            assert micro[0]["advantages"][0][own].tolist() == pytest.approx([2 * value] * int(own.sum()))
        assert (micro[0]["advantages"][0][micro[0]["turn_index"][0] < 0] == 0).all()

    def test_majority_if_asked_for(self, tmp_path):
        judge = by_step(says(1, None, Vote(1), Vote(-1)), says(-1))
        trainer = agent_trainer(
            tmp_path, CombineTrainer, judge=judge, config={"opd_weight": 0.0, "judge_reward": "majority"}
        )
        batches = batches_of(trainer)
        trainer.train()
        assert batches[0]["step_advantages"].tolist() == [[1.0, -1.0]] * 4

    def test_a_step_is_compared_with_the_same_step_of_its_group(self, tmp_path):
        """Rows of one group with 3, 2, 1 and 1 turns: standardised column by column; whoever is alone gets 0."""
        scores = {(0, "2"): 1, (0, "4"): -1, (0, "6"): 1, (0, "9"): 0}

        async def judge(turn):
            first = turn.completion[0] if turn.step == 0 else turn.prompt[1]
            x = first["tool_calls"][0]["function"]["arguments"]["x"] if first.get("tool_calls") else turn.reply
            return says({0: scores[0, str(x)], 1: 1 if x == 2 else 0}.get(turn.step, -1))

        texts = [[call(2), call(4), "6<|im_end|>", "9<|im_end|>"], [call(8), "ok<|im_end|>"], ["done<|im_end|>"]]
        config = {"opd_weight": 0.0, "reward_baseline": "group", "num_generations": 4}
        trainer = agent_trainer(tmp_path, CombineTrainer, texts, judge=judge, config=config)
        batches = batches_of(trainer)
        trainer.train()
        firsts = torch.tensor([1.0, -1.0, 1.0, 0.0])
        seconds = torch.tensor([1.0, 0.0])
        expected = torch.zeros(4, 3)
        expected[:, 0] = (firsts - firsts.mean()) / (firsts.std() + 1e-4)
        expected[:2, 1] = (seconds - seconds.mean()) / (seconds.std() + 1e-4)
        torch.testing.assert_close(batches[0]["step_advantages"], expected)
        trained = (batches[0]["tool_mask"] * batches[0]["completion_mask"]).bool()
        assert not trained[0][spans(batches[0])[2]].any()

    def test_the_outcome_of_a_trajectory_that_is_over_is_not_compared_with_later_steps(self, tmp_path):
        texts = [[call(2), call(4), "6<|im_end|>", "9<|im_end|>"], "ok<|im_end|>"]
        config = {"opd_weight": 0.0, "reward_baseline": "group", "num_generations": 4, "scale_rewards": "none"}
        trainer = agent_trainer(
            tmp_path, CombineTrainer, texts, judge=by_step(says(None), says(None)), config=config,
            reward_funcs=[lambda completions, **kwargs: [1.0, 2.0, 3.0, 10.0]],
        )  # fmt: skip
        batches = batches_of(trainer)
        trainer.train()
        expected = [[-3.0, -0.5], [-2.0, 0.5], [-1.0, 0.0], [6.0, 0.0]]
        assert batches[0]["step_advantages"].tolist() == expected

    @pytest.mark.parametrize("scale", ["group", "batch", "none"])
    def test_with_one_turn_it_is_trls_own_advantage(self, tmp_path, scale):
        async def judge(turn):
            return says((len(turn.prompt_text) + len(turn.reply)) % 3 - 1)

        config = {"opd_weight": 0.0, "reward_baseline": "group", "scale_rewards": scale, "judge_reward": "majority"}
        trainer = agent_trainer(
            tmp_path, CombineTrainer, judge=judge, config={**config, "per_device_train_batch_size": 8},
            rollout_func=lambda prompts, trainer: varied(prompts, trainer), rows=8,
            reward_funcs=[lambda completions, **kwargs: [0.5 * (i % 3) for i in range(len(completions))]],
        )  # fmt: skip
        extend, stock = trainer.extend_batch, []
        trainer.extend_batch = lambda inputs, batch: stock.append(batch["advantages"].clone()) or extend(inputs, batch)
        batches = batches_of(trainer)
        trainer.train()
        assert stock[0].abs().max() > 0.1
        torch.testing.assert_close(batches[0]["step_advantages"].squeeze(1), stock[0])

    def test_an_environment_gives_the_outcome(self, tmp_path):
        class Rewarding(Doubler):
            def get_reward(self):
                return 0.5

        trainer = agent_trainer(
            tmp_path, CombineTrainer, judge=by_step(says(1), says(-1)), environment_factory=Rewarding,
            config={"opd_weight": 0.0},
        )  # fmt: skip
        batches = batches_of(trainer)
        trainer.train()
        assert batches[0]["step_advantages"].tolist() == [[1.5, -0.5]] * 4


def varied(prompts, trainer):
    """`rollout_by_prompt` with completions of different lengths for the rows of a prompt."""
    found = rollout_by_prompt(prompts, trainer)
    for i, ids in enumerate(found["completion_ids"]):
        found["completion_ids"][i] = [70 + i] * (i % 3) + ids
        found["logprobs"][i] = [-1.0] * len(found["completion_ids"][i])
    return found


class TestNextStates:
    def test_the_environment_says_what_followed_the_last_turn(self, tmp_path):
        class Env(Doubler):
            verdict = "solved"

            @property
            def next_state(self):
                return NextState("All tests passed.", "tool", satisfied=True)

        seen = []

        async def judge(turn):
            seen.append(turn.next_state.text)
            return says(1)

        trainer = agent_trainer(tmp_path, judge=judge, environment_factory=Env, next_state=None)
        trainer.train()
        assert sorted(seen) == ["4"] * 4 + ["All tests passed."] * 4
        assert logged(trainer, "environment/verdict/solved") == [1.0]

    def test_a_verdict_or_step_that_a_batch_lacks_counts_there_as_none(self, tmp_path):
        verdicts = iter(["solved"] * 4 + ["failed"] * 4 + ["solved"] * 4)

        class Env(Doubler):
            def reset(self, **row):
                self.verdict = next(verdicts)

        said = "4<|im_end|>"
        trainer = agent_trainer(
            tmp_path, texts=(CALL, said, said, CALL, said), environment_factory=Env, rows=12,
            config={"max_steps": 3, "logging_steps": 3},
        )  # fmt: skip
        trainer.train()
        assert logged(trainer, "environment/verdict/solved") == [pytest.approx(2 / 3)]
        assert logged(trainer, "environment/verdict/failed") == [pytest.approx(1 / 3)]
        assert logged(trainer, "steps/0/turns") == [1.0]
        assert logged(trainer, "steps/1/turns") == [pytest.approx(2 / 3)]

    def test_an_environment_that_fails_to_say_costs_its_own_turn(self, tmp_path):
        class Env(Doubler):
            @property
            def next_state(self):
                raise RuntimeError("no state")

        trainer = agent_trainer(tmp_path, environment_factory=Env)
        trainer.train()
        assert logged(trainer, "feedback/failed/next_state_failed") == [0.5]
        assert logged(trainer, "steps/0/hint_accepted") == [1.0]

    def test_a_call_that_nobody_could_read_is_what_followed_it(self, tmp_path):
        seen = []

        async def judge(turn):
            seen.append(turn.next_state)
            return says(1)

        agent_trainer(tmp_path, texts=[CALL, CALL[:-20] + "<|im_end|>"], judge=judge).train()
        assert [state.text for state in seen].count(UNREAD_CALL) == 4
        assert all(state.satisfied is False for state in seen if state.text == UNREAD_CALL)

    def test_what_a_tool_knows_reaches_the_judge(self, tmp_path):
        def check(x: int) -> str:
            """Check a number.

            Args:
                x: The number.
            """
            return ToolResult("wrong", satisfied=False, info={"wish": "Say 3."})

        seen = []

        async def judge(turn):
            seen.append(turn.next_state)
            return says(1)

        agent_trainer(tmp_path, texts=[call(2, "check"), "ok<|im_end|>"], judge=judge, tools=[check]).train()
        assert NextState("wrong", "tool", False, {"wish": "Say 3."}) in seen


class TestRollouts:
    IDS = [65, 256, 70, 71, 66, 67, 256]
    MASK = [1, 1, 0, 0, 1, 1, 1]

    def rollout(self, **fields):
        def rollout(prompts, trainer):
            n = len(prompts)
            found = {
                "prompt_ids": trainer.tokenize_prompts(prompts), "completion_ids": [self.IDS] * n,
                "logprobs": [[-1.0] * len(self.IDS)] * n, "env_mask": [self.MASK] * n,
            }  # fmt: skip
            return found | {name: value(n) if callable(value) else value for name, value in fields.items()}

        return rollout

    def judged(self, tmp_path, **fields):
        seen = []

        async def judge(turn):
            seen.append(turn)
            return says(-1, f"hint {turn.step}")

        trainer = agent_trainer(tmp_path, judge=judge, rollout_func=self.rollout(**fields))
        batches = batches_of(trainer)
        trainer.train()
        return trainer, batches[0], sorted(seen, key=lambda turn: turn.step)

    def test_messages_that_a_rollout_hands_over(self, tmp_path):
        messages = [
            {"role": "assistant", "content": "A"}, {"role": "user", "content": "go on"},
            {"role": "assistant", "content": "BC"}, {"role": "user", "content": "bye"},
        ]  # fmt: skip
        trainer, batch, seen = self.judged(tmp_path, trajectory=lambda n: [messages] * n)
        assert [turn.next_state.text for turn in seen] == ["go on"] * 4 + ["bye"] * 4
        assert seen[4].next_state.role == "user"
        assert batch["turn_index"][0].tolist() == [0, 0, -1, -1, 1, 1, 1]
        assert logged(trainer, "hint/accepted") == [1.0]

    def test_without_messages_the_ids_are_decoded_turn_by_turn(self, tmp_path):
        _, _, seen = self.judged(tmp_path)
        decode = tool_tokenizer().decode
        assert [turn.reply for turn in seen] == [decode([65])] * 4 + [decode([66, 67])] * 4
        assert seen[0].next_state == NextState(decode([70, 71]), "tool")

    def test_messages_that_do_not_fit_the_ids_are_counted_and_not_taught(self, tmp_path):
        three = [{"role": role, "content": "x"} for role in ("assistant", "user") * 3]
        trainer, batch, _ = self.judged(tmp_path, trajectory=lambda n: [three] * n)
        assert logged(trainer, "turns/unmatched") == [1.0]
        assert logged(trainer, "hint/dropped/unmatched_turn") == [1.0]
        assert not batch["teacher_mask"].any()
        assert logged(trainer, "train_rows/share") == [0.0]

    @pytest.mark.parametrize("fields", [
        {"trajectory": [[{"role": "user"}]]}, {"trajectory": "text"}, {"trajectory": lambda n: [["x"]] * n},
        {"env_mask": lambda n: [[1]] * n},
    ])  # fmt: skip
    def test_bad_fields_are_named(self, tmp_path, fields):
        with pytest.raises(ValueError, match="of the rollout function"):
            self.judged(tmp_path, **fields)


class TestParallelCalls:
    def test_parallel_calls_are_one_turn(self, tmp_path):
        both = CALL.removesuffix("<|im_end|>") + "\n" + call(5)
        seen = []

        async def judge(turn):
            seen.append(turn)
            return says(1)

        agent_trainer(tmp_path, texts=[both, "14<|im_end|>"], judge=judge, tools=[double]).train()
        assert len(seen) == 8
        states = {turn.next_state.text for turn in seen if turn.step == 0}
        assert states == {"[double]\n4\n\n[double]\n10"}


def test_privileged_context_reaches_every_turn(tmp_path):
    rows = [{"prompt": [{"role": "user", "content": "2?"}], "privileged_context": "It is four."}] * 4
    teacher = flat_teacher()
    trainer = agent_trainer(
        tmp_path, OPDTrainer, THREE_TURNS, judge=None, next_state=None, teacher_model=teacher,
        train_dataset=Dataset.from_list(rows), config={"hint_placement": "turn"},
    )  # fmt: skip
    trainer.train()
    contexts = [trainer.processing_class.decode(row.prompt_ids) for row in teacher.rows]
    assert len(contexts) == 12
    assert all(context.count("It is four.") == 1 for context in contexts)
    assert logged(trainer, "hint/accepted") == [1.0]
