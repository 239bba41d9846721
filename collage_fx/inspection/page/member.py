"""The part of a source graph that updates one member of a class."""

import operator
from itertools import chain, count
from typing import Any

import torch
from torch.fx import Node

from collage_fx.inspection.page.operations import name_of
from collage_fx.passes.ir.graph_memory import ORIGIN, mutations
from collage_fx.passes.ir.program import Program, Rewritten
from collage_fx.runtime.trees import tree_leaves

LIMIT = 2000
"""Operations of a member at most; one that has more is shown as far as that."""


class Member:
    """The operations of one member, in graph order, and what they start from."""

    def __init__(self, rewritten: Rewritten, program: Program) -> None:
        """Take the operations that update the representative of a class, as they came."""
        source = program.source.graph
        by_name = {n.name: n for n in source.nodes}
        inputs: dict[Node, str] = {}
        for node, name in zip(rewritten.model.inputs, short_names(rewritten), strict=True):
            origin = by_name.get(node.meta.get(ORIGIN, node.name))
            if origin is not None and origin.op == "placeholder":
                inputs[origin] = name or _label(program, origin)
        stored = mutations(source)
        self.results = {stored[n]: name for n, name in inputs.items() if n in stored}
        """New value -> the state that it is stored in."""
        self.picked: dict[Node, int] = {}
        """Operation on lists -> the position of the member's tensor in them."""
        self._found: set[Node] = set()
        self._reached: set[Node] = set()
        """Nodes at which the walk ended: placeholders, results of operations on many members."""
        wanted = list(self.results)
        for node in rewritten.model.outputs:  # results that are no state's
            origin = by_name.get(node.meta.get(ORIGIN, ""))
            if origin is not None:
                wanted.append(origin)
        for node in wanted:
            self._visit(node)
        # A step count, say, that the member has of its own.
        for n in source.find_nodes(op="placeholder"):
            if n in self._reached and n not in inputs:
                inputs[n] = _label(program, n)
                if (new := stored.get(n)) is not None:
                    self.results.setdefault(new, inputs[n])
        inputs |= {n: n.name for n in self._reached - set(inputs)}
        self.nodes = [n for n in source.nodes if n in self._found and n not in inputs]
        self.inputs = _told_apart(inputs)
        """Inputs of the member -> their short names."""

    def pick(self, node: Node, operand: Any) -> Any:
        """Return of a list of operands of a node that of the member, anything else as it is."""
        place = self.picked.get(node)
        listed = isinstance(operand, list | tuple)
        return operand[place] if listed and place is not None else operand

    def _visit(self, start: Node) -> None:
        """Note all operations that a value is made by."""
        waiting = [start]
        while waiting:
            node = waiting.pop()
            if node in self._found or node in self._reached:
                continue
            if node.op != "call_function" or _gathers(node) or len(self._found) > LIMIT:
                self._reached.add(node)
                continue
            self._found.add(node)
            if node.target is operator.getitem and isinstance(_val(node.args[0]), list | tuple):
                of, place = node.args
                assert isinstance(of, Node) and isinstance(place, int)
                self.picked.setdefault(of, place)
            operands: Any = [*node.args, *node.kwargs.values()]
            if (at := self.picked.get(node)) is not None:
                operands = [o[at : at + 1] if isinstance(o, list | tuple) else o for o in operands]
            waiting += [o for o in tree_leaves(operands) if isinstance(o, Node)]


def short_names(rewritten: Rewritten) -> list[str]:
    """Return short names of a class's inputs in its expanded graph; empty for all but states."""
    states = {at for _, at, _ in rewritten.model.states}
    assert rewritten.expanded is not None
    names = [n.name for n in rewritten.expanded.graph.find_nodes(op="placeholder")]
    return [names[i] if i in states else "" for i in range(len(rewritten.model.inputs))]


def _label(program: Program, placeholder: Node) -> str:
    places = list(placeholder.graph.find_nodes(op="placeholder"))
    carried = {places[c.index]: c.state_name.short for c in program.carried}
    label = carried.get(placeholder) or program.label(placeholder)
    return label if label.isidentifier() else placeholder.name


def _told_apart(inputs: dict[Node, str]) -> dict[Node, str]:
    """Number names that several inputs have."""
    found: dict[Node, str] = {}
    for node, name in inputs.items():
        names = chain([name], (f"{name}_{number}" for number in count(2)))
        found[node] = next(one for one in names if one not in found.values())
    return found


def _val(node: Any) -> Any:
    return node.meta.get("val") if isinstance(node, Node) else None


def _gathers(node: Node) -> bool:
    """Return True if an operation takes a list of tensors and makes one of them: a norm of all."""
    if "_foreach_" in str(node.target):
        return False
    lists = [a for a in node.args if isinstance(a, list | tuple)]
    many = any(len([o for o in one if isinstance(o, Node)]) > 1 for one in lists)
    return many and name_of(node) in ("stack", "cat") and isinstance(_val(node), torch.Tensor)
