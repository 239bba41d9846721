"""Format of residuals in a state dict: further states of the parameter, all of them tensors.

Of `exp_avg` in storage `remainder16` there are, in the state of its parameter,

    collage_fx.exp_avg.remainder16.0      the residual, of the shape of exp_avg (one each component)
    collage_fx.exp_avg.remainder16.rows   checksums of the rows of both, int8
    collage_fx.exp_avg.remainder16.draws  how often it was rounded by chance, if ever

Of one in storage `sr` there is the last alone.

Where exp_avg is a DTensor the first two are, so that torch.distributed.checkpoint saves, loads and
reshards them as it does exp_avg. PyTorch casts states to the dtype of their parameter where nothing
of this package keeps it from that: so integers travel as bits of that dtype where it is as wide,
and otherwise are so small that it holds them exactly.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from collage_fx.errors import CheckpointError
from collage_fx.runtime.residuals.checksum import UNKNOWN, row_checksums, rows_match, total_matches
from collage_fx.runtime.residuals.dtensor import has_whole_rows, rows_like, shard_of, sharded_like
from collage_fx.runtime.residuals.residual import Expected, Residual
from collage_fx.runtime.storage.registry import STORAGES

PREFIX = "collage_fx."
"""Prefix of the keys of our entries in the state of a parameter."""
_ROWS, _DRAWS = "rows", "draws"


@dataclass
class SavedResidual:
    """The residual of one tensor, as a state dict has it."""

    storage: str
    components: dict[int, Tensor] = field(default_factory=dict)
    """Number -> this process's shard as it was saved: integers perhaps as another dtype."""
    rows: Tensor | None = None
    total: int | None = None
    """The checksum of the whole, in checkpoints of format 1."""
    draws: int = 0

    def expected(self, tensor: Tensor, param: torch.dtype) -> Expected | None:
        """Return a predicate of the tensor and the residual: they are as they were saved.

        Args:
            tensor: which gets the residual; the whole of it, where it is sharded.
            param: the dtype of its parameter.
        """
        if self.rows is not None:
            known = has_whole_rows(tensor)
            rows = _from_bits(self.rows, torch.int8, param) if known else _unknown_rows(tensor)
            return functools.partial(rows_match, rows)
        return None if self.total is None else functools.partial(total_matches, self.total)

    def was_cast(self, shape: torch.Size) -> bool:
        """Return True if it may be that of a tensor of this shape which was cast since, and it
        may have been cast with that."""
        known = STORAGES.get(self.storage)
        found = [self.components[n] for n in sorted(self.components)]
        for dtypes in known.residuals.values() if known is not None else ():
            if len(dtypes) == len(found) and all(
                c.shape == shape and (c.is_floating_point() or c.dtype == d)
                for c, d in zip(found, dtypes, strict=True)
            ):
                return True
        return False

    def parts(self, dtype: torch.dtype, param: torch.dtype) -> list[Tensor]:
        """Return the components.

        Args:
            dtype: of the tensor that they are the residual of.
            param: that of its parameter.
        """
        known = STORAGES.get(self.storage)
        dtypes = known.residuals.get(dtype, ()) if known is not None else ()
        found = [self.components[n] for n in sorted(self.components)]
        if len(found) != len(dtypes):
            return found  # which is refused
        return [_from_bits(c, d, param) for c, d in zip(found, dtypes, strict=True)]


def entries_of(
    key: str, tensor: Tensor, residual: Residual, param: torch.dtype
) -> dict[str, Tensor]:
    """Return the entries for the residual of a tensor in the state of its parameter.

    Args:
        key: of the tensor in that state, or ownership.PARAM.
        tensor: the whole of it, where it is sharded.
        residual: of this process's shard of tensor.
        param: the dtype of the parameter.
    """
    name = f"{PREFIX}{key}.{residual.storage}"
    shard = shard_of(tensor)
    words = residual.words(shard)  # of the shape of the tensor, so that they are cut as it is
    found = {
        f"{name}.{n}": sharded_like(_as_bits(word, param), tensor) for n, word in enumerate(words)
    }
    if residual.draws or not words:
        draws = torch.tensor([residual.draws], dtype=torch.int64, device=shard.device)
        found[f"{name}.{_DRAWS}"] = draws.view(param)
    if not words:
        return found
    known = has_whole_rows(tensor)
    rows = row_checksums(shard, *words) if known else _unknown_rows(tensor)
    found[f"{name}.{_ROWS}"] = rows_like(_as_bits(rows, param), tensor)
    return found


def empty_entry(name: str, size: Any, dtype: torch.dtype, like: Tensor | None) -> Tensor:
    """Return the tensor that an entry of a checkpoint is to be loaded into.

    Args:
        name: its key.
        size: of the whole, in the checkpoint.
        dtype: in the checkpoint.
        like: a tensor of the size, and sharded as that whose residual it is; None if there is none.
    """
    part = name.rpartition(".")[2]
    if like is None or part == _DRAWS:
        return torch.zeros(size, dtype=dtype)
    shard = shard_of(like)
    if part == _ROWS:
        return rows_like(torch.zeros(shard.shape[:1], dtype=dtype, device=shard.device), like)
    return sharded_like(torch.zeros_like(shard, dtype=dtype), like)


def without_entries(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the state of a parameter as it is without our entries."""
    return {k: v for k, v in state.items() if not is_entry(k)}


def is_entry(key: object) -> bool:
    """Return True if this is the key of one of our entries."""
    return isinstance(key, str) and key.startswith(PREFIX)


def tensor_of(entry: str) -> str:
    """Return the key of the tensor whose residual an entry is a part of."""
    return entry.removeprefix(PREFIX).rsplit(".", 2)[0]


def names_entry(path: str) -> bool:
    """Return True if a path through state dicts, joined by dots, ends in the key of a residual."""
    _, ours, name = f".{path}".rpartition(f".{PREFIX}")
    parts = name.rsplit(".", 2)
    known = len(parts) == 3 and parts[1] in STORAGES
    return bool(ours) and known and (parts[2] in (_ROWS, _DRAWS) or parts[2].isdecimal())


def read_entries(state: Any, param: torch.dtype) -> dict[str, SavedResidual]:
    """Return the residuals in the state of a parameter, of this dtype, by the keys of tensors.

    Raises CheckpointError for entries that say something else than those above.
    """
    found: dict[str, SavedResidual] = {}
    for name, value in state.items() if isinstance(state, Mapping) else ():
        if is_entry(name):
            try:
                _read_entry(name, value, found, param)
            except (ValueError, RuntimeError, AttributeError) as error:
                raise CheckpointError(
                    f"the checkpoint's entry {name!r} cannot be read: {value!r:.80}"
                ) from error
    return found


def _read_entry(name: str, value: Any, found: dict[str, SavedResidual], param: torch.dtype) -> None:
    key, storage, part = name.removeprefix(PREFIX).rsplit(".", 2)
    residual = found.setdefault(key, SavedResidual(storage))
    if not isinstance(value, Tensor):
        raise ValueError("it is no tensor")
    if residual.storage != storage:
        raise ValueError(f"another residual is there in {residual.storage}")
    shard = shard_of(value)
    if shard.layout != torch.strided or shard.is_meta:
        raise ValueError("it has no data of its own")
    if part == _ROWS:
        residual.rows = shard
    elif part == _DRAWS:
        draws = shard if shard.nbytes == torch.int64.itemsize else _cast_back(shard, param)
        residual.draws = 0 if draws is None else int(draws.view(torch.int64))
    else:
        residual.components[int(part)] = shard
    if residual.draws < 0 or (residual.components and min(residual.components) < 0):
        raise ValueError("it is less than 0")


def _unknown_rows(tensor: Tensor) -> Tensor:
    """Return stand-ins for checksums, where this process has but a part of each row."""
    shard = shard_of(tensor)
    return torch.full(shard.shape[:1], UNKNOWN, dtype=torch.int8, device=shard.device)


def _as_bits(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return integers as the same bits in a floating dtype, if that is as wide; else tensor."""
    as_wide = tensor.itemsize == dtype.itemsize and dtype.is_floating_point
    return tensor.view(dtype) if as_wide and not tensor.is_floating_point() else tensor


def _from_bits(tensor: Tensor, dtype: torch.dtype, param: torch.dtype) -> Tensor:
    """Return the values of before `_as_bits`, perhaps cast since; tensor if that lost some.

    Args:
        param: the dtype that `_as_bits` was given.
    """
    bits = not dtype.is_floating_point and param.is_floating_point
    stored = param if bits and param.itemsize == dtype.itemsize else dtype
    found = _cast_back(tensor, stored)
    return tensor if found is None else found.view(dtype) if found.dtype != dtype else found


def _cast_back(tensor: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Return the values before a cast from dtype; None if they were others."""
    if tensor.dtype == dtype:
        return tensor
    if tensor.dtype == torch.float32 and dtype == torch.bfloat16:
        words = tensor.view(torch.int32)  # which have the bits of a NaN too
        exact = not bool((words & 0xFFFF).any())
        return (words >> 16).to(torch.int16).view(dtype) if exact else None
    found = tensor.to(dtype)
    return found if torch.equal(found.to(tensor.dtype), tensor) else None
