"""With prefix sharing and without: the same losses, gradients and weights, for less work; and where it is refused."""

import logging
from collections import Counter
from dataclasses import dataclass

import datasets
import model_zoo
import pytest
import torch
import transformers
from datasets import Dataset
from model_zoo import LENGTHENED, ZOO, tokens_counted
from peft import LoraConfig, PromptTuningConfig
from PIL import Image
from tiny import tiny_llama
from trainer_harness import (
    SETTINGS,
    alternating_judge,
    always_replies,
    batches_of,
    judge_with_hints,
    logged,
    make_trainer,
    record_gradients,
    rollout_by_prompt,
    snapshot,
)
from trl import GRPOTrainer

from trl_openclaw import CombineConfig, CombineTrainer, OPDTrainer, Vote

LOGGER = "trl_openclaw.shared_prefix"
CONFIG = {
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "max_grad_norm": 0.0,
    # Adam divides by the gradient's size, and so makes a step of the rounding in the smallest ones.
    "optim": "sgd",
    "seed": 3,
}
NO_ROUTER_LOSS = {"router_aux_loss_coef": 0.0}
LORA = {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"])}
THREE_HINTS = {"judge": judge_with_hints("Be brief.", "Be kind.", "Use numbers, and nothing else.")}


def uneven_prompts(chat: bool = True) -> Dataset:
    """Prompts of different lengths, with much or little of their beginning in common; as plain text, one token too."""
    texts = [chr(97 + i) * (1, 9, 4, 30)[i % 4] for i in range(8)]
    return Dataset.from_list([{"prompt": [{"role": "user", "content": text}] if chat else text} for text in texts])


def rollout_by_row(prompts, trainer):
    """Completions without chance, which depend on their prompt and on how often it stood before; some are empty."""
    ids, seen, found = trainer.tokenize_prompts(prompts), Counter(), []
    for row in map(tuple, ids):
        n = len(row) + 3 * seen[row]
        found.append([65 + (n + t * t) % 26 for t in range(n % 5)] + [256] * (n % 4 > 0))
        seen[row] += 1
    return {"prompt_ids": ids, "completion_ids": found, "logprobs": [[-1.0] * len(row) for row in found]}


@dataclass
class Run:
    """What a run came to.

    Args:
        losses: Of every optimizer step, as logged.
        gradients: The whole gradient of every optimizer step, in one vector.
        moved: How far each weight went, in one vector.
        student: Tokens that the policy ran with gradients.
        teacher: Tokens that the teacher ran.
        trainer: What was run.
    """

    losses: list[float]
    gradients: list[torch.Tensor]
    moved: torch.Tensor
    student: int
    teacher: int
    trainer: OPDTrainer


def flat(tensors) -> torch.Tensor:
    return torch.cat([tensor.double().flatten() for tensor in tensors])


def train(tmp_path, sharing, make_model=tiny_llama, trainer_class=OPDTrainer, config=None, prepare=None, **options):
    """A run of five steps on uneven prompts, or of as many as `config` says."""
    config = {"max_steps": 5, "prefix_sharing": sharing, **CONFIG, **(config or {})}
    defaults = {"data": uneven_prompts(), "judge": judge_with_hints("Be brief."), "rollout_func": rollout_by_row}
    folder = tmp_path / ("shared" if sharing else "whole")
    trainer = make_trainer(folder, trainer_class, model=make_model(), config=config, **{**defaults, **options})
    if prepare is not None:
        prepare(trainer)
    steps, before = record_gradients(trainer), snapshot(trainer.model)
    teacher = trainer.model if trainer.teacher is None else trainer.teacher.model
    with tokens_counted(trainer.model) as policy_ran, tokens_counted(teacher) as teacher_ran:
        trainer.train()
    every = trainer.args.gradient_accumulation_steps
    gradients = [flat(step["gradients"].values()) for step in steps[every - 1 :: every]]
    return Run(
        losses=logged(trainer, "loss")[-len(gradients) :],  # a resumed run has those of the run before in its log
        gradients=gradients,
        moved=flat(parameter - before[name] for name, parameter in trainer.model.named_parameters()),
        student=policy_ran[True],
        teacher=teacher_ran[False],
        trainer=trainer,
    )


def both(tmp_path, **options) -> tuple[Run, Run]:
    """A run without sharing, and one with it."""
    return train(tmp_path, False, **options), train(tmp_path, True, **options)


def relative_difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


def assert_same(shared: Run, whole: Run, gradient: float = 1e-5) -> None:
    """Losses, gradients and weights. Differences in the weights grow with every step, since the gradient sees them."""
    assert len(shared.losses) == len(whole.losses) == len(whole.gradients)
    assert all(step.norm() > 1e-3 for step in whole.gradients)
    assert shared.losses == pytest.approx(whole.losses, abs=1e-5)
    assert relative_difference(shared.gradients[0], whole.gradients[0]) < gradient
    assert relative_difference(shared.moved, whole.moved) < 20 * gradient


class TestEveryKindOfModel:
    @pytest.mark.parametrize("family", [name for name in ZOO if name != "qwen3_next"])
    def test_five_steps(self, tmp_path, family):
        config = NO_ROUTER_LOSS if family == "mixtral" else {}
        whole, shared = both(tmp_path, make_model=ZOO[family], config=config)
        assert_same(shared, whole)
        assert shared.student < 0.5 * whole.student
        assert shared.teacher < 0.7 * whole.teacher

    def test_chunked_linear_attention(self, tmp_path, monkeypatch):
        """Sums run over chunks that begin where a pass does, so rounding differs, and steps make more of it.

        In float32 five steps go apart as far as after a change of all weights by 1e-7. In float64 nothing is left.
        """

        class InFloat64:
            """PyTorch, for a module that casts to float32 what must stay precise."""

            def __getattr__(self, name):
                return torch.float64 if name == "float32" else getattr(torch, name)

        monkeypatch.setattr(transformers.models.qwen3_next.modeling_qwen3_next, "torch", InFloat64())

        def make():
            model = ZOO["qwen3_next"]().double()
            model.set_experts_implementation("eager")  # the default one is not for float64
            return model

        whole, shared = both(tmp_path, make_model=make, config={**NO_ROUTER_LOSS, "learning_rate": 1e-4})
        assert_same(shared, whole)
        assert shared.student < 0.5 * whole.student

    def test_chunked_linear_attention_in_float32(self, tmp_path):
        options = {"make_model": ZOO["qwen3_next"], "config": {**NO_ROUTER_LOSS, "max_steps": 1}}
        whole, shared = both(tmp_path, **options)
        assert_same(shared, whole, gradient=1e-4)


class TestEverySetting:
    @pytest.mark.parametrize(
        "options",
        [
            pytest.param({"trainer_class": CombineTrainer}, id="combine"),
            pytest.param(LORA, id="lora"),
            pytest.param({**LORA, "config": {"beta": 0.1}}, id="lora with a reference"),
            pytest.param({**LORA, "config": {"teacher": "ema"}}, id="lora with an average"),
            pytest.param({"config": {"teacher": "ema", "teacher_ema_rate": 0.5}}, id="average"),
            pytest.param({**THREE_HINTS, "config": {"opd_loss": "topk_surrogate"}}, id="support set"),
            pytest.param({**THREE_HINTS, "config": {"opd_loss": "full_divergence"}}, id="whole vocabulary"),
            pytest.param({**THREE_HINTS, "config": {"hint_placement": "system"}}, id="hints come first"),
            pytest.param({"rollout_func": rollout_by_prompt}, id="identical completions"),
            pytest.param({"config": {"num_iterations": 2}}, id="every batch twice"),
            pytest.param({"config": {"mask_truncated_completions": True}}, id="truncated completions"),
            pytest.param({"config": {"loss_type": "grpo"}}, id="mean over rows"),
            pytest.param({"config": {"pad_to_multiple_of": 16}}, id="padding on both sides"),
            pytest.param(
                {"prepare": lambda trainer: setattr(trainer.processing_class, "padding_side", "right")},
                id="tokenizer that pads on the right",
            ),
            pytest.param(
                {"config": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}}, id="accumulation"
            ),
            pytest.param(  # each micro-batch has the last rows of one prompt and the first of the next
                {
                    "config": {
                        "per_device_train_batch_size": 6,
                        "gradient_accumulation_steps": 2,
                        "generation_batch_size": 12,
                    }
                },
                id="parts of prompts",
            ),
        ],
    )
    def test_two_steps(self, tmp_path, options):
        options = {**options, "config": {"max_steps": 2, **options.get("config", {})}}
        whole, shared = both(tmp_path, **options)
        assert_same(shared, whole)
        assert shared.student < 0.75 * whole.student
        assert shared.teacher < 0.75 * whole.teacher

    @pytest.mark.filterwarnings("ignore:The prompts are plain text")
    def test_prompts_of_one_token(self, tmp_path):
        data = uneven_prompts(chat=False)
        whole, shared = both(tmp_path, data=data, config={"max_steps": 2})
        assert {len(ids) for ids in shared.trainer.tokenize_prompts(data["prompt"])} == {1, 4, 9, 30}
        assert_same(shared, whole)

    def test_one_row(self, tmp_path):
        """The student has nothing to share; the teacher has, with three hints for its one prompt."""
        config = {
            "per_device_train_batch_size": 1,
            "num_generations": 1,
            "opd_loss": "topk_surrogate",
            "max_steps": 2,
        }
        judge = judge_with_hints("a" * 30, "a" * 30 + "b", "a" * 30 + "c")
        whole, shared = both(tmp_path, config=config, judge=judge, rollout_func=rollout_by_prompt)
        assert_same(shared, whole)
        assert shared.student == whole.student
        assert shared.teacher < 0.9 * whole.teacher

    @pytest.mark.parametrize(
        "config",
        [
            {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "num_iterations": 2, "max_steps": 4},
            {"gradient_accumulation_steps": 2, "steps_per_generation": 2, "loss_type": "bnpo", "max_steps": 2},
            {"gradient_accumulation_steps": 2, "steps_per_generation": 2, "entropy_coef": 0.5, "max_steps": 2},
            {"gradient_accumulation_steps": 2, "gradient_checkpointing": True, "max_steps": 2},
        ],
        ids=str,
    )
    def test_an_optimizer_step_learns_from_the_rows_that_trl_drew_for_it(self, tmp_path, config):
        """Rows change places only where that changes no gradient, so here fewer prompts are side by side."""
        whole, shared = both(tmp_path, config={"per_device_train_batch_size": 4, **config})
        assert_same(shared, whole)
        assert shared.student <= whole.student

    @pytest.mark.parametrize("make", [tiny_llama, ZOO["lfm2"]])
    def test_half_precision_beside_float32_weights(self, tmp_path, make):
        """Under autocast, which leaves the states between the layers in float32."""
        config = {"bf16": True, "max_steps": 2, "self_test": False}
        whole, shared = both(tmp_path, make_model=make, config=config)
        assert shared.trainer.accelerator.mixed_precision == "bf16"
        assert next(shared.trainer.model.parameters()).dtype == torch.float32
        assert shared.student < 0.75 * whole.student
        assert len(shared.gradients[0]) == len(whole.gradients[0])  # no parameter went without
        assert torch.cosine_similarity(shared.gradients[0], whole.gradients[0], dim=0) > 0.99
        assert shared.losses[0] == pytest.approx(whole.losses[0], abs=0.01)

    @pytest.mark.filterwarnings("ignore:The prompts are plain text")
    def test_a_model_that_cannot_share_keeps_its_rows_in_their_micro_batches(self, tmp_path):
        """Under such a rotary embedding a row's numbers depend on how long the rows beside it are."""
        config = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "max_steps": 2}
        options = {"make_model": LENGTHENED["longrope"], "data": uneven_prompts(chat=False), "config": config}
        whole, shared = both(tmp_path, **options)
        assert_same(shared, whole)
        assert shared.student == whole.student

    def test_evaluation(self, tmp_path):
        found = {}
        for sharing in (False, True):
            trainer = make_trainer(
                tmp_path, data=uneven_prompts(), eval_dataset=uneven_prompts(), rollout_func=rollout_by_row,
                config={**CONFIG, "prefix_sharing": sharing, "per_device_eval_batch_size": 8},
            )  # fmt: skip
            with tokens_counted(trainer.model) as tokens:
                metrics = trainer.evaluate()
            found[sharing] = ({k: v for k, v in metrics.items() if "time" not in k and "second" not in k}, tokens)
        (whole, every), (shared, once) = found[False], found[True]
        assert shared["eval_loss"] != 0
        assert shared["eval_loss"] == pytest.approx(whole["eval_loss"], abs=1e-5)
        logs = [name for name in whole if name.startswith(("eval_opd/", "eval_hint/", "eval_entropy"))]
        assert [shared[name] for name in logs] == pytest.approx([whole[name] for name in logs], abs=1e-5)
        assert once[False] < 0.75 * every[False]

    @pytest.mark.filterwarnings("ignore:.*saves in the middle")
    def test_resumed_in_the_middle_of_a_buffer(self, tmp_path):
        (tmp_path / "model").mkdir()
        tiny_llama().save_pretrained(tmp_path / "model")
        config = {"num_iterations": 4, "save_strategy": "steps", "save_steps": 3, "max_steps": 6}
        ends = []
        for sharing in (False, True):
            options = {"make_model": lambda: str(tmp_path / "model"), "config": config}
            train(tmp_path, sharing, **options)
            checkpoint = str(tmp_path / ("shared" if sharing else "whole") / "checkpoint-3")

            def resume(trainer, checkpoint=checkpoint):
                start = trainer.train
                trainer.train = lambda: start(resume_from_checkpoint=checkpoint)

            ends.append(train(tmp_path, sharing, **options, prepare=resume))
        whole, shared = ends
        assert len(whole.gradients) == 3
        assert_same(shared, whole)
        assert shared.student < 0.6 * whole.student


class TestSampling:
    @pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "mixtral", "lfm2", "qwen2_5_vl", "llava"])
    def test_one_seed_samples_the_same_ids(self, tmp_path, family):
        found = {}
        for sharing in (False, True):
            config = {**CONFIG, "prefix_sharing": sharing, "max_steps": 2, "learning_rate": 0.0}
            if family == "mixtral":
                config |= NO_ROUTER_LOSS
            trainer = make_trainer(tmp_path, model=ZOO[family](), data=uneven_prompts(), config=config)
            batches = batches_of(trainer)
            with tokens_counted(trainer.model) as tokens:
                trainer.train()
            found[sharing] = ([batch["completion_ids"].tolist() for batch in batches], tokens)
        (whole, every), (shared, once) = found[False], found[True]
        assert shared == whole
        assert once[True] < 0.5 * every[True]
        if family != "qwen2_5_vl":  # its positions come in three dimensions, and then the rows are run as they are
            assert once[False] < 0.5 * every[False]

    @pytest.mark.parametrize(
        "setting", ["prefix_sharing", "use_vllm", "use_transformers_continuous_batching", "cache_implementation"]
    )
    def test_only_plain_generation_is_given_shared_prompts(self, tmp_path, monkeypatch, setting):
        trainer, patched = make_trainer(tmp_path, config={"prefix_sharing": True}), []

        def generate(self, prompt_ids, *args, **kwargs):
            patched.append("forward" in vars(self.model.model))
            return [[256]] * len(prompt_ids), None

        monkeypatch.setattr(GRPOTrainer, "_generate_single_turn", generate)
        trainer._generate_single_turn([[1, 2]], None, {})
        value = {"prefix_sharing": None, "cache_implementation": "static"}.get(setting, True)
        setattr(trainer.args if setting == "cache_implementation" else trainer, setting, value)
        trainer._generate_single_turn([[1, 2]], None, {})
        assert patched == [True, False]

    @pytest.mark.parametrize("generation", [{"num_beams": 2}, {"cache_implementation": "static"}])
    def test_other_ways_to_generate(self, tmp_path, generation):
        found = []
        for sharing in (False, True):
            config = {**CONFIG, "prefix_sharing": sharing, "generation_kwargs": generation}
            trainer = make_trainer(tmp_path, data=uneven_prompts(), config=config)
            batches = batches_of(trainer)
            trainer.train()
            found.append(batches[0]["completion_ids"].tolist())
        assert found[0] == found[1]


TRIED_OUT = 3 * 16 + 12 + 3 * 4
"""Tokens that a model runs to be tried out: three rows, their common beginning, and what is left of them."""


def dropping_llama():
    return tiny_llama(attention_dropout=0.1)


class TestRefused:
    """The stock path, with its numbers, and one line in the log that says why."""

    @pytest.fixture(autouse=True)
    def watched(self, caplog):
        caplog.set_level(logging.WARNING, LOGGER)
        self.said = lambda: [record.getMessage() for record in caplog.records if record.name == LOGGER]

    @pytest.mark.parametrize(
        ("make", "reason"),
        [
            (model_zoo.llama_that_refuses_a_cache, "cannot be expanded (NotImplementedError: this model has no cache)"),
            (model_zoo.llama_with_a_wrong_cache, "the model's cache gives other numbers"),
            (model_zoo.llama_with_attention_without_cache, "cannot be expanded (ValueError: no cache in this attent"),
            (model_zoo.mamba, "the model's cache gives other numbers"),
        ],
    )
    def test_a_model_whose_cache_is_of_no_use(self, tmp_path, make, reason):
        whole, shared = both(tmp_path, make_model=make, config={"max_steps": 3})
        assert_same(shared, whole)
        assert whole.student == shared.student
        assert shared.teacher - whole.teacher in range(1, TRIED_OUT + 1)
        (message,) = self.said()
        assert reason in message
        assert "`prefix_sharing=False` silences this" in message

    @pytest.mark.parametrize(
        ("make", "config", "reason"),
        [
            (tiny_llama, {"gradient_checkpointing": True}, "activation checkpointing runs without a cache"),
            (ZOO["mixtral"], {}, "load-balancing loss (`router_aux_loss_coef`)"),
        ],
    )
    def test_a_setting_of_the_students(self, tmp_path, make, config, reason):
        """The teacher's rows, without gradients, are shared all the same."""
        whole, shared = both(tmp_path, make_model=make, config={"max_steps": 3, **config})
        assert_same(shared, whole)
        assert shared.student == whole.student
        assert shared.teacher < 0.7 * whole.teacher
        (message,) = self.said()
        assert reason in message

    def test_dropout(self, tmp_path):
        """Each row draws its own, so a prompt that is run once would be another thing."""
        config = {"max_steps": 3, "disable_dropout": False, "self_test": False}
        whole, shared = both(tmp_path, make_model=dropping_llama, config=config)
        assert shared.student == whole.student
        (message,) = self.said()
        assert "dropout is on (`disable_dropout=False`)" in message

    def test_virtual_tokens(self, tmp_path):
        options = {
            "trainer_class": CombineTrainer,
            "judge": alternating_judge(Vote(score=1), Vote(score=-1), Vote(score=-1)),
            "peft_config": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
            "config": {"opd_weight": 0.0, "max_steps": 3},
        }
        whole, shared = both(tmp_path, **options)
        assert_same(shared, whole)
        assert shared.student == whole.student
        (message,) = self.said()
        assert "virtual tokens" in message

    def test_images(self, tmp_path):
        """Without a teacher, which reads text only. Rows of one prompt differ by more than their tokens."""
        images = [Image.new("RGB", (8, 8), (30 * i, 3, 5)) for i in range(8)]
        content = [{"type": "image"}, {"type": "text", "text": "what " * 9}]
        rows = [{"prompt": [{"role": "user", "content": content}], "images": [image]} for image in images]
        data = Dataset.from_list(rows).cast_column("images", [datasets.Image()])
        found = []
        for sharing in (False, True):
            model, processor = model_zoo.llava()
            config = {**SETTINGS, **CONFIG, "max_steps": 3, "opd_weight": 0.0, "prefix_sharing": sharing}
            trainer = CombineTrainer(
                model=model,
                args=CombineConfig(output_dir=str(tmp_path), **config),
                processing_class=processor,
                train_dataset=data,
                judge=alternating_judge(Vote(score=1), Vote(score=-1), Vote(score=-1)),
                next_state=always_replies,
            )
            steps, batches = record_gradients(trainer), batches_of(trainer)
            with tokens_counted(model) as tokens:
                trainer.train()
            gradients = torch.stack([flat(step["gradients"].values()) for step in steps])
            found.append((gradients, [batch["completion_ids"].tolist() for batch in batches], tokens))
        (whole, ids, every), (gradients, same_ids, tokens) = found
        assert same_ids == ids
        assert relative_difference(gradients, whole) < 1e-5
        assert tokens[True] == every[True]
        assert tokens[False] - every[False] == TRIED_OUT
        (message,) = self.said()
        assert "rows hold more than text (`pixel_values`)" in message

    def test_no_word_where_nothing_could_be_shared(self, tmp_path):
        config = {"gradient_checkpointing": True, "per_device_train_batch_size": 1, "num_generations": 1}
        train(tmp_path, True, config=config)
        assert self.said() == []

    def test_no_word_where_it_is_switched_off(self, tmp_path):
        train(tmp_path, False, make_model=model_zoo.llama_with_a_wrong_cache, config={"max_steps": 1})
        assert self.said() == []

    @pytest.mark.parametrize("sharing", [True, False])
    def test_a_budget_smaller_than_one_row(self, tmp_path, sharing):
        with pytest.raises(ValueError, match=r"`teacher_token_budget=20` is smaller than one row: .* have \d+ tokens"):
            train(tmp_path, sharing, config={"teacher_token_budget": 20})
