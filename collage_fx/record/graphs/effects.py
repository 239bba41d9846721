"""Effects of a Dynamo graph in a recorded step: its operations, and the numbers they depend on."""

from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import map_arg

from collage_fx.record.notes import Notes, Region
from collage_fx.runtime.residuals.memory import has_memory, new_memory
from collage_fx.runtime.trees import tree_leaves, tree_map_only
from collage_fx.segments.memory import storage_key
from collage_fx.segments.segment_graph import same_number
from collage_fx.segments.trie import Place, layout_of, meta_of

_ITEM = torch.ops.aten._local_scalar_dense.default
_CONSTRUCTORS = (torch.tensor, torch.as_tensor, torch.asarray)
_NUMBERS = (int, float, torch.SymInt, torch.SymFloat)


@dataclass(eq=False)
class KnownGraph:
    """A graph, of which the numbers are computed without its tensors: arguments, and of these."""

    graph: GraphModule
    row: int = 0
    """Number of steps in a row in which it was noted operation by operation."""
    last: int = -1
    """The last of them."""

    def count(self, step: int) -> None:
        """Count a step in which it is noted operation by operation."""
        self.row += step != self.last
        self.last = step

    @cached_property
    def nodes(self) -> dict[Node, None]:
        """Nodes that are numbers, in order."""
        nodes = (n for n in self.graph.graph.nodes if n.op != "output")
        return dict.fromkeys(n for n in nodes if isinstance(n.meta.get("example_value"), _NUMBERS))

    @cached_property
    def places(self) -> dict[Node, int]:
        """Arguments, with their positions."""
        return {n: i for i, n in enumerate(self.graph.graph.find_nodes(op="placeholder"))}

    @cached_property
    def read(self) -> list[int]:
        """The positions of the arguments whose data it reads: rates that Dynamo hands over as 0-d
        tensors."""
        items = (n.all_input_nodes[0] for n in self.nodes if n.target == "item")
        return [self.places[n] for n in items if n in self.places]

    @cached_property
    def known(self) -> bool:
        """True if all of its numbers can be computed so."""
        return all(
            node.op == "placeholder"
            or (node.op == "call_function" and self.nodes.keys() >= {*node.all_input_nodes})
            or (node.target == "item" and node.all_input_nodes[0] in self.places)
            for node in self.nodes
        )

    def fit(self, args: tuple[Any, ...]) -> bool:
        """Return True if they can be computed of arguments, which are tensors otherwise, or None.

        Those whose data it reads have to be numbers on the host, such as rates.
        """
        places = [self.places[n] for n in self.nodes if n.op == "placeholder"]
        same = places == [i for i, a in enumerate(args) if type(a) in (int, float)]
        others = (a for a in args if type(a) not in (int, float))
        if not (self.known and same and all(isinstance(a, Tensor | bool | None) for a in others)):
            return False
        read = (args[i] for i in self.read)
        return all(
            isinstance(t, Tensor) and not t.dim() and t.is_cpu and t.dtype is torch.float64
            for t in read
        )

    def of(self, args: tuple[Any, ...]) -> dict[Node, Any]:
        """Return the numbers for some arguments."""
        found: dict[Node, Any] = {}
        for node in self.nodes:
            if node.op == "placeholder":
                found[node] = args[self.places[node]]
            elif node.op == "call_method":
                found[node] = args[self.places[node.all_input_nodes[0]]].item()
            else:
                given, named = map_arg((node.args, node.kwargs), found.__getitem__)
                target: Any = node.target
                found[node] = target(*given, **named)
        return found


@dataclass(eq=False)
class Effect:
    """Operations of a graph at a place in the trie, for operands of certain numbers."""

    places: list[Place]
    """Places of its operations, one by one."""
    draws: list[tuple[Any, Any, Any]]
    """Others, which need no data and are done at once: for each operand what makes one like it."""
    floats: list[Any]
    """Floats that its operations are noted with: each a constant, or the node that it is."""
    first: dict[Node, Any]
    """The numbers that the arguments had when the graph was noted."""
    fixed: dict[Node, Any]
    """Numbers that operations depend on in another way than by one float: it is no line with
    others."""
    values: list[tuple[str, Any]]
    """Values in the order of their numbers, which are the same wherever the line stands at this
    place: "gone" and how many are given up within it, "made" and the looks of one, a "view" and
    its root and layout, "drawn" and the position of it, or a tensor that the graph has as its
    "own"."""
    written: list[int]
    """The numbers of the memory that it writes and has not made."""
    results: list[tuple[str, Any]]
    """"given", "drawn" or "made" with the position or number of it, a "number" with its node, or a
    "constant"."""
    proven: set[Node] = field(default_factory=set)
    """Numbers that have changed since, for which the floats were found to be as expected."""
    versions: list[tuple[int, int]] = field(default_factory=list)
    """Arguments, with how often it writes them."""

    def holds(self, numbers: dict[Node, Any]) -> bool:
        """Return True if it is known what the floats are for these numbers."""
        return self.fixed_are(numbers) and self._changed(numbers) <= self.proven

    def fixed_are(self, numbers: dict[Node, Any]) -> bool:
        """Return True if the numbers that are to be as they were are so."""
        return all(same_number(numbers[n], value) for n, value in self.fixed.items())

    def _changed(self, numbers: dict[Node, Any]) -> set[Node]:
        """Return the numbers that differ from the first that the graph was noted with."""
        return {n for n, x in self.first.items() if not same_number(numbers[n], x)}

    def floats_of(self, numbers: dict[Node, Any]) -> list[float]:
        """Return the floats, where the graph has these numbers."""
        return [numbers[v] if isinstance(v, Node) else v for v in self.floats]

    def proven_by(self, other: "Effect", numbers: dict[Node, Any]) -> "Effect | None":
        """Return this, if it is what the graph did with these numbers too; else None."""
        expected, found = self.floats_of(numbers), other.floats_of(numbers)
        same = all(map(same_number, expected, found)) and len(expected) == len(found)
        if self.places != other.places or self.results != other.results or not same:
            return None
        self.proven |= self._changed(numbers)
        return self


class Tracer(Interpreter):
    """Run of a graph whose operations are noted, from which its effect is read off."""

    def __init__(self, known: KnownGraph, notes: Notes, args: tuple[Any, ...]) -> None:
        super().__init__(known.graph)
        self.extra_traceback = False
        self.known = known
        self.notes = notes
        self.args = args
        self.readable = {id(args[i]) for i in known.read}
        """The ids of the tensors whose data are read as numbers."""
        self.spoiled = False
        """True if something was done that is to be done again in each step."""
        self.draws: list[tuple[Any, Any, Any]] = []
        """Random draws, as `Effect.draws`."""
        self.drawn: list[Tensor] = []
        self.constants: list[Tensor] = []
        """Tensors that torch.tensor makes of numbers that do not change."""
        self.floats: list[Any] = []
        self.fixed: dict[Node, Any] = {}
        """Numbers that operations depend on otherwise, as `Effect.fixed`."""
        self.before = len(notes.path), len(notes.region_of), len(notes.made), notes.taken
        """Lengths of the notes before: lines, regions, made memory, flushes."""

    def reads(self, func: Any, args: Any) -> bool:
        """Return True if an operation reads a number that the graph begins with."""
        return func is _ITEM and id(args[0]) in self.readable

    def draw(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Note an operation that is done at once: memory without values, random bits."""
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        self.spoiled |= not isinstance(result, Tensor) or not all(map(has_memory, given))
        if not self.spoiled:
            makers = tree_map_only(
                Tensor, lambda t: partial(new_memory, *meta_of(t)), (args, kwargs)
            )
            self.draws.append((func, *makers))
            self.drawn.append(result)

    def run_node(self, n: Node) -> Any:
        """Run a node; find out which of its numbers the floats are that it is noted with."""
        before = len(self.notes.floats)
        result = super().run_node(n)
        if n.target in _CONSTRUCTORS and not n.all_input_nodes:
            self.constants.append(result)
            self.spoiled |= self.notes.words.known(result)  # of a number that the step has read
        if n.op != "output" and n not in self.known.nodes:
            self._see(n, self.notes.floats[before:])
        return result

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function; a constructor as torch has it by now, which may be a hook."""
        if target in _CONSTRUCTORS:
            target = getattr(torch, target.__name__)
        return super().call_function(target, args, kwargs)

    def _see(self, n: Node, floats: list[float]) -> None:
        """Note the floats of an operation.

        A number is a float if nothing else among the operands is equal to it, and if every other
        float is a number or a constant as well: an operation may compute some, 1 - x of x.
        """
        numbers, leaves = self.known.nodes, tree_leaves((n.args, n.kwargs))
        operands = [a for a in n.all_input_nodes if a in numbers]
        known = [self.env[a] for a in leaves if isinstance(a, Node) and a in numbers]
        known += [a for a in leaves if type(a) in (int, float)]
        source: dict[int, Node] = {}
        for a in operands:
            places = [i for i, x in enumerate(floats) if same_number(x, self.env[a])]
            if sum(same_number(x, self.env[a]) for x in known) == len(places) == 1:
                source[places[0]] = a
        computed = any(not any(same_number(x, y) for y in known) for x in floats)
        if computed or len(source) < len(operands):
            self.fixed.update({a: self.env[a] for a in operands})
            source = {}
        self.floats += [source.get(i, x) for i, x in enumerate(floats)]

    # What it has done.

    def effect(self, results: Any, numbers: dict[Node, Any]) -> Effect | None:
        """Return the effect of the graph; None if that cannot be done again by the notes.

        Args:
            results: of the graph.
            numbers: those of the graph.
        """
        notes, (path, start, made, taken) = self.notes, self.before
        if self.spoiled or notes.taken != taken or not isinstance(results, tuple | list):
            return None
        places, regions = notes.path[path:], [region.value.at for region in notes.made[made:]]
        looks = dict(zip(regions, (meta for p in places for meta in p.made), strict=True))
        output: Any = self.graph.output_node().args[0]
        each = [self._result(t, node, looks) for t, node in zip(results, output, strict=True)]
        found = [one for one in each if one is not None]
        kept = {at for kind, at in found if kind == "made"}
        values = self._values(start, looks, kept) if len(found) == len(each) else None
        if values is None:
            return None
        roots = {notes.region_of[w.at].value.at for place in places for w in place.writes}
        written = sorted(at for at in roots if at not in looks)
        # What it computes of its numbers follows from those that the arguments are or hold.
        first = {n: x for n, x in numbers.items() if n.op != "call_function"}
        return Effect(places, self.draws, self.floats, first, self.fixed, values, written, found)

    def _result(self, t: Any, node: Any, looks: dict[int, Any]) -> tuple[str, Any] | None:
        """Return the description of a result, for itself or for a node of the graph."""
        if not isinstance(node, Node):
            return "constant", t
        if node in self.known.nodes:
            return "number", node
        if not isinstance(t, Tensor):
            return None
        for kind, known in (("given", self.args), ("drawn", self.drawn)):
            for i, one in enumerate(known):
                if one is t:
                    return kind, i
        region = self.notes.region(t)
        if region is None or region.value.at not in looks or region.layout != layout_of(t):
            return None
        return "made", region.value.at

    def _values(
        self, start: int, looks: dict[int, Any], kept: set[int]
    ) -> list[tuple[str, Any]] | None:
        """Return the new values, as `Effect` has them; None if one of them is not known.

        Args:
            start: the first of them.
            looks: what the operations make: value -> its looks.
            kept: those of these that are results.
        """
        found: list[tuple[str, Any]] = []
        for at, region in enumerate(self.notes.region_of[start:], start):
            root = region.value.at
            if root in looks and root not in kept:
                count = found.pop()[1] if found and found[-1][0] == "gone" else 0
                found.append(("gone", count + 1))
            elif root != at:
                layout = next(one for one, value in region.views.items() if value.at == at)
                found.append(("view", (root, layout)))
            elif at in looks:
                found.append(("made", looks[at]))
            elif (source := self._input(region)) is not None:
                found.append(source)
            else:
                return None
        return found

    def _input(self, region: Region) -> tuple[str, Any] | None:
        """Return what a graph reads that is none of its arguments; None if that is not known."""
        key = next(k for k, found in self.notes.regions.items() if region in found)
        drawn = {storage_key(t): i for i, t in enumerate(self.drawn)}
        if key in drawn:
            return "drawn", drawn[key]
        if region.pending and any(storage_key(t) == key for t in self.constants):
            return None  # it is written, and another in each step
        for t in own_tensors(self.known.graph) + self.constants:
            if storage_key(t) == key and layout_of(t) == region.layout:
                return "own", t
        return None


def own_tensors(graph: GraphModule) -> list[Tensor]:
    """Return the tensors with memory that a graph has as attributes."""
    nodes = graph.graph.find_nodes(op="get_attr")
    found = [getattr(graph, node.target, None) for node in nodes]
    return [t for t in found if isinstance(t, Tensor) and has_memory(t)]
