"""The product of gradients and a number in a graph that Dynamo has made of a step."""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from collage_fx.gradients.multiplied import FACTOR
from collage_fx.optimizer.ownership import source_name
from collage_fx.passes.dedup.graph_scan import memory_of, written_by
from collage_fx.runtime.trees import tree_leaves


def multiply_apart(gm: GraphModule) -> bool | None:
    """Have a Dynamo graph leave the gradients that it multiplies by `FACTOR` as they are, in place.

    Before::

        grad.mul_(factor)
        exp_avg.lerp_(grad, 0.1)

    After::

        mul = torch.mul(grad, factor)
        exp_avg.lerp_(mul, 0.1)

    A gradient that the step itself writes is left alone: what it writes is the user's.

    Args:
        gm: a Dynamo graph.

    Returns:
        whether there is such a product. None if one is not the first to take a gradient as the
        graph is given it, where a hook has read, written or replaced that before.
    """
    factors = {n for n in gm.graph.find_nodes(op="placeholder") if _is_factor(n)}
    found = [
        n for n in gm.graph.find_nodes(op="call_method", target="mul_") if n.args[1] in factors
    ]
    if not found:
        return False
    if not _are_inputs(gm, set(found)):
        return None
    written = _overwritten(gm, set(found))
    apart: dict[Node, Node] = {}
    for node in found:
        gradient = node.args[0]
        assert isinstance(gradient, Node)
        if gradient not in apart and memory_of(gradient.meta["example_value"]) in written:
            apart[gradient] = node
            continue
        if gradient not in apart:
            readers = [u for u in gradient.users if u not in found and _is_read(u)]
            with gm.graph.inserting_before(node):
                product = _append_product(gm.graph, node)
            apart[gradient] = product
            for user in readers:
                user.replace_input_with(gradient, product)
        node.replace_all_uses_with(apart[gradient])  # the second, of a parameter that is met twice
        gm.graph.erase_node(node)
    gm.recompile()
    return True


def _are_inputs(gm: GraphModule, products: set[Node]) -> bool:
    """Return True if gradients are inputs of the graph, which products are the first to take."""
    before: set[int] = set()
    for node in gm.graph.nodes:
        if node in products:
            gradient = node.args[0]
            if gradient.op not in ("placeholder", "get_attr"):
                return False
            if memory_of(gradient.meta["example_value"]) in before:
                return False
        elif node.op.startswith("call"):
            before |= _memory_in(node.all_input_nodes)
    return True


def _append_product(graph: Graph, node: Node) -> Node:
    """Append what `_product` does to the operands of an operation in a Dynamo graph."""
    gradient, factor = node.args
    assert isinstance(gradient, Node)
    value = gradient.meta["example_value"]
    if value.dim():
        product = graph.call_function(torch.mul, node.args)
        product.meta = dict(node.meta)
        return product
    row = graph.call_function(torch.unsqueeze, (gradient, 0))
    wide = graph.call_function(torch.mul, (row, factor))
    product = graph.call_function(torch.squeeze, (wide, 0))
    with torch.no_grad():
        rows = value.unsqueeze(0), torch.empty_like(value).unsqueeze(0)
    for made, example in zip((row, wide, product), (*rows, rows[1].squeeze(0)), strict=True):
        made.meta = {**node.meta, "example_value": example}
    return product


def _is_factor(node: Node) -> bool:
    return source_name(getattr(node, "_dynamo_source", None)).endswith(f".{FACTOR}")


def _overwritten(gm: GraphModule, products: set[Node]) -> set[int]:
    """Return the memory that a graph overwrites, but by these operations or by zeros at the end."""
    found: set[int] = set()
    ends = True
    for node in reversed(gm.graph.nodes):
        if node.op == "output" or node in products:
            continue
        ends &= node.op == "call_method" and node.target == "zero_" and not node.users
        if not ends:
            found |= _memory_in(written_by(node))
    return found


def _memory_in(nodes: Iterable[Node]) -> set[int]:
    """Return the memory of the tensors that nodes stand for."""
    values = [n.meta.get("example_value") for n in nodes]
    return {memory_of(t) for t in tree_leaves(values) if isinstance(t, Tensor)}


def _is_read(user: Node) -> bool:
    """Return True if an operation does more with a gradient than to overwrite it with zeros."""
    return not (user.op == "call_method" and user.target == "zero_")
