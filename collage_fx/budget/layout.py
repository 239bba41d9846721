"""Layouts of states within a budget: those of which the sum of squared errors is least."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from collage_fx.runtime.storage.registry import STORAGES, kept

_OFFERED = ("sr", "ulp4", "ulp8", "remainder16", "mcf2", "mcf3")
_POINTS = 2048
"""Layouts that are kept of the first states, by their bytes, on the way to those of all."""


class Option(NamedTuple):
    """A storage for a state."""

    storage: str
    size: int
    """Bytes of residuals."""
    error: float
    """Square of the error that it makes in the parameters, summed over elements."""


def storages_for(dtype: torch.dtype) -> list[str]:
    """Return the storages that a budget may give a state of a dtype, the smallest first.

    Each keeps more than those before.
    """
    found: list[str] = []
    held = (s for s in _OFFERED if dtype in STORAGES[s].residuals)
    for storage in sorted(held, key=lambda s: (bytes_of(dtype, s, 2), kept(dtype, s))):
        if not found or kept(dtype, storage) < kept(dtype, found[-1]):
            found.append(storage)
    return found


def bytes_of(dtype: torch.dtype, storage: str, numel: float) -> int:
    """Return the bytes of the residuals of so many elements; there may be a part of one more."""
    own = STORAGES[storage].in_memory(dtype)
    (size,) = STORAGES[storage].shape_in_memory((math.ceil(numel),))
    return sum(r.itemsize for r in own) * size


def best(states: Sequence[Sequence[Option]], room: float) -> list[Option]:
    """Return an option for each state, so that the sum of their errors is least.

    Of the layouts of the first states those stay in the list that no smaller one is better than,
    one in each of `_POINTS` intervals of their bytes (the dominance of Nemhauser and Ullmann, 1969,
    cut off): the sum is the least for a room smaller by at most an interval for each state.

    Args:
        states: the options of each.
        room: bytes for all; the smallest options fit into it.
    """
    sizes, errors = torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    least = [min(o.size for o in options) for options in states]
    left, width = sum(least), max(room, 1.0) / _POINTS
    steps: list[tuple[Tensor, Tensor]] = []
    for options, own in zip(states, least, strict=True):
        left -= own
        added = torch.tensor([[o.size, o.error] for o in options], dtype=torch.float64)
        grown = (sizes[:, None] + added[:, 0]).flatten()
        erring = (errors[:, None] + added[:, 1]).flatten()
        kept = _undominated(grown, erring, room - left, width)
        sizes, errors = grown[kept], erring[kept]
        steps.append((kept // len(options), kept % len(options)))
    at, found = len(errors) - 1, []  # the last has the least error
    for options, (before, which) in zip(reversed(states), reversed(steps), strict=True):
        found.append(options[int(which[at])])
        at = int(before[at])
    return found[::-1]


def _undominated(sizes: Tensor, errors: Tensor, room: float, width: float) -> Tensor:
    """Return which layouts fit and err less than all smaller ones, one for each width of bytes.

    In the order of their sizes: the last of an interval errs least in it.
    """
    order = sizes.argsort(stable=True)
    order = order[sizes[order] <= room]
    best_before = errors[order].cummin(0).values
    better = torch.ones_like(order, dtype=torch.bool)
    better[1:] = errors[order][1:] < best_before[:-1]
    order = order[better]
    interval = (sizes[order] / width).floor()
    last = torch.ones_like(order, dtype=torch.bool)
    last[:-1] = interval[1:] != interval[:-1]
    return order[last]
