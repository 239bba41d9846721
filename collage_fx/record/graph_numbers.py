"""The Python numbers of a graph of Dynamo's: its arguments, and what it computes from them."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from collage_fx.record.notes import Notes
from collage_fx.runtime.residuals.memory import has_memory
from collage_fx.segments.segment_graph import same_number

_NUMBERS = (int, float, torch.SymInt, torch.SymFloat)


@dataclass(eq=False)
class GraphNumbers:
    """Computes the numbers of a graph without its tensors."""

    graph: GraphModule

    @cached_property
    def nodes(self) -> dict[Node, None]:
        """Those with numbers, in order."""
        return dict.fromkeys(n for n in self.graph.graph.nodes if _is_number(n))

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
        """Whether all of them can be computed so."""
        return all(
            node.op == "placeholder"
            or (node.op == "call_function" and self.nodes.keys() >= {*node.all_input_nodes})
            or (node.target == "item" and node.all_input_nodes[0] in self.places)
            for node in self.nodes
        )

    def fit(self, args: tuple[Any, ...]) -> bool:
        """Tell whether they can be computed of arguments, which are tensors otherwise, or None."""
        places = [self.places[n] for n in self.nodes if n.op == "placeholder"]
        same = places == [i for i, a in enumerate(args) if type(a) in (int, float)]
        others = (a for a in args if type(a) not in (int, float))
        return self.known and same and all(isinstance(a, Tensor | bool | None) for a in others)

    def given(self, numbers: dict[Node, Any]) -> dict[Node, Any]:
        """Return those of its numbers that the arguments are or hold, which it does not compute."""
        return {n: x for n, x in numbers.items() if n.op != "call_function"}

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


def _is_number(node: Node) -> bool:
    return node.op != "output" and isinstance(node.meta.get("example_value"), _NUMBERS)


@dataclass(eq=False)
class Floats:
    """The floats that the operations of a graph are noted with, of which some change."""

    numbers: GraphNumbers
    values: list[Any]
    """Each a constant, or the node of the graph that it is."""
    first: dict[Node, Any]
    """The numbers that the arguments had when the graph was noted."""
    fixed: dict[Node, Any]
    """Numbers that operations depend on in another way than by one float: it is no line with
    others."""
    proven: set[Node] = field(default_factory=set)
    """Which of these have changed since, and the floats were found to be as expected."""

    def hold(self, numbers: dict[Node, Any]) -> bool:
        """Tell whether it is known what the floats are for these numbers."""
        return self.fixed_are(numbers) and self.changed(numbers) <= self.proven

    def fixed_are(self, numbers: dict[Node, Any]) -> bool:
        """Tell whether the numbers that are to be as they were are so."""
        return all(same_number(numbers[n], value) for n, value in self.fixed.items())

    def changed(self, numbers: dict[Node, Any]) -> set[Node]:
        """Return which numbers are others than the first that the graph was noted with."""
        return {n for n, x in self.first.items() if not same_number(numbers[n], x)}

    def of(self, numbers: dict[Node, Any]) -> list[float]:
        """Return the floats, where the graph has these numbers."""
        return [numbers[v] if isinstance(v, Node) else v for v in self.values]


class Tracer(Interpreter):
    """Runs a graph, and finds out which of the floats that are noted are numbers of the graph."""

    def __init__(self, numbers: GraphNumbers, notes: Notes, constants: list[Tensor]) -> None:
        super().__init__(numbers.graph)
        self.extra_traceback = False
        self.numbers = numbers
        self.notes = notes
        self.constants = constants
        """Where what torch.tensor makes of numbers that do not change is put."""
        self.values: list[Any] = []
        """What the floats are, as `Floats` has it."""
        self.fixed: dict[Node, Any] = {}
        """Likewise."""

    def run_node(self, n: Node) -> Any:
        """Run a node; find out which of its numbers the floats are that it is noted with."""
        before = len(self.notes.floats)
        result = super().run_node(n)
        if n.target in (torch.tensor, torch.as_tensor) and not n.all_input_nodes:
            self.constants.append(result)
        if n.op != "output" and n not in self.numbers.nodes:
            self._see(n, self.notes.floats[before:])
        return result

    def _see(self, n: Node, floats: list[float]) -> None:
        """Note what the floats of an operation are.

        A number is a float if nothing else among the operands is equal to it, and if every other
        float is a number or a constant as well: an operation may compute some, 1 - x of x.
        """
        operands = [a for a in n.all_input_nodes if a in self.numbers.nodes]
        leaves = tree_leaves((n.args, n.kwargs))
        known = [self.env[a] if isinstance(a, Node) else a for a in leaves if _is_operand(a, self)]
        found = dict.fromkeys(operands, -1)
        for a in operands:
            places = [i for i, x in enumerate(floats) if same_number(x, self.env[a])]
            if sum(same_number(x, self.env[a]) for x in known) == len(places) == 1:
                found[a] = places[0]
        computed = any(not any(same_number(x, y) for y in known) for x in floats)
        if computed or -1 in found.values():
            self.fixed.update({a: self.env[a] for a in operands})
            found = {}
        source = {i: a for a, i in found.items()}
        self.values += [source.get(i, x) for i, x in enumerate(floats)]


def _is_operand(a: Any, tracer: Tracer) -> bool:
    """Tell whether an argument of a node is a number."""
    return a in tracer.numbers.nodes if isinstance(a, Node) else type(a) in (int, float)


def is_readable(t: Any) -> bool:
    """Tell whether a tensor is a number on the host, such as a rate."""
    return isinstance(t, Tensor) and not t.dim() and t.is_cpu and t.dtype is torch.float64


def own_tensors(graph: GraphModule) -> list[Tensor]:
    """Return the tensors with memory that a graph has as attributes."""
    nodes = graph.graph.find_nodes(op="get_attr")
    found = [getattr(graph, node.target, None) for node in nodes]
    return [t for t in found if isinstance(t, Tensor) and has_memory(t)]
