"""Queries of FX graphs: mutations, views and memory, and what depends on what."""

import functools
import operator
from collections.abc import Callable, Container, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, TypeVar

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

T = TypeVar("T")
OpOverload: Any = type(torch.ops.aten.add.Tensor)
"""Class of operator overloads such as `aten.add.Tensor`."""
ORIGIN = "origin"
"""The key in a node's meta: the name of a node of the graph before, which is the source for the
canonical graph, that for the expanded one, and that for the lowered one."""
WIDENED = "widened"
"""The key in a node's meta: whether its value would be rounded to 16 bits but for `reductions`."""
PUTS = frozenset(
    {
        *("diagonal_scatter", "index_add", "index_copy", "index_put", "index_reduce"),
        *("masked_scatter", "put", "scatter", "scatter_add", "scatter_reduce", "select_scatter"),
        *("slice_scatter",),
    }
)
"""Names of operations that put tensors into places of a tensor, or add them up there."""
MATRIX_SUMS = frozenset({"addbmm", "addmm", "addmv", "addr", "baddbmm"})
"""Names of operations that add a product of matrices to a tensor."""
PLACES = (PUTS | MATRIX_SUMS) | {"bmm", "gather", "index", "index_select", "mm", "slice", "take"}
"""Names of operations that bring numbers together by their places; indices are no numbers."""


def mutations(graph: Graph) -> dict[Any, Any]:
    """Return placeholder -> new value, for each trailing aten.copy_ onto a placeholder."""
    return {
        node.args[0]: node.args[1]
        for node in graph.nodes
        if node.target is torch.ops.aten.copy_.default and node.args[0].op == "placeholder"
    }


def draws(target: Any) -> bool:
    """Return True if an operation draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


def closure(node: Node, near: Callable[[Node], Iterable[Node]]) -> set[Node]:
    """Return a node, what is near to it, what is near to that, and so on."""
    found, waiting = {node}, [node]
    while waiting:
        for one in near(waiting.pop()):
            if one not in found:
                found.add(one)
                waiting.append(one)
    return found


def representatives(
    graph: Graph, repeats: Callable[[Node], bool], hands_on: Callable[[Node], bool] | None = None
) -> dict[Node, Node]:
    """Return node -> the first that computes the same of the same; itself if it is the first.

    Args:
        graph: which is not changed.
        repeats: whether a node has the value of another one with the same operation and operands.
        hands_on: whether a node has the value of its first operand.
    """
    same: dict[Node, Node] = {}
    first: dict[str, Node] = {}
    for node in graph.nodes:
        same[node] = node
        if hands_on is not None and hands_on(node):
            same[node] = same[node.args[0]]
        elif repeats(node):
            computed = node.target, *map_arg((node.args, node.kwargs), same.__getitem__)
            same[node] = first.setdefault(str(computed), node)
    return same


class Connected(Generic[T]):
    """Disjoint sets of what is connected, as union-find keeps them."""

    def __init__(self) -> None:
        self._parent: dict[T, T] = {}

    def root(self, x: T) -> T:
        """Return the one that stands for all with which x belongs together."""
        while (parent := self._parent.get(x, x)) is not x:
            self._parent[x] = x = self._parent.get(parent, parent)
        return x

    def join(self, a: T, b: T) -> None:
        """Make one set of those of a and b; what stands for that of b stands for it."""
        self._parent[self.root(a)] = self.root(b)


def depending(nodes: Iterable[Node], on: Iterable[Node]) -> list[Node]:
    """Return the nodes, in an order in which they can run, that are computed from others."""
    found, reached = [], set(on)
    for node in nodes:
        if not reached.isdisjoint(node.all_input_nodes):
            found.append(node)
            reached.add(node)
    return found


def behind(node: Node, targets: Container[Any]) -> Node:
    """Return the node from which these operations alone, each on its first operand, make a node."""
    while node.target in targets and isinstance(first := node.args[0], Node):
        node = first
    return node


def writes_only(node: Node) -> bool:
    """Return True if node writes a state, and only the graph's caller sees what it returns."""
    return node.target is torch.ops.aten.copy_.default and all(u.op == "output" for u in node.users)


def base_of(node: Node, *, items: bool = True) -> Node:
    """Return the base of which node is a view, itself if it has memory of its own.

    Args:
        node: the node of a tensor.
        items: whether an item of a list of tensors with memory of their own counts as a view of it.
    """
    while node.op == "call_function" and _is_view(node.target):
        source = node.all_input_nodes[0]
        if node.target is operator.getitem and not items and not _is_view(source.target):
            break
        node = source
    return node


def with_memory(graph: Graph, dtypes: Iterable[torch.dtype]) -> Graph:
    """Return a lowered graph with more inputs, unused: memory of these dtypes for what it makes."""
    made = Graph()
    env = {n: made.node_copy(n) for n in graph.find_nodes(op="placeholder")}
    for k, dtype in enumerate(dtypes):
        made.placeholder(f"out{k}").meta["dtype"] = dtype
    made.output(made.graph_copy(graph, env))
    return made


@functools.cache
def _is_view(target: Any) -> bool:
    if not hasattr(target, "_schema"):
        return target is operator.getitem
    if target is torch.ops.aten._unsafe_view.default:
        return True
    return any(
        r.alias_info is not None and not r.alias_info.is_write for r in target._schema.returns
    )


def fake_mode_of(inputs: Iterable[Node]) -> AbstractContextManager[object]:
    """Return the mode of the fake tensors among the inputs of a graph; none does nothing."""
    modes = (getattr(node.meta.get("val"), "fake_mode", None) for node in inputs)
    return next(filter(None, modes), nullcontext())


def note_origin(node: Node, origin: Node | None) -> None:
    """Note the node of the graph before that a node stems from, and its line in the user's code."""
    if origin is not None:
        node.meta[ORIGIN] = origin.name
        if "stack_trace" in origin.meta:
            node.meta["stack_trace"] = origin.meta["stack_trace"]
