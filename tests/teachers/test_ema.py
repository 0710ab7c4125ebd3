"""The EMA teacher: how far it moves, what it averages, what it refuses, and that a resumed run goes on with it."""

import copy
import shutil
import types

import peft
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from tiny import tiny_llama, tiny_tokenizer
from trainer_harness import ScriptedTeacher, logged, make_trainer, moved, snapshot
from transformers import LlamaForCausalLM

from trl_openclaw import OPDConfig
from trl_openclaw.scoring import TeacherRow
from trl_openclaw.teachers import EMATeacher, FrozenTeacher, InitialWeights
from trl_openclaw.teachers.ema import STATE_FILE, saved_tensors
from trl_openclaw.teachers.ema_limits import ADAPTER, check_adapter, check_engine, check_spread_alike
from trl_openclaw.teachers.weights import keep_initial_adapter

TARGETS = ["q_proj", "v_proj", "gate_proj"]
LORA = {"r": 4, "target_modules": TARGETS}
ADAPTERS = {
    "lora": LoraConfig(**LORA),
    "rslora and dora": LoraConfig(**LORA, use_rslora=True, use_dora=True),
    "pissa": LoraConfig(**LORA, init_lora_weights="pissa"),
    "embedding": LoraConfig(r=4, target_modules=["embed_tokens", "q_proj"]),
    "modules to save": LoraConfig(**LORA, modules_to_save=["lm_head", "embed_tokens"]),
    "tokens": LoraConfig(**LORA, trainable_token_indices=[5, 7]),
    "parameters": LoraConfig(r=4, target_modules=[], target_parameters=["q_proj.weight"]),
    "ia3": peft.IA3Config(target_modules=TARGETS, feedforward_modules=[]),
}
KINDS = [None, "lora"]
ROWS = [TeacherRow([256, 70, 71, 72], [80, 81, 82]), TeacherRow([256, 90], [91, 92])]


@pytest.fixture
def folder(tmp_path):
    tiny_llama().save_pretrained(tmp_path / "tiny")
    tiny_tokenizer().save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def ema_trainer(tmp_path, adapter: str | None = None, *, rate: float = 0.05, start: int = 0, model=None, **config):
    peft_config = copy.deepcopy(ADAPTERS[adapter]) if adapter else None
    settings = {"teacher": "ema", "teacher_ema_rate": rate, "teacher_ema_start": start, **config}
    return make_trainer(tmp_path, model=model, peft_config=peft_config, config=settings)


def engine_trainer(*, fsdp: int | None = None, zero: dict | None = None, model=None):
    """What `check_engine` looks at, of a trainer under an engine."""
    state = types.SimpleNamespace(
        fsdp_plugin=types.SimpleNamespace(fsdp_version=fsdp),
        deepspeed_plugin=types.SimpleNamespace(deepspeed_config={"zero_optimization": zero}),
    )
    return types.SimpleNamespace(
        model=model or tiny_llama(),
        is_fsdp_enabled=fsdp is not None,
        is_deepspeed_enabled=zero is not None,
        accelerator=types.SimpleNamespace(state=state),
    )


def pairs(trainer) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """The teacher's and the student's tensors, side by side."""
    own, student = trainer.teacher._own_tensors(), saved_tensors(trainer.model)
    return {name: (own[name], student[source]) for name, source in trainer.teacher.sources.items()}


def values(trainer) -> dict[str, torch.Tensor]:
    return {name: own.clone() for name, (own, _) in pairs(trainer).items()}


def shift_student(trainer, by: float = 1.0) -> None:
    with torch.no_grad():
        for _, student in pairs(trainer).values():
            student.add_(by)


class TestUpdate:
    @pytest.mark.parametrize("kind", [None, *ADAPTERS])
    def test_one_update_goes_five_percent_of_the_way(self, tmp_path, kind):
        trainer = ema_trainer(tmp_path, kind)
        before = values(trainer)
        assert all(torch.equal(own, student) for own, student in pairs(trainer).values())
        shift_student(trainer)
        trainer.teacher.update(1)
        for name, own in values(trainer).items():
            torch.testing.assert_close(own, before[name] + 0.05, atol=1e-6, rtol=0, msg=name)

    def test_two_updates_by_hand(self, tmp_path):
        trainer = ema_trainer(tmp_path, rate=0.25)
        before = values(trainer)
        shift_student(trainer, 1.0)
        trainer.teacher.update(1)
        shift_student(trainer, 1.0)
        trainer.teacher.update(2)
        for name, own in values(trainer).items():  # 0.75 * 0.25 + 0.25 * 2
            torch.testing.assert_close(own, before[name] + 0.6875, atol=1e-6, rtol=0)

    def test_rate_one_is_the_student_itself(self, tmp_path):
        trainer = ema_trainer(tmp_path, rate=1.0, max_steps=2)
        trainer.train()
        assert all(torch.equal(own, student) for own, student in pairs(trainer).values())

    def test_all_of_a_full_model_is_averaged(self, tmp_path):
        trainer = ema_trainer(tmp_path)
        assert set(trainer.teacher.sources) == set(snapshot(trainer.model))
        assert trainer.teacher.model is not trainer.model

    def test_small_updates_arrive_in_half_precision(self, tmp_path):
        """Each is a fiftieth of what a bfloat16 weight near 1 can resolve."""
        trainer = ema_trainer(tmp_path, model=tiny_llama().to(torch.bfloat16), rate=0.01)
        with torch.no_grad():
            for own, student in pairs(trainer).values():
                own.fill_(1.0)
                student.fill_(1.0 + 2**-6)
        for step in range(200):
            trainer.teacher.update(step + 1)
        expected = 1.0 + 2**-6 * (1 - 0.99**200)
        for name, (own, _) in pairs(trainer).items():
            assert own.dtype == torch.bfloat16
            torch.testing.assert_close(trainer.teacher._masters[name], torch.full(own.shape, expected))
            assert torch.equal(own, torch.full_like(own, expected))
            assert own.unique() > 1.0

    def test_full_precision_keeps_no_second_average(self, tmp_path):
        trainer = ema_trainer(tmp_path)
        trainer.teacher.update(1)
        assert not trainer.teacher._masters

    def test_tied_weights_move_once(self, tmp_path):
        trainer = ema_trainer(tmp_path, model=tiny_llama(tie_word_embeddings=True))
        teacher = trainer.teacher.model
        assert teacher.lm_head.weight is teacher.model.embed_tokens.weight
        before = teacher.lm_head.weight.clone()
        shift_student(trainer)
        trainer.teacher.update(1)
        torch.testing.assert_close(teacher.lm_head.weight, before + 0.05, atol=1e-6, rtol=0)

    def test_buffers_are_copied_and_caches_are_not(self, tmp_path):
        model = tiny_llama()
        model.register_buffer("seen", torch.zeros(3, dtype=torch.long))
        model.register_buffer("cache", torch.zeros(3), persistent=False)
        trainer = ema_trainer(tmp_path, model=model)
        trainer.model.seen += 3
        trainer.model.cache += 3
        trainer.teacher.update(1)
        assert trainer.teacher.model.seen.tolist() == [3, 3, 3]
        assert trainer.teacher.model.cache.tolist() == [0, 0, 0]

    def test_nothing_moves_up_to_the_start(self, tmp_path):
        trainer = ema_trainer(tmp_path, start=2)
        shift_student(trainer)
        before = values(trainer)
        for step, moves in ((1, False), (2, False), (3, True)):
            assert trainer.teacher.same_weights_at_start
            trainer.teacher.update(step)
            assert any(not torch.equal(before[name], own) for name, own in values(trainer).items()) is moves
        assert not trainer.teacher.same_weights_at_start


class TestTraining:
    @pytest.mark.parametrize("kind", [None, *ADAPTERS])
    def test_the_student_trains_and_the_teacher_follows(self, tmp_path, kind):
        trainer = ema_trainer(tmp_path, kind, max_steps=2, learning_rate=0.01)
        student, teacher = snapshot(trainer.model), values(trainer)
        trainable = {name for name, p in trainer.model.named_parameters() if p.requires_grad}
        trainer.train()
        assert logged(trainer, "self_test/max_gap")[0] < 1e-4
        changed = moved(trainer.model, student)
        following = set(trainer.teacher.sources) if kind else set()
        assert {name for name, hit in changed.items() if hit} - following == trainable
        for name, (own, now) in pairs(trainer).items():
            before = student[trainer.teacher.sources[name]]
            if not torch.equal(before, now):
                assert 0 < (own - teacher[name]).abs().sum() < (now - before).abs().sum(), name

    @pytest.mark.parametrize("kind", KINDS)
    def test_the_average_of_the_steps_that_were_taken(self, tmp_path, kind):
        """Three optimiser steps of two micro-batches each, averaged by hand."""
        trainer = ema_trainer(tmp_path, kind, rate=0.5, start=1, max_steps=3, gradient_accumulation_steps=2)
        teacher, steps = trainer.teacher, []
        update = teacher.update

        def recording(step):
            steps.append((step, {name: student.clone() for name, (_, student) in pairs(trainer).items()}))
            update(step)

        teacher.update = recording
        first = values(trainer)
        trainer.train()
        assert [step for step, _ in steps] == [1, 2, 3]
        for name, own in values(trainer).items():
            expected = 0.25 * first[name] + 0.25 * steps[1][1][name] + 0.5 * steps[2][1][name]
            torch.testing.assert_close(own, expected, atol=1e-6, rtol=1e-5)

    @pytest.mark.parametrize("kind", [None, *ADAPTERS])
    def test_scores_are_those_of_the_averaged_weights(self, tmp_path, kind):
        trainer = ema_trainer(tmp_path, kind, rate=0.5)
        with torch.no_grad():
            for _, student in pairs(trainer).values():
                student.add_(torch.randn(student.shape) * 0.1)
        trainer.teacher.update(1)
        scores = trainer.teacher.score(ROWS).per_token_logps
        with torch.no_grad():  # the student with the teacher's weights
            for own, student in pairs(trainer).values():
                student.copy_(own)
            for i, row in enumerate(ROWS):
                ids = torch.tensor([[*row.prompt_ids, *row.completion_ids]])
                dist = trainer.model(input_ids=ids).logits[0].log_softmax(-1)
                at = range(len(row.prompt_ids) - 1, ids.size(1) - 1)
                expected = torch.stack([dist[t, ids[0, t + 1]] for t in at])
                torch.testing.assert_close(scores[i, : len(expected)], expected, atol=1e-4, rtol=1e-4)

    @pytest.mark.parametrize("kind", ADAPTERS)
    def test_scoring_leaves_the_adapter_in_training_as_it_was(self, tmp_path, kind):
        trainer = ema_trainer(tmp_path, kind)
        frozen = next(p for p in trainer.model.parameters() if p.requires_grad)
        frozen.requires_grad_(False)  # by hand: PEFT would make it trainable again
        flags = {name: p.requires_grad for name, p in trainer.model.named_parameters()}
        assert any(flags.values())
        assert not any(flags[name] for name in trainer.teacher.sources if name in flags)
        trainer.teacher.score(ROWS)
        assert {name: p.requires_grad for name, p in trainer.model.named_parameters()} == flags
        assert trainer.model.active_adapter == "default"

    def test_a_trained_adapter_is_where_the_teacher_starts(self, tmp_path):
        model = get_peft_model(tiny_llama(), LoraConfig(**LORA, init_lora_weights=False))
        trainer = ema_trainer(tmp_path, model=model)
        assert all(own.abs().sum() > 0 for own in values(trainer).values())
        trainer.train()
        assert logged(trainer, "self_test/max_gap")[0] < 1e-4

    def test_trls_reference_model_stays_where_it_is(self, tmp_path, folder):
        trainer = ema_trainer(tmp_path, model=str(folder), beta=0.1, rate=0.5)
        assert trainer.teacher.model is not trainer.ref_model
        before = snapshot(trainer.ref_model)
        trainer.train()
        assert not any(moved(trainer.ref_model, before).values())
        assert all(moved(trainer.teacher.model, before).values())

    def test_a_model_in_memory_is_where_the_teacher_starts_whatever_beta_loads(self, tmp_path, folder):
        model = LlamaForCausalLM.from_pretrained(folder)
        with torch.no_grad():
            model.model.norm.weight.mul_(2)
        trainer = ema_trainer(tmp_path, model=model, beta=0.1)
        assert all(torch.equal(own, student) for own, student in pairs(trainer).values())

    def test_a_frozen_reference_beside_it_has_a_model_of_its_own(self, tmp_path):
        trainer, initial = ema_trainer(tmp_path, reward_scale=1.5), InitialWeights(copy=tiny_llama())
        teacher, reference = (kind.build(trainer, trainer.scorer, initial) for kind in (EMATeacher, FrozenTeacher))
        before = snapshot(reference.model)
        shift_student(trainer)
        teacher.update(1)
        assert not any(moved(reference.model, before).values())


class TestRefused:
    @pytest.mark.parametrize(
        "config",
        [
            peft.AdaLoraConfig(target_modules=TARGETS, total_step=10),
            peft.VeraConfig(target_modules=["q_proj"]),
            peft.OFTConfig(target_modules=["q_proj"], oft_block_size=4),
            peft.VBLoRAConfig(target_modules=["q_proj"], num_vectors=8, vector_length=8, topk=2),
        ],
        ids=lambda config: config.peft_type.value,
    )
    def test_other_kinds_of_adapters(self, tmp_path, config):
        with pytest.raises(ValueError, match=rf"not {config.peft_type.value}.*`teacher='frozen'`"):
            make_trainer(tmp_path, peft_config=config, config={"teacher": "ema"})

    def test_prompt_learning(self, tmp_path):
        config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
        with pytest.raises(ValueError, match="Prompt-learning"):
            make_trainer(tmp_path, peft_config=config, config={"teacher": "ema"})

    def test_biases_and_weights_outside_the_adapter(self, tmp_path):
        with pytest.raises(ValueError, match="`bias`"):
            make_trainer(
                tmp_path,
                model=tiny_llama(attention_bias=True),
                peft_config=LoraConfig(**LORA, bias="all"),
                config={"teacher": "ema"},
            )
        model = get_peft_model(tiny_llama(), LoraConfig(**LORA))
        model.get_parameter("base_model.model.model.norm.weight").requires_grad_(True)
        with pytest.raises(ValueError, match=r"`base_model\.model\.model\.norm\.weight` is trained outside"):
            make_trainer(tmp_path, model=model, config={"teacher": "ema"})

    def test_names_that_are_taken(self, tmp_path):
        taken = get_peft_model(tiny_llama(), LoraConfig(**LORA), adapter_name=ADAPTER)
        with pytest.raises(ValueError, match="one already"):
            make_trainer(tmp_path, model=taken, config={"teacher": "ema"})
        model = get_peft_model(tiny_llama(), LoraConfig(**LORA))
        make_trainer(tmp_path, model=model, config={"teacher": "ema"})
        with pytest.raises(ValueError, match="delete_adapter"):
            make_trainer(tmp_path, model=model, config={"teacher": "ema"})
        model.delete_adapter(ADAPTER)
        make_trainer(tmp_path, model=model, config={"teacher": "ema"})

    def test_kasa_would_cut_the_base_weights_twice(self, tmp_path):
        with pytest.raises(ValueError, match="KaSA"):
            make_trainer(
                tmp_path, peft_config=LoraConfig(**LORA, kasa_config=peft.KasaConfig()), config={"teacher": "ema"}
            )

    def test_vllm_would_be_sent_the_teachers_modules(self):
        model = get_peft_model(tiny_llama(), ADAPTERS["modules to save"])
        check_adapter(model, use_vllm=False)
        with pytest.raises(ValueError, match="modules_to_save"):
            check_adapter(model, use_vllm=True)

    @pytest.mark.parametrize(
        ("engine", "said"),
        [
            ({"fsdp": 1}, "fsdp_version: 2"),
            ({"zero": {"stage": 3, "offload_param": {"device": "nvme"}}}, "nvme"),
            ({"zero": {"stage": 3, "zero_hpz_partition_size": 8}}, "zero_hpz_partition_size"),
            ({"zero": {"stage": 3, "zero_quantized_nontrainable_weights": True}}, "quantises"),
        ],
        ids=str,
    )
    def test_engines_that_hide_parts_of_weights(self, engine, said):
        with pytest.raises(ValueError, match=rf"{said}.*`teacher='frozen'`"):
            check_engine(engine_trainer(**engine))

    @pytest.mark.parametrize(
        "engine",
        [{}, {"fsdp": 2}, {"zero": {"stage": 2, "zero_hpz_partition_size": 8}}, {"zero": {"stage": 3}}],
        ids=str,
    )
    def test_other_engines_are_followed(self, engine):
        check_engine(engine_trainer(**engine))

    def test_an_adapter_that_an_earlier_trainer_has_spread(self):
        trainer = engine_trainer(zero={"stage": 3}, model=get_peft_model(tiny_llama(), LoraConfig(**LORA)))
        check_engine(trainer)
        next(p for p in trainer.model.parameters() if p.requires_grad).ds_tensor = torch.zeros(1)
        with pytest.raises(ValueError, match="earlier trainer"):
            check_engine(trainer)

    def test_parts_that_differ_between_teacher_and_student(self, tmp_path):
        trainer = ema_trainer(tmp_path)
        check_spread_alike(pairs(trainer))
        trainer.model.get_parameter("model.norm.weight").ds_tensor = torch.zeros(3)
        with pytest.raises(ValueError, match=r"`model\.norm\.weight`: this process holds \(32,\).*\(3,\)"):
            check_spread_alike(pairs(trainer))

    def test_a_model_that_zero_3_has_spread_already(self, tmp_path):
        model = tiny_llama()
        model.model.norm.weight.ds_id = 1
        with pytest.raises(ValueError, match=r"cannot be copied.* Pass its path as `model`\.$"):
            make_trainer(tmp_path, model=model, config={"teacher": "ema"})

    @pytest.mark.parametrize(
        "setting",
        [{"teacher_ema_rate": 0.0}, {"teacher_ema_rate": 1.1}, {"teacher_ema_start": -1}, {"teacher_ema_start": 0.5}],
        ids=str,
    )
    def test_settings_out_of_range(self, tmp_path, setting):
        with pytest.raises(ValueError, match=next(iter(setting))):
            OPDConfig(output_dir=str(tmp_path), bf16=False, use_cpu=True, **setting)


class TestCheckpoints:
    SAVED = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "learning_rate": 0.01, "rate": 0.3}

    @pytest.mark.parametrize(
        ("kind", "latest"), [(None, False), (None, True), ("lora", False), ("modules to save", True)]
    )
    def test_a_resumed_run_has_the_same_teacher(self, tmp_path, kind, latest):
        whole = ema_trainer(tmp_path, kind, **self.SAVED)
        whole.train()
        if latest:
            shutil.rmtree(tmp_path / "checkpoint-4")
        resumed = ema_trainer(tmp_path, kind, **self.SAVED)
        first = values(resumed)
        resumed.train(resume_from_checkpoint=True if latest else str(tmp_path / "checkpoint-2"))
        expected, found = values(whole), values(resumed)
        assert resumed.state.global_step == 4
        assert all(torch.equal(expected[name], found[name]) for name in expected)
        assert any(not torch.equal(first[name], found[name]) for name in found)
        assert all(torch.equal(pairs(whole)[name][1], pairs(resumed)[name][1]) for name in found)  # the student, too

    def test_half_precision_is_resumed_without_rounding(self, tmp_path):
        trainer = ema_trainer(tmp_path, model=tiny_llama().to(torch.bfloat16))
        shift_student(trainer, 0.01)
        trainer.teacher.update(1)
        trainer.teacher.save(tmp_path)
        other = ema_trainer(tmp_path, model=tiny_llama().to(torch.bfloat16)).teacher
        assert other.same_weights_at_start
        other.restore(tmp_path)
        other.begin()
        assert other._masters
        assert not other.same_weights_at_start
        for name, master in trainer.teacher._masters.items():
            assert torch.equal(other._masters[name], master)
            assert torch.equal(other._own_tensors()[name], master.bfloat16())

    def test_only_the_averaged_tensors_are_saved(self, tmp_path):
        trainer = ema_trainer(tmp_path, "lora")
        trainer.teacher.save(tmp_path)
        assert set(load_file(tmp_path / STATE_FILE)) == set(trainer.teacher.sources)
        assert all(f".{ADAPTER}." in name for name in trainer.teacher.sources)

    def test_checkpoints_without_an_optimizer_carry_no_average(self, tmp_path):
        ema_trainer(tmp_path, save_strategy="steps", save_steps=1, save_only_model=True).train()
        assert (tmp_path / "checkpoint-1" / "model.safetensors").exists()
        assert not (tmp_path / "checkpoint-1" / STATE_FILE).exists()

    def test_a_checkpoint_without_an_average(self, tmp_path):
        trainer = ema_trainer(tmp_path)
        (tmp_path / "checkpoint-1").mkdir()
        with pytest.raises(ValueError, match=f"checkpoint-1` has no `{STATE_FILE}`.*`teacher='frozen'`"):
            trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))

    def test_a_truncated_average(self, tmp_path):
        trainer = ema_trainer(tmp_path)
        trainer.teacher.save(tmp_path)
        file = tmp_path / STATE_FILE
        file.write_bytes(file.read_bytes()[:-100])
        with pytest.raises(ValueError, match="is damaged"):
            trainer.teacher.restore(tmp_path)

    @pytest.mark.parametrize("other", [{"intermediate_size": 48}, {"num_hidden_layers": 1}], ids=str)
    def test_an_average_of_another_shape(self, tmp_path, other):
        ema_trainer(tmp_path, model=tiny_llama(**other)).teacher.save(tmp_path)
        trainer = ema_trainer(tmp_path)
        before = values(trainer)
        with pytest.raises(ValueError, match=r"saved of another model or adapter: `model\.layers\."):
            trainer.teacher.restore(tmp_path)
        trainer.teacher.begin()
        assert all(torch.equal(before[name], own) for name, own in values(trainer).items())

    @pytest.mark.parametrize("kind", ["lora", "modules to save"])
    def test_what_is_saved_is_the_students_adapter_alone(self, tmp_path, kind):
        trainer = ema_trainer(tmp_path, kind, **self.SAVED)
        trainer.train()
        trainer.save_model(str(tmp_path / "final"))
        assert ADAPTER in trainer.model.peft_config
        for folder in ("final", "checkpoint-4"):
            assert not [path for path in (tmp_path / folder).iterdir() if path.is_dir()]
            names = load_file(tmp_path / folder / "adapter_model.safetensors")
            assert len(names) == len(trainer.teacher.sources)
            assert not [name for name in names if ADAPTER in name.split(".")]
            loaded = PeftModel.from_pretrained(tiny_llama(), tmp_path / folder)
            assert list(loaded.peft_config) == ["default"]
            tensors = saved_tensors(loaded)
            for name, source in trainer.teacher.sources.items():
                assert torch.equal(tensors[source], pairs(trainer)[name][1])

    def test_other_teachers_save_and_resume_as_ever(self, tmp_path):
        trainer = make_trainer(tmp_path, teacher_model=ScriptedTeacher(lambda row: [-1.0] * len(row.completion_ids)))
        trainer.save_model(str(tmp_path / "final"))
        assert (tmp_path / "final" / "model.safetensors").exists()
        config = {"save_strategy": "steps", "save_steps": 1}
        make_trainer(tmp_path, config=config).train()
        make_trainer(tmp_path, config={"max_steps": 2}).train(resume_from_checkpoint=True)
        assert not (tmp_path / "checkpoint-1" / STATE_FILE).exists()


class TestCopiesOfAdapters:
    @pytest.mark.parametrize("kind", ADAPTERS)
    def test_every_tensor_has_its_value_and_dtype(self, kind):
        model = get_peft_model(tiny_llama(), ADAPTERS[kind])
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn(parameter.shape))
                    parameter.data = parameter.data.bfloat16()
        before = {name: (p.detach().clone(), p.requires_grad) for name, p in model.named_parameters()}
        sources = keep_initial_adapter(model, "kept")
        assert set(sources.values()) >= {name for name, (_, trains) in before.items() if trains}
        for name, parameter in model.named_parameters():
            value, trains = before[sources.get(name, name)]
            assert torch.equal(parameter, value)
            assert parameter.dtype == value.dtype
            assert parameter.requires_grad is (trains and name not in sources)

    def test_tensors_that_the_original_does_not_have(self):
        model = get_peft_model(tiny_llama(), LoraConfig(**LORA))
        model.peft_config["default"].target_modules.add("o_proj")
        with pytest.raises(ValueError, match="cannot be copied to 'kept'"):
            keep_initial_adapter(model, "kept")


def test_average_is_saved_before_older_checkpoints_go(tmp_path, monkeypatch):
    trainer = ema_trainer(tmp_path, max_steps=2, save_strategy="steps", save_steps=1, save_total_limit=1)
    there, save = [], trainer.teacher.save

    def observed(checkpoint, writes):
        assert writes
        save(checkpoint)
        there.append(sorted(folder.parent.name for folder in tmp_path.glob(f"checkpoint-*/{STATE_FILE}")))

    monkeypatch.setattr(trainer.teacher, "save", observed)
    trainer.train()
    assert there == [["checkpoint-1"], ["checkpoint-1", "checkpoint-2"]]
    assert [folder.name for folder in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]
    assert not list(tmp_path.glob("**/*.unfinished"))
