"""Every objective on a real trainer with a tiny model: it trains, and its numbers are those of plain log-probs."""

import itertools
import math

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig
from tiny import tiny_llama, tiny_tokenizer
from trainer_harness import (
    HINTS,
    LORA,
    ScriptedTeacher,
    alternating_judge,
    batches_of,
    judge_that,
    judge_with_hints,
    logged,
    make_trainer,
    moved,
    prompts,
    record_gradients,
    rollout_by_prompt,
    snapshot,
)

from trl_openclaw import CombineTrainer, OPDTrainer, Verdict, Vote

OBJECTIVES = [
    {"opd_loss": "topk_surrogate"},
    {"opd_loss": "topk_surrogate", "topk_support": "teacher", "logp_gap_clip": None},
    {"opd_loss": "topk_surrogate", "topk_support": "overlap", "topk": 40},
    {"opd_loss": "topk_reverse_kl"},
    {"opd_loss": "topk_reverse_kl", "topk_support": "teacher", "topk": 9},
    {"opd_loss": "topk_reverse_kl", "topk_support": "overlap", "topk": 40},
    {"opd_loss": "full_divergence"},
    {"opd_loss": "full_divergence", "divergence": "forward_kl"},
    {"opd_loss": "full_divergence", "divergence": "jsd", "jsd_beta": 0.3},
]
ONE_OF_EACH = [OBJECTIVES[0], OBJECTIVES[3], OBJECTIVES[6]]


def other_model(folder) -> str:
    tiny_llama(seed=1).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


class TestEveryBranchTrains:
    # Each objective with each rule once; trainers, tunings and loss types take turns, so that most pairs are met.
    OFF_POLICY = [
        {},
        {"num_iterations": 2, "max_steps": 3},
        {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "max_steps": 2, "per_device_train_batch_size": 2},
        {"gradient_checkpointing": True},
    ]
    LOSS_TYPES = ["dapo", "grpo", "bnpo", "dr_grpo", "cispo", "luspo", "sapo"]
    RULES = ["sequence", "token", "longest", "shortest", "random"]
    CASES = [
        (trainer, tuning, {**objective, **off_policy, "hint_selection": rule, "loss_type": loss_type, "beta": beta})
        for objective, rule, trainer, tuning, off_policy, loss_type, beta in zip(
            OBJECTIVES * 3,
            itertools.cycle(RULES),
            itertools.cycle([OPDTrainer, CombineTrainer]),
            itertools.cycle(["full", "full", "lora"]),
            itertools.cycle(OFF_POLICY),
            itertools.cycle(LOSS_TYPES),
            itertools.cycle([0.0, 0.0, 0.0, 0.0, 0.1]),
            strict=False,
        )
    ]  # fmt: skip

    @pytest.mark.parametrize(("trainer_class", "tuning", "config"), CASES, ids=str)
    def test_moves_every_parameter(self, tmp_path, trainer_class, tuning, config):
        kwargs = {}
        if tuning == "lora":
            kwargs["peft_config"] = LoraConfig(**LORA)
            config = {**config, "max_steps": max(3, config.get("max_steps", 0))}
        elif config["beta"]:
            kwargs["model"] = other_model(tmp_path / "model")
        trainer = make_trainer(tmp_path, trainer_class, judge=judge_with_hints(*HINTS), config=config, **kwargs)
        before = snapshot(trainer.model)
        trainer.train()
        changed = moved(trainer.model, before)
        assert all(hit for name, hit in changed.items() if tuning == "full" or "lora_" in name)
        assert tuning == "full" or not any(hit for name, hit in changed.items() if "lora_" not in name)
        assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())
        assert all(torch.tensor(logged(trainer, "opd/loss")).isfinite())

    @pytest.mark.parametrize(
        ("loss", "reference", "tuning"),
        [
            ("sampled_token", "initial", "lora"),
            ("sampled_token", "unhinted_teacher", "full"),
            ("sampled_token", "path", "full"),
            ("topk_surrogate", None, "full"),
            ("topk_surrogate", "unhinted_teacher", "lora"),
            ("topk_surrogate", "path", "lora"),
        ],
    )
    def test_goes_beyond_the_teacher(self, tmp_path, loss, reference, tuning):
        if reference == "path":
            reference = other_model(tmp_path / "reference")
        config = {"opd_loss": loss, "reward_scale": 1.5, "opd_reference": reference, "max_steps": 2}
        peft = {"peft_config": LoraConfig(**LORA)} if tuning == "lora" else {}
        trainer = make_trainer(tmp_path, judge=judge_with_hints(*HINTS), config=config, **peft)
        before = snapshot(trainer.model)
        trainer.train()
        assert all(hit for name, hit in moved(trainer.model, before).items() if tuning == "full" or "lora_" in name)


class Dense:
    """The objectives by their definitions, from plain logits in float64 and nothing of the package.

    Args:
        trainer: For its settings and its tokenizer.
        initial: The teacher.
        hints: The candidates for a prompt's text.
        reference: Of G-OPD.
    """

    def __init__(self, trainer, initial, hints, reference=None):
        self.args, self.tokenizer, self.hints = trainer.args, trainer.processing_class, hints
        self.teacher = initial.double()
        self.reference = reference and reference.double()

    def logps(self, model, prompt, completion):
        """Log-probs `(T, V)` at the completion's positions."""
        ids = torch.tensor([[*prompt, *completion]])
        start = len(prompt) - 1
        logits = model(input_ids=ids, use_cache=False).logits[0, start : start + len(completion)]
        return (logits / self.args.temperature).log_softmax(-1)

    def hinted(self, prompt, hint):
        """The prompt's ids with the hint at the end of the user's message."""
        text = self.tokenizer.decode(prompt)
        head, tail = text.split("<|im_end|>", 1)
        return self.tokenizer(f"{head}\n\nHint: {hint}<|im_end|>{tail}")["input_ids"]

    def rows(self, batch):
        for i in range(len(batch["prompt_ids"])):
            prompt = batch["prompt_ids"][i][batch["prompt_mask"][i].bool()].tolist()
            completion = batch["completion_ids"][i][batch["completion_mask"][i].bool()].tolist()
            yield prompt, completion

    def chosen(self, candidates, student):
        """The candidate's log-probs with the largest overlap of best tokens, per row or per token."""
        k = self.args.topk
        best = student.topk(k).indices
        others = [candidate.topk(k).indices for candidate in candidates]
        overlaps = torch.tensor(
            [[len({*a.tolist()} & {*b.tolist()}) / k for a, b in zip(best, other, strict=True)] for other in others]
        )
        if self.args.hint_selection == "sequence":
            return candidates[int(overlaps.double().mean(1).argmax())]
        return torch.stack([candidates[int(m)][t] for t, m in enumerate(overlaps.argmax(0))])

    def position_losses(self, current, old, teacher, beyond):
        """Losses `(T,)` from log-probs `(T, V)`."""
        args = self.args
        if args.opd_loss == "full_divergence":
            beta = {"reverse_kl": 1.0, "forward_kl": 0.0, "jsd": args.jsd_beta}[args.divergence]
            mixture = (beta * teacher.exp() + (1 - beta) * current.exp()).log()
            reverse = (current.exp() * (current - (teacher if beta == 1 else mixture))).sum(-1)
            forward = (teacher.exp() * (teacher - (current if beta == 0 else mixture))).sum(-1)
            return {1.0: reverse, 0.0: forward}.get(beta, beta * forward + (1 - beta) * reverse)
        losses = []
        for now, before, target, further in zip(current, old, teacher, beyond, strict=True):
            student, taught = before.topk(args.topk).indices.tolist(), target.topk(args.topk).indices.tolist()
            ids = {"student": student, "teacher": taught, "overlap": [v for v in student if v in taught]}
            ids = ids[args.topk_support]
            if args.opd_loss == "topk_reverse_kl":
                loss = (now[ids].exp() * (now[ids] - target[ids])).sum()
                rest, target_rest = 1 - now[ids].exp().sum(), 1 - target[ids].exp().sum()
                losses.append(loss + rest * (rest.log() - target_rest.log()))
                continue
            gap = target[ids] + further[ids] - before[ids]
            gap = gap if args.logp_gap_clip is None else gap.clamp(-args.logp_gap_clip, args.logp_gap_clip)
            advantages = torch.softmax(before[ids], -1) * gap
            ratio = (now[ids] - before[ids]).exp()
            clipped = ratio.clamp(1 - args.epsilon, 1 + args.epsilon_high)
            losses.append(-torch.minimum(advantages * ratio, advantages * clipped).sum())
        return torch.stack(losses)

    def loss(self, model, initial, batch):
        """The batch's loss, and the mean reverse KL to the chosen teacher: over all tokens of hinted rows."""
        losses, divergences = [], []
        for prompt, completion in self.rows(batch):
            hints = self.hints(self.tokenizer.decode(prompt))
            if not hints:
                continue
            current = self.logps(model, prompt, completion)
            with torch.no_grad():
                old = self.logps(initial, prompt, completion)
                candidates = [self.logps(self.teacher, self.hinted(prompt, hint), completion) for hint in hints]
                teacher = self.chosen(candidates, old)
                beyond = torch.zeros_like(teacher)
                if self.reference is not None:
                    beyond = (self.args.reward_scale - 1) * (teacher - self.logps(self.reference, prompt, completion))
            losses.append(self.position_losses(current, old, teacher, beyond))
            divergences.append((current.exp() * (current - teacher)).sum(-1).detach())
        return torch.cat(losses).mean(), torch.cat(divergences).mean()


def hints_by_prompt(text: str) -> tuple[str, ...]:
    """Three candidates for every other length of prompt, else none."""
    return HINTS if text.count("hi") % 2 else ()


async def judge_by_prompt(turn):
    hints = hints_by_prompt(turn.prompt[0]["content"]) or (None,)
    return Verdict.from_votes([Vote(score=-1, hint=hint) for hint in hints])


async def judge_about_prompt(turn):
    """A hint of its own for every prompt."""
    return Verdict.from_votes([Vote(score=-1, hint=f"About {turn.prompt[0]['content']}.")])


class TestAgainstPlainLogProbs:
    @pytest.mark.parametrize("rule", ["sequence", "token"])
    @pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
    def test_loss_and_gradients_on_and_off_policy(self, tmp_path, objective, rule):
        """Two steps on one batch: the second with other weights than those that sampled it."""
        config = {
            **objective, "hint_selection": rule, "temperature": 0.8, "num_iterations": 2, "max_steps": 2,
            "learning_rate": 3e-3, "max_grad_norm": 0.0, "per_device_train_batch_size": 8,
        }  # fmt: skip
        trainer = make_trainer(tmp_path, judge=judge_by_prompt, config=config)
        batches, steps, weights = batches_of(trainer), record_gradients(trainer), []
        step = trainer.training_step
        trainer.training_step = lambda *a, **k: weights.append(snapshot(trainer.model)) or step(*a, **k)
        trainer.train()
        (batch,) = batches
        assert 0 < batch["hint_mask"].sum() < 8
        dense = Dense(trainer, tiny_llama(), hints_by_prompt)
        for taken, found in zip(steps, weights, strict=True):
            model = tiny_llama().double()
            model.load_state_dict(found, strict=False)
            loss, _ = dense.loss(model, dense.teacher, batch)
            loss.backward()
            assert taken["loss"] == pytest.approx(loss.item(), rel=1e-4, abs=1e-5)
            for name, parameter in model.named_parameters():
                torch.testing.assert_close(taken["gradients"][name].double(), parameter.grad, atol=1e-5, rtol=1e-3)

    @pytest.mark.parametrize("objective", [o for o in OBJECTIVES if o.get("logp_gap_clip", 1)], ids=str)
    def test_a_step_brings_the_student_nearer_to_its_teacher(self, tmp_path, objective):
        config = {**objective, "learning_rate": 1e-4, "per_device_train_batch_size": 8}
        trainer = make_trainer(tmp_path, judge=judge_by_prompt, config=config)
        batches = batches_of(trainer)
        trainer.train()
        dense = Dense(trainer, tiny_llama(), hints_by_prompt)
        with torch.no_grad():
            _, before = dense.loss(dense.teacher, dense.teacher, batches[0])
            _, after = dense.loss(trainer.model.double(), dense.teacher, batches[0])
        assert after < before

    def test_the_surrogate_goes_beyond_the_teacher(self, tmp_path):
        config = {
            "opd_loss": "topk_surrogate",
            "reward_scale": 1.5,
            "opd_reference": other_model(tmp_path / "reference"),
        }
        trainer = make_trainer(tmp_path, judge=judge_by_prompt, config={**config, "per_device_train_batch_size": 8})
        batches, steps = batches_of(trainer), record_gradients(trainer)
        trainer.train()
        dense = Dense(trainer, tiny_llama(), hints_by_prompt, reference=tiny_llama(seed=1))
        with torch.no_grad():
            loss, _ = dense.loss(dense.teacher, dense.teacher, batches[0])
        assert steps[0]["loss"] == pytest.approx(loss.item(), rel=1e-4, abs=1e-5)

    @pytest.mark.parametrize("reference", ["initial", "unhinted_teacher", "path"])
    def test_the_sampled_token_goes_beyond_the_teacher(self, tmp_path, reference):
        path = other_model(tmp_path / "reference")
        config = {"reward_scale": 1.5, "opd_reference": path if reference == "path" else reference}
        trainer = make_trainer(tmp_path, config={**config, "logp_gap_clip": None})
        seen, token_advantages = [], trainer.token_advantages
        trainer.token_advantages = lambda *args: seen.append((args[0], token_advantages(*args))) or seen[-1][1]
        trainer.train()
        inputs, advantages = seen[0]
        dense = Dense(trainer, tiny_llama(), lambda text: ("Be brief.",))
        other = tiny_llama(seed=1 if reference == "path" else 0).double()
        expected = []
        with torch.no_grad():
            for prompt, completion in dense.rows(inputs):
                at = (range(len(completion)), completion)
                teacher = dense.logps(dense.teacher, dense.hinted(prompt, "Be brief."), completion)[at]
                old, beyond = (dense.logps(m, prompt, completion)[at] for m in (dense.teacher, other))
                expected.append(teacher - old + 0.5 * (teacher - beyond))
        torch.testing.assert_close(
            advantages[inputs["completion_mask"].bool()].double(), torch.cat(expected), atol=1e-4, rtol=1e-4
        )


class TestSameNumbersWhateverTheShape:
    def gradients(self, tmp_path, **config):
        trainer = make_trainer(
            tmp_path, judge=judge_by_prompt, rollout_func=rollout_by_prompt,
            config={"per_device_train_batch_size": 8, "max_grad_norm": 0.0, **config},
        )  # fmt: skip
        steps = record_gradients(trainer)
        trainer.train()
        return sum(step["loss"] for step in steps), steps[-1]["gradients"]

    def assert_same(self, first, second):
        assert first[0] == pytest.approx(second[0], rel=1e-4, abs=1e-6)
        for name, gradient in first[1].items():
            torch.testing.assert_close(gradient, second[1][name], atol=1e-6, rtol=1e-3)

    @pytest.mark.parametrize("objective", ONE_OF_EACH, ids=str)
    def test_batch_of_the_teacher_and_micro_batches(self, tmp_path, objective):
        whole = self.gradients(tmp_path, **objective)
        assert whole[0] != 0
        self.assert_same(whole, self.gradients(tmp_path, **objective, teacher_token_budget=100))
        self.assert_same(whole, self.gradients(tmp_path, **objective, teacher_token_budget=300))
        parts = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
        self.assert_same(whole, self.gradients(tmp_path, **objective, **parts))

    def test_a_support_of_the_whole_vocabulary_is_the_full_divergence(self, tmp_path):
        full = self.gradients(tmp_path, opd_loss="full_divergence", hint_selection="longest")
        topk = self.gradients(tmp_path, opd_loss="topk_reverse_kl", topk=259, hint_selection="longest")
        self.assert_same(full, topk)

    @pytest.mark.parametrize("objective", [*ONE_OF_EACH, {"control": "random_hint"}], ids=str)
    def test_an_evaluation_in_between_changes_nothing(self, tmp_path, objective):
        """It asks the teacher, too, while a batch that was sampled before still waits for its second use."""
        weights = []
        for evaluates in ("no", "steps"):
            trainer = make_trainer(
                tmp_path / evaluates, judge=judge_about_prompt, rollout_func=rollout_by_prompt, eval_dataset=prompts(4),
                config={
                    **objective, "num_iterations": 2, "max_steps": 4, "eval_strategy": evaluates, "eval_steps": 1,
                    "optim": "sgd", "learning_rate": 0.1,
                },
            )  # fmt: skip
            trainer.train()
            assert len(logged(trainer, "eval_loss")) == (4 if evaluates == "steps" else 0)
            weights.append(snapshot(trainer.model))
        for name, parameter in weights[0].items():
            # Not to the bit: an evaluation draws a seed, and so TRL puts a batch's rows into another order.
            torch.testing.assert_close(parameter, weights[1][name], atol=1e-5, rtol=1e-5)


class TestNoSignalNoGradient:
    @pytest.mark.parametrize(
        ("objective", "loss_type"), list(zip(OBJECTIVES, ["dapo", "grpo", "bnpo"] * 3, strict=True)), ids=str
    )
    def test_a_batch_without_hints(self, tmp_path, objective, loss_type):
        trainer = make_trainer(tmp_path, judge=judge_that(hint=None), config={**objective, "loss_type": loss_type})
        steps, before = record_gradients(trainer), snapshot(trainer.model)
        trainer.train()
        assert steps[0]["loss"] == 0.0
        assert all((gradient == 0).all() for gradient in steps[0]["gradients"].values())
        assert not any(moved(trainer.model, before).values())
        assert not logged(trainer, "opd/loss")
        assert not logged(trainer, "opd/overlap")

    @pytest.mark.parametrize("objective", ONE_OF_EACH, ids=str)
    def test_rows_without_a_hint_keep_their_reward_alone(self, tmp_path, objective):
        judge = alternating_judge(Vote(score=-1, hint="Be brief."), Vote(score=-1))
        trainer = make_trainer(tmp_path, CombineTrainer, judge=judge, config=objective)
        seen, losses = [], trainer.token_losses
        trainer.token_losses = lambda inputs, *args: seen.append((inputs, losses(inputs, *args))) or seen[-1][1]
        trainer.train()
        inputs, tokens = seen[0]
        assert inputs["tool_mask"].bool().equal(inputs["completion_mask"].bool())
        assert (tokens[~inputs["hint_mask"]] == 0).all()
        assert (tokens[inputs["hint_mask"]] != 0).any()
        assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())

    @pytest.mark.parametrize("objective", ONE_OF_EACH, ids=str)
    def test_weights_of_combine(self, tmp_path, objective):
        """Twice the weight is twice the gradient, and with the weight 0 of the reward it is distillation alone."""
        found = []
        for trainer_class, weights in (
            (OPDTrainer, {}),
            (CombineTrainer, {"rl_weight": 0.0, "opd_weight": 2.0}),
        ):
            trainer = make_trainer(tmp_path, trainer_class, config={**objective, **weights, "max_grad_norm": 0.0})
            steps = record_gradients(trainer)
            trainer.train()
            found.append(steps[0])
        assert found[1]["loss"] == pytest.approx(2 * found[0]["loss"], rel=1e-5)
        for name, gradient in found[0]["gradients"].items():
            torch.testing.assert_close(found[1]["gradients"][name], 2 * gradient, atol=1e-6, rtol=1e-4)


class TestPrecision:
    @pytest.mark.parametrize("config", [{}, {"cast_lm_head_to_fp32": True}], ids=str)
    @pytest.mark.parametrize("objective", [*ONE_OF_EACH, OBJECTIVES[-1]], ids=str)
    def test_autocast_is_near_to_full_precision(self, tmp_path, objective, config):
        losses = []
        for half in (False, True):
            trainer = make_trainer(
                tmp_path, config={**objective, **config, "bf16": half}, rollout_func=rollout_by_prompt
            )
            before = snapshot(trainer.model)
            trainer.train()
            assert all(moved(trainer.model, before).values())
            assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())
            losses += logged(trainer, "opd/loss")
        assert losses[1] == pytest.approx(losses[0], rel=0.1, abs=0.05)

    @pytest.mark.parametrize("num_iterations", [1, 2])
    @pytest.mark.parametrize("config", [{}, {"cast_lm_head_to_fp32": True}], ids=str)
    def test_the_first_ratio_is_one_in_half_precision(self, tmp_path, config, num_iterations):
        """The student of the loss's own forward, or of TRL's pass before it, must be the one that the loss sees."""
        config = {**config, "num_iterations": num_iterations}
        trainer = make_trainer(tmp_path, config={"opd_loss": "topk_surrogate", "bf16": True, "topk": 40, **config})
        seen, losses = [], trainer.objective.token_losses

        def spying(positions):
            now = positions.student.log_probs_at(positions.data["support_ids"])
            seen.append((now - positions.data["old_support_logps"]).abs().mean().item())
            return losses(positions)

        trainer.objective.token_losses = spying
        trainer.train()
        assert seen[0] < 1e-3


class TestRefused:
    @pytest.mark.parametrize(
        ("config", "message"),
        [
            (
                {"topk": 260, "opd_loss": "topk_surrogate"},
                "`topk=260` is more than the vocabulary's 259 tokens. Use a smaller `topk`",
            ),
            ({"topk": 0}, "`topk` must be a whole number at least 1"),
            ({"max_hints": 0}, "`max_hints` must be a whole number at least 1, got 0"),
            ({"logp_gap_clip": 0.0}, "`logp_gap_clip` must be a finite number greater than 0 or None"),
            ({"logp_gap_clip": -1}, "`logp_gap_clip` must be"),
            *[
                ({"reward_scale": scale}, "`reward_scale` must be a finite number greater than 0")
                for scale in (0.0, -1.0, float("nan"), float("inf"), "2")
            ],
            ({"opd_loss": "topk_reverse_kl", "reward_scale": 1.5}, "`reward_scale=1.5` needs `opd_loss='sampled"),
            ({"opd_loss": "full_divergence", "reward_scale": 0.5}, "would be no distribution"),
            ({"opd_reference": "initial"}, "only used with a `reward_scale` other than 1; set that, or remove"),
            ({"control": "negative_advantage", "reward_scale": 2.0}, "`reward_scale=2.0` needs an advantage"),
            ({"control": "negative_advantage", "logp_gap_clip": None}, "gives every token `-C`: set `logp_gap_clip`"),
            ({"control": "negative_advantage", "format_gap_clip": 0.1}, "`format_gap_clip=0.1` needs an advantage"),
            ({"format_gap_clip": 1.0}, "`format_gap_clip=1` must be tighter than `logp_gap_clip=1`"),
            ({"topk": 8}, "`topk=8` needs an `opd_loss` over k tokens, or a `hint_selection` by overlap"),
            ({"opd_reference": 5, "reward_scale": 2.0}, "`opd_reference` must be initial, unhinted_teacher, or"),
            ({"alarm_action": "stop"}, "`alarm_action` and `alarm_patience` need `alarms`, which is empty"),
            ({"teacher_ema_rate": 0.1}, "need `teacher='ema'`, but `teacher='frozen'`"),
            (
                {"control": "unhinted_teacher", "opd_reference": "unhinted_teacher", "reward_scale": 2.0},
                "so `reward_scale` would do nothing. Use `opd_reference='initial'`",
            ),
            ({"divergence": "jsd"}, "`divergence='jsd'` needs `opd_loss='full_divergence'`"),
            ({"opd_loss": "full_divergence", "jsd_beta": 0.3}, "`jsd_beta=0.3` needs `divergence='jsd'`"),
            ({"opd_loss": "full_divergence", "divergence": "jsd", "jsd_beta": 1}, "use `divergence='reverse_kl'`"),
            ({"topk_support": "teacher"}, "`topk_support='teacher'` needs an `opd_loss` over k tokens"),
            ({"opd_loss": "full_divergence", "logp_gap_clip": 0.5}, "`logp_gap_clip=0.5` needs `opd_loss='sampled"),
            ({"opd_loss": "topk"}, "`opd_loss` must be one of sampled_token, topk_surrogate"),
            ({"opd_loss": "topk_surrogate", "control": "negative_advantage"}, "`opd_loss='sampled_token'`"),
            ({"opd_loss": "topk_surrogate", "top_entropy_quantile": 0.5}, "acts on TRL's own loss"),
            ({"opd_loss": "full_divergence", "teacher": "live", "num_iterations": 2}, "use `teacher='frozen'`"),
            (
                {"opd_loss": "full_divergence", "teacher": "live", "steps_per_generation": 2},
                "has moved on by then",
            ),
        ],
        ids=str,
    )  # fmt: skip
    def test_settings(self, tmp_path, config, message):
        with pytest.raises(ValueError) as error:
            make_trainer(tmp_path, config=config)
        assert message in str(error.value)

    @pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
    def test_a_teacher_that_only_scores(self, tmp_path, objective):
        teacher = ScriptedTeacher(lambda row: [-1.0] * len(row.completion_ids))
        message = "needs a teacher whose hidden states are at hand, but `ScriptedTeacher` only scores. Use `opd_loss="
        with pytest.raises(ValueError, match=message):
            make_trainer(tmp_path, teacher_model=teacher, config=objective)

    @pytest.mark.parametrize("objective", ONE_OF_EACH, ids=str)
    def test_virtual_tokens(self, tmp_path, objective):
        peft = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
        with pytest.raises(ValueError, match="Use LoRA"):
            make_trainer(tmp_path, peft_config=peft, config=objective)

    @pytest.mark.parametrize("control", ["random_hint", "raw_next_state", "unhinted_teacher"])
    def test_controls_over_hints_where_there_are_none(self, tmp_path, control):
        teacher = ScriptedTeacher(lambda row: [-1.0] * len(row.completion_ids))
        with pytest.raises(ValueError, match=rf"`control='{control}'` replaces hints, but there are none"):
            make_trainer(tmp_path, judge=None, teacher_model=teacher, config={"control": control})

    def test_a_reference_that_is_the_teacher_itself(self, tmp_path):
        teacher = ScriptedTeacher(lambda row: [-1.0] * len(row.completion_ids))
        config = {"reward_scale": 1.5, "opd_reference": "unhinted_teacher"}
        with pytest.raises(ValueError, match=r"`opd_reference='unhinted_teacher'` is the teacher itself.*'initial'"):
            make_trainer(tmp_path, judge=None, teacher_model=teacher, config=config)

    def test_next_states_as_hints_without_next_states(self, tmp_path):
        data = prompts().add_column("privileged_context", ["4"] * 8)
        with pytest.raises(ValueError, match="`control='raw_next_state'` takes hints from next states: pass"):
            make_trainer(tmp_path, judge=None, next_state=None, data=data, config={"control": "raw_next_state"})

    def test_a_teacher_whose_head_is_smaller(self, tmp_path):
        kwargs = {"teacher_model": tiny_llama(1), "teacher_processing_class": tiny_tokenizer()}
        with pytest.raises(ValueError, match=r"all 320 tokens .* but the teacher's has 259"):
            make_trainer(
                tmp_path, model=tiny_llama(vocab_size=320), config={"opd_loss": "full_divergence"}, **kwargs
            )  # fmt: skip


def test_share_of_clipped_tokens_counts_what_g_opd_adds(tmp_path):
    config = {"reward_scale": 5.0, "opd_reference": "unhinted_teacher", "logp_gap_clip": 3.0}
    trainer = make_trainer(tmp_path, config=config)
    seen, advantages = [], trainer.token_advantages
    trainer.token_advantages = lambda *args: seen.append((args[0], advantages(*args))) or seen[-1][1]
    trainer.train()
    inputs, found = seen[0]
    taught = inputs["completion_mask"].bool() & inputs["hint_mask"].unsqueeze(1)
    share = (found[taught].abs() == 3.0).double().mean().item()
    assert 0 < share < 1
    assert logged(trainer, "opd/clipped") == [pytest.approx(share, abs=1e-6)]


def test_a_loss_that_is_no_number_is_logged_as_such(tmp_path):
    trainer = make_trainer(tmp_path, config={"self_test": False})
    loss = trainer._compute_loss
    trainer._compute_loss = lambda *args: loss(*args) * float("nan")
    trainer.train()
    assert math.isnan(trainer.state.log_history[0]["loss"])
