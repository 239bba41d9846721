"""Positions of a tensor's elements in the whole tensor, by which equal elements round apart."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Place(NamedTuple):
    """The place of a shard in the whole tensor."""

    start: int
    """The number of the shard's first element in the whole tensor, counted row by row."""
    strides: tuple[int, ...]
    """Strides of the whole tensor when it is contiguous, in elements."""


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor of a shape; none of them is 0."""
    strides, size = [], 1
    for extent in reversed(shape):
        strides.append(size)
        size *= max(extent, 1)
    return tuple(reversed(strides))


def place_in_order(shape: Sequence[int], place: Place | None) -> int | None:
    """Return the position of the first element if those of a shard follow it one by one, else None.

    Args:
        shape: of the shard.
        place: that of the shard; None for a tensor that is whole.
    """
    if place is None:
        return 0
    own = zip(shape, contiguous_strides(shape), place.strides, strict=True)
    return place.start if all(n == 1 or mine == its for n, mine, its in own) else None


def positions(like: Tensor, place: Place | None = None) -> Tensor:
    """Return the position of each element of a tensor in the whole tensor, modulo 2^32, as int32.

    Args:
        like: the tensor; of a shape without symbols.
        place: its own, if it is a shard.
    """
    start, strides = place or Place(0, contiguous_strides(like.shape))
    found = torch.full((), start, dtype=torch.int64, device=like.device)
    for at, (size, stride) in enumerate(zip(like.shape, strides, strict=True)):
        row = torch.arange(size, dtype=torch.int64, device=like.device) * stride
        found = found + row.view(-1, *(1 for _ in like.shape[at + 1 :]))
    return found.to(torch.int32)
