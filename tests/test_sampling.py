import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import trl
from tiny import tiny_llama, tiny_tokenizer
from trl.chat_template_utils import add_response_schema

from trl_openclaw._trl import in_step
from trl_openclaw._trl.sampling import context_window, sample_turns

END = 256


class Sampler(SimpleNamespace):
    """As much of a trainer as sampling needs; the policy says its context's last id, twice, and ends."""

    def __init__(self, **attributes):
        tokenizer = tiny_tokenizer()
        config = SimpleNamespace(max_new_tokens=100)
        super().__init__(
            calls=[], limits=[], tokenizer=tokenizer, processing_class=tokenizer, eos_token_ids=[END], use_vllm=False,
            generation_config=config, empty_rows=None, **attributes,
        )  # fmt: skip

    def _generate_single_turn(self, prompt_ids, images, multimodal_fields, num_generations):
        assert images is None
        assert multimodal_fields == {}
        assert num_generations == 1
        assert self.empty_rows is not None  # else an empty turn would be filled up
        self.calls.append(prompt_ids)
        self.limits.append(self.generation_config.max_new_tokens)
        return [[ids[-1], ids[-1], END] for ids in prompt_ids], None


@pytest.fixture
def other_ranks(monkeypatch):
    """Sets how many rows the other processes have."""

    def with_rows(*rows):
        monkeypatch.setattr(in_step, "gather_object", lambda own: [*own, *rows])

    return with_rows


class TestSampleTurns:
    def test_a_turn_for_each_context(self):
        turns = sample_turns(Sampler(), [[1, 65], [66]], [10, 10])
        assert [turn.ids for turn in turns] == [[65, 65, END], [66, 66, END]]
        assert [turn.message["role"] for turn in turns] == ["assistant"] * 2
        assert [turn.message["content"] for turn in turns] == tiny_tokenizer().batch_decode([[65, 65], [66, 66]])
        assert not any(turn.cut for turn in turns)

    def test_no_more_than_there_is_room_for(self):
        trainer = Sampler()
        long, short = sample_turns(trainer, [[65], [66]], [7, 2])
        assert trainer.limits == [7]
        assert trainer.generation_config.max_new_tokens == 100
        assert not long.cut
        assert (short.ids, short.cut) == ([66, 66], True)

    def test_room_beyond_the_limit_of_the_trainer(self):
        trainer = Sampler()
        sample_turns(trainer, [[65]], [1000])
        assert trainer.limits == [100]

    def test_nobody_has_a_row(self, other_ranks):
        other_ranks(0)
        trainer = Sampler()
        assert sample_turns(trainer, [], []) is None
        assert trainer.calls == []

    def test_a_rank_without_rows_samples_with_the_others(self, other_ranks):
        other_ranks(3)
        trainer = Sampler()
        assert sample_turns(trainer, [], []) == []
        assert trainer.calls == [[[END]]]
        assert trainer.limits == [1]

    @pytest.mark.parametrize(
        ("vllm", "split_over", "rows"), [("server", 1, 3), ("colocate", 2, 3), ("colocate", 1, 1), (None, 1, 1)]
    )
    def test_an_engine_that_processes_share_wants_as_many_rows_of_all(self, other_ranks, vllm, split_over, rows):
        other_ranks(3)
        trainer = Sampler(vllm_mode=vllm, args=SimpleNamespace(vllm_tensor_parallel_size=split_over))
        trainer.use_vllm = vllm is not None
        (turn,) = sample_turns(trainer, [[65]], [10])
        assert turn.ids == [65, 65, END]
        assert [len(call) for call in trainer.calls] == [rows]

    def test_a_tokenizer_that_parses(self):
        trainer = Sampler()
        template = Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja"
        trainer.tokenizer.chat_template = template.read_text(encoding="utf-8")
        add_response_schema(trainer.tokenizer)
        ids = [*trainer.tokenizer.encode("<think>\nhm\n</think>\n\nYes."), END]
        trainer._generate_single_turn = lambda prompt_ids, *args: ([ids], None)
        prompt = trainer.tokenizer.encode("<|im_start|>assistant\n")
        (turn,) = sample_turns(trainer, [prompt], [100])
        assert turn.ids == ids
        assert turn.message == {"role": "assistant", "content": "Yes.", "reasoning_content": "hm"}


class TestContextWindow:
    def test_of_the_model(self):
        assert context_window(SimpleNamespace(use_vllm=False, model=tiny_llama())) == 512

    def test_of_a_model_without_positions(self):
        config = SimpleNamespace(get_text_config=lambda: object())
        assert context_window(SimpleNamespace(use_vllm=False, model=SimpleNamespace(config=config))) == math.inf

    def test_of_vllm_in_this_process(self):
        engine = SimpleNamespace(model_config=SimpleNamespace(max_model_len=99))
        vllm = SimpleNamespace(llm=SimpleNamespace(llm_engine=engine))
        assert context_window(SimpleNamespace(use_vllm=True, vllm_mode="colocate", vllm_generation=vllm)) == 99
