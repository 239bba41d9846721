"""Agreement of processes on a plan: what those that have shards of the same parameters know."""

import hashlib
from collections.abc import Hashable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from collage_fx.runtime.residuals.dtensor import is_sharded

Rows = dict[str, list[float]]
"""Name of a tensor -> as many numbers for each."""


def together(tensors: Mapping[str, Tensor], rows: Rows, *, largest: bool = False) -> Rows:
    """Return numbers on tensors, each the mean over the processes of the mesh that it is on.

    All of these call it, as often; of a tensor that some of them do not have, the mean is that of
    the others. Of one that is no DTensor the numbers are those of this process.

    Args:
        tensors: by name, whole, as an optimizer has them.
        rows: the numbers.
        largest: whether to return the largest ones instead of means.
    """
    found = dict(rows)
    meshes: dict[Hashable, tuple[Any, list[str]]] = {}
    for name, tensor in tensors.items():
        sharded: Any = tensor
        if is_sharded(tensor):
            meshes.setdefault(sharded.device_mesh, (sharded.device_mesh, []))[1].append(name)
    for mesh, names in meshes.values():
        if mesh.get_coordinate() is not None:
            for dim in range(mesh.ndim):
                own = {name: found[name] for name in names if name in found}
                found |= _combined(own, mesh.get_group(dim), mesh.device_type, largest=largest)
    return found


def _combined(own: Rows, group: Any, device: str, *, largest: bool) -> Rows:
    """Return numbers as the processes of a group have them together."""
    key = int(hashlib.sha256("\n".join(own).encode()).hexdigest()[:12], 16)
    keys = torch.tensor([key, -key], dtype=torch.float64, device=device)
    dist.all_reduce(keys, dist.ReduceOp.MAX, group)
    if float(keys[0]) == -float(keys[1]):  # all have the same tensors, as they nearly always do
        values = torch.tensor(list(own.values()), dtype=torch.float64, device=device)
        if values.numel():
            dist.all_reduce(values, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group)
        values = values if largest else values / dist.get_world_size(group)
        return dict(zip(own, values.tolist(), strict=True))
    every: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, own, group)
    names = dict.fromkeys(name for one in every for name in one)
    columns = {n: list(zip(*(one[n] for one in every if n in one), strict=True)) for n in names}
    return {
        n: [max(column) if largest else sum(column) / len(column) for column in found]
        for n, found in columns.items()
    }
