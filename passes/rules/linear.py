"""Linear rules: sums, differences and averages.

A plain term is rounded once to the storage; a term that is an expansion keeps its low word.
"""

from typing import Any

import torch

from collage_fx.passes.rules.builder import Builder, Call, Components, Decayed, Expanded, Term, rule
from collage_fx.passes.rules.join_split import apply_wide
from collage_fx.passes.rules.product import decayed, near_one, times
from collage_fx.runtime.expansion.eft import WIDER
from collage_fx.runtime.ops import collage

aten = torch.ops.aten


def plus(b: Builder, x: Expanded, term: Any, operation: Any) -> Components:
    """Return x + term or x - term, as operation is aten.add.Tensor or aten.sub.Tensor."""
    other = b.expansion(term)
    if other is not None:
        if operation is aten.sub.Tensor:
            other = b.pair(collage.neg.default, *other)
        return b.pair(collage.add.default, *b.settle(x), *other)
    if isinstance(x, Decayed):
        total = b.op(operation, x.term, b.widened(term), dtype=WIDER[b.dtype])
        return b.settle(Decayed(x.pair, total, x.small))
    rounded = b.rounded(term)
    if operation is aten.sub.Tensor:
        rounded = b.op(aten.neg.default, rounded, dtype=b.dtype)
    return b.pair(collage.grow.default, *x, rounded)


@rule(aten.add.Tensor)
def add(b: Builder, node: Call, x: Expanded, at: int) -> Expanded:
    """x + t = grow(x, t), 2u^2; with an expansion, add, 3u^2/(1-4u); with a number, in wide."""
    term = node.args[1 - at]
    if b.is_number(term) or node.kwargs:
        return apply_wide(b, node, x, at)
    return plus(b, x, term, aten.add.Tensor)


@rule(aten.sub.Tensor)
def sub(b: Builder, node: Call, x: Expanded, at: int) -> Expanded:
    """x - t and t - x: as the sum with -t, or of -x with t; the bounds of `add`."""
    term = node.args[1 - at]
    if b.is_number(term) or node.kwargs:
        return apply_wide(b, node, x, at)
    if at == 1:
        return plus(b, b.pair(collage.neg.default, *b.settle(x)), term, aten.add.Tensor)
    return plus(b, x, term, aten.sub.Tensor)


@rule(aten.neg.default)
def neg(b: Builder, node: Call, x: Expanded, at: int) -> Expanded:
    """-x, exact."""
    return b.pair(collage.neg.default, *b.settle(x))


@rule(aten.lerp.Scalar, aten.lerp.Tensor)
def lerp(b: Builder, node: Call, x: Expanded, at: int) -> Expanded:
    """lerp(x, end, w) = (1-w)*x + w*end, so that the decay acts on the whole expansion.

    w*end is not rounded to the storage: where end is near x, as in an average of weights, that
    would lose more than the difference of the two.

    Error: 5u^2 of (1-w)*x, 2u^2 of w*end and 3u^2/(1-4u) of the sum; for a w near zero, u of
    w*(end - x).
    """
    weight: Any = node.args[2]
    number = b.is_number(weight)
    if at == 2 or (at == 1 and not number):
        return apply_wide(b, node, x, at)
    pair, wide = b.settle(x), WIDER[b.dtype]
    if at == 1:  # x is the end
        start = b.op(aten.mul.Tensor, b.widened(node.args[0]), 1 - weight, dtype=wide)
        return _plus_wide(b, b.settle(times(b, pair, weight)), start)
    whole = b.expansion(node.args[1]) is not None
    towards = b.op(aten.mul.Tensor, b.widened(node.args[1]), b.plain(weight), dtype=wide)
    if number and not near_one(b, 1 - weight):
        return _plus_wide(b, b.settle(times(b, pair, 1 - weight)), towards)
    plain = b.plain(weight)
    gap = -weight if number else b.op(aten.neg.default, plain, dtype=plain.meta["dtype"])
    away = decayed(b, pair, gap, small=number)
    total = b.op(aten.add.Tensor, away.term, towards, dtype=wide)
    return b.settle(Decayed(pair, total, small=number and not whole))


def _plus_wide(b: Builder, x: Components, term: Term) -> Components:
    """Return x + term, a term of the wide dtype, which is split."""
    return b.pair(collage.add.default, *x, *b.split(term))
