"""0-d work of the members of a class, such as bias corrections, as one operation for all.

A step count and its bias corrections are 0-d, and each parameter has its own. They are no part of a
slice, whose kernel would compute them once for each element. Left to Inductor, they are unrolled.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.fx import Graph, GraphModule, Node

from collage_fx.passes.codegen.inductor_lowering import register_lowerings
from collage_fx.passes.frontend.slice import elementwise, make_slice
from collage_fx.passes.ir.graph_memory import depending, writes_only
from collage_fx.passes.ir.program import (
    LOW_PRECISION,
    Carried,
    Rewritten,
    Slice,
    is_scalar,
    other_outputs,
    value_of,
)
from collage_fx.runtime.torch_private import lowerings


@dataclass
class Scalars:
    """The 0-d parts of all members of a class."""

    members: list[Slice]
    """Isomorphic slices; their outputs are new values of 0-d states, or go to the member."""
    feeds: dict[int, int]
    """Input of the member's slice -> the one of `other_outputs` that it is."""
    lowered: GraphModule
    """Placeholders and outputs are the inputs and outputs of a part."""


def scalars_of(
    rewritten: Rewritten,
    states: dict[Node, Carried],
    stored: dict[Node, list[Node]],
    others: set[Node],
    alone: Callable[[Slice], set[Node] | None],
) -> Scalars | None:
    """Return the 0-d parts of a class, or None if there are none, or they are not alike.

    Args:
        rewritten: the class.
        states: placeholder -> state, of all 0-d carried states.
        stored: new value -> the placeholders that it is stored in.
        others: the nodes of all slices, of which no part can be made.
        alone: for a member that stands for others which are not in the graph, the inputs that only
            it takes. What it computes from none of them is that of all. A count among them that
            nothing reads is updated with it.
    """
    inputs = list(map(alone, rewritten.members))
    counts = [[v for v, at in stored.items() if states.keys() & (i or ()) & {*at}] for i in inputs]
    pairs = zip(rewritten.members, counts, strict=True)
    cones = [_cone([*member.inputs, *own], others) for member, own in pairs]
    seen = Counter(node for cone in cones for node in cone)
    cones = [c if i is None else depending(c, i) for c, i in zip(cones, inputs, strict=True)]
    device = next(value_of(n).device for n in rewritten.members[0].inputs if value_of(n).dim())
    # What comes of numbers of the host alone, such as a learning rate that changes, is made there.
    own = [[n for n in cone if seen[n] == 1 and value_of(n).device == device] for cone in cones]
    if not all(own):
        return None
    parts = [make_slice(nodes, states, stored) for nodes in own]
    feeds = [_feeds(m, part) for m, part in zip(rewritten.members, parts, strict=True)]
    alike = all(p.key == parts[0].key for p in parts) and all(f == feeds[0] for f in feeds)
    # A launch brings such numbers along.
    given = {value_of(n).device for part in parts for n in part.inputs}
    closed = all(map(only_taken_by, parts, rewritten.members))
    if not (alike and closed and given <= {device, torch.device("cpu")}):
        return None
    lowered = _lower(parts[0])
    return Scalars(parts, feeds[0], lowered) if lowered is not None else None


def _cone(values: list[Node], others: set[Node]) -> list[Node]:
    """Return the nodes that compute those of some values that are 0-d from 0-d tensors alone, in
    order."""
    found: dict[Node, None] = {}

    def visit(node: Node) -> None:
        if node in found or node in others:
            return
        if elementwise(node) and all(map(_is_scalar, (node, *node.all_input_nodes))):
            for a in node.all_input_nodes:
                visit(a)
            found[node] = None

    for node in filter(_is_scalar, values):
        visit(node)
    return list(found)


def _is_scalar(node: Node) -> bool:
    """Return True if a node is a 0-d tensor, and not of low precision."""
    return is_scalar(node) and value_of(node).dtype not in LOW_PRECISION


def _feeds(member: Slice, part: Slice) -> dict[int, int]:
    where = {node: k for k, node in enumerate(other_outputs(part))}
    return {i: where[n] for i, n in enumerate(member.inputs) if n in where}


def only_taken_by(part: Slice, member: Slice, *, or_returned: bool = False) -> bool:
    """Return True if nothing but a member and the states of a part takes what the part computes.

    Args:
        part: the part, which may be the member.
        member: the member.
        or_returned: whether it may be a result of the graph too.
    """
    inside = {*part.nodes, *member.nodes}
    new = {(part.inputs[at], value) for _, at, value in part.states}
    return all(
        user in inside
        or (or_returned and user.op == "output")
        or (user.args in new and writes_only(user))
        for node in part.outputs
        for user in node.users
    )


def _lower(part: Slice) -> GraphModule | None:
    """Return the graph of a part; None if an operation in it has no lowering by itself."""
    register_lowerings()
    if any(node.target not in lowerings for node in part.nodes):
        return None
    graph = Graph()
    env: dict[Node, Node] = {}
    for i, node in enumerate(part.inputs):
        env[node] = graph.placeholder(f"in{i}")
        env[node].meta["dtype"] = value_of(node).dtype
    for node in part.nodes:
        env[node] = graph.node_copy(node, lambda n: env[n])
        env[node].meta = {"dtype": value_of(node).dtype}
    graph.output(tuple(env[n] for n in part.outputs))
    return GraphModule(torch.nn.Module(), graph)
