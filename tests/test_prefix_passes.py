"""The cache between two passes."""

import inspect

import torch
from model_zoo import ZOO
from tiny import tiny_llama
from turn_rows import turns_of

from trl_openclaw.prefix_passes import cache_name_of, run_passes
from trl_openclaw.prefix_plan import make_plan


@torch.no_grad()
def test_the_cache_holds_no_row_that_has_ended():
    model = tiny_llama()
    rows = [[*row.prompt_ids, *row.completion_ids] for row in turns_of(1, hints=(4,))]
    plan = make_plan(rows, None, 0)
    ids = torch.tensor([row + [0] * (max(map(len, rows)) - len(row)) for row in rows])
    held = []

    def backbone(**kwargs):
        cache = kwargs[cache_name_of(model.model.forward)]
        held.append(len(cache.layers[0].keys) if cache.get_seq_length() else 0)
        return model.model.forward(**kwargs)

    backbone.__signature__ = inspect.signature(model.model.forward)
    list(run_passes(backbone, ids, plan, model))
    assert held == [len(part.parents) for part in plan.passes]
    assert max(held) < len(rows)
    assert held[-1] == 1  # what is left is the last turn


@torch.no_grad()
def test_a_single_pass_has_no_cache():
    model = ZOO["mistral"]()
    (output,) = run_passes(
        model.model.forward, torch.tensor([[1, 2, 3]] * 2), make_plan([[1, 2, 3]] * 2, None, 0), model
    )
    whole = model.model(input_ids=torch.tensor([[1, 2, 3]]))
    torch.testing.assert_close(output.last_hidden_state, whole.last_hidden_state)
