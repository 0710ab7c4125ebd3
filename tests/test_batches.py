"""Shuffled micro-batches whose rows are put back beside those of the same prompt."""

import torch

from trl_openclaw._trl.batches import keep_prompts_together


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


def test_prompts_keep_the_order_of_their_first_rows_and_rows_their_own():
    batches = keep_prompts_together(micro_batches([4, 9, 9, 4, 3, 4], 2))
    assert [batch["row"].tolist() for batch in batches] == [[0, 3], [5, 1], [2, 4]]
    assert [batch["names"] for batch in batches] == [["row 0", "row 3"], ["row 5", "row 1"], ["row 2", "row 4"]]
    assert [batch["prompt_ids"][:, 1].tolist() for batch in batches] == [[4, 4], [4, 9], [9, 3]]
    assert all(batch["num_items_in_batch"] == 17 and batch["old_per_token_logps"] is None for batch in batches)


def test_prompts_that_differ_in_their_padding_alone_are_different_prompts():
    batches = micro_batches([3, 3, 3, 3], 2)
    for batch in batches:
        batch["prompt_ids"][:] = 257
        batch["prompt_mask"][1] = 1
    assert [batch["row"].tolist() for batch in keep_prompts_together(batches)] == [[0, 2], [1, 3]]


def test_batches_with_images_stay_as_they_are():
    batches = micro_batches([9, 3, 9, 3], 2)
    for batch in batches:
        batch["pixel_values"] = torch.zeros(5, 3)
    assert keep_prompts_together(batches) is batches
