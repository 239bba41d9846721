"""Division of a functional graph's operations on several tensors into operations on each."""

import operator
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

aten = torch.ops.aten


def on_single_tensors(graph: Graph) -> Graph:
    """Return a graph without lists of tensors, as far as that can be.

    Operations on lists (`_foreach_*`) become operations on lists of one tensor. Where tensors are
    concatenated, and the whole is split again after elementwise operations, these are done to each
    tensor instead.

    Before::

        cat = aten.cat.default([a, b])
        mul = aten.mul.Tensor(cat, 0.5)
        unbind = aten.unbind.int(mul)

    After::

        mul = aten.mul.Tensor(a, 0.5)
        select = aten.select.int(mul, 0, 0)
        clone = aten.clone.default(select)
        ...                                 # and likewise of b

    Bits are the same, but for functions such as exp that compilers do in another way to vectors.
    """
    splitter = _Splitter()
    for node in graph.nodes:
        splitter.take(node)
    return splitter.graph


class _Splitter:
    def __init__(self) -> None:
        self.graph = Graph()
        self.env: dict[Node, Node] = {}
        self.pieces: dict[Node, list[Node]] = {}
        """Tensor -> the pieces that it is the concatenation of, along its first dimension."""
        self.items: dict[Node, list[Node]] = {}
        """The results of an operation that returns a list."""

    def take(self, node: Node) -> None:
        """Append an operation, or what is done for it to each of several tensors."""
        first = next(iter(node.args), None)
        if _is_foreach(node):
            self.items[node] = [self._item(node, i) for i in range(len(node.meta["val"]))]
        elif node.target is operator.getitem and first in self.items:
            self.env[node] = self.items[first][node.args[1]]  # type: ignore[index]
        elif _is_concatenation(node):
            self.pieces[node] = list(map(self._whole, first))  # type: ignore[arg-type]
        elif piece := self._slice(node):
            self.env[node] = piece
        elif pieces := self._split(node):
            self.items[node] = pieces
        elif pieces := list(self._elementwise(node)):
            self.pieces[node] = pieces
        else:
            self.env[node] = self.graph.node_copy(node, self._whole)

    def _whole(self, node: Node) -> Node:
        if node not in self.env:
            cat = self.graph.call_function(aten.cat.default, (self.pieces[node],))
            cat.meta = dict(node.meta)
            self.env[node] = cat
        return self.env[node]

    def _item(self, node: Node, i: int) -> Node:
        """Append what a foreach operation does to one tensor of its lists; return the result."""

        def one(a: Any) -> Any:
            return map_arg([a[i]] if isinstance(a, list | tuple) else a, self._whole)

        kwargs = {name: one(a) for name, a in node.kwargs.items()}
        args, value = tuple(map(one, node.args)), node.meta["val"][i]
        alone = self._call(node, node.target, args, kwargs, [value])
        return self._call(node, operator.getitem, (alone, 0), {}, value)

    def _pieces_of(self, node: Node) -> list[Node]:
        """Return the pieces of which an operation's first operand is the concatenation, if any."""
        first = node.args[0] if node.args else None
        return self.pieces.get(first, []) if isinstance(first, Node) else []

    def _split(self, node: Node) -> list[Node]:
        """Return the results of an operation that splits a concatenation into what it is of."""
        pieces = self._pieces_of(node)
        if not pieces or node.target not in (aten.split.Tensor, aten.unbind.int):
            return []
        unbinds = node.target is aten.unbind.int
        size, *dim = [1, *node.args[1:]] if unbinds else node.args[1:]
        if dim not in ([], [0]) or any(p.meta["val"].shape[0] != size for p in pieces):
            return []
        pairs = zip(pieces, node.meta["val"], strict=True)
        return [self._cut(node, p, value, selects=unbinds) for p, value in pairs]

    def _slice(self, node: Node) -> Node | None:
        """Return the tensor that is cut out of a concatenation, if it is one of those it is of."""
        pieces = self._pieces_of(node)
        ends = list(accumulate(p.meta["val"].shape[0] for p in pieces))
        if not pieces or node.target is not aten.slice.Tensor or len(node.args) != 4:
            return None
        _, dim, first, last = node.args
        for piece, begin, end in zip(pieces, [0, *ends], ends, strict=False):
            if (dim, first, min(last, ends[-1])) == (0, begin, end):
                return self._cut(node, piece, node.meta["val"])
        return None

    def _cut(self, node: Node, piece: Node, value: Any, *, selects: bool = False) -> Node:
        """Append what is cut out of a concatenation; it has memory of its own, as results must."""
        if selects:
            piece = self._call(node, aten.select.int, (piece, 0, 0), {}, value)
        return self._call(node, aten.clone.default, (piece,), {}, value)

    def _elementwise(self, node: Node) -> Iterator[Node]:
        """Append what an elementwise operation does to each piece of its operands."""
        target: Any = node.target
        operands = node.all_input_nodes
        pieces = [self.pieces[a] for a in operands if a in self.pieces]
        others = [a.meta["val"] for a in operands if a not in self.pieces]
        shapes = [[p.meta["val"].shape for p in some] for some in pieces]
        if (
            torch.Tag.pointwise not in getattr(target, "tags", ())
            or any(some != shapes[0] for some in shapes)
            or any(isinstance(v, torch.Tensor) and v.dim() for v in others)
        ):
            return
        for i in range(len(pieces[0]) if pieces else 0):

            def one(a: Node, i: int = i) -> Node:
                return self.pieces[a][i] if a in self.pieces else self.env[a]

            args, kwargs = map_arg((node.args, node.kwargs), one)
            values, named = map_arg((args, kwargs), lambda n: n.meta["val"])
            yield self._call(node, target, args, kwargs, target(*values, **named))

    def _call(self, node: Node, target: Any, args: Any, kwargs: Any, value: Any) -> Node:
        """Append an operation that does a part of what a node does."""
        new = self.graph.call_function(target, args, kwargs)
        new.meta = {**node.meta, "val": value}
        return new


def _is_concatenation(node: Node) -> bool:
    """Return True if an operation puts tensors one behind the other, and changes none of them."""
    if node.target is not aten.cat.default or node.args[1:] not in ((), (0,)) or node.kwargs:
        return False
    value = node.meta["val"]
    operands = [a.meta["val"] for a in node.all_input_nodes]
    return all(
        v.dtype == value.dtype and v.dim() == value.dim() and v.is_contiguous() for v in operands
    )


def _is_foreach(node: Node) -> bool:
    """Return True if an operation does the same to each tensor of its lists, and to no other."""
    if not getattr(node.target, "__name__", "").startswith("_foreach_"):
        return False
    count = len(node.meta["val"])
    operands = [*node.args, *node.kwargs.values()]
    return (
        all(len(a) == count for a in operands if isinstance(a, list | tuple))
        and all(a.meta["val"].dim() == 0 for a in operands if isinstance(a, Node))
        and all(u.target is operator.getitem for u in node.users)
    )
