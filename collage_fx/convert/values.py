"""Whole values of weights and moments, in each of the formats, and their forms in a storage."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from collage_fx.convert.formats import LISTS, LOW, OURS, Format, checked_master, moments
from collage_fx.convert.structure import SavedOptimizer
from collage_fx.errors import CheckpointError
from collage_fx.optimizer.checkpoints.history import History
from collage_fx.optimizer.checkpoints.reading import ENTRY, read_residuals
from collage_fx.optimizer.checkpoints.saved_residuals import SavedResidual, without_entries
from collage_fx.optimizer.ownership import PARAM
from collage_fx.runtime.residuals.residual import Residual
from collage_fx.runtime.storage.registry import (
    EXPANSIONS,
    check_compensable,
    join_in,
    split_into,
    value_in_float64,
)
from collage_fx.runtime.storage.state_name import StateName

_CHUNK = 1 << 22
"""Number of elements that are compared at once, in float64."""
Place = tuple[int, str]
"""Position of a parameter, and key of its state, or PARAM."""


@dataclass
class Source:
    """The parameters of a saved optimizer, from which values are read one after the other."""

    form: Format
    optimizer: SavedOptimizer
    names: list[str]
    weights: list[Tensor]
    residuals: dict[Place, SavedResidual] = field(default_factory=dict)
    history: History = field(default_factory=History)
    dtypes: dict[str, str] = field(default_factory=dict)
    """Keys of states that are to keep another dtype than their parameter -> that dtype."""
    masters: dict[int, Tensor] = field(default_factory=dict)
    """Position -> fp32 weight, where these are kept beside the state dict."""

    def state(self, index: int) -> dict[Any, Any]:
        """Return the state of a parameter, without our entries."""
        return without_entries(self.optimizer.states.get(self.optimizer.ids[index], {}))

    def weight(self, index: int) -> Tensor:
        """Return the whole value of a parameter, in fp32 or float64."""
        weight, name = self.weights[index], self.names[index]
        if self.form.value is not None:
            state = self.state(index)
            group = self.optimizer.groups[self.optimizer.group_of(index)]
            if self.form.mark in state:
                weight = self.form.value(weight, state[self.form.mark], group, name)
        elif index in self.masters:
            weight = checked_master(weight, self.masters[index], name)
        elif (index, PARAM) in self.residuals:
            weight = self._joined((index, PARAM), weight)
        return weight if weight.dtype == torch.float64 else weight.to(torch.float32)

    def moments(self, index: int) -> dict[str, Tensor]:
        """Return the values of its other states, by key."""
        state, name = self.state(index), self.names[index]
        if self.form is not OURS:
            return moments(state, self.weights[index], name, self.form)
        return {
            key: self._joined((index, key), value) if (index, key) in self.residuals else value
            for key, value in state.items()
            if isinstance(value, Tensor) and value.dim() and value.is_floating_point()
        }

    def _joined(self, place: Place, tensor: Tensor) -> Tensor:
        """Return the value of a tensor and its residual; raises CheckpointError if they differ."""
        saved, param = self.residuals[place], self.weights[place[0]].dtype
        parts = saved.parts(tensor.dtype, param)
        expected = saved.expected(tensor, param)
        if expected is not None and not expected(tensor, *parts):
            name = StateName(None if place[1] == PARAM else place[1], self.names[place[0]])
            raise CheckpointError(
                f"the residual of {name} is not of the value that the checkpoint has of it: "
                "weights and states are of different steps"
            )
        return whole(saved.storage, tensor, parts)

    def stays(self, index: int) -> bool:
        """Return True for an fp32 parameter beside others in 16 bits, which is to stay one."""
        mixed = any(weight.dtype in LOW for weight in self.weights)
        own = (index, PARAM) in self.residuals
        return mixed and self.weights[index].dtype not in LOW and not own


def source_of(
    form: Format, optimizer: SavedOptimizer, names: list[str], tensors: Mapping[str, Tensor]
) -> Source:
    """Return the parameters of an optimizer with what the checkpoint has of them.

    Raises:
        CheckpointError: residuals, or fp32 weights beside the states, that do not fit.
    """
    source = Source(form, optimizer, names, [tensors[name] for name in names])
    for index, name in enumerate(names):
        for tensor in (source.weights[index], *source.state(index).values()):
            _check_plain(tensor, name)
    states = {i: optimizer.states[k] for i, k in enumerate(optimizer.ids) if k in optimizer.states}
    loaded = read_residuals(states, optimizer.groups, source.weights)
    if loaded is not None and loaded.lost:
        raise CheckpointError(
            f"the entry {ENTRY!r} of the parameter groups says that there were residuals, and none "
            "is there: something has left them out"
        )
    if loaded is not None:
        source.residuals, source.history = loaded.residuals, loaded.history
        source.dtypes = loaded.dtypes
    if form in LISTS:
        source.masters = _masters(source)
    return source


def _check_plain(value: Any, name: str) -> None:
    """Raise CheckpointError for a tensor that does not have all of its elements itself."""
    if not isinstance(value, Tensor):
        return
    if type(value) not in (Tensor, nn.Parameter) or value.is_meta or value.layout != torch.strided:
        kind = "meta" if value.is_meta else f"{type(value).__name__}, {value.layout}"
        raise CheckpointError(
            f"the weight or a state of {name} is a tensor of another kind ({kind}): save sharded "
            "parameters by torch.distributed.checkpoint, and others as dense tensors"
        )


def _masters(source: Source) -> dict[int, Tensor]:
    """Return the fp32 weights that stand in lists, one for each group, of its 16-bit parameters."""
    lists = source.optimizer.around[source.form.mark]
    if len(lists) != len(source.optimizer.groups):
        raise CheckpointError(
            f"{source.form.mark} has {len(lists)} lists, and there are "
            f"{len(source.optimizer.groups)} parameter groups"
        )
    found: dict[int, Tensor] = {}
    for number, masters in enumerate(lists):
        low = [
            index
            for index, weight in enumerate(source.weights)
            if source.optimizer.group_of(index) == number and weight.dtype in LOW
        ]
        if len(low) != len(masters):
            raise CheckpointError(
                f"{source.form.mark} has {len(masters)} weights for group {number}, of which "
                f"{len(low)} parameters are in 16 bits"
            )
        found.update(zip(low, masters, strict=True))
    return found


def stored(
    value: Tensor, dtype: torch.dtype, storage: str, name: StateName
) -> tuple[Tensor, Residual]:
    """Return a value as a tensor of a dtype and its residual.

    Raises:
        StorageError: the storage cannot hold a state of that dtype.
    """
    check_compensable(dtype, storage, str(name))
    hi, *lows = split_into(storage, value, dtype)
    residual = Residual(hi, storage, name)
    residual.hold(lows)
    return hi, residual


def whole(storage: str, hi: Tensor, words: Sequence[Tensor]) -> Tensor:
    """Return the value of a tensor and its residual, in fp32 where that holds all of them."""
    if storage in EXPANSIONS or hi.dtype == torch.float32:
        return value_in_float64(storage, hi, words)
    return join_in(torch.float32, storage, hi, *words)


def error(value: Tensor, held: Tensor) -> float:
    """Return the largest relative error of what is held of a value; 0 where it is exact.

    NaNs are equal, and infinities to themselves. Of a value that became infinite it is infinite.
    """
    pairs = zip(*(t.reshape(-1).split(_CHUNK) for t in (value, held)), strict=True)
    return max((_error(v.to(torch.float64), h.to(torch.float64)) for v, h in pairs), default=0.0)


def _error(exact: Tensor, found: Tensor) -> float:
    differs = ~((exact == found) | ((exact != exact) & (found != found)))
    if not bool(differs.any()):
        return 0.0
    off = ((found - exact) / exact)[differs].abs()
    return float(off.nan_to_num(nan=torch.inf).max())
