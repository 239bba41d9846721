"""The part of a source graph that updates one member of a class."""

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from collage_fx.inspection.page.operations import name_of
from collage_fx.passes.ir.graph_memory import ORIGIN, mutations
from collage_fx.passes.ir.program import Program, Rewritten

LIMIT = 2000
"""Operations of a member at most; one that has more is shown as far as that."""


@dataclass
class Member:
    """The operations of one member, in graph order, and what they start from."""

    nodes: list[Node]
    inputs: dict[Node, str]
    """What the member takes, with short names."""
    results: dict[Node, str]
    """New value -> the state that it is stored in."""
    picked: dict[Node, int] = field(default_factory=dict)
    """Of an operation on lists, which of the tensors is the member's."""

    def pick(self, node: Node, operand: Any) -> Any:
        """Return of a list of operands of a node that of the member, anything else as it is."""
        place = self.picked.get(node)
        return (
            operand[place] if isinstance(operand, list | tuple) and place is not None else operand
        )


def member_of(rewritten: Rewritten, program: Program) -> Member:
    """Return the operations that update the representative of a class, as they came."""
    source = program.source.graph
    placeholders = list(source.find_nodes(op="placeholder"))
    by_name = {n.name: n for n in source.nodes}
    short = short_names(rewritten)
    inputs = {}
    for node, name in zip(rewritten.model.inputs, short, strict=True):
        origin = by_name.get(node.meta.get(ORIGIN, node.name))
        if origin is not None and origin.op == "placeholder":
            inputs[origin] = name or _label(program, origin)
    stored = mutations(source)
    results = {stored[n]: name for n, name in inputs.items() if n in stored}
    finder = _Finder(inputs)
    wanted = list(results)
    for node in rewritten.model.outputs:  # results that are no state's
        origin = by_name.get(node.meta.get(ORIGIN, ""))
        if origin is not None and origin not in finder.found:
            wanted.append(origin)
    for node in wanted:
        finder.visit(node)
    # A step count, say, that the member has of its own.
    for n in placeholders:
        if n in finder.reached and n not in inputs:
            inputs[n] = _label(program, n)
            new = stored.get(n)
            if new is not None:
                results.setdefault(new, inputs[n])
    for n in finder.reached - set(inputs):
        inputs[n] = n.name
    nodes = [n for n in source.nodes if n in finder.found and n not in inputs]
    return Member(nodes, _told_apart(inputs), results, finder.picked)


def short_names(rewritten: Rewritten) -> list[str]:
    """Return what the inputs of a class are called in its expanded graph, if they are states."""
    states = {at for _, at, _ in rewritten.model.states}
    assert rewritten.expanded is not None
    names = [n.name for n in rewritten.expanded.graph.find_nodes(op="placeholder")]
    return [names[i] if i in states else "" for i in range(len(rewritten.model.inputs))]


def _label(program: Program, placeholder: Node) -> str:
    places = list(placeholder.graph.find_nodes(op="placeholder"))
    carried = {places[c.index]: c.name.partition(" of ")[0] for c in program.carried}
    label = carried.get(placeholder) or program.label(placeholder)
    return label if label.isidentifier() else placeholder.name


def _told_apart(inputs: dict[Node, str]) -> dict[Node, str]:
    """Number names that several inputs have."""
    taken: set[str] = set()
    found = {}
    for node, name in inputs.items():
        number, one = 1, name
        while one in taken:
            number += 1
            one = f"{name}_{number}"
        taken.add(one)
        found[node] = one
    return found


class _Finder:
    """Walks from new values to what they are made of."""

    def __init__(self, inputs: dict[Node, str]) -> None:
        self.inputs = inputs
        self.found: set[Node] = set()
        self.reached: set[Node] = set()
        """Where the walk ended: placeholders, and what is made of the tensors of many members."""
        self.picked: dict[Node, int] = {}

    def visit(self, start: Node) -> None:
        """Note all operations that a value is made by."""
        waiting = [start]
        while waiting:
            node = waiting.pop()
            if node in self.found or node in self.reached:
                continue
            if node.op != "call_function" or _gathers(node) or len(self.found) > LIMIT:
                self.reached.add(node)
                continue
            self.found.add(node)
            if node.target is operator.getitem and isinstance(_val(node.args[0]), list | tuple):
                of, place = node.args
                assert isinstance(of, Node) and isinstance(place, int)
                self.picked.setdefault(of, place)
            waiting += self._operands(node)

    def _operands(self, node: Node) -> list[Node]:
        place = self.picked.get(node)
        found: list[Node] = []
        for operand in (*node.args, *node.kwargs.values()):
            if isinstance(operand, list | tuple):
                chosen = operand[place : place + 1] if place is not None else operand
                found += [o for o in chosen if isinstance(o, Node)]
            elif isinstance(operand, Node):
                found.append(operand)
        return found


def _val(node: Any) -> Any:
    return node.meta.get("val") if isinstance(node, Node) else None


def _gathers(node: Node) -> bool:
    """Tell whether an operation takes a list of tensors and makes one of them: a norm of all."""
    if "_foreach_" in str(node.target):
        return False
    lists = [a for a in node.args if isinstance(a, list | tuple)]
    many = any(len([o for o in one if isinstance(o, Node)]) > 1 for one in lists)
    return many and name_of(node) in ("stack", "cat") and isinstance(_val(node), torch.Tensor)
