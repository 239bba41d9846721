"""Divide a functional graph into its connected components, and find those that are isomorphic.

A step that does the same to each of a hundred parameters is a hundred copies of one computation.
What runs each copy is compiled once then: a graph for some of them, which is called again and
again with the tensors of others.
"""

import operator
from collections import ChainMap
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import is_concrete_int
from torch.fx.node import map_arg

from collage_fx.passes.dedup.single_tensors import on_single_tensors
from collage_fx.passes.ir.graph_memory import Connected, OpOverload, draws
from collage_fx.passes.ir.program import Program, graph_of

aten = torch.ops.aten
COPY = aten.copy_.default
CHECKS = (aten._assert_async.default, aten._assert_async.msg)
_NUMBERS = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)
LEAST = 8
"""Least number of isomorphic components that are worth a graph of their own: to compile one takes
as long as to compile four or five components of a larger one, whatever is in it."""
MOST = 4
"""Largest number of components of a graph: of 100 small ones, called one by one, each takes
4.6 us, by fours 3.3, by tens 4.3, and all at once 5.1."""


@dataclass
class Call:
    """Inputs and results of one call of a graph, within a larger graph that it is a part of."""

    inputs: list[int]
    """The inputs of the larger graph that it takes, by their positions."""
    results: list[int]
    """The results of the larger graph that it makes, likewise."""


@dataclass
class Repeated:
    """A graph, and the calls of it which together do what many isomorphic components do."""

    graph: Graph
    calls: list[Call]


@dataclass(eq=False)
class _Component:
    """A connected component: what it checks, writes and returns, and what is computed for that."""

    checks: list[Node] = field(default_factory=list)
    writes: list[Any] = field(default_factory=list)
    results: list[tuple[int, Node]] = field(default_factory=list)
    """Each with its position among the results of the graph."""
    inputs: list[Node] = field(default_factory=list)
    """Inputs in the order in which a traversal that begins at the checks comes to them; no two
    isomorphic components differ in it."""
    nodes: list[Node] = field(default_factory=list)
    """Nodes that compute, in that order too."""


def divide(graph: Graph) -> list[Repeated] | None:
    """Return the graphs which, called one after another, do what a graph does; None for itself.

    Components are connected by data flow, and by inputs that one of them writes. Numbers (0-d
    tensors computed from 0-d inputs) and constants do not connect: each component computes anew
    what it uses of them. A number that is used by several components is written by the last graph.

    Args:
        graph: aten and collage:: operations, with new values of inputs copied to them at the end.
    """
    if not all(map(_is_known, graph.nodes)):
        return None
    graph = on_single_tensors(graph)
    components, rest = _Components(graph).found()
    classes: dict[Hashable, list[_Component]] = {}
    for component in components:
        classes.setdefault(_traverse(component), []).append(component)
    many = [alike for alike in classes.values() if len(alike) >= LEAST]
    if not many:
        return None
    for component in (c for alike in classes.values() if len(alike) < LEAST for c in alike):
        rest.checks += component.checks
        rest.writes += component.writes
        rest.results += component.results
    place = {n: i for i, n in enumerate(graph.find_nodes(op="placeholder"))}
    divided = [_stacked(alike, place) for alike in many]
    if rest.checks or rest.writes or rest.results:
        _traverse(rest)
        divided.append(_stacked([rest], place))
    return divided


def calls_of_members(program: Program) -> Repeated:
    """Return the graph of one member of a class, or of a few, and its calls for all members.

    Results of members that were left out are numbered behind those of the graph, and noted in
    `member_results`.
    """
    graph = graph_of(program.result).graph
    (copies,) = program.copies
    member = _Component()
    member.checks = [n for n in graph.nodes if n.target in CHECKS]
    member.writes = [n for n in graph.nodes if n.target is COPY]
    results: Any = graph.output_node().args[0]
    count = len(results)
    member.results = [(k, n) for k, n in enumerate(results) if isinstance(n, Node)]
    _traverse(member)
    rows: list[dict[int, int]] = [{i: i for i in copies.inputs}]
    rows += [{i: c.index for i, c in zip(copies.inputs, o, strict=True)} for o in copies.others]
    lows = program.residual_places
    for row in rows:
        pairs = ((lows.get(i, ()), lows.get(at, ())) for i, at in tuple(row.items()))
        row |= {mine: its for some, others in pairs for mine, its in zip(some, others, strict=True)}
    numbers = [[k for k, _ in member.results]]
    for _ in copies.others:
        numbers.append(list(range(count, count + len(member.results))))
        count += len(member.results)
    program.member_results = {k: list(others) for k, *others in zip(*numbers, strict=True)}
    place = {n: i for i, n in enumerate(graph.find_nodes(op="placeholder"))}
    common = [n for n in member.inputs if place[n] not in rows[0]]
    own = [place[n] for n in member.inputs if place[n] in rows[0]]
    each = [Call([row[i] for i in own], at) for row, at in zip(rows, numbers, strict=True)]
    size, calls = _by_several([place[n] for n in common], each)
    return Repeated(_graph_of([member] * size, common), calls)


def _is_known(node: Node) -> bool:
    """Return True if it is known what an operation does, and it does the same in each run."""
    if node.target in CHECKS:
        return True
    if node.op in ("get_attr", "output"):
        return all(n.target is not COPY for n in node.all_input_nodes)
    value = node.meta.get("val")
    if "unbacked_bindings" in node.meta or (node.users and _description(value) is None):
        return False
    if node.target is COPY:
        return node.args[0].op == "placeholder"  # type: ignore[union-attr]
    if node.op == "placeholder" or node.target is operator.getitem:
        return True
    if isinstance(node.target, OpOverload):
        return not draws(node.target) and not node.is_impure()
    return node.op == "call_function" and isinstance(value, _NUMBERS)


def _description(value: Any) -> Hashable | None:
    """Return a key of a value that isomorphic components share; None for symbolic shapes."""
    if isinstance(value, list | tuple):
        found = tuple(map(_description, value))
        return None if None in found else found
    if isinstance(value, _NUMBERS):
        return type(value), str(value)
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return None
    sizes = *value.shape, *value.stride()
    if not all(map(is_concrete_int, sizes)):
        return None
    return value.dtype, value.dim(), tuple(map(int, sizes)), value.device


def _is_number(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_number, value))
    return value.dim() == 0 if isinstance(value, Tensor) else isinstance(value, _NUMBERS)


class _Components:
    """The connected components of a graph."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.together: Connected[Node] = Connected()
        self.writes: list[Any] = [n for n in graph.nodes if n.target is COPY]
        self.written = {w.args[0]: w for w in self.writes}
        self.light = self._light()
        """Numbers and constants, which each component that uses them computes by itself."""
        for node in graph.nodes:
            if node.op == "call_function" and not self._is_light(node):
                for a in set(node.all_input_nodes) - self.light:
                    if a.op != "placeholder" or a in self.written:
                        self.together.join(a, node)

    def _light(self) -> set[Node]:
        heavy: set[Node] = set()
        while True:
            light: set[Node] = set()
            for node in self.graph.nodes:
                operands = node.all_input_nodes
                free = node.op == "get_attr" or _is_number(node.meta.get("val"))
                if node.op == "call_function":
                    free = (free or not operands) and light.issuperset(operands)
                if free and node.target is not COPY and node not in heavy:
                    light.add(node)
            changed = {a for a, w in self.written.items() if a in light and w.args[1] not in light}
            if not changed:
                return light
            heavy |= changed

    def _is_light(self, node: Node) -> bool:
        """Return True if a node is a number or a constant, or writes a number to a number."""
        return node in self.light or (node.target is COPY and self.light.issuperset(node.args))

    def found(self) -> tuple[list[_Component], _Component]:
        """Return the components that check, write or return something, and what belongs to none."""
        owner = self._owners()
        found: dict[Node, _Component] = {}
        rest = _Component()
        for check in self.graph.nodes:  # they come first: before others write
            if check.target in CHECKS:
                found.setdefault(self.together.root(check), _Component()).checks.append(check)
        for write in self.writes:
            root = owner.get(write, self.together.root(write))
            component = found.setdefault(root, _Component()) if root is not None else rest
            component.writes.append(write)
        results: Any = self.graph.output_node().args[0]
        for k, node in enumerate(results):
            if isinstance(node, Node) and node.op != "placeholder":
                root = None if node in self.light else self.together.root(node)
                component = found.setdefault(root, _Component()) if root is not None else rest
                component.results.append((k, node))
        return list(found.values()), rest

    def _owners(self) -> dict[Node, Node | None]:
        """Return for each write of a number the only component that depends on what it overwrites.

        None if there are several: the number is written when all of them have run.
        """
        readers = self._readers()
        owner: dict[Node, Node | None] = {}
        for write in filter(self._is_light, self.writes):
            heavy = [r for r in readers[write.args[0]] if not self._is_light(r)]
            roots = {None if r.op == "output" else self.together.root(r) for r in heavy}
            owner[write] = roots.pop() if len(roots) == 1 else None
        changed = True
        while changed:
            changed = False
            for write, root in owner.items():
                others = {owner[r] for r in readers[write.args[0]] if r in owner}
                if root is not None and others != {root}:
                    owner[write], changed = None, True
        return owner

    def _readers(self) -> dict[Any, set[Node]]:
        """Return for each number that is written what reads the old one, the write included."""
        depends: dict[Node, frozenset[Node]] = {}
        readers: dict[Any, set[Node]] = {a: set() for a in self.written}
        for node in self.graph.nodes:
            behind = [depends.get(a, frozenset()) for a in node.all_input_nodes]
            if node in self.light:
                depends[node] = frozenset({node} & self.written.keys()).union(*behind)
            else:
                for number in frozenset().union(*behind):
                    readers[number].add(node)
        return readers


def _traverse(component: _Component) -> Hashable:
    """Fill in the nodes of a component; return what it has in common with isomorphic ones."""
    written = [a for w in component.writes for a in w.args[::-1]]
    ends = [*component.checks, *written, *(n for _, n in component.results)]
    number: dict[Node, str] = {}
    lines: list[Hashable] = []
    for node in _postorder(ends):
        operands = repr(map_arg((node.args, node.kwargs), lambda n: f"%{number[n]}"))
        is_input = node.op == "placeholder"
        (component.inputs if is_input else component.nodes).append(node)
        number[node] = str(len(number))
        target = "" if is_input else str(node.target)
        lines.append((node.op, target, operands, _description(node.meta.get("val"))))
    lines.append(tuple(number[n] for n in ends))
    return len(component.checks), len(component.writes), *lines


def _postorder(ends: Iterable[Node]) -> Iterable[Node]:
    """Return nodes and all that they depend on, each behind its operands."""
    found: dict[Node, None] = {}
    waiting = list(ends)[::-1]
    while waiting:
        operands = [a for a in waiting[-1].all_input_nodes if a not in found]
        if not operands:
            found[waiting.pop()] = None
        waiting += operands[::-1]
    return found


def _stacked(alike: list[_Component], place: dict[Node, int]) -> Repeated:
    """Return a graph of some components, whose calls do what all of them do.

    Args:
        alike: isomorphic components.
        place: the positions of the inputs.
    """
    columns = zip(*(c.inputs for c in alike), strict=True)
    common = [n for n, *others in columns if {n}.issuperset(others)]
    own = [[place[n] for n in c.inputs if n not in common] for c in alike]
    each = [Call(at, [k for k, _ in c.results]) for at, c in zip(own, alike, strict=True)]
    size, calls = _by_several([place[n] for n in common], each)
    return Repeated(_graph_of(alike[:size], common), calls)


def _by_several(common: list[int], each: list[Call]) -> tuple[int, list[Call]]:
    """Return of how many components a graph is, and the calls of it.

    Args:
        common: the inputs that all components take.
        each: what each component takes and makes by itself.
    """
    size = max(n for n in range(1, MOST + 1) if len(each) % n == 0)
    runs = [each[i : i + size] for i in range(0, len(each), size)]
    return size, [
        Call(
            common + [i for one in run for i in one.inputs],
            [k for one in run for k in one.results],
        )
        for run in runs
    ]


def _graph_of(components: list[_Component], common: list[Node]) -> Graph:
    """Return a graph that does what these components do."""
    graph = Graph()

    def given(node: Node) -> Node:
        new = graph.placeholder(f"input{len(graph.nodes)}")
        new.meta = dict(node.meta)
        return new

    shared = {n: given(n) for n in common}
    pairs = [
        (c, ChainMap({n: given(n) for n in c.inputs if n not in shared}, shared))
        for c in components
    ]
    for component, env in pairs:
        for node in component.nodes:
            if node not in shared:
                alike = shared.keys() >= {*node.all_input_nodes}
                (shared if alike else env)[node] = graph.node_copy(node, env.__getitem__)
    for component, env in pairs:
        for write in component.writes:  # when all has been read
            graph.node_copy(write, env.__getitem__)
    results = tuple(env[n] for c, env in pairs for _, n in c.results)
    graph.output(results)
    graph.output_node().meta = {"user_visible_output_idxs": list(range(len(results)))}
    return graph
