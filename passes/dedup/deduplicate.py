"""Before AOTAutograd: leave one member of each class in the graph of a step.

Dynamo unrolls the step of an optimizer, AOTAutograd traces it operation by operation, and the
passes then find that it is the same slice over and over. Where one kernel is to update a class, all
but one of its members leave the graph that Dynamo made, before any of that work; `emit` gives them
back, as operands of the class's one operation. What is left out here is only supposed to be
elementwise: whether it is, `emit` finds out from the member that stayed.

Members that reduce or multiply matrices (a norm of each parameter, Newton-Schulz) leave the graph
altogether: one of them becomes a graph of its own, which is called for each. Values that they have
in common (a norm of all gradients) are inputs of it, and results of the graph that is left.
"""

import operator
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import is_concrete_int
from torch.fx.node import map_aggregate

from collage_fx.passes.dedup.graph_scan import (
    Atom,
    Part,
    Scan,
    UnknownOperation,
    is_full,
    with_counters,
)
from collage_fx.passes.dedup.independent_parts import LEAST
from collage_fx.passes.ir.program import Unlike
from collage_fx.runtime.expansion.eft import LOW_PRECISION
from collage_fx.runtime.torch_private import _set_grad_enabled

Fact = Callable[[Node], Hashable | None]


@dataclass
class Group:
    """Members of a class, alike but for the sizes of their tensors; the first stays in the graph.

    Inputs and results of all members are listed in the same order.
    """

    inputs: list[list[Any]]
    """Inputs that each member alone takes: placeholders and attributes of the whole graph. Of
    members that Dynamo has not seen, what the caller has in their place."""
    results: list[list[int]]
    """Positions of each member's results among those of the whole graph."""
    shared: set[int]
    """Indices of the inputs that are read outside the member too; none is 0-d or written."""


@dataclass
class Narrow:
    """A graph that has one member of each group."""

    gm: GraphModule
    inputs: list[int]
    """The placeholders of the whole graph that it takes; behind them are numbered the values that
    it is handed, see `handed`."""
    results: list[int]
    """The results of the whole graph that it returns; behind them are numbered `handed`."""
    returned: dict[int, Node]
    """Other results: the inputs that they are."""
    groups: list[Group]
    called: bool = False
    """True if the graph is one member, and is called for each member of its group."""
    handed: list[Node] = field(default_factory=list)
    """Values of the whole graph that graphs in `apart` take from this one."""
    apart: list["Narrow"] = field(default_factory=list)
    """Graphs of one member each, which run after this one."""

    @property
    def idle(self) -> bool:
        """True if the graph computes nothing and returns nothing, and need not run."""
        calls = (n for n in self.gm.graph.nodes if n.op.startswith("call"))
        return not self.results and all(n.target is _set_grad_enabled for n in calls)


def narrow(
    gm: GraphModule,
    fact: Fact,
    least: Callable[[torch.device], int],
    dtypes: Collection[torch.dtype] = LOW_PRECISION,
    *,
    calls: bool = False,
) -> Narrow | None:
    """Return the graph of one member of each class, or None if no class can do with that.

    A member is what is connected by tensors that only it uses. Members of a group agree in
    operations, constants, dtypes, in what is known of their inputs, and in how many dimensions and
    which of size 1 their tensors have: all of them have one shape and are dense, or are 0-d and
    computed from 0-d tensors. Those of another group agree in all shapes and strides, and are done
    by calls; see `apart`.

    Args:
        gm: a Dynamo graph.
        fact: what else members have to agree in for an input; None if it is to be left alone.
        least: of how many members a class on a device consists at least.
        dtypes: those of states that may be compensated; others need no narrow graph.
        calls: whether members may be done by calls.
    """
    try:
        found = Scan(gm)
    except UnknownOperation:
        return None
    classes: dict[tuple[int, Hashable], dict[Hashable, list[Part]]] = {}
    shaped: dict[Hashable, list[Part]] = {}
    for part in found.parts():
        layout = _layout(part, dtypes)
        shapes = _shapes(part, dtypes) if calls and layout is None else None
        key = _key(part, found, fact) if layout is not None or shapes is not None else None
        if key is not None and layout is not None:
            at = (least(_device(part)), key)
            classes.setdefault(at, {}).setdefault(layout, []).append(part)
        elif key is not None:
            shaped.setdefault((key, shapes), []).append(part)
    large = [same for (n, _), same in classes.items() if sum(map(len, same.values())) >= n]
    groups = [parts for same in large for parts in same.values() if len(parts) > 1]
    apart = [parts for parts in shaped.values() if len(parts) >= LEAST]
    return _divided(found, groups, apart) if groups or apart else None


@dataclass
class Standing:
    """A member that stands for others which Dynamo has not seen."""

    owner: int
    """The number of its class."""
    inputs: list[Node]
    """The inputs that each parameter of the class has of its own."""
    part: Part
    called: bool
    """True if the members of the class are done by calls."""


@dataclass
class Represented:
    """A graph with the members in it that stand for others which Dynamo has not seen."""

    scan: Scan
    members: list[Standing] = field(default_factory=list)

    def narrow(self, groups: list[Group]) -> Narrow:
        """Return the graph as that of all members, given those of each class."""
        pairs = list(zip(self.members, groups, strict=True))
        called = [(member, group) for member, group in pairs if member.called]
        if not called:
            count = len(self.scan.gm.graph.find_nodes(op="placeholder"))
            return Narrow(self.scan.gm, list(range(count)), [], {}, groups)
        rest = _divided(self.scan, [], [[member.part] for member, _ in called])
        rest.groups = [group for member, group in pairs if not member.called]
        for one, (_, group) in zip(rest.apart, called, strict=True):
            one.groups = [group]
        return rest


def represented(
    gm: GraphModule,
    stands: Callable[[Node], int | None],
    count: int,
    dtypes: Collection[torch.dtype] = LOW_PRECISION,
    *,
    calls: bool = False,
) -> Represented | Unlike:
    """Find in a graph the members that stand for others which Dynamo has not seen.

    Args:
        gm: a Dynamo graph.
        stands: the number of the class for whose first parameter an input is, None for others.
        count: how many such classes there are.
        dtypes: those of states that may be compensated.
        calls: whether members may be done by calls, being of one shape.

    Returns:
        Those members. Or why the graph is not made of such parts, or does not update all classes.
    """
    try:
        scan = Scan(gm)
    except UnknownOperation:
        return Unlike("it has an operation that is not known")
    if scan.results:
        return Unlike("it returns values")
    parts = with_counters(scan.parts(), stands)
    outside = {x for a in scan.atoms for x in a.operands if x.part is not a.part}
    if any(stands(x.node) is not None for x in (*outside, *scan.numbers_read) if x.is_input):
        return Unlike("what belongs to one parameter is read for others too")
    found = Represented(scan)
    updated = set()
    for part in parts:
        own = [x for x in part.inputs if stands(x.node) is not None or is_full(x) or x.bound]
        owners = {stands(x.node) for x in own}
        if owners <= {None}:
            continue
        owner = owners.pop()
        if owner is None or owners:
            return Unlike("parameters are updated together")
        called = _layout(part, dtypes) is None
        if called and not (calls and _shapes(part, dtypes) is not None):
            return Unlike("a parameter is not updated element by element")
        # A rate in a tensor is for all, though no other class reads it.
        found.members.append(Standing(owner, [x.node for x in own], part, called))
        if any(x.bound and is_full(x) for x in part.inputs):
            updated.add(owner)
    if len(updated) < count:
        return Unlike("some parameters are updated in another graph")
    return found


def _layout(part: Part, dtypes: Collection[torch.dtype]) -> Hashable | None:
    """Return the key that layouts of members have in common, None for one that cannot leave."""
    if any(a.odd for a in part.atoms) or any(x.odd for x in part.inputs):
        return None
    operands = {x: None for a in part.atoms for x in a.operands if x.part is not part}
    full = [x.value for x in (*part.inputs, *operands) if x.value is not None and x.value.dim()]
    if not full or any(x.others and not is_full(x) for x in part.inputs):
        return None
    shape, stride = full[0].shape, full[0].stride()
    if not all(is_concrete_int(n) and n != 0 for n in (*shape, *stride)):
        return None
    if any(v.shape != shape or v.stride() != stride for v in full):
        return None
    if not torch.ops.aten.is_non_overlapping_and_dense(full[0]):
        return None
    for atom in part.atoms:
        if atom.value is None or (is_full(atom) and atom.value.shape != shape):
            return None
        if not is_full(atom) and any(is_full(x) for x in atom.operands):
            return None  # a reduction
    states = (x.value for x in part.inputs if x.bound and x.value is not None and x.value.dim())
    low = any(value.dtype in dtypes for value in states)
    return tuple(int(n) == 1 for n in shape) if low else None


def _shapes(part: Part, dtypes: Collection[torch.dtype]) -> Hashable | None:
    """Return the layouts of all tensors of a member that is done by calls; None for other parts."""
    if any(a.odd for a in part.atoms) or any(x.odd for x in part.inputs):
        return None
    outside = {x for a in part.atoms for x in a.operands if not (x.part is part or x.is_input)}
    # What has 16 bits is rounded where it is handed from graph to graph.
    if any(x.odd or x.value is None or x.value.dtype in LOW_PRECISION for x in outside):
        return None
    values = [x.value for x in (*part.inputs, *part.atoms, *outside)]
    layouts = [(v.dtype, v.shape, v.stride()) for v in values if v is not None]
    sizes = [n for _, shape, stride in layouts for n in (*shape, *stride)]
    if len(layouts) < len(values) or not all(is_concrete_int(n) and n != 0 for n in sizes):
        return None
    states = (x.value for x in part.inputs if x.bound and x.value is not None and x.value.dim())
    if not any(value.dtype in dtypes for value in states):
        return None
    return tuple((d, *map(int, shape), "by", *map(int, stride)) for d, shape, stride in layouts)


def _key(part: Part, scan: Scan, fact: Fact) -> Hashable | None:
    """Describe the part but for sizes and tensors; None if an input is to be left alone."""
    number = {x: f"in{i}" for i, x in enumerate(part.inputs)}
    lines: list[Hashable] = []
    for x in part.inputs:
        known = fact(x.node)
        value = x.value
        if known is None or value is None:
            return None
        lines.append((known, x.node.op, is_full(x), x.bound, x.others, str(value.dtype)))
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
    """Return the device of the tensors of a part that are not 0-d."""
    return next(x.value.device for x in part.inputs if x.value is not None and x.value.dim())


def _divided(scan: Scan, groups: list[list[Part]], apart: list[list[Part]]) -> Narrow:
    """Return the graph of the first part of each group, and of what is in none.

    Args:
        scan: the whole graph.
        groups: parts of which one stays in the graph.
        apart: parts that are done by calls of a graph of their own.
    """
    called = {part for parts in apart for part in parts}
    node_of = {x: node for node, x in scan.atom_of.items()}
    handed = dict.fromkeys(
        node_of[x]
        for part in called
        for a in part.atoms
        for x in a.operands
        if not (x.part is part or x.is_input)
    )
    left = [*called, *(part for parts in groups for part in parts[1:])]
    gone = {x for part in left for x in (*part.atoms, *part.inputs) if not x.others}
    results = [k for k, a in enumerate(scan.results) if a not in gone and k not in scan.returned]
    rest = _graph_without(scan, gone, results, (), tuple(handed))
    rest.handed, rest.groups = list(handed), list(map(_group, groups))
    for parts in apart:
        first = parts[0]
        own = {*first.atoms, *first.inputs}
        own |= {x for a in first.atoms for x in a.operands if x.is_input} | {*scan.numbers_read}
        others = {x for x in (*scan.inputs, *scan.atoms) if x not in own}
        one = _graph_without(scan, others, first.results, tuple(handed), ())
        one.groups, one.called = [_group(parts)], True
        rest.apart.append(one)
    (rest.apart[0] if rest.idle else rest).returned = scan.returned
    return rest


def _group(parts: list[Part]) -> Group:
    shared = {i for i, x in enumerate(parts[0].inputs) if x.others}
    return Group([[x.node for x in p.inputs] for p in parts], [p.results for p in parts], shared)


def _graph_without(
    scan: Scan, gone: set[Atom], results: list[int], given: tuple[Node, ...], made: tuple[Node, ...]
) -> Narrow:
    """Return a graph that does some of what the whole graph does.

    Args:
        scan: the whole graph.
        gone: operations and inputs that are left out.
        results: those of the whole graph that it returns.
        given: values that it takes behind the placeholders, if they are used.
        made: values that it returns behind the results.
    """
    rest = {f: [i for i, a in enumerate(own) if a not in gone] for f, own in scan.lists.items()}
    graph = Graph()
    env: dict[Node, Node] = {}
    placeholders = scan.gm.graph.find_nodes(op="placeholder")
    for node in placeholders:
        if scan.atom_of.get(node) not in gone:
            env[node] = graph.node_copy(node)
            env[node]._dynamo_source = getattr(node, "_dynamo_source", None)
    for node in given:
        env[node] = graph.placeholder(node.name)
        env[node].meta = dict(node.meta)
        env[node]._dynamo_source = None  # AOTAutograd asks for one
    for node in scan.gm.graph.nodes:
        if node in env or node.op == "output" or scan.atom_of.get(node) in gone:
            continue
        if rest.get(node) == [] or (
            node in scan.scalars and not env.keys() >= {*node.all_input_nodes}
        ):
            continue
        if node in rest:
            env[node] = _shortened(graph, node, rest[node], env)
        elif node.target is operator.getitem and node.args[0] in rest:
            at = rest[node.args[0]].index(node.args[1])
            env[node] = graph.call_function(operator.getitem, (env[node.args[0]], at))
            env[node].meta = dict(node.meta)
        else:
            env[node] = graph.node_copy(node, lambda n: env[n])
    output = scan.gm.graph.output_node()
    values: Any = output.args[0]
    graph.output(tuple(env.get(n, n) for n in (*(values[k] for k in results), *made)))
    graph.output_node().meta = dict(output.meta)
    for node in (*reversed(scan.scalars), *given):
        if node in env and (node.op != "placeholder" or node in given) and not env[node].users:
            graph.erase_node(env.pop(node))
    inputs = [i for i, n in enumerate((*placeholders, *given)) if n in env]
    count = len(scan.results)
    numbered = [*results, *range(count, count + len(made))]
    return Narrow(module_of(scan.gm, graph), inputs, numbered, {}, [])


def module_of(gm: GraphModule, graph: Graph) -> GraphModule:
    """Return a module of a graph that stands for the one of Dynamo, with the facts about it."""
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
