"""Linear rules: sums and differences with plain terms; the term is rounded once to the storage."""

from typing import Any

import torch
from torch.fx import Node

from collage_fx.passes.rules.joined import join_op_split
from collage_fx.passes.rules.product import decayed, near_one, times
from collage_fx.passes.rules.registry import Builder, Decayed, Expanded, Pair, rule
from collage_fx.runtime.eft import WIDER
from collage_fx.runtime.ops import collage

aten = torch.ops.aten


def plus(b: Builder, x: Expanded, term: Any, operation: Any) -> Pair:
    """Return x + term or x - term, as operation is aten.add.Tensor or aten.sub.Tensor."""
    if isinstance(x, Decayed):
        total = b.op(operation, x.term, b.widened(term), dtype=WIDER[b.dtype])
        return b.settle(Decayed(x.pair, total, x.small))
    rounded = b.rounded(term)
    if operation is aten.sub.Tensor:
        rounded = b.op(aten.neg.default, rounded, dtype=b.dtype)
    return b.pair(collage.grow.default, *x, rounded)


@rule(aten.add.Tensor)
def add(b: Builder, node: Node, x: Expanded, at: int) -> Expanded:
    """x + t = grow(x, t)."""
    term = node.args[1 - at]
    if b.is_number(term) or node.kwargs:
        return join_op_split(b, node, x, at)
    return plus(b, x, term, aten.add.Tensor)


@rule(aten.sub.Tensor)
def sub(b: Builder, node: Node, x: Expanded, at: int) -> Expanded:
    """x - t = grow(x, -t); t - x = grow(-x, t)."""
    term = node.args[1 - at]
    if b.is_number(term) or node.kwargs:
        return join_op_split(b, node, x, at)
    if at == 1:
        return plus(b, b.pair(collage.neg.default, *b.settle(x)), term, aten.add.Tensor)
    return plus(b, x, term, aten.sub.Tensor)


@rule(aten.neg.default)
def neg(b: Builder, node: Node, x: Expanded, at: int) -> Expanded:
    """-x."""
    return b.pair(collage.neg.default, *b.settle(x))


@rule(aten.lerp.Scalar, aten.lerp.Tensor)
def lerp(b: Builder, node: Node, x: Expanded, at: int) -> Expanded:
    """lerp(x, end, w) = (1-w)*x + w*end, so that the decay acts on the whole expansion."""
    weight: Any = node.args[2]
    if at == 1 and b.is_number(weight):
        term = b.op(aten.mul.Tensor, b.widened(node.args[0]), 1 - weight, dtype=WIDER[b.dtype])
        return b.pair(
            collage.grow.default, *b.settle(times(b, b.settle(x), weight)), b.narrowed(term)
        )
    if at != 0:
        return join_op_split(b, node, x, at)
    pair, wide, number = b.settle(x), WIDER[b.dtype], b.is_number(weight)
    towards = b.op(aten.mul.Tensor, b.widened(node.args[1]), b.plain(weight), dtype=wide)
    if number and not near_one(b, 1 - weight):
        return b.pair(
            collage.grow.default, *b.settle(times(b, pair, 1 - weight)), b.narrowed(towards)
        )
    plain = b.plain(weight)
    gap = -weight if number else b.op(aten.neg.default, plain, dtype=plain.meta["dtype"])
    away = decayed(b, pair, gap, small=number)
    total = b.op(aten.add.Tensor, away.term, towards, dtype=wide)
    return b.settle(Decayed(pair, total, small=number))
