"""Product rules: an expansion times a constant, a scalar tensor or a tensor."""

from typing import Any

import torch
from torch.fx import Node

from collage_fx.passes.rules.registry import Builder, Decayed, Expanded, Pair, rule
from collage_fx.runtime.arithmetic import split_constant
from collage_fx.runtime.eft import WIDER
from collage_fx.runtime.ops import collage

aten = torch.ops.aten


def times(b: Builder, x: Pair, factor: Any) -> Expanded:
    """Return x * factor.

    A constant within 5u of one, and a scalar tensor (1 - lr * weight_decay), become a decay. Any
    other constant becomes an expansion: beta2 = 0.95 is (0.94921875, 0.000782013) in bf16.
    """
    if b.is_number(factor):
        if near_one(b, factor):
            return decayed(b, x, factor - 1, small=True)
        hi, lo = split_constant(float(factor), b.dtype)
        if abs(hi + lo - factor) <= _unit(b) ** 2 * abs(factor):
            return b.pair(collage.mul.constant, *x, hi, lo)
        # Outside the range of the dtype, as 1e5 and 1e-7 are in fp16.
        whole = b.op(collage.join.default, *x, dtype=WIDER[b.dtype])
        product = b.op(aten.mul.Tensor, whole, factor, dtype=WIDER[b.dtype])
        return b.pair(collage.split.default, product, b.dtype)
    plain = b.plain(factor)
    if plain.meta["scalar"]:
        gap = b.op(aten.sub.Tensor, plain, 1, dtype=plain.meta["dtype"])
        return decayed(b, x, gap, small=False)
    if plain.meta["dtype"] == b.dtype:
        return b.pair(collage.mul.float, *x, plain)
    return b.pair(collage.mul.default, *x, *b.pair(collage.split.default, plain, b.dtype))


def _unit(b: Builder) -> float:
    return torch.finfo(b.dtype).eps / 2


def near_one(b: Builder, factor: float) -> bool:
    """Tell whether x * factor is better x + (factor - 1) * x; see `Decayed`."""
    return abs(1 - factor) <= 5 * _unit(b)


def decayed(b: Builder, x: Pair, gap: Any, *, small: bool) -> Decayed:
    """Return x * (1 + gap), for a number or a scalar tensor."""
    decay = collage.decay.constant if b.is_number(gap) else collage.decay.default
    return Decayed(x, b.op(decay, *x, gap, dtype=WIDER[b.dtype]), small)


@rule(aten.mul.Tensor)
def mul(b: Builder, node: Node, x: Expanded, at: int) -> Expanded:
    """x * c."""
    return times(b, b.settle(x), node.args[1 - at])
