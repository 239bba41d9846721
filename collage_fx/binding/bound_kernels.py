"""The kernels of a compiled graph over the tensors of one call, run again for a later one.

A call looks at some thousands of tensors in Python: for residuals that do not belong to their
tensors any more, for the addresses that kernels are given. Compiled code compares all of them with
the last call (`TensorSnapshot`), and fills the tables from which kernels take addresses.
"""

import dataclasses
import weakref
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from collage_fx.binding.launches import Unrepeatable, launches
from collage_fx.compilation.partition import Direct
from collage_fx.compilation.residual_binding import Gathered
from collage_fx.compilation.side_inputs import Observed
from collage_fx.passes.ir.program import LOW_PRECISION, is_tensor, value_of
from collage_fx.runtime.expansion.stochastic import Seeds
from collage_fx.runtime.kernels.tensor_snapshot import Contents, TensorSnapshot
from collage_fx.runtime.residuals.checks import note
from collage_fx.runtime.residuals.residual import Residual, next_draw
from collage_fx.runtime.residuals.store import STORE

_NOWHERE = -1


class BoundKernels:
    """The kernels of a graph, bound to tensors."""

    def __init__(
        self,
        direct: Direct | None,
        seeds: Seeds | None,
        observed: Observed,
        contents: Contents,
        values: Sequence[Any],
        *,
        keeps: bool = True,
    ) -> None:
        """Bind the kernels to what a call has given them.

        Args:
            direct: those of the graph, if it is called without Inductor.
            seeds: what they take of these, if they round by chance.
            observed: what a call has given to its kernels.
            contents: what has to be as it was; memory of the kernels' own is added.
            values: inputs of the graph that are other numbers in each call, here or on a device.
            keeps: whether the tensors are kept alive.

        Raises Unrepeatable.
        """
        self.direct, self.seeds = _repeatable(direct), seeds
        self.memory = memory = self.direct.allocate()
        contents = dataclasses.replace(contents, others=[*contents.others, *memory])
        known = [*contents.guarded, *contents.others]
        self.first = len(known) + len(contents.given)
        """The place of the first address that each call has to be given."""
        places = self._places(observed.inputs, [*known, *contents.given, *values], memory)
        self.rest = [(i, places[i]) for i in self.direct.inputs]
        """The inputs of what Inductor has compiled, and which of all tensors and values each is."""
        calls = self.direct.calls
        taken = {places[n] for call in calls for column in call.operands for n in column}
        self.taken = sorted(place for place in taken if place >= self.first)
        """The addresses from `first` on that kernels take."""
        slots = {place: self.first + k for k, place in enumerate(self.taken)}
        zero = self.first + len(self.taken)  # of one more, which nobody sets
        self.snapshot = TensorSnapshot(contents, len(self.taken) + 1, keeps=keeps)
        ends = (*self.direct.constants, *(n.meta["val"] for n in self.direct.made))
        tensors = [*observed.inputs, *(None for _ in self._devices), *memory, *ends]
        unchecked = {id(t): r.checks for t, r in observed.residuals.current if r.checks}
        at = [slots.get(p, p) for p in places]
        self.launches = launches(calls, at, tensors, self.first, zero, unchecked)
        self.settle = settling(self.snapshot, observed.residuals, unchecked)

    def _places(self, inputs: Sequence[Any], every: list[Any], memory: list[Tensor]) -> list[int]:
        """Return for each number of `Direct` which of all tensors and values it is.

        Seeds and what Inductor's part makes come after the values, and constants are nowhere.
        """
        at = {id(x): k for k, x in reversed(list(enumerate(every))) if isinstance(x, Tensor)}
        numbers = [k for k, x in enumerate(every) if not isinstance(x, Tensor)]
        found, given = [at.get(id(x)) for x in inputs], [every[k] for k in numbers]
        sizes = [i for i, x in enumerate(inputs) if not isinstance(x, Tensor)]
        if given:  # they keep their order; else they are sizes, which no kernel takes
            if [inputs[i] for i in sizes] != given:
                raise Unrepeatable("its numbers are not those that Dynamo has handed over")
            for i, k in zip(sizes, numbers, strict=True):
                found[i] = k
        wanted = {*range(len(inputs))} - {*sizes} | {*self.direct.inputs}
        if any([found[i] is None for i in wanted]):
            raise Unrepeatable("it takes other tensors than parameters, gradients and states")
        seeds = range(len(every), len(every) + len(self._devices))
        made = range(seeds.stop, seeds.stop + len(self.direct.made))
        nowhere = [_NOWHERE] * len(self.direct.constants)
        known = [_NOWHERE if k is None else k for k in found]
        return [*known, *seeds, *[at[id(m)] for m in memory], *nowhere, *made]

    @property
    def _devices(self) -> Sequence[torch.device]:
        """The devices on which the kernels take a seed."""
        return [t.device for t in self.seeds.tensors] if self.seeds is not None else ()

    def _next_draw(self) -> int:
        return next_draw(r for r in STORE.of(self.snapshot.written) if r is not None)

    def fit(self) -> bool:
        """Return True if the kernels can be called for the addresses of now."""
        return self.launches.fit(self.snapshot)

    def run(
        self, given: Sequence[Tensor], values: Sequence[Any], written: Sequence[Tensor]
    ) -> list[Any]:
        """Call the kernels; return the results of the graph.

        Args:
            given: as those of the call that they are bound to.
            values: likewise.
            written: tensors whose versions are counted up.
        """
        direct, made = self.direct, list[Any]()
        seeds = self.seeds.draw(self._next_draw()) if self.seeds is not None else []
        if direct.compiled is not None:
            every = (*self.snapshot.tensors, *given, *values)
            made = direct.make({i: every[k] for i, k in self.rest})
        fresh = (*values, *seeds, *made)
        self.launches.run(self.snapshot, self.first, [fresh[k - self.first] for k in self.taken])
        torch.autograd.graph.increment_version(written)
        self.settle()
        ends = (*direct.constants, *made)
        return [ends[n - direct.first_made + len(direct.constants)] for n in direct.results]


def settling(
    snapshot: TensorSnapshot, known: Gathered, unchecked: Container[int] | None = None
) -> Callable[[], None]:
    """Return a function that settles the residuals of a snapshot's tensors after each step.

    Args:
        snapshot: of these tensors.
        known: the residuals.
        unchecked: the ids of tensors whose checks no kernel notes; None for all.
    """
    kept = [weakref.ref(t) for t, r in known.current if r.kept is not None]
    noted = [
        (r.address, r.checks)
        for t, r in known.current
        if r.checks is not None and (unchecked is None or id(t) in unchecked)
    ]

    def settle() -> None:
        snapshot.settle()
        if noted:
            note(noted)
        for find in kept:
            if (tensor := find()) is not None and (residual := STORE.get(tensor)) is not None:
                residual.keep(tensor)

    return settle


def current_residuals(known: Iterable[Gathered]) -> dict[int, tuple[Tensor, Residual]]:
    """Return the tensors that a call has written with their residuals, by the ids of the tensors.

    Raises Unrepeatable where a later call has to do more with a residual than to take it.
    """
    known = list(known)
    current = {id(t): (t, r) for one in known for t, r in one.current}
    looked_at = [r.expected is not None or r.renewed is not False for _, r in current.values()]
    # A gradient with a residual that is zeroed: who adds to it next finds it zero.
    replaced = [not r.of_gradient for one in known for _, r in one.replaced]
    if any(looked_at) or any(replaced):
        raise Unrepeatable("residuals are dropped, or have to be looked at")
    if any([one.leaves_unnoted for one in known]):
        raise Unrepeatable("it does not note changes that others do")
    return current


def _repeatable(direct: Direct | None) -> Direct:
    """Return the kernels of a graph that writes nothing else, and returns no state."""
    if direct is None or not direct.writes_by_kernels:
        raise Unrepeatable("its graph does more than to call kernels")
    for n in direct.results:
        made = direct.made[n - direct.first_made] if n >= direct.first_made else None
        if n < direct.first_made - len(direct.constants) or _may_be_state(made):
            raise Unrepeatable("it returns tensors that may be states")
    return direct


def _may_be_state(made: Node | None) -> bool:
    """Return True if a value is a tensor of a dtype that states have."""
    return made is not None and is_tensor(made) and value_of(made).dtype in LOW_PRECISION
