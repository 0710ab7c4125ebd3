"""A dataset must fill one generation batch, or TRL trains 0 steps and says nothing."""

from types import SimpleNamespace

import pytest
from datasets import IterableDataset
from trainer_harness import prompts

from trl_openclaw.trainer.inputs import check_size

ARGS = SimpleNamespace(generation_batch_size=8, num_generations=2)


def test_one_batch_is_enough():
    check_size(prompts(4), ARGS)
    with pytest.raises(ValueError, match="has 3 rows, but one generation batch takes 4 prompts"):
        check_size(prompts(3), ARGS)


def test_a_stream_has_no_size():
    check_size(IterableDataset.from_generator(lambda: iter(prompts(1))), ARGS)
