"""Product rules: an expansion times a constant, a scalar tensor or a tensor."""

from typing import Any

import torch
from collage_fx.passes.rules.registry import Builder, Pair, rule
from collage_fx.runtime.arithmetic import split_constant
from collage_fx.runtime.ops import collage
from torch.fx import Node

aten = torch.ops.aten


def times(b: Builder, x: Pair, factor: Any) -> Pair:
    """Return x * factor; a factor that the storage does not represent becomes an expansion."""
    if b.is_number(factor):
        return b.pair(collage.mul.constant, *x, *split_constant(float(factor), b.dtype))
    plain = b.plain(factor)
    if plain.meta["dtype"] == b.dtype:
        return b.pair(collage.mul.default, *x, plain, 0.0)
    return b.pair(collage.mul.default, *x, *b.pair(collage.split.default, plain, b.dtype))


@rule(aten.mul.Tensor)
def mul(b: Builder, node: Node, x: Pair, at: int) -> Pair:
    """x * c, where a constant such as beta2 = 0.999 is (1.0, -0.000999451) in bf16."""
    return times(b, x, node.args[1 - at])
