"""Settings that cannot be are refused on every process, which is told why: none of them is left waiting."""

import pytest
from launch_ranks import launch_script

WORDS = {
    "more rows than fill the processes": "generation_batch_size (12) must be divisible by the global batch size (8)",
    "rows that make no whole groups": "generation_batch_size (6) must be divisible by num_generations (4)",
    "evaluation rows that make no whole groups": "divisible by the number of generations used for evaluation (4)",
    "a mistake that TRL finds": "vllm_importance_sampling_clip_min (5.0) must be less than",
    "a mistake that the trainer of TRL finds": "You passed `sync_ref_model=True` while `beta=0.0`",
    "a mistake that we find": "Use `importance_sampling_level='token'`",
    "too few prompts for all processes": "`train_dataset` has 8 rows, but one generation batch takes 16 prompts",
    "an average that one process alone has": "machine1/checkpoint-1` has no `ema_teacher.safetensors`",
    "checkpoints that one process alone has": "There is no checkpoint in `output_dir`",
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict[str, str | None]]:
    return launch_script("refused_ranks.py", tmp_path_factory.mktemp("refused"))


@pytest.mark.parametrize("name", WORDS)
def test_all_processes_are_told(ranks, name):
    first, second = (rank[name] for rank in ranks)
    assert first is not None
    assert first == second
    assert WORDS[name] in first


def test_nothing_else_was_tried(ranks):
    assert [list(rank) for rank in ranks] == [list(WORDS)] * 2
