"""Product rules: products, quotients and roots of expansions."""

import functools
import operator
from math import inf
from typing import Any

import torch

from collage_fx.passes.ir.program import CONVERT
from collage_fx.passes.rules.builder import Builder, Call, Components, Decayed, Expanded, Term, rule
from collage_fx.passes.rules.join_split import apply_wide
from collage_fx.runtime.expansion.components import split_constant
from collage_fx.runtime.expansion.eft import WIDER
from collage_fx.runtime.ops import collage

aten = torch.ops.aten


def times(b: Builder, x: Components, factor: Any) -> Expanded:
    """Return x * factor.

    A constant within 5u of one, and a scalar tensor (1 - lr * weight_decay, a rate), become a
    decay. Any other constant becomes an expansion: beta2 = 0.95 is (0.94921875, 0.000782013) in
    bf16.
    """
    if b.is_number(factor):
        if near_one(b, factor):
            return decayed(b, x, factor - 1, small=True)
        both = _constant(b, factor)
        if both:
            return b.pair(collage.mul.constant, *x, *both)
        # Outside the range of the dtype, as 1e5 and 1e-7 are in fp16.
        return b.split(b.op(aten.mul.Tensor, b.join(x), factor, dtype=WIDER[b.dtype]))
    other = b.expansion(factor)
    if other is not None:
        return b.pair(collage.mul.default, *x, *other)
    plain = b.plain(factor)
    if plain.meta["scalar"]:
        return _scaled(b, x, plain)
    if not plain.meta["dtype"].is_floating_point:  # a mask
        plain = b.convert(plain, b.dtype)
    if plain.meta["dtype"] == b.dtype:
        return b.pair(collage.mul.float, *x, plain)
    return b.pair(collage.mul.default, *x, *b.split(plain))


def _scaled(b: Builder, x: Components, s: Term) -> Decayed:
    """Return x * s for a scalar tensor: x + (s - 1)*x, or 0 + s*x for s up to a half.

    s - 1 is exact where s is near one; of a small s*x, a rate times a state, x and what is taken
    away from it would leave no more than the last bits of x.
    """
    dtype = s.meta["dtype"]
    if dtype not in (torch.float32, torch.float64):  # a count or a mask, or s - 1 would be rounded
        dtype = torch.float32
        s = b.op(CONVERT, s, dtype, dtype=dtype)
    small = b.op(aten.le.Scalar, s, 0.5, dtype=torch.bool)
    near = b.op(aten.sub.Tensor, s, 1, dtype=dtype)
    gap = b.op(aten.where.self, small, s, near, dtype=dtype)
    # Of what is not finite the term is zero, as of any decay.
    size = b.op(aten.abs.default, x[0], dtype=b.dtype)
    finite = b.op(aten.lt.Scalar, size, inf, dtype=torch.bool)
    rest = b.op(aten.where.ScalarSelf, finite, 0, x[0], dtype=b.dtype)
    hi = b.op(aten.where.self, small, rest, x[0], dtype=b.dtype)
    lows = (b.op(aten.where.ScalarSelf, small, 0, c, dtype=c.meta["dtype"]) for c in x[1:])
    return Decayed((hi, *lows), decayed(b, x, gap, small=False).term, small=False)


def _constant(b: Builder, c: float) -> tuple[float, ...] | None:
    """Return a number as an expansion; None if it is outside the range of the dtype."""
    found = split_constant(float(c), b.dtype, b.count)
    rest = functools.reduce(operator.sub, found, float(c))
    return found if abs(rest) <= _unit(b) ** b.count * abs(c) else None


def _unit(b: Builder) -> float:
    return torch.finfo(b.dtype).eps / 2


def near_one(b: Builder, factor: float) -> bool:
    """Return True if x * factor is better computed as x + (factor - 1) * x; see `Decayed`."""
    return abs(1 - factor) <= 5 * _unit(b)


def decayed(b: Builder, x: Components, gap: Any, *, small: bool) -> Decayed:
    """Return x * (1 + gap), for a number or a scalar tensor."""
    decay = collage.decay.constant if b.is_number(gap) else collage.decay.default
    return Decayed(x, b.op(b.form(decay), *x, gap, dtype=WIDER[b.dtype]), small)


@rule(aten.mul.Tensor)
def mul(b: Builder, node: Call, x: Expanded, at: int) -> Expanded:
    """x * c, 5u^2; a constant, as an expansion, is off by u^2/2 more.

    A constant within 5u of one, once added up: 7u^2. A scalar tensor s: 4u^2 of |x| where that is
    added to (s - 1)*x, for s of a half and more, so that it is 8u^2 of the product.
    """
    return times(b, b.settle(x), node.args[1 - at])


@rule(aten.div.Tensor)
def div(b: Builder, node: Call, x: Expanded, at: int) -> Expanded:
    """x / t and t / x, 3u^2 + 8u^3; a constant, as an expansion, is off by u^2/2 more.

    A number within 5u of one becomes the decay by its inverse. What is not of the storage dtype (a
    scalar tensor, a number in the dividend or out of range) divides the joined value: rounding it
    to the storage first would overflow or lose what it is wider by.
    """
    other = node.args[1 - at]
    if b.is_number(other):
        if at == 0 and near_one(b, other):
            return decayed(b, b.settle(x), (1 - other) / other, small=True)
        both = _constant(b, other) if at == 0 else None
        return (
            b.pair(collage.div.constant, *b.settle(x), *both)
            if both
            else apply_wide(b, node, x, at)
        )
    pair = b.expansion(other)
    if pair is not None:
        dividend, divisor = (b.settle(x), pair) if at == 0 else (pair, b.settle(x))
        return b.pair(collage.div.default, *dividend, *divisor)
    plain = b.plain(other)
    if plain.meta["scalar"] or plain.meta["dtype"] != b.dtype:
        return apply_wide(b, node, x, at)
    if at == 0:
        return b.pair(collage.div.float, *b.settle(x), plain)
    return b.pair(collage.div.into, plain, *b.settle(x))


@rule(aten.reciprocal.default)
def reciprocal(b: Builder, node: Call, x: Expanded, at: int) -> Expanded:
    """1 / x, 3u^2 + 8u^3."""
    pair = b.settle(x)
    return b.pair(collage.div.into, b.op(aten.ones_like.default, pair[0], dtype=b.dtype), *pair)


@rule(aten.sqrt.default)
def sqrt(b: Builder, node: Call, x: Expanded, at: int) -> Expanded:
    """sqrt(x), 25/8 u^2."""
    return b.pair(collage.sqrt.default, *b.settle(x))
