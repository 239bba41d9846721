"""What happens to an operation on a carried path that has no rule: join - op - split."""

from torch.fx import Node

from collage_fx.passes.rules.registry import Builder, Expanded
from collage_fx.runtime.eft import WIDER
from collage_fx.runtime.ops import collage


def join_op_split(b: Builder, node: Node, x: Expanded, at: int) -> Expanded:
    """Join the expansion in the wide dtype, apply the operation there and split its result.

    Relative error: that of the operation in fp32 plus that of the storage, about u^2.
    """
    b.joined(node)
    wide = WIDER[b.dtype]
    whole = b.op(collage.join.default, *b.settle(x), dtype=wide)
    args = [whole if a is node.args[at] else b.widened(a) for a in node.args]
    return b.pair(collage.split.default, b.again(node, args, wide), b.dtype)
