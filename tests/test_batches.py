"""Shuffled micro-batches whose rows are put back beside those of the same prompt."""

from types import SimpleNamespace

import pytest
import torch

from trl_openclaw._trl.batches import exchange_window, keep_prompts_together


def micro_batches(prompts: list[int], size: int) -> list[dict]:
    """Rows of these prompts, numbered, `size` of them in each micro-batch."""
    whole = {
        "prompt_ids": torch.tensor([[257, p] if p < 5 else [p, p] for p in prompts]),
        "prompt_mask": torch.tensor([[0, 1] if p < 5 else [1, 1] for p in prompts]),
        "row": torch.arange(len(prompts)),
        "names": [f"row {i}" for i in range(len(prompts))],
    }
    found = []
    for start in range(0, len(prompts), size):
        found.append({name: value[start : start + size] for name, value in whole.items()})
        found[-1] |= {"num_items_in_batch": torch.tensor(17), "old_per_token_logps": None}
    return found


def trainer(per_generation: int, accumulation: int, **settings) -> SimpleNamespace:
    """A trainer as far as the question goes, with default settings but for these."""
    own = {"loss_type": "dapo", "top_entropy_quantile": 1.0, "aux_loss_enabled": False}
    args = {"entropy_coef": 0.0, "use_adaptive_entropy": False, "gradient_checkpointing": False}
    args = SimpleNamespace(
        steps_per_generation=per_generation,
        gradient_accumulation_steps=accumulation,
        **{name: settings.get(name, value) for name, value in args.items()},
    )
    return SimpleNamespace(args=args, **{name: settings.get(name, value) for name, value in own.items()})


def test_prompts_go_by_their_length_then_by_their_first_rows_and_keep_what_is_theirs():
    batches = keep_prompts_together(micro_batches([4, 9, 9, 4, 3, 4], 2), 3)
    assert [batch["row"].tolist() for batch in batches] == [[0, 3], [5, 4], [1, 2]]
    assert [batch["names"] for batch in batches] == [["row 0", "row 3"], ["row 5", "row 4"], ["row 1", "row 2"]]
    assert [batch["prompt_ids"][:, 1].tolist() for batch in batches] == [[4, 4], [4, 3], [9, 9]]
    assert all(batch["num_items_in_batch"] == 17 and batch["old_per_token_logps"] is None for batch in batches)


def test_rows_stay_within_their_window():
    batches = keep_prompts_together(micro_batches([9, 3, 3, 9, 9, 3, 3, 9], 2), 2)
    assert [batch["row"].tolist() for batch in batches] == [[1, 2], [0, 3], [5, 6], [4, 7]]
    unchanged = micro_batches([9, 3, 3, 9], 2)
    assert keep_prompts_together(unchanged, 1) is unchanged


@pytest.mark.parametrize(
    ("per_generation", "accumulation", "window"), [(4, 4, 4), (4, 2, 2), (2, 4, 2), (3, 2, 1), (1, 8, 1), (6, 4, 2)]
)
def test_rows_are_exchanged_between_micro_batches_of_one_optimizer_step(per_generation, accumulation, window):
    assert exchange_window(trainer(per_generation, accumulation)) == window


@pytest.mark.parametrize(
    "setting",
    [
        {"loss_type": "bnpo"},
        {"top_entropy_quantile": 0.2},
        {"aux_loss_enabled": True},
        {"entropy_coef": 0.01},
        {"use_adaptive_entropy": True},
        {"gradient_checkpointing": True},
    ],
    ids=str,
)
def test_no_rows_are_exchanged_where_a_micro_batch_counts(setting):
    assert exchange_window(trainer(4, 4, **setting)) == 1


def test_prompts_that_differ_in_their_padding_alone_are_different_prompts():
    batches = micro_batches([3, 3, 3, 3], 2)
    for batch in batches:
        batch["prompt_ids"][:] = 257
        batch["prompt_mask"][1] = 1
    assert [batch["row"].tolist() for batch in keep_prompts_together(batches, 2)] == [[0, 2], [1, 3]]


def test_batches_with_images_stay_as_they_are():
    batches = micro_batches([9, 3, 9, 3], 2)
    for batch in batches:
        batch["pixel_values"] = torch.zeros(5, 3)
    assert keep_prompts_together(batches, 2) is batches
