"""A Dynamo graph bound to the tensors of one call, to repeat a step.

Dynamo guards what a step of arbitrary Python may read. Behind its guards the arguments of the
graph, and the tensors that are attributes of it, are all that a call depends on.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from collage_fx.binding.bound_kernels import BoundKernels, current_residuals, settling
from collage_fx.binding.launches import Unrepeatable
from collage_fx.binding.read_gradients import Pairs, ReadGradients, components_of
from collage_fx.compilation.layout_guards import guards_of, is_plain
from collage_fx.compilation.residual_binding import Gathered
from collage_fx.compilation.side_inputs import Code, Observed
from collage_fx.passes.ir.program import StatePlan
from collage_fx.runtime.kernels.tensor_snapshot import Contents, TensorSnapshot
from collage_fx.runtime.residuals.residual import Residual, keep_versions, memory_of
from collage_fx.runtime.residuals.store import STORE


class BoundGraph:
    """A compiled graph, for calls with the states that one call had, and with any gradients.

    It keeps none of these tensors alive: the arguments of a function may be of no use to others.
    """

    def __init__(
        self,
        graph: Any,
        code: Code,
        args: tuple[Any, ...],
        observed: Sequence[Observed],
        attributes: Sequence[Tensor],
        counted_up: Sequence[Tensor],
    ) -> None:
        """Bind the graph to what a call has given it.

        Args:
            graph: what Dynamo calls.
            code: what it was compiled to.
            args: those of the call.
            observed: what the kernels were given, of each part that compensates.
            attributes: the tensors of the graph that are no arguments.
            counted_up: the tensors whose versions the call has counted up.

        Raises Unrepeatable, or whatever compiling the comparison raises.
        """
        self.graph, self.code, self.generation = graph, code, STORE.generation
        known = [call.residuals for call in code.begin(args)]  # of each part, in their order
        written = code.written(args)
        self._written = [(weakref.ref(t), plan) for t, plan in written]
        fixed = [*attributes, *counted_up, *(t for t, _ in written)]
        reads, places = [find(args) for find, _ in code.reads], {*map(id, args)}
        fixed += [t for t in reads if t is not None and id(t) not in places]
        read = [pair for one in known for pair in one.read]
        taken = {*map(id, fixed)}
        states = [t for t, r in read if not r.of_gradient or id(t) in taken]
        gradients = [(t, r) for t, r in read if r.of_gradient and id(t) not in taken]
        fixed += states
        contents, residuals = _contents(args, known, fixed, components_of(gradients))
        self.given = [i for i in contents.given_arguments if i < len(args)]
        given = contents.given[: len(self.given)]
        looks = bool(code.reads or code.high)
        self.gradients = ReadGradients(gradients, given, looks=looks)
        at = {id(t): k for k, t in enumerate(contents.guarded)}
        self.read = [at[id(t)] for t in states]
        """Positions in the snapshot of what it only reads, and others write between its calls."""
        self.runs: _Kernels | Calls
        try:
            if code.parts:
                raise Unrepeatable("it is compiled in parts")
            changed = [at[id(t)] for t in counted_up]
            self.runs = _Kernels(code, observed[0], contents, changed)
        except Unrepeatable:
            self.runs = Calls(code, known, contents, gradients, keeps=False)
        self.snapshot = self.runs.snapshot
        keep_versions(residuals, self.snapshot.versions)

    def run(self, args: tuple[Any, ...]) -> Any:
        """Run the graph; return its results, or None, with nothing done, if it cannot."""
        if self.generation != STORE.generation:
            return None
        found = self.gradients.find([args[i] for i in self.given])
        if found is None:
            return None
        try:
            holds = self.snapshot.holds((*args, *components_of(found))) and self._belong()
            return self.runs.run(args, found) if holds else None
        finally:
            self.snapshot.let_go()

    @property
    def written(self) -> list[tuple[Tensor, StatePlan]]:
        """The states of 16 bits that it writes, with the verdicts."""
        return [(t, plan) for find, plan in self._written if (t := find()) is not None]

    def _belong(self) -> bool:
        """Return True if the residuals of the states that it only reads are of their values."""
        states = [self.snapshot.tensors[k] for k in self.read]
        pairs = zip(states, STORE.of(states), strict=True)
        return all([r is not None and r.expected is None and r.belongs(t) for t, r in pairs])


class _Kernels:
    """A graph that is done by its kernels and what Inductor has compiled for these."""

    def __init__(
        self, code: Code, observed: Observed, contents: Contents, counted_up: Sequence[int]
    ) -> None:
        args, side = observed.args, code.side
        self.members = side.members if side is not None else None
        chosen = range(len(args)) if self.members is None else self.members.narrow.inputs
        known = {*contents.arguments, *contents.given_arguments}
        self.values = [i for i in chosen if i not in known]
        self.given, self.counted_up = contents.given_arguments, counted_up
        values = [args[i] for i in self.values]
        self.kinds = list(map(_kind, values))
        seeds, direct = code.new_seeds(), code.direct
        self.bound = BoundKernels(direct, seeds, observed, contents, values, keeps=False)
        self.snapshot = self.bound.snapshot

    def run(self, args: tuple[Any, ...], gradients: Pairs) -> tuple[Any, ...] | None:
        values = [args[i] for i in self.values]
        if not self.bound.fit() or list(map(_kind, values)) != self.kinds:
            return None
        every = (*args, *components_of(gradients))
        written = [self.snapshot.tensors[k] for k in self.counted_up]
        results = self.bound.run([every[i] for i in self.given], values, written)
        return tuple(results) if self.members is None else self.members.results(results, args)


@dataclass
class _Known(Gathered):
    """The residuals of an earlier call; the versions of all their tensors are noted at once."""

    note: Callable[[], None] = field(kw_only=True)

    def keep(self) -> None:
        self.note()


class Calls:
    """A graph that is called as in full, with the residuals of an earlier call."""

    def __init__(
        self,
        code: Code,
        known: Sequence[Gathered],
        contents: Contents,
        gradients: Pairs,
        *,
        keeps: bool = True,
    ) -> None:
        """Take up the residuals of an earlier call.

        Args:
            code: the graph.
            known: the residuals of each part of it, as `code.begin` finds them.
            contents: what has to be as it was.
            gradients: those of them that are found anew at each call, see `ReadGradients`.
            keeps: whether the tensors are kept alive.
        """
        self.code, self.snapshot = code, TensorSnapshot(contents, keeps=keeps)
        tensors = [*contents.guarded, *[t for t, _ in gradients]]
        at = {id(t): k for k, t in enumerate(tensors)}
        self.parts = [
            (
                [at[id(t)] for t, _ in one.current],
                [at[id(t)] for t, _ in one.read],
                one.bits,
                settling(self.snapshot, one),
            )
            for one in known
        ]
        """Positions of what each part writes and of what it reads, in the snapshot and behind that
        among the gradients; bits of changes; and the function that settles its residuals."""
        self.count = len(contents.guarded)

    def run(self, args: tuple[Any, ...], gradients: Pairs) -> Any:
        """Call the graph, for gradients with these residuals; return its results."""
        tensors = self.snapshot.tensors[: self.count]
        pairs: list[Any] = [*zip(tensors, STORE.of(tensors), strict=True), *gradients]
        known = [
            _Known([pairs[k] for k in current], [], [pairs[k] for k in read], bits, note=note)
            for current, read, bits, note in self.parts
        ]
        return self.code.call(args, self.code.begin(args, known))


def _contents(
    args: tuple[Any, ...],
    known: Sequence[Gathered],
    fixed: Sequence[Tensor],
    memory: Sequence[Tensor],
) -> tuple[Contents, list[Residual]]:
    """Return the contents that have to be unchanged, and the residuals of the written tensors.

    Args:
        args: those of the graph.
        known: the residuals of each part.
        fixed: the tensors that no others may take the place of.
        memory: tensors that each call is given behind the arguments.
    """
    args = (*args, *memory)
    current = current_residuals(known)
    written, residuals = [t for t, _ in current.values()], [r for _, r in current.values()]
    taken = {*map(id, fixed)}
    read = [r for one in known for t, r in one.read if id(t) in taken]
    guarded = list({id(t): t for t in (*fixed, *written)}.values())
    place = {id(x): i for i, x in reversed(list(enumerate(args)))}
    taken = {id(t) for t in guarded}
    given = [i for i, x in enumerate(args) if id(x) not in taken and not _is_number(x)]
    present = [args[i] for i in given]
    if not all(map(is_plain, [*guarded, *present])) or any(t.is_inference() for t in guarded):
        raise Unrepeatable("there are tensors of classes with code of their own, or no versions")
    contents = Contents(
        guarded=guarded,
        others=memory_of([*residuals, *read]),
        written=written,
        given=present,
        arguments=[place.get(id(t), -1) for t in guarded],
        given_arguments=given,
        alike=guards_of([*guarded, *present]).check,
    )
    return contents, residuals


def _is_number(value: Any) -> bool:
    """Return True if an argument is a number of the host: floats that change come as tensors."""
    return not isinstance(value, Tensor) or (value.dim() == 0 and value.is_cpu)


def _kind(value: Any) -> torch.dtype | type:
    return value.dtype if isinstance(value, Tensor) else type(value)
