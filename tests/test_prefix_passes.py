"""The cache between two passes, and where their states are put."""

import inspect
from types import SimpleNamespace

import torch
from tiny import tiny_llama
from turn_rows import turns_of

from trl_openclaw.prefix_passes import cache_name_of, copy_wanted, run_passes
from trl_openclaw.prefix_plan import ENDED, Pass, make_plan


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


def test_a_single_pass_has_no_cache():
    seen = []

    def backbone(input_ids, past_key_values=None, use_cache=None):
        seen.append((input_ids.tolist(), past_key_values, use_cache))
        return SimpleNamespace(last_hidden_state=None)

    list(run_passes(backbone, torch.tensor([[1, 2, 3]] * 2), make_plan([[1, 2, 3]] * 2, None, 0), tiny_llama()))
    assert seen == [([[1, 2, 3]], None, False)]


def test_states_are_put_where_rows_of_the_call_want_them():
    """Rows 2 and 0 of a call, whose completions begin at 3 and 1; the first has ended before the second pass."""
    hidden, starts = torch.zeros(3, 4, 1), torch.tensor([3, 1])
    states = torch.arange(1.0, 9).view(2, 4, 1)
    copy_wanted(hidden, [2, 0], starts, Pass(0, 4, (1, 0), (), (1, 0)), states)
    expected = [[1, 2, 3, 4], [0] * 4, [7, 8, 0, 0]]
    assert hidden.squeeze(-1).tolist() == expected
    copy_wanted(hidden, [2, 0], starts, Pass(4, 6, (1,), (0,), (ENDED, 0)), torch.full((1, 2, 1), 9.0))
    assert hidden.squeeze(-1).tolist() == expected
    copy_wanted(hidden, [2, 0], starts, Pass(4, 6, (0,), (1,), (0, ENDED)), torch.full((1, 2, 1), 9.0))
    assert hidden.squeeze(-1).tolist() == [[1, 2, 3, 4], [0] * 4, [7, 8, 9, 9]]
