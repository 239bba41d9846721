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

    dtype: torch.dtype
    names: list[str]
    is_param: list[bool]
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
    return [_sample(dtype, members) for (dtype, _), members in kinds.items()]


def _sample(dtype: torch.dtype, members: Sequence[tuple[Owned, Residual | None]]) -> Sample:
    # Without the tensors, which it would keep alive.
    names = [owned.name for owned, _ in members]
    is_param = [owned.key == PARAM for owned, _ in members]
    values = torch.stack([_values(owned.tensor, residual) for owned, residual in members])
    return Sample(dtype, names, is_param, values)


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
        rows = [i for i, is_param in enumerate(one.is_param) if is_param]
        if rows:
            names = [one.names[i] for i in rows]
            left.append(Sample(one.dtype, names, [True] * len(rows), one.values[rows]))
    return left


def moves_between(before: Iterable[Sample], after: Iterable[Sample]) -> dict[str, Moves]:
    """Return the moves of the states that are in both, by name."""
    found: dict[str, Moves] = {}
    old = {name: row for one in before for name, row in zip(one.names, one.values, strict=True)}
    for one in after:
        rows = {name: i for i, name in enumerate(one.names) if name in old}
        if rows:
            then = torch.stack([old[name] for name in rows])
            sums = sums_of(then, one.values[list(rows.values())], one.dtype).tolist()
            found |= {name: Moves(*row) for name, row in zip(rows, sums, strict=True)}
    return found


def moves_by_last_places(found: Iterable[Sample]) -> dict[str, Moves]:
    """Return by name moves of each state by units in its last place."""
    moves: dict[str, Moves] = {}
    for one in found:
        rows = sums_of(one.values, one.values, one.dtype).tolist()
        pairs = zip(one.names, rows, strict=True)
        moves |= {name: Moves(*row).by_last_places(one.dtype) for name, row in pairs}
    return moves
