"""Statistics of what storing an update in 16 bits loses, of one state or of several together.

Source of the lost share and the Effective Descent Quality (EDQ): Collage, arXiv 2405.03637.
"""

import functools
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from collage_fx.compilation.side_inputs import Look, Observed, looked_at
from collage_fx.diagnosis.stats import UpdateStats
from collage_fx.optimizer.ownership import Owned
from collage_fx.optimizer.state_table import PARAMETER, columns
from collage_fx.passes.codegen.printers.measured_kernel import sums_of
from collage_fx.passes.ir.exact import ExactGraph, ExactStep, Member, NotExact, piece_for
from collage_fx.runtime.kernels.update_sums import TYPES, update_sums
from collage_fx.runtime.residuals.residual import version
from collage_fx.runtime.storage.state_name import StateName
from collage_fx.runtime.torch_private import _disable_current_modes


class GraphUpdates(Look):
    """Updates of an optimizer's states by the graphs of a step, each done again in float64."""

    def __init__(self, states: Sequence[Owned], *, measure: bool = True) -> None:
        """Begin a step.

        Args:
            states: of the optimizer, those that have elements.
            measure: whether graphs are done again; if not, it is only seen whether they show all.
        """
        self.states = {_place(o.tensor): o for o in states}
        self.versions = {o.state_name: version(o.tensor) for o in self.states.values()}
        self.measure = measure
        self.found: dict[StateName, UpdateStats] = {}
        """Name of a state -> its statistics, of those that a graph has updated."""
        self.missed: set[StateName] = set()
        """Names of states that were written in another way too, or by several graphs."""
        self.problem = ""
        """Reason why a graph could not be done again."""
        self._call: ExactStep | None = None
        self._taken: dict[StateName, UpdateStats] = {}
        """Name of a state -> its statistics in the graph that is being called."""

    @property
    def complete(self) -> bool:
        """True if graphs have shown all that was written to the states, and something was."""
        return bool(self.found) and not self.missed

    @property
    def unchanged(self) -> bool:
        """True if no state was written."""
        return not self.found and not self.missed

    def run(self, step: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Do a step, and look at its graphs."""
        with looked_at(self):
            result = step(*args, **kwargs)
        self.enter(())  # what was written after the last graph
        return result

    def enter(self, args: tuple[Any, ...]) -> None:
        """Note the states that were written since the last graph."""
        self.missed |= self._written()

    @_disable_current_modes()
    def take(self, exact: ExactGraph | None, observed: Observed) -> None:
        """Look at the inputs of a graph; copy those that it overwrites."""
        if exact is None:
            return
        gathered = observed.residuals
        residuals = [(r.storage, r.components) for _, r in (*gathered.current, *gathered.read)]
        count = len(observed.inputs) - len(observed.residuals.inputs)
        inputs = observed.inputs[:count]
        try:
            if self.measure:
                self._call = exact.begin(inputs, residuals)
            else:
                self._see(dict.fromkeys(map(_place, exact.updated(inputs)), UpdateStats()))
        except Exception as error:  # memory for copies, say: no reason to end a training
            self._note(error)

    @_disable_current_modes()
    def leave(self) -> None:
        """Note the updates of the graph, done again."""
        found: dict[Any, UpdateStats] = {}
        try:
            for members in self._call.classes() if self._call is not None else ():
                for state, stats in _stats_of_members(members):
                    if (place := _place(state)) in self.states:
                        found[place] = found.get(place, UpdateStats()) + stats
            self._see(found)
        except Exception as error:  # the step is done, and is to be finished
            self._note(error)
        self.missed |= (self._written() - self._taken.keys()) | (self.found.keys() & self._taken)
        self.found |= self._taken
        self._call, self._taken = None, {}

    def _see(self, found: dict[Any, UpdateStats]) -> None:
        states = self.states
        self._taken |= {states[at].state_name: s for at, s in found.items() if at in states}

    def _written(self) -> set[StateName]:
        now = {o.state_name: version(o.tensor) for o in self.states.values()}
        before, self.versions = self.versions, now
        return {name for name, number in now.items() if number != before[name]}

    def _note(self, error: Exception) -> None:
        name = "" if isinstance(error, NotExact) else f"{type(error).__name__}: "
        self.problem = f"a graph cannot be done again in float64: {name}{error}"


def _place(tensor: Tensor) -> Hashable:
    """Return a key of a state; a shard may be another object each time."""
    return tensor.data_ptr(), tensor.numel(), tensor.dtype


def _stats_of_members(members: list[Member]) -> Iterator[tuple[Tensor, UpdateStats]]:
    """Yield the 16-bit states of members, each with statistics of some of its elements or all."""
    for member, sums in zip(members, sums_of(members, 2.0**_LEAST), strict=True):
        if sums is None:
            yield from ((state, stats_of(*tensors)) for state, *tensors in member.updates())
        else:
            states = [words.high for words in member.new]
            yield from (
                (t, _of_compiled(one, t.dtype)) for t, one in zip(states, sums, strict=True)
            )


def _of_compiled(sums: list[float], dtype: torch.dtype) -> UpdateStats:
    """Return the statistics of compiled sums, in which logarithms are in units of first places."""
    sums[6] -= sums[0] * math.log2(torch.finfo(dtype).eps)
    return UpdateStats(*sums)


def stats_of(high: Tensor, whole: Tensor, now: Tensor, after: Tensor, exact: Tensor) -> UpdateStats:
    """Return the statistics of a state.

    Args:
        high: the state before the step, in its dtype.
        whole: its value with the residual then, float64.
        now: the state after the step, in its dtype.
        after: its value with the residual then, float64.
        exact: what that should be, float64.
    """
    states = [t.reshape(-1) for t in (high, whole, now, after, exact)]
    size = piece_for(high.device)
    if high.numel() <= size:
        return _stats_of_piece(*states)
    pieces = zip(*(t.split(size) for t in states), strict=True)
    return sum((_stats_of_piece(*piece) for piece in pieces), start=UpdateStats())


def _stats_of_piece(*states: Tensor) -> UpdateStats:
    high = states[0]
    if high.dtype in TYPES and high.is_cpu:
        # In one pass, which takes a third of the time of PyTorch's thirty.
        compiled = update_sums(states, 2.0**_LEAST)
        if compiled is not None:
            return _of_compiled(compiled, high.dtype)
    found = _sums(*states).tolist()
    if all(map(math.isfinite, found)):
        return UpdateStats(*found)
    finite = functools.reduce(torch.logical_and, (t.double().isfinite() for t in states))
    infinities = int((~states[2].double().isfinite()).sum())
    return UpdateStats(*[*_sums(*(t[finite] for t in states)).tolist(), infinities])


def _sums(high: Tensor, whole: Tensor, now: Tensor, after: Tensor, exact: Tensor) -> Tensor:
    """Return the fields of UpdateStats, but for infinities, as a vector in float64.

    Where there are some, the sums are not finite.
    """
    before = high.double()
    update, stored = exact - whole, after - whole
    rounded = (before + update).to(high.dtype).double().sub_(before)
    residual = now.double().sub_(after)
    count = update.count_nonzero()
    zeros = update.numel() - count
    least = _LEAST - math.log2(torch.finfo(high.dtype).eps)
    found = (
        count,
        # What is not zero is counted faster than what is equal.
        count - rounded.count_nonzero(),
        count - (update * stored).count_nonzero(),
        update.dot(update),
        update.dot(rounded),
        update.dot(stored),
        _log2_of_ulps(update, high) - zeros * least,
        residual.dot(residual),
        (stored - update).square().sum(),
    )
    return torch.stack([one.double() for one in found])


_LEAST = -126
"""Binary logarithm of the smallest update that is told from zero, beside the first place."""


def _log2_of_ulps(update: Tensor, high: Tensor) -> Tensor:
    """Return the sum of the logarithms of updates in units of the last place of their high words.

    For an update of zero it has that of the smallest one.
    """
    limits = torch.finfo(high.dtype)
    # Without its mantissa a number is the place of its first bit; below the normal ones that stays.
    bits = high.float().abs_().clamp_(min=limits.smallest_normal).view(torch.int32)
    first = bits.bitwise_and_(0x7F800000).view(torch.float32)
    shares = update.float().abs_().div_(first).clamp_(min=2.0**_LEAST)
    return shares.log2_().sum().double() - update.numel() * math.log2(limits.eps)


@dataclass
class Measurement:
    """Statistics of one step, for each state."""

    step: int
    """Number of the step among those that the monitor has seen, from 1."""
    found: dict[StateName, UpdateStats]

    @property
    def states(self) -> dict[str, UpdateStats]:
        """The statistics by name, such as `exp_avg_sq of layers.0.weight`."""
        return {str(name): stats for name, stats in self.found.items()}

    def kinds(self) -> dict[str, UpdateStats]:
        """Return the statistics of all states of a kind together: `parameter`, `exp_avg`."""
        return self._together(lambda kind, param: kind)

    def layers(self) -> dict[str, UpdateStats]:
        """Return statistics by layer, of its parameters together: of `h.0.weight` that is `h.0`."""
        return self._together(
            lambda kind, param: (param.rpartition(".")[0] or param) if kind == PARAMETER else None
        )

    def __getitem__(self, part: str) -> Any:
        """Return `kinds`, `layers`, `states` or `step` of `to_dict`."""
        return self.to_dict()[part]

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as JSON can hold it."""
        parts = {"kinds": self.kinds(), "layers": self.layers(), "states": self.states}
        shown = {k: {n: s.to_dict() for n, s in part.items()} for k, part in parts.items()}
        return {"step": self.step, **shown}

    def scalars(self) -> dict[str, float]:
        """Return scalars for a log by kind and layer, as `collage/parameter/lost`."""
        parts = {**self.kinds(), **{f"layer/{n}": s for n, s in self.layers().items()}}
        named = ((n, s.to_dict()) for n, s in parts.items())
        return {f"collage/{n}/{key}": x for n, found in named for key, x in found.items()}

    def _together(self, key: Callable[[str, str], str | None]) -> dict[str, UpdateStats]:
        found: dict[str, UpdateStats] = {}
        for name, stats in self.found.items():
            if (into := key(*columns(name))) is not None:
                found[into] = found.get(into, UpdateStats()) + stats
        return found
