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
from collage_fx.record.graph_numbers import Floats, GraphNumbers, Tracer, is_readable
from collage_fx.record.notes import CannotNote, Notes, Region
from collage_fx.runtime.residuals.memory import has_memory, new_memory
from collage_fx.segments.memory import storage_key
from collage_fx.segments.operations import OPERATIONS
from collage_fx.segments.segment_graph import same_number
from collage_fx.segments.trie import Constant, Layout, Meta, Place, layout_of, meta_of

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


@dataclass(eq=False)
class Effect:
    """What a graph does at a place in the trie, to operands of certain numbers."""

    places: list[Place]
    """Its operations, one by one."""
    draws: list[tuple[Any, Any, Any]]
    floats: Floats
    values: list[Any] = field(default_factory=list)
    """What its values are, in the order of their numbers: how many are given up; the root and the
    layout of a view; the looks of what is made; what was drawn, by its position; a tensor of the
    graph's own."""
    written: list[int] = field(default_factory=list)
    """The numbers of the memory that it writes and has not made."""
    results: list[tuple[str, Any]] = field(default_factory=list)
    """"given", "drawn" or "made" with the position or number of it, a "number" with its node, or a
    "constant"."""
    versions: list[tuple[int, int]] = field(default_factory=list)
    """Arguments, with how often it writes them."""

    def proven_by(self, other: "Effect", args: tuple[Any, ...]) -> "Effect | None":
        """Return this, if it is what the graph did with these arguments too; else None."""
        numbers = self.floats.numbers.of(args)
        expected, found = self.floats.of(numbers), other.floats.of(numbers)
        same = all(map(same_number, expected, found)) and len(expected) == len(found)
        if self.places != other.places or self.results != other.results or not same:
            return None
        self.floats.proven |= self.floats.changed(args)
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
            line = self._line(graph, args)
            place = None if line is None else self.notes.at.next.get(line)
            changed = place.effect.floats.changed(args) if place is not None else set()
            if place is not None and changed <= place.effect.floats.proven:
                return self._again(place, args), len(place.effect.places)
        if line is None:
            return graph(*args), 0
        return self._first(line, args, place.effect if place is not None else None)

    def _line(self, graph: GraphModule, args: tuple[Any, ...]) -> Any:
        """Return the line that a graph is; None if it is to be noted operation by operation."""
        known = self.known.get(graph)
        if known is None:
            known = self.known[graph] = _Known(GraphNumbers(graph))
        numbers = known.numbers
        if self.trace is not None or known.row >= MOST:
            return None
        if not numbers.known or not all(isinstance(a, Tensor | int | float | None) for a in args):
            return None
        if any(not is_readable(args[i]) or self._waits(args[i]) for i in numbers.read):
            return None
        try:
            return graph, tuple([self._operand(a) for a in args]), ()
        except CannotNote:
            return None

    def _operand(self, a: Any) -> Any:
        return type(a) if type(a) in (int, float) else self.notes.operand(a)

    def _waits(self, t: Tensor) -> bool:
        region = self.notes.region(t)
        return region is not None and region.pending

    def _first(self, line: Any, args: tuple[Any, ...], known: Effect | None) -> tuple[Any, int]:
        """Note the operations of a graph; from now on they are a line at this place.

        Args:
            line: the line.
            args: the arguments of the graph.
            known: what the graph did with other numbers: if it does not do so, it is no line.
        """
        notes, graph = self.notes, self.known[line[0]]
        numbers = graph.numbers
        graph.count(self.steps)
        before, taken = notes.at, notes.taken
        start = _Start(len(notes.path), len(notes.region_of))
        versions = [_version(a) for a in args]
        begun = numbers.begin(args)
        trace = self.trace = Trace(readable=frozenset(id(args[i]) for i in numbers.read))
        tracer = Tracer(numbers, notes)
        try:
            results = tracer.run(*args)
        finally:
            self.trace = None
        effect = None
        if not trace.spoiled and notes.taken == taken:
            floats = Floats(numbers, tracer.values, begun)
            effect = _Reader(notes, floats, start, trace).effect(args, results)
        if effect is not None and known is not None:
            effect = known.proven_by(effect, args)
        if effect is None:
            graph.row = MOST
            return results, 0
        changed = [
            (i, _version(a) - v) for i, (a, v) in enumerate(zip(args, versions, strict=True))
        ]
        effect.versions = [(i, n) for i, n in changed if n]
        place = before.next.get(line)
        if place is None:
            place = before.next[line] = Place(line, effect=effect)
        del notes.path[start.path :]
        notes.go(place)
        return results, len(effect.places)

    def _again(self, place: Place, args: tuple[Any, ...]) -> Any:
        """Note a graph as it was noted before; return its results."""
        notes, effect = self.notes, place.effect
        self.known[place.line[0]].row = 0
        notes.go(place)
        drawn = []
        for func, given, named in effect.draws:
            given, named = tree_map_only(_Looks, _Looks.like, (given, named))
            drawn.append(self.at_once.born(func, func(*given, **named)))
        made = {}
        for value in effect.values:
            if type(value) is int:
                notes.region_of += [_GONE] * value
            elif type(value) is _Looks:
                at = len(notes.region_of)
                made[at] = notes.make(value.meta)
            elif isinstance(value, Tensor):
                notes.take_input(value)
            elif type(value) is Constant:
                notes.take_input(drawn[value.value])
            else:
                root, layout = value
                notes.add_view(notes.region_of[root], layout)
        for at in effect.written:
            notes.region_of[at].pending = True
        numbers = effect.floats.numbers.of(args)
        notes.floats += effect.floats.of(numbers)
        notes.wait = True
        for i, count in effect.versions:
            increment_version([args[i]] * count)
        of: dict[str, Any] = {"given": args, "drawn": drawn, "made": made, "number": numbers}
        return tuple([of[kind][at] if kind in of else at for kind, at in effect.results])


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
                if found and type(found[-1]) is int:
                    found[-1] += 1
                else:
                    found.append(1)
            elif root != at:
                found.append((root, _layout(regions[at], at)))
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
            return Constant(int, self.drawn[key])
        nodes = self.graph.graph.find_nodes(op="get_attr")
        own = [getattr(self.graph, node.target, None) for node in nodes]
        known = (t for t in own if isinstance(t, Tensor) and has_memory(t))
        return next(
            (t for t in known if storage_key(t) == key and layout_of(t) == region.layout), None
        )


def _layout(region: Region, at: int) -> Layout:
    return next(layout for layout, value in region.views.items() if value.at == at)


def _version(a: Any) -> int:
    return a._version if isinstance(a, Tensor) and not a.is_inference() else 0
