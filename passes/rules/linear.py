"""Linear rules: sums and differences with plain terms; the term is rounded once to the storage."""

import torch
from collage_fx.passes.rules.joined import join_op_split
from collage_fx.passes.rules.product import times
from collage_fx.passes.rules.registry import Builder, Pair, rule
from collage_fx.runtime.ops import collage
from torch.fx import Node

aten = torch.ops.aten


def _has_alpha(node: Node) -> bool:
    return bool(node.kwargs)


@rule(aten.add.Tensor)
def add(b: Builder, node: Node, x: Pair, at: int) -> Pair:
    """x + t = grow(x, t)."""
    term = node.args[1 - at]
    if b.is_number(term) or _has_alpha(node):
        return join_op_split(b, node, x, at)
    return b.pair(collage.grow.default, *x, b.rounded(term))


@rule(aten.sub.Tensor)
def sub(b: Builder, node: Node, x: Pair, at: int) -> Pair:
    """x - t = grow(x, -t); t - x = grow(-x, t)."""
    term = node.args[1 - at]
    if b.is_number(term) or _has_alpha(node):
        return join_op_split(b, node, x, at)
    if at == 1:
        return b.pair(collage.grow.default, *b.pair(collage.neg.default, *x), b.rounded(term))
    minus = b.op(aten.neg.default, b.rounded(term), dtype=b.dtype)
    return b.pair(collage.grow.default, *x, minus)


@rule(aten.neg.default)
def neg(b: Builder, node: Node, x: Pair, at: int) -> Pair:
    """-x."""
    return b.pair(collage.neg.default, *x)


@rule(aten.lerp.Scalar)
def lerp(b: Builder, node: Node, x: Pair, at: int) -> Pair:
    """lerp(x, end, w) = (1-w)*x + w*end, so that the decay acts on the whole expansion."""
    weight = node.args[2]
    assert isinstance(weight, int | float)
    decay, other = (1 - weight, node.args[1]) if at == 0 else (weight, node.args[0])
    term = b.op(aten.mul.Tensor, b.plain(other), 1 - decay, dtype=b.dtype)
    return b.pair(collage.grow.default, *times(b, x, decay), term)
