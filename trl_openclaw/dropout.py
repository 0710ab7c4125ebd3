"""Dropout, also where modules keep its probability as a plain number."""

from torch import nn


def disable_functional_dropout(model: nn.Module) -> None:
    """Set dropout probabilities that modules keep as plain numbers, such as `attention_dropout`, to 0."""
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def largest_dropout(model: nn.Module) -> float:
    """The largest dropout probability in use, of `nn.Dropout` or kept as a plain number."""
    probabilities = [
        value
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, float) and ("drop" in name or (name == "p" and isinstance(module, nn.Dropout)))
    ]
    return max(probabilities, default=0.0)
