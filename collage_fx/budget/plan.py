"""Plan of a budget: the storage of each state, and the error that is predicted of it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from collage_fx.budget.agreement import Rows, together
from collage_fx.budget.error_model import Moves, Way, parameter_error, state_error
from collage_fx.budget.layout import Option, best, bytes_of, storages_for
from collage_fx.budget.prediction import Predicted
from collage_fx.budget.rehearsal import states_to_come
from collage_fx.config import CollageConfig, total_bytes
from collage_fx.optimizer.ownership import (
    PARAM,
    Owned,
    owned_parameters,
    owned_tensors,
    params_of,
)
from collage_fx.optimizer.served import Served
from collage_fx.runtime.errors import BudgetError
from collage_fx.runtime.residuals.dtensor import place_of, shard_of
from collage_fx.runtime.residuals.residual import Residual
from collage_fx.runtime.residuals.store import STORE
from collage_fx.runtime.storage.registry import Initial, kept


def beginning(config: CollageConfig, optimizer: Optimizer) -> CollageConfig:
    """Return a configuration with the storages in which the states of an optimizer begin.

    Parameters begin in the finest for which there is room beside the states that a step makes, and
    these share the rest, so that next to nothing is lost before there is a plan. Where it is not
    known what a step makes, the first one may take more than the budget.

    Raises BudgetError for a budget that is known to be too small.
    """
    if config.budget is None:
        return config
    params = [shard_of(p) for p in params_of(optimizer)]
    made = states_to_come(optimizer)
    numel = sum(p.numel() for p in params) or 1
    own = sum(_bytes(t) for t in (*params, *(made or ())))
    left = per_element(config.budget, numel) * numel - own
    if left < 0:
        raise _too_small(config.budget, own, numel, f"the step of {type(optimizer).__name__}")
    finest = _finest(params, left)
    left -= sum(bytes_of(p.dtype, finest, p.numel()) for p in params if storages_for(p.dtype))
    others = "sr" if made is None else _finest(made, left)
    return replace(config, storage=Initial((("param", finest), ("*", others))))


def _finest(tensors: Sequence[Tensor], room: float) -> str:
    """Return the finest storage for all of these tensors that hold residuals, in so many bytes."""
    held = [t for t in tensors if storages_for(t.dtype)]
    dtypes = {t.dtype for t in held}
    storages = set.intersection(*(set(storages_for(d)) for d in dtypes)) if dtypes else set()
    fitting = [s for s in storages if sum(bytes_of(t.dtype, s, t.numel()) for t in held) <= room]
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

    @property
    def over(self) -> bool:
        """True if residuals take more bytes than there are for them."""
        return sum(s.size for s in self.held) > self.room

    def check(self, budget: float | str, subject: str) -> None:
        """Raise BudgetError if a budget is too small, whatever the storages."""
        if not self.fit:
            needed = per_element(budget, self.numel) * self.numel + self.least - self.room
            raise _too_small(budget, needed, self.numel, subject)

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


def _too_small(budget: float | str, least: float, numel: float, subject: str) -> BudgetError:
    """Return the error of a budget that is less than so many bytes for so many elements."""
    needed = math.ceil(1000 * least / numel) / 1000
    whole = f" ({needed * numel / 2**20:,.2f} MiB)" if isinstance(budget, str) else ""
    return BudgetError(
        f"budget={budget!r}: {needed:g} bytes for each element of the parameters{whole} is the "
        f"least that works for {subject}: what it and its states take without any residual. "
        "Gradients are no part of it"
    )


def states_within(
    optimizer: Optimizer,
    budget: float | str,
    moves: Mapping[str, Moves],
    served: Mapping[Any, Served],
    *,
    alone: bool = False,
) -> States:
    """Return the states of an optimizer, and the bytes that a budget leaves for their residuals.

    Bytes are means over the processes that share the states, each of which calls it, and for a
    budget of each process the largest.

    Args:
        optimizer: whose states they are.
        budget: bytes for each element of the parameters, or of this process.
        moves: of the states, by name.
        served: what reports have of each state, by its place.
        alone: whether only this process calls it, which then sees its own bytes.
    """
    every = {o.name: o for o in owned_tensors(optimizer)}
    rows: Rows = {n: [o.tensor.numel(), _bytes(o.tensor)] for n, o in every.items()}
    if not alone:
        wholes = {n: o.whole for n, o in every.items()}
        rows = together(wholes, rows, largest=isinstance(budget, str))
    states = []
    for name, o in every.items():
        residual, one = STORE.get(o.tensor), served.get(o.place)
        if residual is not None or o.key == PARAM:
            factor = None if one is None else one.change.factor
            states.append(State(o, residual, moves.get(name, Moves()), rows[name][0], factor))
    numel = sum(s.numel for s in states if s.owned.key == PARAM) or 1.0
    own = sum(size for _, size in rows.values())
    return States(states, per_element(budget, numel) * numel - own, numel)


def any_over(optimizer: Optimizer, states: States) -> bool:
    """Return True if residuals take too many bytes, to one of the processes that share them."""
    wholes = {o.name: o.whole for o in owned_parameters(optimizer)}
    rows: Rows = {name: [float(states.over)] for name in wholes}
    return any(over for (over,) in together(wholes, rows, largest=True).values())


def agreed(optimizer: Optimizer, moves: Mapping[str, Moves]) -> dict[str, Moves]:
    """Return moves of states as the processes that share them know them together."""
    wholes = {o.name: o.whole for o in owned_tensors(optimizer) if o.name in moves}
    found = together(wholes, {name: moves[name].listed() for name in wholes})
    return {name: Moves(*sums) for name, sums in found.items() if sums[0]}


def _bytes(tensor: Tensor) -> int:
    """Return the bytes that count: those of numbers by themselves, such as step counts, do not."""
    return tensor.nbytes if tensor.dim() else 0


def carry_out(chosen: list[tuple[State, str]]) -> None:
    """Convert residuals into the storages chosen for them, those first that become smaller."""
    for state, storage in sorted(chosen, key=lambda one: one[0].bytes_in(one[1]) - one[0].size):
        if state.storage != storage:
            STORE.convert(state.owned.tensor, storage, place_of(state.owned.whole))
