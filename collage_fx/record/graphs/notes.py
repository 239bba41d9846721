"""Dynamo graphs in a recorded step: noted operation by operation once, and then as a whole."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd.graph import increment_version
from torch.fx import GraphModule, Node

from collage_fx.record.at_once import AtOnce
from collage_fx.record.graphs.effects import KnownGraph, Tracer, own_tensors
from collage_fx.record.notes import Notes, Region
from collage_fx.runtime.residuals.residual import version
from collage_fx.runtime.torch_private import _pop_mode_temporarily
from collage_fx.runtime.trees import tree_map_only
from collage_fx.segments.memory import storage_key
from collage_fx.segments.trie import Place

MOST = 16
"""A graph that does something else in each of so many steps is noted operation by operation."""
_GONE = Region((None, (), (), 0))
"""Region that stands for memory which a graph makes and gives up."""


@dataclass(eq=False)
class GraphNotes:
    """Recorder of Dynamo graphs, as single lines.

    Such a graph does the same with tensors of the same layouts each time, with other Python
    numbers. How those depend on its arguments is found out when it is noted for the first time, and
    looked at again when one of these has changed for the first time.
    """

    notes: Notes
    at_once: AtOnce
    trace: Tracer | None = None
    """Runs the graph that is being noted operation by operation."""
    known: dict[GraphModule, KnownGraph] = field(default_factory=dict)
    steps: int = 0
    """Number of steps that have begun."""

    def run(self, graph: GraphModule, args: tuple[Any, ...]) -> tuple[Any, int]:
        """Note a graph; return its results, and how many operations it is, noted as a whole."""
        with _pop_mode_temporarily():
            line, numbers = self._line(graph, args)
            place = None if line is None else self.notes.at.next.get(line)
            if place is not None and place.effect.holds(numbers):
                return self._again(place, args, numbers), len(place.effect.places)
        if line is None:
            return graph(*args), 0
        return self._first(line, args, numbers, place)

    def _line(self, graph: GraphModule, args: tuple[Any, ...]) -> tuple[Any, dict[Node, Any]]:
        """Return the line that a graph is, and its numbers.

        The line is None if the graph is to be noted operation by operation. All that its operations
        depend on is in the line, on the way to it in the trie, or a number.
        """
        notes, known = self.notes, self.known.get(graph)
        if known is None:
            known = self.known[graph] = KnownGraph(graph)
        if self.trace is not None or known.row >= MOST or not known.fit(args):
            return None, {}
        read = (notes.region(args[i]) for i in known.read)
        if any(region is not None and region.pending for region in read):
            return None, {}
        try:
            given = tuple([type(a) if type(a) in (int, float) else notes.operand(a) for a in args])
            own = [  # as far as the notes know them
                notes.operand(t) if storage_key(t) in notes.regions else None
                for t in own_tensors(graph)
            ]
            return (graph, given, tuple(own)), known.of(args)
        except Exception:  # numbers that raise do so where they stand: when the graph is run
            return None, {}

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
        given = [(i, a, version(a)) for i, a in enumerate(args) if isinstance(a, Tensor)]
        known.count(self.steps)
        trace = self.trace = Tracer(known, notes, args)
        try:
            results = trace.run(*args)
        finally:
            self.trace = None
        effect = trace.effect(results, numbers)
        if effect is not None and place is not None and place.effect.fixed_are(numbers):
            effect = place.effect.proven_by(effect, numbers)
        if effect is None:
            known.row = MOST
            return results, 0
        effect.versions = [(i, n) for i, t, then in given if (n := version(t) - then)]
        place = place or Place(line)
        place.effect = effect
        before.next[line] = place
        del notes.path[len(notes.path) - len(effect.places) :]
        notes.path.append(place)
        return results, len(effect.places)

    def _again(self, place: Place, args: tuple[Any, ...], numbers: dict[Node, Any]) -> Any:
        """Note a graph as it was noted before; return its results."""
        notes, effect = self.notes, place.effect
        self.known[place.line[0]].row = 0
        notes.path.append(place)
        if effect.places:  # what follows is the same after a line and after its operations
            notes.at = effect.places[-1]
        drawn = []
        for func, given, named in effect.draws:
            given, named = tree_map_only(partial, lambda make: make(), (given, named))
            drawn.append(self.at_once.born(func, func(*given, **named)))
        made = {}
        for kind, what in effect.values:
            if kind == "gone":
                notes.region_of += [_GONE] * what
            elif kind == "made":
                at = len(notes.region_of)
                made[at] = notes.make(what)
            elif kind == "view":
                root, layout = what
                notes.add_view(notes.region_of[root], layout)
            else:
                notes.take_input(drawn[what] if kind == "drawn" else what)
        for at in effect.written:
            notes.region_of[at].pending = True
        notes.floats += effect.floats_of(numbers)
        notes.wait = True
        counted = [(args[i], args[i]._version + count) for i, count in effect.versions]
        for t, expected in counted:  # of which some may have one counter
            increment_version([t] * (expected - t._version))
        of: dict[str, Any] = {"given": args, "drawn": drawn, "made": made, "number": numbers}
        return tuple([of[kind][at] if kind in of else at for kind, at in effect.results])
