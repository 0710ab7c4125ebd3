"""Dropout is found and switched off where it is kept as a plain number, too."""

import pytest
from torch import nn

from trl_openclaw.dropout import disable_functional_dropout, largest_dropout


class Attention(nn.Module):
    """Keeps its dropout as a number, as Llama's attention does; `p` and `dropout_name` are no probabilities."""

    def __init__(self, dropout: float):
        super().__init__()
        self.attention_dropout = dropout
        self.p = 0.9
        self.dropout_name = "some"


@pytest.mark.parametrize(
    ("number", "module", "largest"), [(0.3, 0.1, 0.3), (0.1, 0.3, 0.3), (0.0, 0.3, 0.3), (0.3, 0.0, 0.3), (0.0, 0.0, 0)]
)
def test_the_largest_of_modules_and_numbers(number, module, largest):
    assert largest_dropout(nn.Sequential(Attention(number), nn.Dropout(module))) == largest


def test_a_model_without_any():
    assert largest_dropout(nn.Linear(2, 2)) == 0.0


def test_numbers_are_switched_off_and_nothing_else():
    model = nn.Sequential(Attention(0.3), nn.Dropout(0.1))
    disable_functional_dropout(model)
    assert vars(model[0])["attention_dropout"] == 0.0
    assert (model[0].p, model[0].dropout_name, model[1].p) == (0.9, "some", 0.1)
