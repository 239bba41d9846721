"""Agreement of processes on a plan: sums over those that have shards of the same parameters."""

from collections.abc import Hashable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from collage_fx.runtime.residuals.dtensor import is_sharded


def means(tensors: Sequence[Tensor], rows: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return numbers on tensors, each the mean over the processes of the mesh that it is on.

    All of these call it with the same tensors, of which each has its shard; of a tensor that is no
    DTensor the numbers are those of this process.

    Args:
        tensors: whole, as an optimizer has them.
        rows: as many numbers for each.
    """
    found = [list(row) for row in rows]
    meshes: dict[Hashable, tuple[Any, list[int]]] = {}
    for i, tensor in enumerate(tensors):
        sharded: Any = tensor
        if is_sharded(tensor):
            meshes.setdefault(sharded.device_mesh, (sharded.device_mesh, []))[1].append(i)
    for mesh, members in meshes.values():
        if mesh.get_coordinate() is None:
            continue
        own = torch.tensor([found[i] for i in members], dtype=torch.float64)
        sums = own.to(mesh.device_type)
        for dim in range(mesh.ndim):
            dist.all_reduce(sums, group=mesh.get_group(dim))
        for i, row in zip(members, (sums / mesh.size()).tolist(), strict=True):
            found[i] = row
    return found
