"""Arithmetic on expansions of two components; `three_components.py` has the rest there is.

An expansion is a pair (hi, lo) of tensors of one dtype with value hi + lo and hi = RN(hi + lo). The
same functions are the eager reference, which anyone can call on bf16, fp16 or fp32 tensors, and the
text that `passes/rewrite/lower.py` traces into a compiled graph. u is the unit roundoff 2^-p
(bf16: 2^-8, fp16: 2^-11, fp32: 2^-24).

Where hi is infinite or NaN it is what plain arithmetic on hi would give (or the exact result is
beyond the largest number), and lo is zero: a residual is always finite, so that a parameter which
is restored afterwards is whole again.
"""

import math
from typing import Any

import torch
from torch import Tensor

from collage_fx.runtime.expansion.eft import WIDER, fast_two_sum, two_prod, two_sum

Expansion = tuple[Tensor, Tensor]
Component = Tensor | float


def finite_or_zero(x: Tensor) -> Tensor:
    """Return x with infinities and NaNs replaced by zero."""
    return torch.where(x.abs() < math.inf, x, 0.0)


def normalize(hi: Tensor, lo: Tensor) -> Expansion:
    """Return the expansion of hi + lo, for |hi| >= |lo| or hi = 0.

    Fast2Sum, except that a hi which is not finite comes back unchanged, with lo zero.
    """
    s, t = fast_two_sum(hi, finite_or_zero(lo))
    return s, finite_or_zero(t)


def grow(hi: Tensor, lo: Tensor, a: Tensor) -> Expansion:
    """Return the expansion of (hi + lo) + a, where a is one float.

    `Grow` of the Collage paper (arXiv 2405.03637) with 2Sum as its first step, which is DWPlusFP:
    relative error at most 2u^2 (Joldes, Muller, Popescu, TOMS 44(2), 2017).
    """
    s, t = two_sum(hi, a)
    return normalize(s, lo + t)


def add(hi: Tensor, lo: Tensor, b_hi: Tensor, b_lo: Tensor) -> Expansion:
    """Return the expansion of (hi + lo) + (b_hi + b_lo).

    AccurateDWPlusDW: relative error at most 3u^2 / (1 - 4u) (Joldes, Muller, Popescu 2017).
    """
    s, t = two_sum(hi, b_hi)
    tail, rest = two_sum(lo, b_lo)
    s, t = normalize(s, t + tail)
    return normalize(s, rest + t)


def mul(hi: Tensor, lo: Tensor, b_hi: Component, b_lo: Component) -> Expansion:
    """Return the expansion of (hi + lo) * (b_hi + b_lo).

    `Mul` of the Collage paper, which is DWTimesDW1: relative error at most 5u^2 (Muller, Rideau,
    TOMS 48(1), 2022) while the product's error does not underflow (see `eft.two_prod`). `b_hi` and
    `b_lo` are tensors of the dtype of hi, or Python numbers that it represents.
    """
    p, e = two_prod(hi, b_hi)
    cross = lo * b_hi + hi * b_lo
    return normalize(p, cross + e)


def div(hi: Tensor, lo: Component, b_hi: Component, b_lo: Component) -> Expansion:
    """Return the expansion of (hi + lo) / (b_hi + b_lo).

    DWDivFP3 and DWDivDW2 of Joldes, Muller, Popescu 2017 (3u^2 and 15u^2 + 56u^3) with the
    remainder kept in `WIDER[hi.dtype]`, which leaves one rounding in the low word: hi - q*b_hi is
    exact there, so is q*b_lo, and of the quotient they and lo are at most u each. So the relative
    error is at most 3u^2 + 8u^3, and 2u^2 + 8u^3 for b_lo = 0, where u times the quotient is a
    normal number. A q that a device rounds otherwise than to nearest is corrected as well.
    """
    wide = WIDER[hi.dtype]
    q = hi / b_hi
    numerator, tail, divisor, rest = (_widened(c, wide) for c in (hi, lo, b_hi, b_lo))
    remainder = ((numerator - q.to(wide) * divisor) + tail) - q.to(wide) * rest
    return normalize(q, (remainder / (divisor + rest)).to(hi.dtype))


def sqrt(hi: Tensor, lo: Tensor) -> Expansion:
    """Return the expansion of the square root of hi + lo.

    One Newton step from s = RN(sqrt(hi)), whose remainder hi - s*s is exact in the wide dtype. With
    d = sqrt(hi + lo) - s, at most 1.5u of s: the step leaves d^2/(2s), at most 9/8 u^2, and its
    rounding 1.5u^2, 21/8 u^2 in all and O(u^3). It is SQRTDWtoDW, for which 25/8 u^2 is proven
    (Lefevre, Louvet, Muller, Picot, Rideau, TOMS 49(1), 2023). Zero where hi is zero.
    """
    wide = WIDER[hi.dtype]
    s = hi.sqrt()
    root = s.to(wide)
    remainder = (hi.to(wide) - root * root) + lo.to(wide)
    return normalize(s, (remainder / (root + root)).to(hi.dtype))


def _widened(x: Component, wide: torch.dtype) -> Any:
    return x.to(wide) if isinstance(x, Tensor) else x
