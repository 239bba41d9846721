"""The Python numbers of a graph of Dynamo's: its arguments, and what it computes from them."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import map_arg

from collage_fx.record.notes import Notes
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

    def begin(self, args: tuple[Any, ...]) -> list[Any]:
        """Return the numbers among some arguments, and those that 0-d tensors hold."""
        numbers = [a for a in args if type(a) in (int, float)]
        return numbers + [args[i].item() for i in self.read]

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
    first: list[Any]
    """What the graph began with when it was noted."""
    proven: set[int] = field(default_factory=set)
    """Which of these have changed since, and the floats were found to be as expected."""

    def changed(self, args: tuple[Any, ...]) -> set[int]:
        """Return which numbers are others than the first that the graph was noted with."""
        now = zip(self.numbers.begin(args), self.first, strict=True)
        return {i for i, (a, b) in enumerate(now) if not same_number(a, b)}

    def of(self, numbers: dict[Node, Any]) -> list[float]:
        """Return the floats, where the graph has these numbers."""
        return [numbers[v] if isinstance(v, Node) else v for v in self.values]


class Tracer(Interpreter):
    """Runs a graph, and finds out which of the floats that are noted are numbers of the graph."""

    extra_traceback = False

    def __init__(self, numbers: GraphNumbers, notes: Notes) -> None:
        super().__init__(numbers.graph)
        self.extra_traceback = False
        self.numbers = numbers
        self.notes = notes
        self.values: list[Any] = []

    def run_node(self, n: Node) -> Any:
        """Run a node; what it is noted with are its operands that are numbers, or constants."""
        before = len(self.notes.floats)
        result = super().run_node(n)
        operands = [a for a in n.all_input_nodes if a in self.numbers.nodes]
        for value in self.notes.floats[before:]:
            fits = (a for a in operands if same_number(self.env[a], value))
            found = next(fits, None)
            if found is not None:
                operands.remove(found)
            self.values.append(value if found is None else found)
        return result


def is_readable(t: Any) -> bool:
    """Tell whether a tensor is a number on the host, such as a rate."""
    return isinstance(t, Tensor) and not t.dim() and t.is_cpu and t.dtype is torch.float64
