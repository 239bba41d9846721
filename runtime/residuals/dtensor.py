"""Sharded tensors: the state of a DTensor is, to us, the shard that this process has of it."""

import operator
import sys
from collections.abc import Hashable, Sequence
from typing import Any, TypeVar

from torch import Tensor
from torch.nn import Module, Parameter

from collage_fx.runtime.storage.positions import Place, contiguous_strides
from collage_fx.runtime.torch_private import _disable_current_modes


def is_sharded(tensor: object) -> bool:
    """Return True if this is a DTensor."""
    # None is there unless that module was imported, which takes a second.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


T = TypeVar("T", Tensor, Tensor | None)
_PLAIN = frozenset({Tensor, Parameter, type(None)})
SHARD, SPEC = "_local_tensor", "_spec"
"""The attributes of a DTensor: the shard of this process, and how the whole is laid out."""


def shard_of(tensor: T) -> T:
    """Return the shard of a DTensor that this process has, itself; any other tensor as it is."""
    if type(tensor) in _PLAIN:  # as nearly always: this is asked for each tensor in each step
        return tensor
    sharded: Any = tensor
    return getattr(sharded, SHARD) if is_sharded(tensor) else tensor


def shards_of(tensors: Sequence[Any]) -> list[Any]:
    """Return `shard_of` of each of these tensors, without a call for each if none is a DTensor."""
    plain = _PLAIN.issuperset(map(type, tensors))
    return list(tensors) if plain else list(map(shard_of, tensors))


def sharding_of(tensor: Tensor) -> Hashable:
    """Return the mesh and the placements of a DTensor; None for any other tensor."""
    sharded: Any = tensor
    return (sharded.device_mesh, sharded.placements) if is_sharded(tensor) else None


def spec_of(tensor: Tensor) -> object:
    """Return the layout of a DTensor, shape and dtype included; None for any other tensor."""
    return getattr(tensor, SPEC) if is_sharded(tensor) else None


def place_of(tensor: Tensor) -> Place | None:
    """Return the place of this process's shard of a DTensor; None for any other tensor."""
    sharded: Any = tensor
    if not is_sharded(tensor):
        return None
    strides = contiguous_strides(tensor.shape)
    with _disable_current_modes():  # it is asked while a graph is compiled, too
        for chunk in sharded.__create_chunk_list__():
            return Place(sum(map(operator.mul, chunk.offsets, strides)), strides)
    return Place(0, strides)  # of a process that has nothing of it


def is_partial(tensor: Tensor) -> bool:
    """Return True if the values of a DTensor are yet to be reduced over the mesh."""
    sharded: Any = tensor
    return is_sharded(tensor) and any(p.is_partial() for p in sharded.placements)


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
    return _whole(shard, like, like.placements, like.shape, like.stride())


def has_whole_rows(tensor: Tensor) -> bool:
    """Return True if this process has nothing or all of each row of a tensor."""
    placements: Any = getattr(tensor, "placements", ()) if is_sharded(tensor) else ()
    return all(map(_keeps_rows, placements))


def rows_like(rows: Tensor, tensor: Tensor) -> Tensor:
    """Return one number for each row of a shard as the DTensor of those of the whole tensor.

    Args:
        rows: of this process's shard of tensor; the same in all processes that have parts of a row.
        tensor: what tells mesh and placements; if it is no DTensor, rows are returned as they are.
    """
    if not is_sharded(tensor):
        return rows
    like: Any = tensor
    copies: Any = sys.modules["torch.distributed.tensor"].Replicate()
    placements = [p if _keeps_rows(p) else copies for p in like.placements]
    shape = like.shape[:1]
    return _whole(rows, like, placements, shape, (1,) * len(shape))


def _keeps_rows(placement: Any) -> bool:
    """Return True if a placement leaves rows whole: it copies, or cuts between them."""
    return bool(getattr(placement, "dim", 0) == 0)


def _whole(shard: Tensor, like: Any, placements: Any, shape: Any, stride: Any) -> Tensor:
    placed = {"run_check": False, "shape": shape, "stride": stride}
    whole: Tensor = type(like).from_local(shard, like.device_mesh, placements, **placed)
    return whole


def fsdp_modules(model: Module) -> list[Any]:
    """Return the modules that `torch.distributed.fsdp.fully_shard` has taken."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return [] if kind is None else [m for m in model.modules() if isinstance(m, kind)]
