"""Samples of the values of an optimizer's states, by which their moves in a step are known."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from collage_fx.budget.error_model import Moves, sums_of
from collage_fx.optimizer.ownership import PARAM, Owned, owned_tensors
from collage_fx.runtime.residuals.lost_share import elements
from collage_fx.runtime.residuals.residual import Residual
from collage_fx.runtime.residuals.store import STORE
from collage_fx.runtime.storage.registry import value_in_float64

ELEMENTS = 2048
"""Elements of a state in a sample; of a smaller one some come twice."""


class Sample(NamedTuple):
    """Elements of states of one dtype on one device: a row of ELEMENTS values for each, float64."""

    owned: list[Owned]
    values: Tensor


def states_of(optimizer: Optimizer) -> list[tuple[Owned, Residual | None]]:
    """Return the parameters of an optimizer and its states with residuals, with these."""
    found = [(o, STORE.get(o.tensor)) for o in owned_tensors(optimizer)]
    return [
        (o, r if r is not None and r.fits(o.tensor) else None)
        for o, r in found
        if (r is not None or o.key == PARAM) and o.tensor.is_floating_point()
    ]


def samples(states: Iterable[tuple[Owned, Residual | None]]) -> list[Sample]:
    """Return samples of states, by dtype and device; without those that have no elements."""
    kinds: dict[Any, list[tuple[Owned, Residual | None]]] = {}
    for owned, residual in states:
        if owned.tensor.numel():
            kind = owned.tensor.dtype, owned.tensor.device
            kinds.setdefault(kind, []).append((owned, residual))
    return [_sample(members) for members in kinds.values()]


def _sample(members: Sequence[tuple[Owned, Residual | None]]) -> Sample:
    values = torch.stack([_values(owned.tensor, residual) for owned, residual in members])
    return Sample([owned for owned, _ in members], values)


def _values(tensor: Tensor, residual: Residual | None) -> Tensor:
    high = elements(tensor.detach(), ELEMENTS)
    if residual is None:
        return high.double()
    low = [elements(word, ELEMENTS) for word in residual.words(tensor)]
    return value_in_float64(residual.storage, high, low)


def parameters_in(found: Iterable[Sample]) -> list[Sample]:
    """Return samples without the states of the parameters."""
    left = []
    for one in found:
        rows = [i for i, o in enumerate(one.owned) if o.key == PARAM]
        if rows:
            left.append(Sample([one.owned[i] for i in rows], one.values[rows]))
    return left


def moves_between(before: Iterable[Sample], after: Iterable[Sample]) -> dict[str, Moves]:
    """Return the moves of the states that are in both, by name."""
    found: dict[str, Moves] = {}
    old = {o.name: row for one in before for o, row in zip(one.owned, one.values, strict=True)}
    for one in after:
        owned = [o for o in one.owned if o.name in old]
        if not owned:
            continue
        rows = {o.name: i for i, o in enumerate(one.owned)}
        now = one.values[[rows[o.name] for o in owned]]
        then = torch.stack([old[o.name] for o in owned])
        sums = sums_of(then, now, owned[0].tensor.dtype).tolist()
        found |= {o.name: Moves(*row) for o, row in zip(owned, sums, strict=True)}
    return found


def moves_by_last_places(found: Iterable[Sample]) -> dict[str, Moves]:
    """Return by name moves of each state by units in its last place."""
    moves: dict[str, Moves] = {}
    for one in found:
        dtype = one.owned[0].tensor.dtype
        rows = sums_of(one.values, one.values, dtype).tolist()
        moves |= {
            o.name: Moves(*row).by_last_places(dtype)
            for o, row in zip(one.owned, rows, strict=True)
        }
    return moves
