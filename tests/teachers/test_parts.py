"""Weights in parts: what one process takes of a whole one, and files that are written one weight at a time."""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from trl_openclaw.teachers import parts

TENSORS = {
    "b.half": torch.arange(6, dtype=torch.bfloat16).view(2, 3),
    "a.count": torch.tensor([1, 2, 3]),
    "one": torch.tensor(2.5),
    "none": torch.zeros(0, 4),
    "flags": torch.tensor([True, False, True]),
    "view": torch.arange(12.0).view(3, 4).T,
}


def described(tensors):
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def test_a_file_written_one_by_one_is_one_of_safetensors(tmp_path):
    parts.save_one_by_one(tmp_path / "file", described(TENSORS), TENSORS.__getitem__)
    found = load_file(tmp_path / "file")
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_who_does_not_write_asks_in_the_same_order(tmp_path):
    asked = {path: [] for path in (tmp_path / "file", None)}
    for path, names in asked.items():
        parts.save_one_by_one(path, described(TENSORS), lambda name, names=names: names.append(name) or TENSORS[name])
    assert asked[None] == asked[tmp_path / "file"]
    assert sorted(asked[None]) == sorted(TENSORS)


@pytest.mark.parametrize(("rank", "expected"), [(0, [0, 1, 2]), (1, [3, 4, 0])])
def test_the_last_part_under_zero_3_is_filled_up(monkeypatch, rank, expected):
    monkeypatch.setattr(parts.dist, "get_rank", lambda group: rank)
    monkeypatch.setattr(parts.dist, "get_world_size", lambda group: 2)
    weight = SimpleNamespace(ds_tensor=torch.zeros(3), ds_process_group=None)
    assert parts.take_apart(torch.arange(5.0), weight).tolist() == expected


def test_a_whole_weight_is_its_own_part():
    weight = torch.nn.Parameter(torch.ones(2, 3))
    assert not parts.is_spread(weight)
    assert parts.part_of(weight) is weight
    assert parts.take_apart(weight, weight) is parts.put_together(weight, weight, torch.device("cpu")) is weight
    assert parts.shape_of(weight) == (2, 3)
