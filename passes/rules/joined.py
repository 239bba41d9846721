"""What happens to an operation on a carried path that has no rule: join - op - split."""

import torch
from collage_fx.passes.rules.registry import Builder, Pair
from collage_fx.runtime.eft import WIDER
from collage_fx.runtime.ops import collage
from torch.fx import Node


def join_op_split(b: Builder, node: Node, x: Pair, at: int) -> Pair:
    """Join the expansion in the wide dtype, apply the operation there and split its result.

    Relative error: that of the operation in fp32 plus that of the storage, about u^2.
    """
    b.joined(node)
    wide = WIDER[b.dtype]
    whole = b.op(collage.join.default, *x, dtype=wide)
    args = [whole if a is node.args[at] else _widened(b, a, wide) for a in node.args]
    value = b.again(node, args, wide)
    return b.pair(collage.split.default, value, b.dtype)


def _widened(b: Builder, operand: object, wide: torch.dtype) -> object:
    plain = b.plain(operand)
    if isinstance(plain, Node) and plain.meta["dtype"] == b.dtype:
        return b.op(torch.ops.prims.convert_element_type.default, plain, wide, dtype=wide)
    return plain
