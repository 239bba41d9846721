"""Graphs of Dynamo's in a recorded step: noted operation by operation once, and then as a whole."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import _pop_mode_temporarily
from torch.utils._pytree import tree_leaves, tree_map_only

from collage_fx.record.at_once import AtOnce
from collage_fx.record.graph_numbers import Floats, GraphNumbers, Tracer, is_readable, own_tensors
from collage_fx.record.notes import Notes, Region
from collage_fx.runtime.residuals.memory import has_memory, new_memory
from collage_fx.segments.memory import storage_key
from collage_fx.segments.operations import OPERATIONS
from collage_fx.segments.segment_graph import same_number
from collage_fx.segments.trie import Layout, Meta, Place, layout_of, meta_of

aten = torch.ops.aten

MOST = 16
"""A graph that does something else in each of so many steps is noted operation by operation."""
_GONE = Region((None, (), (), 0))
"""What a graph makes and gives up."""


@dataclass(eq=False)
class Trace:
    """What operations of a graph do beside what is noted of them."""

    draws: list[tuple[Any, Any, Any]] = field(default_factory=list)
    """Operations that need no data, and are done at once: memory without values, random bits."""
    drawn: list[Tensor] = field(default_factory=list)
    spoiled: bool = False
    """Whether something was done that is to be done again in each step."""
    constants: list[Tensor] = field(default_factory=list)
    """What torch.tensor has made."""
    readable: frozenset[int] = frozenset()
    """The ids of the tensors whose data are read as numbers."""

    def reads(self, func: Any, args: Any) -> bool:
        """Tell whether an operation reads a number that the graph begins with."""
        return func is aten._local_scalar_dense.default and id(args[0]) in self.readable

    def draw(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Note what is done at once, with the looks of its operands in their place."""
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        self.spoiled |= not isinstance(result, Tensor) or not all(map(has_memory, given))
        if not self.spoiled:
            self.draws.append((func, *tree_map_only(Tensor, _Looks.of, (args, kwargs))))
            self.drawn.append(result)


@dataclass(frozen=True)
class _Looks:
    """What a tensor is like."""

    meta: Meta

    @classmethod
    def of(cls, t: Tensor) -> "_Looks":
        return cls(meta_of(t))

    def like(self) -> Tensor:
        return new_memory(*self.meta)


@dataclass
class _Gone:
    """Values that are given up within the graph."""

    count: int = 1


@dataclass(frozen=True)
class _View:
    """A view of a value that is not given up."""

    root: int
    layout: Layout


@dataclass(frozen=True)
class _Drawn:
    """What was done at once, by its position among the draws."""

    at: int


@dataclass(eq=False)
class Effect:
    """What a graph does at a place in the trie, to operands of certain numbers."""

    places: list[Place]
    """Its operations, one by one."""
    draws: list[tuple[Any, Any, Any]]
    floats: Floats
    values: list[Any] = field(default_factory=list)
    """What its values are, in the order of their numbers, which are the same wherever the line
    stands at this place: `_Looks` is what is made, a tensor one of the graph's own."""
    written: list[int] = field(default_factory=list)
    """The numbers of the memory that it writes and has not made."""
    results: list[tuple[str, Any]] = field(default_factory=list)
    """"given", "drawn" or "made" with the position or number of it, a "number" with its node, or a
    "constant"."""
    versions: list[tuple[int, int]] = field(default_factory=list)
    """Arguments, with how often it writes them."""

    def proven_by(self, other: "Effect", numbers: dict[Node, Any]) -> "Effect | None":
        """Return this, if it is what the graph did with these numbers too; else None."""
        expected, found = self.floats.of(numbers), other.floats.of(numbers)
        same = all(map(same_number, expected, found)) and len(expected) == len(found)
        if self.places != other.places or self.results != other.results or not same:
            return None
        self.floats.proven |= self.floats.changed(numbers)
        return self


@dataclass(eq=False)
class _Known:
    """What is known of a graph."""

    numbers: GraphNumbers
    row: int = 0
    """In how many steps in a row it was noted operation by operation."""
    last: int = -1
    """The last of them."""

    def count(self, step: int) -> None:
        """Note that it is noted operation by operation in a step."""
        self.row += step != self.last
        self.last = step


@dataclass(eq=False)
class GraphNotes:
    """Notes graphs of Dynamo's as single lines.

    Such a graph does the same with tensors of the same layouts each time, with other Python
    numbers. How those depend on its arguments is found out when it is noted for the first time, and
    looked at again when one of these has changed for the first time.
    """

    notes: Notes
    at_once: AtOnce
    trace: Trace | None = None
    """Of the graph that is being noted operation by operation."""
    known: dict[GraphModule, _Known] = field(default_factory=dict)
    steps: int = 0
    """How many have begun."""

    def run(self, graph: GraphModule, args: tuple[Any, ...]) -> tuple[Any, int]:
        """Note a graph; return its results, and how many operations it is, noted as a whole."""
        with _pop_mode_temporarily():
            line, numbers = self._line(graph, args)
            place = None if line is None else self.notes.at.next.get(line)
            if place is not None and place.effect.floats.hold(numbers):
                return self._again(place, args, numbers), len(place.effect.places)
        if line is None:
            return graph(*args), 0
        return self._first(line, args, numbers, place)

    def _line(self, graph: GraphModule, args: tuple[Any, ...]) -> tuple[Any, dict[Node, Any]]:
        """Return the line that a graph is, and its numbers.

        The line is None if the graph is to be noted operation by operation. All that its operations
        depend on is in the line, on the way to it in the trie, or a number.
        """
        known = self.known.get(graph)
        if known is None:
            known = self.known[graph] = _Known(GraphNumbers(graph))
        numbers = known.numbers
        if self.trace is not None or known.row >= MOST or not numbers.fit(args):
            return None, {}
        if any(not is_readable(args[i]) or self._waits(args[i]) for i in numbers.read):
            return None, {}
        try:
            given = tuple([self._operand(a) for a in args])
            own = tuple([self._own(t) for t in own_tensors(graph)])
            return (graph, given, own), numbers.of(args)
        except Exception:  # numbers that raise do so where they stand: when the graph is run
            return None, {}

    def _own(self, t: Tensor) -> Any:
        """Return what a tensor of the graph's own is in the notes; None if they do not know it."""
        return self.notes.operand(t) if storage_key(t) in self.notes.regions else None

    def _operand(self, a: Any) -> Any:
        return type(a) if type(a) in (int, float) else self.notes.operand(a)

    def _waits(self, t: Tensor) -> bool:
        region = self.notes.region(t)
        return region is not None and region.pending

    def _first(
        self, line: Any, args: tuple[Any, ...], numbers: dict[Node, Any], place: Place | None
    ) -> tuple[Any, int]:
        """Note the operations of a graph; from now on they are a line at this place.

        Args:
            line: the line.
            args: the arguments of the graph.
            numbers: those of the graph.
            place: where it was noted before, with other numbers: if it does not do the same with
                these, it is no line.
        """
        notes, known, before = self.notes, self.known[line[0]], self.notes.at
        versions = [_version(a) for a in args]
        known.count(self.steps)
        results, effect = self._traced(known.numbers, args, known.numbers.given(numbers))
        if effect is not None and place is not None and place.effect.floats.fixed_are(numbers):
            effect = place.effect.proven_by(effect, numbers)
        if effect is None:
            known.row = MOST
            return results, 0
        changed = [_version(a) - v for a, v in zip(args, versions, strict=True)]
        effect.versions = [(i, n) for i, n in enumerate(changed) if n]
        place = place or Place(line)
        place.effect = effect
        before.next[line] = place
        del notes.path[len(notes.path) - len(effect.places) :]
        notes.path.append(place)
        return results, len(effect.places)

    def _traced(
        self, numbers: GraphNumbers, args: tuple[Any, ...], given: dict[Node, Any]
    ) -> tuple[Any, Effect | None]:
        """Note the operations of a graph; return its results, and its effect, None if unknown."""
        notes, taken = self.notes, self.notes.taken
        start = _Start(len(notes.path), len(notes.region_of))
        trace = self.trace = Trace(readable=frozenset(id(args[i]) for i in numbers.read))
        tracer = Tracer(numbers, notes, trace.constants)
        try:
            results = tracer.run(*args)
        finally:
            self.trace = None
        if trace.spoiled or notes.taken != taken:
            return results, None
        floats = Floats(numbers, tracer.values, given, tracer.fixed)
        return results, _Reader(notes, floats, start, trace).effect(args, results)

    def _again(self, place: Place, args: tuple[Any, ...], numbers: dict[Node, Any]) -> Any:
        """Note a graph as it was noted before; return its results."""
        notes, effect = self.notes, place.effect
        self.known[place.line[0]].row = 0
        notes.path.append(place)
        if effect.places:  # what follows is the same after a line and after its operations
            notes.at = effect.places[-1]
        drawn = []
        for func, given, named in effect.draws:
            given, named = tree_map_only(_Looks, _Looks.like, (given, named))
            drawn.append(self.at_once.born(func, func(*given, **named)))
        made = {}
        for value in effect.values:
            if type(value) is _Gone:
                notes.region_of += [_GONE] * value.count
            elif type(value) is _Looks:
                at = len(notes.region_of)
                made[at] = notes.make(value.meta)
            elif type(value) is _View:
                notes.add_view(notes.region_of[value.root], value.layout)
            else:
                notes.take_input(drawn[value.at] if type(value) is _Drawn else value)
        for at in effect.written:
            notes.region_of[at].pending = True
        notes.floats += effect.floats.of(numbers)
        notes.wait = True
        _count_versions([(args[i], count) for i, count in effect.versions])
        of: dict[str, Any] = {"given": args, "drawn": drawn, "made": made, "number": numbers}
        return tuple([of[kind][at] if kind in of else at for kind, at in effect.results])


def _count_versions(written: list[tuple[Tensor, int]]) -> None:
    """Count versions up, of tensors that may have one counter."""
    wanted = [(t, t._version + count) for t, count in written]
    for t, version in wanted:
        increment_version([t] * (version - t._version))


@dataclass(frozen=True)
class _Start:
    """How much was noted before a graph."""

    path: int
    values: int


class _Reader:
    """Reads off the notes what a graph has done."""

    def __init__(self, notes: Notes, floats: Floats, start: _Start, trace: Trace) -> None:
        self.notes = notes
        self.floats = floats
        self.graph = floats.numbers.graph
        self.start = start
        self.trace = trace
        self.places = notes.path[start.path :]
        self.drawn = {storage_key(t): i for i, t in enumerate(trace.drawn)}

    def effect(self, args: tuple[Any, ...], results: Any) -> Effect | None:
        """Return it; None if it cannot be done again by what the notes have."""
        effect = Effect(self.places, self.trace.draws, self.floats)
        if not isinstance(results, tuple | list):
            return None
        output: Any = self.graph.graph.output_node().args[0]
        for result, node in zip(results, output, strict=True):
            found = self._result(result, node, args)
            if found is None:
                return None
            effect.results.append(found)
        kept = {at for kind, at in effect.results if kind == "made"}
        values = self._values(kept)
        if values is None:
            return None
        effect.values = values
        roots = {self._root(w.at) for place in self.places for w in place.writes}
        own = self._made()
        effect.written = sorted(at for at in roots if at not in own)
        return effect

    def _root(self, at: int) -> int:
        return self.notes.region_of[at].value.at

    def _result(self, t: Any, node: Any, args: tuple[Any, ...]) -> tuple[str, Any] | None:
        """Return what a result is, which stands for itself or for a node of the graph."""
        if not isinstance(node, Node):
            return "constant", t
        if node in self.floats.numbers.nodes:
            return "number", node
        if not isinstance(t, Tensor):
            return None
        for kind, known in (("given", args), ("drawn", self.trace.drawn)):
            for i, one in enumerate(known):
                if one is t:
                    return kind, i
        region = self.notes.region(t)
        if region is None or region.storage is None or region.layout != layout_of(t):
            return None
        new = region.value.at >= self.start.values
        return ("made", region.value.at) if new else None

    def _made(self) -> dict[int, Meta]:
        """Return what the operations make: value -> its looks."""
        found: dict[int, Meta] = {}
        at = self.start.values
        for place in self.places:
            if place.line[0] == "input" or OPERATIONS[place.line[0]].kind == "view":
                at += 1
                continue
            for meta in place.made:
                found[at] = meta
                at += 1
        return found

    def _values(self, kept: set[int]) -> list[Any] | None:
        """Return what the new values are, as `Effect` has it; None if of one that is not known."""
        made, regions = self._made(), self.notes.region_of
        found: list[Any] = []
        for at in range(self.start.values, len(regions)):
            root = self._root(at)
            if root in made and root not in kept:
                if found and type(found[-1]) is _Gone:
                    found[-1].count += 1
                else:
                    found.append(_Gone())
            elif root != at:
                found.append(_View(root, _layout(regions[at], at)))
            elif at in made:
                found.append(_Looks(made[at]))
            else:
                source = self._input(regions[at])
                if source is None:
                    return None
                found.append(source)
        return found

    def _input(self, region: Region) -> Any:
        """Return what a graph reads that is none of its arguments; None if that is not known."""
        key = next(k for k, found in self.notes.regions.items() if region in found)
        if key in self.drawn:
            return _Drawn(self.drawn[key])
        if region.pending and any(storage_key(t) == key for t in self.trace.constants):
            return None  # it is written, and another in each step
        for t in own_tensors(self.graph) + self.trace.constants:
            if storage_key(t) == key and layout_of(t) == region.layout:
                return t
        return None


def _layout(region: Region, at: int) -> Layout:
    return next(layout for layout, value in region.views.items() if value.at == at)


def _version(a: Any) -> int:
    return a._version if isinstance(a, Tensor) and not a.is_inference() else 0
