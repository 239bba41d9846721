"""Sharded tensors: a state that is a DTensor is, to us, the shard that this process has of it."""

import sys
from typing import Any

from torch import Tensor


def is_sharded(tensor: object) -> bool:
    """Tell whether this is a DTensor."""
    # None is there unless that module was imported, which takes a second.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def shard_of(tensor: Tensor) -> Tensor:
    """Return the shard of a DTensor that this process has, itself; any other tensor as it is."""
    sharded: Any = tensor
    return sharded._local_tensor if is_sharded(tensor) else tensor


def placed(tensor: Tensor) -> str:
    """Say on which mesh and how a DTensor is sharded; empty for another tensor."""
    sharded: Any = tensor
    if not is_sharded(tensor):
        return ""
    return f"sharded by {sharded.placements} over {sharded.device_mesh}"


def sharded_like(shard: Tensor, tensor: Tensor) -> Tensor:
    """Return the DTensor that a shard is of, where tensor is one; else the shard as it is.

    Args:
        shard: of the shape of this process's shard of tensor.
        tensor: what tells mesh, placements and the shape of the whole.
    """
    if not is_sharded(tensor):
        return shard
    like: Any = tensor
    whole: Tensor = type(like).from_local(
        shard,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )
    return whole
