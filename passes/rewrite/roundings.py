"""Roundings to 16 bits that Inductor has to carry out."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from collage_fx.passes.ir.graph_memory import behind, draws, representatives
from collage_fx.passes.ir.program import CONVERT
from collage_fx.passes.rewrite.lower import EXACT
from collage_fx.passes.rewrite.op_schema import COLLECTIVE
from collage_fx.passes.rules.structural import STRUCTURE
from collage_fx.runtime import torch_versions
from collage_fx.runtime.expansion.eft import SIXTEEN_BITS
from collage_fx.runtime.ops import collage
from collage_fx.runtime.torch_private import (
    inductor_prims as inductor_prims,  # registers torch.ops.prims.fma
)

aten, prims = torch.ops.aten, torch.ops.prims
COPY = aten.copy_.default
_TAKEN_APART = (aten.mul.Tensor, aten.div.Tensor)
ROUNDED = SIXTEEN_BITS
"""The dtypes of high words whose rounding Inductor can be made to carry out."""
_FUSED = frozenset({torch.Tag.pointwise, torch.Tag.reduction})
_SAME_DIGITS = STRUCTURE | EXACT
_MOVING = STRUCTURE - {aten.where.self}
_NOTED = "low_precision_pointwise_barrier"
"""The key by which torch notes them in the meta of a node."""


def keep_user_roundings(gm: GraphModule) -> None:
    """Make the results of the operations that were noted ones that Inductor has to round.

    Of what an operation is decomposed into PyTorch rounds the last result only. That of a
    collective operation has no data yet, before it has been waited for.
    """
    for node in list(gm.graph.nodes):
        noted = node.meta.pop(_NOTED, False)
        if not noted or node.target is CONVERT or _communicates(node):
            continue
        results = [*node.users] if isinstance(node.meta["val"], list | tuple) else [node]
        for result in results:
            val = result.meta.get("val")
            if isinstance(val, Tensor) and val.dtype in ROUNDED and not _is_view(result):
                _round_again(gm, result, val)
    keep_roundings(gm)


def widen_products(gm: GraphModule) -> None:
    """Have products and quotients within an addcmul or addcdiv not rounded to less than its dtype.

    Dynamo takes `v.addcmul_(g, g, value=c)` apart, into the product of 16-bit tensors and an fma of
    fp32; PyTorch rounds once, to fp32. See docs/stock-defects.md.
    """
    for fma in gm.graph.find_nodes(op="call_function", target=prims.fma.default):
        product, out = fma.args[0], fma.meta["val"].dtype
        if not isinstance(product, Node) or product.target not in _TAKEN_APART:
            continue
        if product.meta["val"].dtype not in ROUNDED or out in ROUNDED:
            continue
        with gm.graph.inserting_before(fma):
            terms = [_widened(gm, x, out) for x in product.args]
            whole = gm.graph.call_function(product.target, tuple(terms))
        kept = {k: v for k, v in product.meta.items() if k != _NOTED}
        whole.meta = {**kept, "val": product.meta["val"].to(out)}
        fma.replace_input_with(product, whole)
        if not product.users:
            gm.graph.erase_node(product)


def _widened(gm: GraphModule, x: Any, dtype: torch.dtype) -> Any:
    if not isinstance(x, Node) or x.meta["val"].dtype is dtype:
        return x
    wide = gm.graph.call_function(CONVERT, (x, dtype))
    wide.meta["val"] = x.meta["val"].to(dtype)
    return wide


def keep_shared_roundings(gm: GraphModule) -> None:
    """Make what several operations read one value, rounded, where Inductor would have two.

    It rounds what it stores, and computes the same anew, unrounded, in the kernels that it fuses: a
    tensor and its largest element, or a state and what is computed of it, had different values.
    What one operation reads stays whole.
    """
    shared = _shared(gm.graph)
    kept: list[Node] = []
    for node in list(gm.graph.nodes):
        val = node.meta.get("val")
        if not isinstance(val, Tensor) or val.dtype not in ROUNDED:
            continue
        if node.target is CONVERT and shared.intersection((node, *_moved(node.args[0]))):
            kept.append(node)
        elif node in shared and _is_fused(node):
            kept.append(_round_again(gm, node, val))
    keep_roundings(gm, kept)


def _shared(graph: Graph) -> set[Node]:
    """Return the values that several operations read, if only by their digits; nodes that compute
    the same have one value."""
    same = representatives(graph, _repeats)
    readers: dict[Node, set[Node]] = defaultdict(set)
    for node in graph.nodes:
        for operand in node.all_input_nodes:
            readers[same[operand]].add(same[node])
    shared: set[Node] = set()
    for node in reversed(list(readers)):
        if len(readers[node]) > 1 or any(
            r.target in _SAME_DIGITS and r in shared for r in readers[node]
        ):
            shared.add(node)
    return {node for node in graph.nodes if same[node] in shared}


def _moved(node: Any) -> tuple[Any, Any]:
    """Return a value, and the one that it has its elements of."""
    return node, behind(node, _MOVING)


def _is_fused(node: Node) -> bool:
    """Return True if Inductor may fuse an operation, which rounds its result, with its readers."""
    fused = bool(_FUSED.intersection(getattr(node.target, "tags", ())))
    return fused and node.target not in _SAME_DIGITS


def _repeats(node: Node) -> bool:
    return (_is_fused(node) and not draws(node.target)) or node.target in _SAME_DIGITS


def _communicates(node: Node) -> bool:
    return getattr(node.target, "namespace", "") in COLLECTIVE


def _is_view(node: Node) -> bool:
    return bool(getattr(node.target, "is_view", False))


def _round_again(gm: GraphModule, node: Node, val: Tensor) -> Node:
    """Convert what a node makes to fp32 and back, for all that use it; return its rounding."""
    wide = torch.float32
    with gm.graph.inserting_after(node):
        widened = gm.graph.call_function(CONVERT, (node, wide))
    with gm.graph.inserting_after(widened):
        rounded = gm.graph.call_function(CONVERT, (widened, val.dtype))
    widened.meta["val"], rounded.meta["val"] = val.to(wide), val
    node.replace_all_uses_with(rounded, lambda user: user is not widened)
    return rounded


def keep_roundings(gm: GraphModule, only: Iterable[Node] | None = None) -> None:
    """Make each rounding to 16 bits, or only these, one that Inductor cannot leave out.

    It keeps 16-bit values of a kernel in fp32, where what `split` subtracts would be x - x. Most
    are stored as well, and are not to be rounded twice for that.
    """
    narrows = not torch_versions.drops_roundings()
    every = gm.graph.find_nodes(op="call_function", target=CONVERT)
    for node in every if only is None else only:
        x: Any = node.args[0]
        dtype: Any = node.args[1]
        wide = x.meta["val"].dtype
        if dtype not in ROUNDED or wide not in (torch.float32, torch.float64):
            continue
        back = [u for u in node.users if u.target is CONVERT and u.args[1] is wide]
        with gm.graph.inserting_before(node):
            rounded = gm.graph.call_function(collage.round.default, (x, dtype))
            rounded.meta["val"] = x.meta["val"]
        for user in back:
            user.replace_all_uses_with(rounded)
        if narrows and all(_stores(user, node) for user in node.users if user not in back):
            node.target = collage.narrow.default
        else:
            node.update_arg(0, rounded)
    gm.graph.eliminate_dead_code()
    gm.recompile()


def _stores(user: Node, value: Node) -> bool:
    """Return True if a node does no more with a value than to store it."""
    return user.op == "output" or (user.target is COPY and user.args[0] is not value)
