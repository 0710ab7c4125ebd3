"""What the teacher's pass puts into a batch: which hint, which tokens, and never a gradient."""

import random

import pytest
import torch
from peft import LoraConfig
from tiny import tiny_llama, tiny_tokenizer
from trainer_harness import (
    ScriptedTeacher,
    alternating_judge,
    batches_of,
    judge_with_hints,
    logged,
    make_trainer,
    micro_batches_of,
)

from trl_openclaw import Vote
from trl_openclaw.errors import TeacherError
from trl_openclaw.scoring import TeacherScores
from trl_openclaw.teachers import FrozenTeacher
from trl_openclaw.trainer.hint_rows import HintedTurn, shortlist

LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"]}
HINTS = ("One.", "Two.", "Three.")
BY_OVERLAP = {"hint_selection": "sequence", "topk": 4}


class Steered:
    """A teacher with an opinion of its own, whose log-prob of every token is -(m + 1) under candidate m.

    Args:
        agrees: Whether, under candidate m and at token t, its best tokens are the student's.
        model: The student.
        hints: The candidates.
    """

    def __init__(self, agrees, model, hints=HINTS):
        self.agrees, self.model, self.hints, self.rows = agrees, model, hints, []
        self.tokenizer = tiny_tokenizer()

    def best(self, row, hint, k):
        """The student's best tokens `(T, k)` after the prompt without the hint."""
        text = self.tokenizer.decode(row.prompt_ids).replace(f"\n\nHint: {hint}", "")
        prompt = self.tokenizer(text)["input_ids"]
        with torch.no_grad():
            logits = self.model(input_ids=torch.tensor([[*prompt, *row.completion_ids]])).logits[0]
        return logits[len(prompt) - 1 : -1].topk(k).indices

    def score(self, rows, *, topk=0):
        self.rows += rows
        width = max((len(row.completion_ids) for row in rows), default=0)
        logps = torch.full((len(rows), width), float("nan"))
        ids = torch.zeros((len(rows), width, topk), dtype=torch.long)
        for i, row in enumerate(rows):
            text = self.tokenizer.decode(row.prompt_ids)
            m = next(m for m, hint in enumerate(self.hints) if hint in text)
            best = self.best(row, self.hints[m], 2 * topk)
            for t in range(len(row.completion_ids)):
                logps[i, t] = -(m + 1.0)
                ids[i, t] = best[t, :topk] if self.agrees(m, t) else best[t, topk:]
        return TeacherScores(logps, logps.isfinite(), ids if topk else None)


def steered_trainer(tmp_path, agrees, config, hints=HINTS, **kwargs):
    model = tiny_llama()
    teacher = Steered(agrees, model, hints)
    kwargs.setdefault("judge", judge_with_hints(*hints))
    trainer = make_trainer(tmp_path, model=model, teacher_model=teacher, config=config, **kwargs)
    return trainer, teacher


class TestNoGradientIntoTargets:
    @pytest.mark.parametrize("peft", [False, True])
    @pytest.mark.parametrize("teacher", ["frozen", "live"])
    @pytest.mark.parametrize(
        "objective",
        [
            {"hint_selection": "token"},
            {"reward_scale": 1.5},
            {"opd_loss": "topk_surrogate"},
            {"opd_loss": "topk_surrogate", "reward_scale": 1.5, "opd_reference": "unhinted_teacher"},
            {"opd_loss": "topk_reverse_kl"},
            {"opd_loss": "full_divergence"},
        ],
        ids=str,
    )  # fmt: skip
    @pytest.mark.filterwarnings("ignore:.*drift")
    def test_whatever_is_in_the_batch(self, tmp_path, objective, teacher, peft):
        folder = tmp_path / "model"
        tiny_llama().save_pretrained(folder)
        kwargs = {"peft_config": LoraConfig(**LORA)} if peft else {}
        config = {**objective, "teacher": teacher}
        trainer = make_trainer(tmp_path, model=str(folder), judge=judge_with_hints(*HINTS), config=config, **kwargs)
        whole, batches = batches_of(trainer), micro_batches_of(trainer)
        trainer.train()
        scored = {name for name, value in whole[0].items() if isinstance(value, torch.Tensor) and value.requires_grad}
        assert not scored
        tensors = {name: value for name, value in batches[0].items() if isinstance(value, torch.Tensor)}
        assert {"teacher_per_token_logps", "hint_mask"} < tensors.keys()
        assert not [name for name in tensors if name.startswith(("candidate_", "reference_"))]
        assert not [name for name, value in tensors.items() if value.requires_grad]


class TestHintSelection:
    def test_the_candidate_that_agrees_best_with_the_student(self, tmp_path):
        trainer, teacher = steered_trainer(
            tmp_path, lambda m, t: m == 1 or t == 0, {**BY_OVERLAP, "log_completions": True}
        )
        batches = micro_batches_of(trainer)
        trainer.train()
        batch = batches[0]
        mask = batch["completion_mask"].bool()
        assert (batch["teacher_per_token_logps"][mask] == -2.0).all()
        assert batch["teacher_per_token_logps"][~mask].isnan().all()
        assert len(teacher.rows) == 12
        assert logged(trainer, "opd/overlap") == [1.0]
        assert logged(trainer, "hint/candidates") == [3.0]
        import pandas as pd

        table = pd.read_parquet(next((tmp_path / "completions").glob("*.parquet")))
        assert table["hint"].tolist() == ["Two."] * 4
        assert table["hint_candidates"].tolist() == [3] * 4
        assert table["hint_overlap"].tolist() == [1.0] * 4

    def test_overlap_is_a_mean_over_the_tokens_that_have_a_teacher(self, tmp_path):
        judge = alternating_judge(Vote(score=-1, hint="One."), Vote(score=-1))
        trainer, _ = steered_trainer(tmp_path, lambda m, t: t < 2, BY_OVERLAP, judge=judge)
        batches = batches_of(trainer)
        trainer.train()
        lengths = batches[0]["completion_mask"].sum(1)[batches[0]["hint_mask"]]
        assert len(lengths) == 2
        assert logged(trainer, "opd/overlap") == [
            pytest.approx(lengths.clamp(max=2).sum().item() / lengths.sum().item())
        ]
        assert logged(trainer, "hint/candidates") == [1.0]

    def test_a_draw_goes_to_the_first_vote(self, tmp_path):
        trainer, _ = steered_trainer(tmp_path, lambda m, t: m > 0, BY_OVERLAP)
        batches = micro_batches_of(trainer)
        trainer.train()
        assert (batches[0]["teacher_per_token_logps"][batches[0]["completion_mask"].bool()] == -2.0).all()

    def test_each_token_may_have_a_candidate_of_its_own(self, tmp_path):
        config = {**BY_OVERLAP, "hint_selection": "token", "log_completions": True}
        trainer, _ = steered_trainer(tmp_path, lambda m, t: m == (0, 2, 2)[t % 3], config)
        batches = micro_batches_of(trainer)
        trainer.train()
        batch = batches[0]
        pattern = torch.tensor([-1.0, -3.0, -3.0, -1.0, -3.0, -3.0])[: batch["completion_mask"].size(1)]
        for found, mask in zip(batch["teacher_per_token_logps"], batch["completion_mask"].bool(), strict=True):
            assert torch.equal(found[mask], pattern[mask])
        import pandas as pd

        table = pd.read_parquet(next((tmp_path / "completions").glob("*.parquet")))
        assert table["hint"].tolist() == ["Three."] * 4  # the one that most tokens have

    @pytest.mark.parametrize("num_iterations", [1, 2])
    def test_a_candidate_without_a_score_that_others_have_is_not_chosen(self, tmp_path, num_iterations):
        """Which tokens train is settled before the choice is made, so the choice must not cost one its score."""

        class Patchy(Steered):
            """Cannot score the second token under the second candidate, with which it agrees best."""

            def score(self, rows, *, topk=0):
                scores = super().score(rows, topk=topk)
                mask = scores.mask.clone()
                for i in range(len(rows)):
                    mask[i, 1] &= scores.per_token_logps[i, 0] != -2.0
                return TeacherScores(scores.per_token_logps, mask, scores.topk_ids)

        for rule, first in (("sequence", -1.0), ("token", -2.0)):
            model = tiny_llama()
            teacher = Patchy(lambda m, t: m == 1, model)
            trainer = make_trainer(
                tmp_path, model=model, teacher_model=teacher, judge=judge_with_hints(*HINTS),
                config={**BY_OVERLAP, "hint_selection": rule, "num_iterations": num_iterations},
            )  # fmt: skip
            batches = micro_batches_of(trainer)
            trainer.train()
            batch = batches[0]
            scores = batch["teacher_per_token_logps"]
            assert (scores[:, 0] == first).all()
            assert (scores[:, 1] == -1.0).all()
            assert torch.equal(scores.isfinite(), batch["teacher_mask"])
            assert batch["num_items_in_batch"] == batch["completion_mask"].sum()

    @pytest.mark.parametrize("rule", ["sequence", "token"])
    def test_a_token_that_no_candidate_could_score_is_in_no_normaliser(self, tmp_path, rule):
        class Narrow(Steered):
            def score(self, rows, *, topk=0):
                scores = super().score(rows, topk=topk)
                mask = scores.mask.clone()
                mask[:, 1] = False
                return TeacherScores(scores.per_token_logps, mask, scores.topk_ids)

        model = tiny_llama()
        trainer = make_trainer(
            tmp_path, model=model, teacher_model=Narrow(lambda m, t: m == 1, model), judge=judge_with_hints(*HINTS),
            config={**BY_OVERLAP, "hint_selection": rule},
        )  # fmt: skip
        batches = micro_batches_of(trainer)
        trainer.train()
        batch = batches[0]
        assert batch["teacher_per_token_logps"][:, 1].isnan().all()
        assert batch["num_items_in_batch"] == batch["completion_mask"].sum() - len(batch["completion_mask"])
        assert (batch["advantages"][:, 1] == 0).all()

    @pytest.mark.parametrize(("max_hints", "asked"), [(1, 1), (2, 2), (5, 3)])
    def test_no_more_candidates_than_allowed(self, tmp_path, max_hints, asked):
        trainer, teacher = steered_trainer(tmp_path, lambda m, t: True, {**BY_OVERLAP, "max_hints": max_hints})
        trainer.train()
        assert len(teacher.rows) == 4 * asked
        assert logged(trainer, "hint/candidates") == [asked]

    def test_hints_that_come_out_alike_are_one(self, tmp_path):
        trainer, teacher = steered_trainer(
            tmp_path, lambda m, t: True, BY_OVERLAP, judge=judge_with_hints("One.", '"One."', " One.  ", "Two.")
        )
        trainer.train()
        assert len(teacher.rows) == 8

    @pytest.mark.parametrize("rule", ["sequence", "token", "longest", "random"])
    def test_a_candidate_that_does_not_fit_costs_itself_and_not_the_row(self, tmp_path, rule):
        hints = ("a" * 400, "Be brief.", "b" * 400)
        config = {"hint_selection": rule, "log_completions": True}
        trainer = make_trainer(
            tmp_path, model=tiny_llama(max_position_embeddings=120), judge=judge_with_hints(*hints), config=config
        )
        trainer.train()
        assert logged(trainer, "hint/accepted") == [1.0]
        assert logged(trainer, "hint/dropped/too_long") == [0.0]
        assert logged(trainer, "hint/candidates") == [1.0]

    def test_a_reference_reads_no_more_than_its_window(self, tmp_path):
        folder = tmp_path / "reference"
        tiny_llama(max_position_embeddings=40).save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
        config = {"reward_scale": 1.5, "opd_reference": str(folder)}
        trainer = make_trainer(tmp_path, judge=judge_with_hints("Be brief."), config=config)
        trainer.train()
        assert logged(trainer, "hint/dropped/too_long") == [1.0]

    def test_by_chance_is_the_same_again_with_the_same_seed(self, tmp_path):
        asked = []
        for seed in (1, 1, 2, 3):
            trainer, teacher = steered_trainer(
                tmp_path, lambda m, t: True, {"hint_selection": "random", "seed": seed, "max_steps": 2}
            )
            trainer.train()
            assert len(teacher.rows) == 8
            texts = [trainer.processing_class.decode(row.prompt_ids) for row in teacher.rows]
            asked.append([next(hint for hint in HINTS if hint in text) for text in texts])
        assert asked[0] == asked[1]
        assert asked[0] != asked[2] or asked[0] != asked[3]
        assert len({*asked[0], *asked[2], *asked[3]}) == 3

    def test_batches_of_one_step_draw_apart(self, tmp_path):
        config = {"hint_selection": "random", "gradient_accumulation_steps": 4, "steps_per_generation": 1}
        trainer, teacher = steered_trainer(tmp_path, lambda m, t: True, config)
        trainer.train()
        texts = [trainer.processing_class.decode(row.prompt_ids) for row in teacher.rows]
        drawn = [next(hint for hint in HINTS if hint in text) for text in texts]
        batches = [tuple(drawn[i : i + 4]) for i in range(0, len(drawn), 4)]
        assert len(batches) == 4
        assert len(set(batches)) > 1

    @pytest.mark.parametrize(("rule", "expected"), [("longest", "ccc"), ("shortest", "a"), ("sequence", None)])
    def test_rules_of_texts_look_at_what_fits(self, rule, expected):
        candidates = [HintedTurn(drop="too_long"), *(HintedTurn(hint, [1]) for hint in ("bb", "ccc", "a"))]
        found = shortlist(candidates, rule, random.Random(0))
        assert found == (candidates if expected is None else [HintedTurn(expected, [1])])
        assert shortlist(candidates[:1], rule, random.Random(0)) == candidates[:1]


class TestTeachersOfOnesOwn:
    class Narrow(Steered):
        """Scores the first two tokens, and its answer ends there."""

        def score(self, rows, *, topk=0):
            scores = super().score(rows, topk=topk)
            ids = scores.topk_ids[:, :2] if topk else None
            return TeacherScores(scores.per_token_logps[:, :2].double(), scores.mask[:, :2], ids)

    @pytest.mark.parametrize(
        "config", [{}, BY_OVERLAP, {"reward_scale": 1.5, "opd_reference": "unhinted_teacher"}], ids=str
    )
    def test_an_answer_may_end_early(self, tmp_path, config):
        model = tiny_llama()
        teacher = self.Narrow(lambda m, t: m == 1, model, ("One.", "Two.", ""))  # the last for prompts without a hint
        trainer = make_trainer(
            tmp_path, model=model, teacher_model=teacher, judge=judge_with_hints("One.", "Two."), config=config
        )
        batches = micro_batches_of(trainer)
        trainer.train()
        scores = batches[0]["teacher_per_token_logps"]
        assert scores.dtype == torch.float32
        assert scores[:, :2].isfinite().all()
        assert scores[:, 2:].isnan().all()

    @pytest.mark.parametrize("config", [{}, BY_OVERLAP], ids=str)
    def test_its_answer_for_no_rows_may_be_of_any_shape(self, tmp_path, config):
        class Curt:
            def score(self, rows, *, topk=0):
                assert not rows
                return TeacherScores(torch.zeros(0), torch.zeros(0, dtype=torch.bool))

        trainer = make_trainer(tmp_path, teacher_model=Curt(), judge=judge_with_hints(), config=config)
        trainer.train()
        assert logged(trainer, "hint/accepted") == [0.0]
        assert not logged(trainer, "hint/candidates")

    def test_candidates_are_counted_per_row_that_has_some(self, tmp_path):
        calls = iter(range(100))
        teacher = ScriptedTeacher(lambda row: [(-1.0, float("nan"))[next(calls) % 2]] * len(row.completion_ids))
        judge = alternating_judge(Vote(score=-1, hint="One."), Vote(score=-1, hint="Two."), Vote(score=-1))
        trainer = make_trainer(tmp_path, teacher_model=teacher, judge=judge)
        trainer.train()
        assert logged(trainer, "hint/accepted") == [0.5]
        assert logged(trainer, "hint/dropped/no_teacher_score") == [0.25]
        assert logged(trainer, "hint/candidates") == [1.0]

    @pytest.mark.parametrize("ids", [None, torch.zeros(4, 6, 3, dtype=torch.long), torch.zeros(4, 6, 4)], ids=str)
    def test_wrong_best_tokens(self, tmp_path, ids):
        class Wrong(ScriptedTeacher):
            def score(self, rows, *, topk=0):
                scores = super().score(rows)
                return TeacherScores(scores.per_token_logps, scores.mask, ids)

        teacher = Wrong(lambda row: [-1.0] * len(row.completion_ids))
        trainer = make_trainer(tmp_path, teacher_model=teacher, config=BY_OVERLAP)
        with pytest.raises(TeacherError, match=r"The teacher `Wrong` gave `topk_ids` .*not torch.int64 \(4, 6, 4\)"):
            trainer.train()

    def test_one_that_knows_no_best_tokens(self, tmp_path):
        teacher = ScriptedTeacher(lambda row: [-1.0] * len(row.completion_ids))
        trainer = make_trainer(tmp_path, teacher_model=teacher, config=BY_OVERLAP)
        with pytest.raises(TeacherError, match=r"'topk'\. `score\(rows\)` must .*; `score\(rows, topk=k\)` also"):
            trainer.train()
        # It is not asked for them where one hint is all there is, or where the texts decide.
        for config in ({**BY_OVERLAP, "max_hints": 1}, {"hint_selection": "shortest"}):
            make_trainer(tmp_path, teacher_model=teacher, judge=judge_with_hints(*HINTS), config=config).train()

    def test_a_reference_that_gives_a_token_no_chance_is_left_out(self, tmp_path):
        class Doubtful(ScriptedTeacher):
            """Knows nothing of the second token where it reads no hint."""

            def score(self, rows):
                scores = super().score(rows)
                hinted = ["Hint:" in tiny_tokenizer().decode(row.prompt_ids) for row in rows]
                if not any(hinted):
                    scores.per_token_logps[:, 1] = float("-inf")
                return TeacherScores(scores.per_token_logps, scores.per_token_logps.isfinite())

        config = {"reward_scale": 1.5, "opd_reference": "unhinted_teacher", "logp_gap_clip": None}
        teacher = Doubtful(lambda row: [-1.0] * len(row.completion_ids))
        trainer = make_trainer(tmp_path, teacher_model=teacher, config=config)
        batches = batches_of(trainer)
        trainer.train()
        assert (batches[0]["extrapolation"] == 0).all()
        assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())


class TestVocabularies:
    @pytest.mark.parametrize("loss", ["topk_surrogate", "topk_reverse_kl"])
    @pytest.mark.parametrize("support", ["student", "teacher"])
    def test_rows_that_only_one_embedding_has_are_not_compared(self, tmp_path, loss, support):
        teacher = tiny_llama(1, vocab_size=320)
        trainer = make_trainer(
            tmp_path, teacher_model=teacher, teacher_processing_class=tiny_tokenizer(),
            config={"opd_loss": loss, "topk_support": support, "topk": 40},
        )  # fmt: skip
        batches = micro_batches_of(trainer)
        trainer.train()
        ids, mask = batches[0]["support_ids"], batches[0]["support_mask"]
        assert (ids < 259).all()
        assert mask.any(dim=-1)[batches[0]["completion_mask"].bool()].all()
        assert mask[batches[0]["completion_mask"].bool()].all() == (support == "student")
        assert logged(trainer, "opd/loss")[0] == logged(trainer, "opd/loss")[0] != 0


class TestReference:
    @pytest.mark.parametrize("teacher", ["frozen", "live", "ema", "external"])
    @pytest.mark.filterwarnings("ignore:.*drift")
    def test_the_initial_policy_stays_what_it_was(self, tmp_path, teacher):
        config, kwargs = {"reward_scale": 1.5, "max_steps": 2, "learning_rate": 0.01}, {}
        if teacher == "external":
            kwargs = {"teacher_model": tiny_llama(1), "teacher_processing_class": tiny_tokenizer()}
        else:
            config["teacher"] = teacher
        trainer = make_trainer(tmp_path, config=config, **kwargs)
        trainer.train()
        reference = trainer._teaching.lessons.reference
        assert isinstance(reference, FrozenTeacher)
        assert (reference is trainer.teacher) == (teacher == "frozen")
        for parameter, initial in zip(reference.model.parameters(), tiny_llama().parameters(), strict=True):
            assert torch.equal(parameter, initial)
