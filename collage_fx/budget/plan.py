"""Plan of a budget: the storage of each state, and the error that is predicted of it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from collage_fx.budget.agreement import means
from collage_fx.budget.error_model import Moves, Way, parameter_error, state_error
from collage_fx.budget.layout import Option, best, bytes_of, storages_for
from collage_fx.budget.prediction import Predicted
from collage_fx.budget.rehearsal import states_to_come
from collage_fx.config import CollageConfig, total_bytes
from collage_fx.optimizer.ownership import PARAM, Owned, owned_tensors, params_of
from collage_fx.optimizer.served import Served
from collage_fx.runtime.errors import BudgetError
from collage_fx.runtime.residuals.dtensor import place_of, shard_of
from collage_fx.runtime.residuals.residual import Residual
from collage_fx.runtime.residuals.store import STORE
from collage_fx.runtime.storage.registry import Initial, kept

_MOMENTS = 2
"""Number of states of a parameter, where that is not known."""


def beginning(config: CollageConfig, optimizer: Optimizer) -> CollageConfig:
    """Return a configuration with the storages in which the states of an optimizer begin.

    Parameters begin in the finest for which there is room beside the states that a step makes, and
    these share the rest, so that next to nothing is lost before there is a plan.
    """
    if config.budget is None:
        return config
    params = [p for p in map(shard_of, params_of(optimizer)) if storages_for(p.dtype)]
    dtypes = {p.dtype for p in params}
    numel = sum(p.numel() for p in params) or 1
    states = states_to_come(optimizer)
    made = params * _MOMENTS if states is None else states
    own = sum(t.nbytes for t in (*params, *made))
    left = per_element(config.budget, numel) * numel - own
    finest = _finest(dtypes, left / numel)
    left -= sum(bytes_of(p.dtype, finest, p.numel()) for p in params)
    held = [t for t in made if storages_for(t.dtype)]
    count = sum(t.numel() for t in held) or 1
    others = _finest({t.dtype for t in held}, left / count)
    return replace(config, storage=Initial((("param", finest), ("*", others))))


def _finest(dtypes: set[torch.dtype], size: float) -> str:
    """Return the finest storage for states of these dtypes of so many bytes for each element."""
    storages = set.intersection(*(set(storages_for(d)) for d in dtypes)) if dtypes else set()
    fitting = [s for s in storages if all(bytes_of(d, s, 2) <= 2 * size for d in dtypes)]
    return min(fitting, key=lambda s: (max(kept(d, s) for d in dtypes), s), default="sr")


def per_element(budget: float | str, numel: float) -> float:
    """Return the bytes of a budget for each element of the parameters."""
    return total_bytes(budget) / numel if isinstance(budget, str) else budget


@dataclass(frozen=True)
class State:
    """A state that may have a residual; numbers are means over the processes that share it."""

    owned: Owned
    residual: Residual | None
    moves: Moves
    numel: float
    factor: float | None
    """Factor of its old value in a step; None if that is not known."""

    @property
    def storage(self) -> str:
        """The storage of now; empty if there is no residual."""
        return "" if self.residual is None else self.residual.storage

    @property
    def size(self) -> int:
        """Bytes of the residual of now."""
        return self.bytes_in(self.storage) if self.storage else 0

    def bytes_in(self, storage: str) -> int:
        """Return the bytes of a residual in a storage."""
        return bytes_of(self.owned.tensor.dtype, storage, self.numel)

    def options(self, way: Way, weight: float) -> list[Option]:
        """Return the storages that it may have, beside a parameter of so many elements."""
        known = storages_for(self.owned.tensor.dtype)
        return [Option(s, self.bytes_in(s), weight * self.error(way, s)) for s in known]

    def error(self, way: Way, storage: str) -> float:
        """Return the mean square of the error that a storage of it makes in its parameter."""
        dtype = self.owned.tensor.dtype
        if self.owned.key == PARAM:
            return parameter_error(way, dtype, storage)
        return state_error(way, self.moves, dtype, storage, self.factor)


@dataclass(frozen=True)
class States:
    """The states of an optimizer, and the bytes that a budget leaves for their residuals."""

    states: list[State]
    room: float
    numel: float
    """The elements of parameters."""

    @property
    def held(self) -> list[State]:
        """The states with residuals."""
        return [s for s in self.states if s.residual is not None]

    def parameters(self) -> dict[int, State]:
        """Return the parameters by their positions."""
        return {s.owned.param: s for s in self.states if s.owned.key == PARAM}

    @property
    def least(self) -> int:
        """The bytes of residuals in their smallest storages."""
        held = [(s, storages_for(s.owned.tensor.dtype)) for s in self.held]
        return sum(state.bytes_in(storages[0]) for state, storages in held)

    @property
    def fit(self) -> bool:
        """True if there are storages for which there are bytes."""
        return self.least <= self.room

    def check(self, budget: float | str, subject: str) -> None:
        """Raise BudgetError if a budget is too small, whatever the storages."""
        if self.fit:
            return
        needed = per_element(budget, self.numel) + (self.least - self.room) / self.numel
        needed = math.ceil(needed * 1000) / 1000
        whole = f" ({needed * self.numel / 2**20:,.2f} MiB)" if isinstance(budget, str) else ""
        raise BudgetError(
            f"budget={budget!r}: {needed:g} bytes for each element of the parameters{whole} is the "
            f"least that works for {subject}: what it and its states take without any residual. "
            "Gradients are no part of it"
        )

    def choose(self, ways: Mapping[int, Way]) -> list[tuple[State, str]]:
        """Return the storages of the least error that there are bytes for.

        Args:
            ways: of the parameters, by position.
        """
        params = self.parameters()
        held = [s for s in self.held if s.owned.param in params]
        listed = [s.options(ways[s.owned.param], params[s.owned.param].numel) for s in held]
        taken = best(listed, self.room)
        return [(s, option.storage) for s, option in zip(held, taken, strict=True)]

    def predicted(self, ways: Mapping[int, Way]) -> list[Predicted]:
        """Return the error that each state makes in all parameters, relative to their ways."""
        params = self.parameters()
        # What is noise in the values that were looked at is no way.
        noises = {i: p.error(ways[i], p.storage) for i, p in params.items() if p.storage}
        lengths = {i: ways[i].length ** 2 for i in params}
        squares = sum(
            p.numel * max(lengths[i] - noises.get(i, 0.0), lengths[i] / 16)
            for i, p in params.items()
        )
        found = []
        for one in self.held:
            if (param := params.get(one.owned.param)) is not None:
                error = param.numel * one.error(ways[one.owned.param], one.storage)
                noise = one.moves.noise(one.owned.tensor.dtype, one.storage)
                relative = math.sqrt(error / squares) if squares else 0.0
                name = one.owned.state_name
                found.append(Predicted(name, one.storage, one.size, relative, noise))
        return found

    def per_element(self, budget: float | str) -> float:
        """Return the bytes of now for each element of the parameters."""
        held = sum(s.size for s in self.held)
        return per_element(budget, self.numel) + (held - self.room) / self.numel


def states_within(
    optimizer: Optimizer,
    budget: float | str,
    moves: Mapping[str, Moves],
    served: Mapping[Any, Served],
    *,
    together: bool,
) -> States:
    """Return the states of an optimizer, and the bytes that a budget leaves for their residuals.

    Args:
        optimizer: whose states they are.
        budget: bytes for each element of the parameters, or of this process.
        moves: of the states, by name.
        served: what reports have of each state, by its place.
        together: whether bytes are means over the processes that share the states, each of which
            calls it.
    """
    every = list(owned_tensors(optimizer))
    rows: list[list[float]] = [[o.tensor.numel(), _bytes(o.tensor)] for o in every]
    rows = means([o.whole for o in every], rows) if together else rows
    states = []
    for o, (numel, _) in zip(every, rows, strict=True):
        residual, one = STORE.get(o.tensor), served.get(o.place)
        if residual is not None or o.key == PARAM:
            factor = None if one is None else one.change.factor
            states.append(State(o, residual, moves.get(o.name, Moves()), numel, factor))
    numel = sum(s.numel for s in states if s.owned.key == PARAM) or 1.0
    own = sum(row[1] for row in rows)
    return States(states, per_element(budget, numel) * numel - own, numel)


def agreed(optimizer: Optimizer, moves: Mapping[str, Moves]) -> dict[str, Moves]:
    """Return moves of states as the processes that share them know them together."""
    every = [o for o in owned_tensors(optimizer) if o.tensor.is_floating_point()]
    rows = [moves.get(o.name, Moves()).listed() for o in every]
    found = zip(every, means([o.whole for o in every], rows), strict=True)
    return {o.name: Moves(*sums) for o, sums in found if sums[0]}


def _bytes(tensor: Tensor) -> int:
    """Return the bytes that count: those of numbers by themselves, such as step counts, do not."""
    return tensor.nbytes if tensor.dim() else 0


def carry_out(chosen: list[tuple[State, str]]) -> None:
    """Convert residuals into the storages chosen for them, those first that become smaller."""
    for state, storage in sorted(chosen, key=lambda one: one[0].bytes_in(one[1]) - one[0].size):
        if state.storage != storage:
            STORE.convert(state.owned.tensor, storage, place_of(state.owned.whole))
