"""Roundings to 16 bits that Inductor has to carry out."""

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from collage_fx.passes.ir.program import CONVERT
from collage_fx.runtime import torch_versions
from collage_fx.runtime.expansion.eft import SIXTEEN_BITS
from collage_fx.runtime.ops import collage

COPY = torch.ops.aten.copy_.default
ROUNDED = SIXTEEN_BITS
"""The dtypes of high words whose rounding Inductor can be made to carry out."""
_NOTED = "low_precision_pointwise_barrier"
"""The key by which torch notes them in the meta of a node."""


def keep_user_roundings(gm: GraphModule) -> None:
    """Make the results of the operations that were noted ones that Inductor has to round.

    Of what an operation is decomposed into PyTorch rounds the last result only.
    """
    for node in list(gm.graph.nodes):
        if not node.meta.pop(_NOTED, False) or node.target is CONVERT:
            continue
        results = [*node.users] if isinstance(node.meta["val"], list | tuple) else [node]
        for result in results:
            val = result.meta.get("val")
            if isinstance(val, Tensor) and val.dtype in ROUNDED and not _is_view(result):
                _round_again(gm, result, val)
    keep_roundings(gm)


def _is_view(node: Node) -> bool:
    return bool(getattr(node.target, "is_view", False))


def _round_again(gm: GraphModule, node: Node, val: Tensor) -> None:
    """Convert what a node makes to fp32 and back, for all that use it."""
    wide = torch.float32
    with gm.graph.inserting_after(node):
        widened = gm.graph.call_function(CONVERT, (node, wide))
    with gm.graph.inserting_after(widened):
        rounded = gm.graph.call_function(CONVERT, (widened, val.dtype))
    widened.meta["val"], rounded.meta["val"] = val.to(wide), val
    node.replace_all_uses_with(rounded, lambda user: user is not widened)


def keep_roundings(gm: GraphModule) -> None:
    """Make each rounding to 16 bits one that Inductor cannot leave out.

    It keeps 16-bit values of a kernel in fp32, where what `split` subtracts would be x - x. Most
    are stored as well, and are not to be rounded twice for that.
    """
    narrows = not torch_versions.drops_roundings()
    for node in gm.graph.find_nodes(op="call_function", target=CONVERT):
        x, dtype = node.args
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
    """Tell whether a node does no more with a value than to store it."""
    return user.op == "output" or (user.target is COPY and user.args[0] is not value)
