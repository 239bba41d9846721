"""Pass 5: cut the graph into slices, and group isomorphic slices into classes."""

import torch
from torch.fx import Node

from collage_fx.passes.ir.graph_memory import Connected, closure, depending, draws, mutations
from collage_fx.passes.ir.program import (
    LOW_PRECISION,
    SAME_VALUE,
    Carried,
    Program,
    Slice,
    StateClass,
    compensable_in,
    graph_of,
    is_tensor,
    value_of,
)
from collage_fx.runtime.ops import JOINS

aten = torch.ops.aten


def slice_(program: Program) -> None:
    """Find the slices and their classes.

    A slice is a connected component of elementwise nodes of one shape that holds a carried state
    which may be compensated; others that it updates, fp32 averages say, are its states too. What is
    computed from 0-d values only (step counts, bias corrections, a tensor learning rate), what
    reduces, multiplies matrices or changes shape is in no slice: slices take its results as inputs.
    Slices that agree in operations, constants, dtypes and the roles of their inputs form a class.
    The graph does not change.
    """
    nodes = list(graph_of(program.canonical).graph.nodes)
    placeholders = [n for n in nodes if n.op == "placeholder"]
    new_value = mutations(graph_of(program.canonical).graph)
    for c in program.carried:
        c.always_plain = not compensable_in(c, program.settings.storage)
    states = {
        placeholders[c.index]: c
        for c in program.carried
        if not (c.refusal or (c.always_plain and (c.val.dim() == 0 or c.val.dtype.is_complex)))
    }
    groups = _components(nodes, states, new_value)
    where = {node: group for group in groups for node in group}
    for placeholder, carried in states.items():
        path = _path_refusal(placeholder, new_value[placeholder], where)
        if path and not carried.always_plain:
            carried.refusal = path
    stored = inverse(new_value)
    by_key: dict[str, StateClass] = {}
    for group in groups:
        part = make_slice(group, states, stored)
        if not all(c.always_plain for c, _, _ in part.states):
            by_key.setdefault(part.key, StateClass([])).members.append(part)
    program.classes = list(by_key.values())


def inverse(new_value: dict[Node, Node]) -> dict[Node, list[Node]]:
    """Return new value -> the placeholders that it is stored in."""
    stored: dict[Node, list[Node]] = {}
    for placeholder, new in new_value.items():
        stored.setdefault(new, []).append(placeholder)
    return stored


def shape_of(node: Node) -> tuple[str, ...]:
    """Return the shape of a tensor as text: to compare a symbolic size would add a guard."""
    return tuple(str(s) for s in value_of(node).shape)


def elementwise(node: Node) -> bool:
    """Return True if each element of the result depends on one element of each operand."""
    if node.op != "call_function" or not is_tensor(node) or node.target is aten.copy_.default:
        return False
    if node.target in SAME_VALUE or node.target in JOINS:
        return True
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) and not draws(node.target)


def _components(
    nodes: list[Node], states: dict[Node, Carried], new_value: dict[Node, Node]
) -> list[list[Node]]:
    """Return the connected components of sliceable nodes, each in graph order.

    What reads the old value of a state and what makes its new one are connected too, although the
    new value may come from another state: buffers that change places are one system.
    """
    together: Connected[Node] = Connected()
    sliceable: dict[Node, None] = {}
    first_user: dict[Node, Node] = {}
    for node in nodes:
        if not elementwise(node):
            continue
        near = [a for a in node.all_input_nodes if is_tensor(a)]
        if value_of(node).dim() == 0 and not any(
            a in sliceable or a in states or value_of(a).dtype in LOW_PRECISION for a in near
        ):
            continue
        sliceable[node] = None
        for a in near:
            # Users of one carried state belong together; other inputs may be shared freely.
            link = first_user.setdefault(a, node) if a in states else a
            if link in sliceable and shape_of(link) == shape_of(node):
                together.join(link, node)
    for state in states:
        old, new = first_user.get(state), new_value[state]
        if old is not None and new in sliceable and shape_of(old) == shape_of(new):
            together.join(old, new)
    groups: dict[Node, list[Node]] = {}
    for node in sliceable:
        groups.setdefault(together.root(node), []).append(node)
    return list(groups.values())


def _path_refusal(placeholder: Node, new: Node, where: dict[Node, list[Node]]) -> str:
    """Say why the way from the old to the new value is not within one slice; empty if it is.

    A new value that does not depend on the old one is no carried path: `recurrence` finds that out.
    """
    group = where.get(new, [])
    if new in depending(group, [placeholder]):
        return ""
    before = closure(new, lambda n: n.all_input_nodes)
    if placeholder not in before:
        return ""
    inside, nodes = set(group), (n for n in placeholder.graph.nodes if n in before)
    foreign = [n for n in depending(nodes, [placeholder]) if n not in inside]
    blocking = [n for n in foreign if not elementwise(n)] or foreign
    if not blocking:
        return ""
    return f"its update passes through {blocking[-1].target}, which is not elementwise"


def make_slice(
    group: list[Node], states: dict[Node, Carried], stored: dict[Node, list[Node]]
) -> Slice:
    """Return the slice of these nodes.

    A state that is overwritten without being read is an input too: the memory for its new value.

    Args:
        group: the nodes, in an order in which they can run.
        states: placeholder -> carried state.
        stored: new value -> the placeholders that it is stored in.
    """
    inside = set(group)
    new_value = {p: n for n in group for p in stored.get(n, ()) if p in states}
    inputs = dict.fromkeys(a for n in group for a in n.all_input_nodes if a not in inside)
    inputs |= dict.fromkeys(new_value)
    outputs = [n for n in group if any(user not in inside for user in n.users)]
    part = Slice(group, list(inputs), outputs, [])
    for at, node in enumerate(part.inputs):
        if node in new_value:
            part.states.append((states[node], at, new_value[node]))
    part.key = _key(part)
    return part


def _key(part: Slice) -> str:
    """Describe the slice but for its shapes and tensors."""
    number: dict[Node, str] = {n: f"in{i}" for i, n in enumerate(part.inputs)}
    shape = shape_of(part.nodes[0])
    lines = [f"{number[n]} {value_of(n).dtype} {_role(n, shape)}" for n in part.inputs]
    for i, node in enumerate(part.nodes):
        number[node] = f"n{i}"
        operands = torch.fx.node.map_aggregate(
            (node.args, node.kwargs), lambda a: number[a] if isinstance(a, Node) else repr(a)
        )
        lines.append(f"{node.target} {operands} {value_of(node).dtype}")
    lines += [f"out {number[n]}" for n in part.outputs]
    lines += [f"state in{at} -> {number[new]} {c.owner}" for c, at, new in part.states]
    return "\n".join(lines)


def _role(node: Node, shape: tuple[str, ...]) -> str:
    return "full" if shape_of(node) == shape else f"{value_of(node).dim()}-d"
