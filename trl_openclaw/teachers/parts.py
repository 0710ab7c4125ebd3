"""Weights that an engine spreads over processes, part by part: FSDP2 (PyTorch's `DTensor`) and DeepSpeed's ZeRO-3.

Two models that are spread alike hold parts of the same elements, so one can follow the other without any process
seeing a whole weight. What belongs to files is put together one weight at a time.
"""

import json
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor


def is_spread(tensor: torch.Tensor) -> bool:
    """Whether this process holds but a part of a weight."""
    return isinstance(tensor, DTensor) or hasattr(tensor, "ds_tensor")


def part_of(tensor: Any) -> torch.Tensor:
    """What this process holds of a weight, to be read and written in place; all of it where nothing is spread."""
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    return getattr(tensor, "ds_tensor", tensor)


def shape_of(tensor: Any) -> tuple[int, ...]:
    """The shape of the whole weight."""
    return tuple(getattr(tensor, "ds_shape", tensor.shape))


def put_together(tensor: Any, part: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A whole weight out of the processes' parts. A collective.

    Args:
        tensor: The weight, which says how it is spread.
        part: What this process holds of it, or of a tensor that is spread like it.
        device: Where processes talk to each other from.
    """
    if isinstance(tensor, DTensor):
        mesh, shape, stride = tensor.device_mesh, tensor.shape, tensor.stride()
        spread = DTensor.from_local(part.to(device), mesh, tensor.placements, shape=shape, stride=stride)
        return spread.full_tensor()
    if not is_spread(tensor):
        return part
    group, part = tensor.ds_process_group, part.to(device)
    world = dist.get_world_size(group)
    padded = part.new_empty(part.numel() * world)
    dist.all_gather(list(padded.chunk(world)), part.contiguous(), group)
    return padded[: tensor.ds_numel].view(tensor.ds_shape)


def take_apart(whole: torch.Tensor, tensor: Any) -> torch.Tensor:
    """The part that this process holds of a whole weight. Asks no other process.

    Args:
        whole: The weight.
        tensor: What says how it is spread.
    """
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        return distribute_tensor(whole.to(mesh.device_type), mesh, tensor.placements, src_data_rank=None).to_local()
    if not is_spread(tensor):
        return whole
    size, rank = tensor.ds_tensor.numel(), dist.get_rank(tensor.ds_process_group)
    padded = whole.new_zeros(size * dist.get_world_size(tensor.ds_process_group))
    padded[: whole.numel()] = whole.flatten()
    return padded[rank * size : (rank + 1) * size]


def only_parts(model: nn.Module) -> None:
    """Drop the whole weights that FSDP2 keeps in a model between passes, so that its parameters are parts."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def part_changed(tensor: Any) -> None:
    """Drop the whole weight that ZeRO-3 may keep beside a part, so that the next pass asks for the new parts."""
    if hasattr(tensor, "ds_tensor"):
        tensor.partition()


def save_one_by_one(
    path: Path | None,
    described: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    tensor_of: Callable[[str], torch.Tensor],
) -> None:
    """Write a safetensors file with one tensor in memory at a time; safetensors itself wants all of them.

    Args:
        path: The file; `None` where another process writes, which this one only helps to put tensors together.
        described: The dtype and the shape of each tensor.
        tensor_of: The tensor of a name. Asked in the same order by all processes.
    """
    # Larger elements first: each tensor then begins at a multiple of its element's size.
    names = sorted(described, key=lambda name: (-described[name][0].itemsize, name))
    header: dict[str, Any] = {}
    end = 0
    for name in names:
        dtype, shape = described[name]
        start, end = end, end + dtype.itemsize * torch.Size(shape).numel()
        header[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") if path else nullcontext() as file:
        if file:
            file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            tensor = tensor_of(name)
            if file:
                file.write(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)


DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""What safetensors calls the dtypes of weights and buffers."""
