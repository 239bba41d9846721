"""Before AOTAutograd: leave one member of each class in the graph of a step.

Dynamo unrolls the step of an optimizer, AOTAutograd traces it operation by operation, and the
passes then find that it is the same slice over and over. Where one kernel is to update a class, all
but one of its members leave the graph that Dynamo made, before any of that work; `emit` gives them
back, as operands of the class's one operation. What is left out here is only supposed to be
elementwise: whether it is, `emit` finds out from the member that stayed.
"""

import operator
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate

from collage_fx.passes.dedup.graph_scan import Atom, Part, Scan, UnknownOperation
from collage_fx.passes.frontend.torch_internals import is_concrete_int
from collage_fx.passes.ir.program import Unlike
from collage_fx.runtime.expansion.eft import LOW_PRECISION

Fact = Callable[[Node], Hashable | None]


@dataclass
class Group:
    """Members of a class, alike but for the sizes of their tensors; the first stays in the graph.

    Inputs and results of all members are listed in the same order.
    """

    inputs: list[list[Any]]
    """For each member what it alone takes: placeholders and attributes of the whole graph. For
    those that Dynamo has not seen what the caller has in their place."""
    results: list[list[int]]
    """For each member the positions of what it makes among the results of the whole graph."""
    shared: set[int]
    """Which of the inputs are read outside the member too; none of them is 0-d or written."""


@dataclass
class Narrow:
    """A graph that has one member of each group."""

    gm: GraphModule
    inputs: list[int]
    """The placeholders of the whole graph that it takes."""
    results: list[int]
    """The results of the whole graph that it returns."""
    returned: dict[int, Node]
    """Other results: the inputs that they are."""
    groups: list[Group]


def narrow(
    gm: GraphModule,
    fact: Fact,
    least: Callable[[torch.device], int],
    dtypes: Collection[torch.dtype] = LOW_PRECISION,
) -> Narrow | None:
    """Return the graph of one member of each class, or None if no class can do with that.

    A member is what is connected by tensors that only it uses. Members of a group agree in
    operations, constants, dtypes, in what is known of their inputs, and in how many dimensions and
    which of size 1 their tensors have: all of them have one shape and are dense, or are 0-d and
    computed from 0-d tensors.

    Args:
        gm: a graph of Dynamo's.
        fact: what else members have to agree in for an input; None if it is to be left alone.
        least: of how many members a class on a device consists at least.
        dtypes: those of states that may be compensated; others need no narrow graph.
    """
    try:
        found = Scan(gm)
    except UnknownOperation:
        return None
    classes: dict[tuple[int, Hashable], dict[Hashable, list[Part]]] = {}
    for part in found.parts():
        layout = _layout(part, dtypes)
        key = _key(part, found, fact) if layout is not None else None
        if key is not None:
            at = (least(_device(part)), key)
            classes.setdefault(at, {}).setdefault(layout, []).append(part)
    large = [same for (n, _), same in classes.items() if sum(map(len, same.values())) >= n]
    groups = [parts for same in large for parts in same.values() if len(parts) > 1]
    return _without(found, groups) if groups else None


def represented(
    gm: GraphModule,
    stands: Callable[[Node], int | None],
    count: int,
    dtypes: Collection[torch.dtype] = LOW_PRECISION,
) -> list[tuple[int, list[Node]]] | Unlike:
    """Find in a graph the members that stand for others which Dynamo has not seen.

    Args:
        gm: a graph of Dynamo's.
        stands: the number of the class for whose first parameter an input is, None for others.
        count: how many such classes there are.
        dtypes: those of states that may be compensated.

    Returns:
        Parts of the graph: the class, and the inputs that each parameter has of its own. Or why
        the graph is not made of such parts, or does not update all classes.
    """
    try:
        scan = Scan(gm)
    except UnknownOperation:
        return Unlike("it has an operation that is not known")
    if scan.results:
        return Unlike("it returns values")
    parts = scan.parts()
    outside = {x for a in scan.atoms for x in a.operands if x.part is not a.part}
    if any(stands(x.node) is not None for x in (*outside, *scan.numbers_read) if x.is_input):
        return Unlike("what belongs to one parameter is read for others too")
    found = []
    updated = set()
    for part in parts:
        own = [x for x in part.inputs if stands(x.node) is not None or _full(x) or x.bound]
        owners = {stands(x.node) for x in own}
        if owners <= {None}:
            continue
        owner = owners.pop()
        if owner is None or owners:
            return Unlike("parameters are updated together")
        if _layout(part, dtypes) is None:
            return Unlike("a parameter is not updated element by element")
        # A rate in a tensor is for all, though no other class reads it.
        found.append((owner, [x.node for x in own]))
        if any(x.bound and _full(x) for x in part.inputs):
            updated.add(owner)
    if len(updated) < count:
        return Unlike("some parameters are updated in another graph")
    return found


def _layout(part: Part, dtypes: Collection[torch.dtype]) -> Hashable | None:
    """Return what layouts of members must have in common, None for one that cannot leave."""
    if any(a.odd for a in part.atoms) or any(x.odd for x in part.inputs):
        return None
    operands = {x: None for a in part.atoms for x in a.operands if x.part is not part}
    full = [x.value for x in (*part.inputs, *operands) if x.value is not None and x.value.dim()]
    if not full or any(x.others and not _full(x) for x in part.inputs):
        return None
    shape, stride = full[0].shape, full[0].stride()
    if not all(is_concrete_int(n) and n != 0 for n in (*shape, *stride)):
        return None
    if any(v.shape != shape or v.stride() != stride for v in full):
        return None
    if not torch.ops.aten.is_non_overlapping_and_dense(full[0]):
        return None
    for atom in part.atoms:
        if atom.value is None or (_full(atom) and atom.value.shape != shape):
            return None
        if not _full(atom) and any(_full(x) for x in atom.operands):
            return None  # a reduction
    states = (x.value for x in part.inputs if x.bound and x.value is not None and x.value.dim())
    low = any(value.dtype in dtypes for value in states)
    return tuple(int(n) == 1 for n in shape) if low else None


def _key(part: Part, scan: Scan, fact: Fact) -> Hashable | None:
    """Describe the part but for sizes and tensors; None if an input is to be left alone."""
    number = {x: f"in{i}" for i, x in enumerate(part.inputs)}
    lines: list[Hashable] = []
    for x in part.inputs:
        known = fact(x.node)
        value = x.value
        if known is None or value is None:
            return None
        lines.append((known, x.node.op, _full(x), x.bound, x.others, str(value.dtype)))
        lines.append((str(value.device), value.requires_grad))
    for i, atom in enumerate(part.atoms):
        number[atom] = f"n{i}"

        def text(a: Any) -> str:
            if not isinstance(a, Node):
                return repr(a)
            operand = scan.atom_of.get(a)
            if operand is None:
                return scan.scalars[a]
            return number.get(operand) or f"{operand.node.name}[{operand.at}]"

        operands = repr(map_aggregate(atom.args, text))
        lines.append((atom.node.op, str(atom.node.target), operands, atom.graded))
    lines += [number[scan.results[k]] for k in part.results]  # type: ignore[index]
    return tuple(lines)


def _device(part: Part) -> torch.device:
    """Return where the tensors of a part are that are not 0-d."""
    return next(x.value.device for x in part.inputs if x.value is not None and x.value.dim())


def _full(x: Atom) -> bool:
    return x.value is not None and x.value.dim() > 0


def _without(scan: Scan, groups: list[list[Part]]) -> Narrow:
    """Return the graph of the first part of each group, and of what is in none."""
    left = [part for parts in groups for part in parts[1:]]
    gone = {x for part in left for x in (*part.atoms, *part.inputs) if not x.others}
    rest = {f: [i for i, a in enumerate(own) if a not in gone] for f, own in scan.lists.items()}
    graph = Graph()
    env: dict[Node, Node] = {}
    for node in scan.gm.graph.nodes:
        if node.op == "output" or scan.atom_of.get(node) in gone or rest.get(node) == []:
            continue
        if node in rest:
            env[node] = _shortened(graph, node, rest[node], env)
        elif node.target is operator.getitem and node.args[0] in rest:
            at = rest[node.args[0]].index(node.args[1])
            env[node] = graph.call_function(operator.getitem, (env[node.args[0]], at))
            env[node].meta = dict(node.meta)
        else:
            env[node] = graph.node_copy(node, lambda n: env[n])
        if node.op == "placeholder":
            env[node]._dynamo_source = getattr(node, "_dynamo_source", None)
    output = scan.gm.graph.output_node()
    results = [k for k, a in enumerate(scan.results) if a not in gone and k not in scan.returned]
    values: Any = output.args[0]
    graph.output(tuple(env.get(values[k], values[k]) for k in results))
    graph.output_node().meta = dict(output.meta)
    for node in reversed(scan.scalars):
        if node.op != "placeholder" and not env[node].users:
            graph.erase_node(env[node])
    placeholders = scan.gm.graph.find_nodes(op="placeholder")
    inputs = [i for i, n in enumerate(placeholders) if n in env]
    found = [
        Group(
            [[x.node for x in part.inputs] for part in parts],
            [part.results for part in parts],
            {i for i, x in enumerate(parts[0].inputs) if x.others},
        )
        for parts in groups
    ]
    return Narrow(_module(scan.gm, graph), inputs, results, scan.returned, found)


def _module(gm: GraphModule, graph: Graph) -> GraphModule:
    module = GraphModule(gm, graph, class_name=type(gm).__name__)
    module.meta = gm.meta
    for name in ("_param_name_to_source", "compile_subgraph_reason"):
        if hasattr(gm, name):
            object.__setattr__(module, name, getattr(gm, name))
    return module


def _shortened(graph: Graph, node: Node, kept: list[int], env: dict[Node, Node]) -> Node:
    """Append a foreach operation for some of the tensors of its lists."""

    def some(a: Any) -> Any:
        chosen = [a[i] for i in kept] if isinstance(a, list | tuple) else a
        return map_aggregate(chosen, lambda n: env[n] if isinstance(n, Node) else n)

    args = tuple(some(a) for a in node.args)
    kwargs = {k: some(a) for k, a in node.kwargs.items()}
    new = graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
    new.meta = {**node.meta, "example_value": some(node.meta["example_value"])}
    return new
