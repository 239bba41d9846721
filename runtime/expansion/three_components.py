"""Arithmetic on expansions of three components.

An expansion is (hi, mid, lo) of one dtype with hi = RN(hi + mid) and mid = RN(mid + lo), so that
|mid| <= u|hi| and |lo| <= u^2|hi|. Sums are formed exactly in the dtype itself and then cut to
three components. Of products, quotients and roots hi is rounded in the dtype, and the remainder,
what hi leaves of the result, is computed in `WIDER[dtype]` and split into mid and lo. Every product
of two components is exact there, so that an FMA changes nothing. u = 2^-p is the unit roundoff
of the dtype, w that of the wide one: u^3 for bf16, u^2/4 for fp16, u^2/32 for fp32.

The bounds are relative to the exact result for these components, for p >= 8. Where the lo of a
product, quotient or root is no normal number (results below 2^(emin + 2p): 2^-110 in bf16, 2^8 in
fp16), half the smallest number of the dtype comes to them (2^-134, 2^-25).

Where the result is infinite or NaN, hi is what plain arithmetic on the high words gives and the
residuals are zero, for they are finite always; and so where it is so near to the largest number
that a step on the way overflows.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from collage_fx.runtime.expansion.eft import WIDER, fast_two_sum, two_sum

Triple = tuple[Tensor, Tensor, Tensor]
Terms = Sequence[Tensor | float]
"""One to three components: tensors, or Python numbers that the dtype represents."""


def add(x: Sequence[Tensor], y: Sequence[Tensor]) -> Triple:
    """Return the expansion of x + y: three components, and one to three.

    `_exact_sum` cut to three components: relative error at most (3u/2)^3 / (1 - 3u/2), however much
    cancels and however small the result is.
    """
    return _checked(_leading(_exact_sum(x, y)), x[0] + y[0])


def mul(x: Sequence[Tensor], y: Terms) -> Triple:
    """Return the expansion of x * y: three components, and one to three.

    Relative error at most (3u^3 + 7uw)(1 + 4u). The remainder is at most 3u of the product; as mid
    is off by 3u^2 at most, lo is rounded by 3u^3. The product of the two lo, u^4, is left out, and
    7uw are the roundings of the wide sum.
    """
    p = x[0] * y[0]
    a, b = _widened(x), _widened(y)
    smallest_first = [a[i] * b[k - i] for k in (3, 2, 1) for i in range(3) if 0 <= k - i < len(b)]
    error = a[0] * b[0] - p.to(WIDER[p.dtype])
    return _with_remainder(p, error + _sum(smallest_first))


def div(x: Sequence[Tensor], y: Terms) -> Triple:
    """Return the expansion of x / y, of which one has three components and the other up to three.

    Relative error at most (3u^3 + 14uw)(1 + 8u). With q = RN(x_hi / y_hi), x_hi - q*y_hi is exact
    and at most u|x_hi|, as x_mid and q*y_mid are. So mid + lo are at most 3u of the quotient, and
    lo is rounded by 3u^3; the wide arithmetic adds 7uw in the remainder and twice 3uw by dividing
    it by all of y. In bf16, whose range is that of fp32, for |x_hi| from 2^(emin + p) on.
    """
    q = x[0] / y[0]
    a, b, wide = _widened(x), _widened(y), q.to(WIDER[q.dtype])
    smallest_first = [
        term for i in (2, 1) for term in (*a[i : i + 1], *(-(wide * c) for c in b[i : i + 1]))
    ]
    remainder = (a[0] - wide * b[0]) + _sum(smallest_first)
    return _with_remainder(q, remainder / _sum(b[::-1]))


def sqrt(x: Sequence[Tensor]) -> Triple:
    """Return the expansion of the square root of x, three components.

    Relative error at most (75/32 u^3 + 5uw)(1 + 8u). With s = RN(sqrt(x_hi)), x_hi - s*s is exact;
    r = x - s*s is at most 3u of x, and d = sqrt(x) - s = r / (2s + d) at most 3/2 u of s. With
    r / (2s) for the d of the denominator d is off by d^3 / (4s^2), 27/32 u^3 of s, and lo is
    rounded by 3/2 u^3. Zero where x_hi is zero.
    """
    s = x[0].sqrt()
    root = s.to(WIDER[s.dtype])
    hi, mid, lo = _widened(x)
    remainder = (hi - root * root) + (mid + lo)
    twice = root + root
    return _with_remainder(s, remainder / (twice + remainder / twice))


def split_constant(c: float, dtype: torch.dtype) -> tuple[float, float, float]:
    """Return (hi, mid, lo), each represented in dtype, with hi + mid + lo = c up to u^3 relative.

    Each is the rounding of what the ones before leave; subnormal ones are off by as much as that.
    """
    parts: list[float] = []
    for _ in range(3):
        parts.append(float(torch.tensor(c, dtype=torch.float64).to(dtype)))
        c -= parts[-1]  # exact
    hi, mid, lo = parts
    return hi, mid, lo


def _exact_sum(x: Sequence[Tensor], y: Sequence[Tensor]) -> list[Tensor]:
    """Return x + y exactly: floats in descending order whose bits do not overlap, among them zeros.

    Expansion-Sum of Shewchuk, Discrete Comput. Geom. 18, 1997, theorem 12: y is added from its
    smallest component on, each to what all before have left above their own place.
    """
    h = list(x)
    for b in reversed(y):
        for i in reversed(range(len(x))):
            b, h[i] = two_sum(b, h[i])
        h.insert(0, b)
    return h


def _leading(h: list[Tensor]) -> Triple:
    """Return the three components of the exact sum of h, as `_exact_sum` returns it.

    Adding up h from its end, s_i = RN(h_i + s_(i+1)) with error e_(i+1), leaves the same value in
    s_0, e_1, ...: |s_(i+1)| is at most the last bit of h_i, so that Fast2Sum will do, and s_i and
    e_i are multiples of the last bit of s_(i+1). As |e_(i+2)| is at most half an ulp of that, and
    then s_(i+1) is even (ties go to even), at least one bit is between any two of them. From such
    floats |s_i| >= |s_(i+1)| follows, so each e is at most u|s_0|, and what follows the first that
    is not zero is less than half its last bit: all are at most 3u/2 |s_0|. So the first time makes
    room between the bits, and the second, third and fourth give a component each, all but 3u/2 of
    what is left.
    """
    for first in (0, 0, 1):
        s = h[-1]
        for i in reversed(range(first, len(h) - 1)):
            s, h[i + 1] = fast_two_sum(h[i], s)
        h[first] = s
    low = h[-1]
    for e in reversed(h[2:-1]):
        low = e + low
    return _normalized(h[0], h[1], low)


def _normalized(a: Tensor, b: Tensor, c: Tensor) -> Triple:
    """Return the expansion of a + b + c, exactly, where |b| <= 3u|a| and |c| <= 3u/2 |b|, about.

    By the second round the first two are normalized but for an a that the tie of half an ulp with
    what c adds moves on.
    """
    for _ in range(2):
        a, b = fast_two_sum(a, b)
        b, c = fast_two_sum(b, c)
    return a, b, c


def _widened(x: Terms) -> list[Any]:
    return [c.to(WIDER[c.dtype]) if isinstance(c, Tensor) else c for c in x]


def _sum(terms: list[Any]) -> Any:
    """Return the terms added up, one after another."""
    return sum(terms[1:], start=terms[0])


def _with_remainder(plain: Tensor, remainder: Tensor) -> Triple:
    """Return the expansion of plain, a result rounded, and of what it leaves, of the wide dtype."""
    mid = remainder.to(plain.dtype)
    lo = (remainder - mid.to(remainder.dtype)).to(plain.dtype)
    return _checked(_normalized(plain, mid, lo), plain)


def _checked(x: Triple, plain: Tensor) -> Triple:
    """Return x, or plain without residuals where x is not finite."""
    finite = x[0].abs() < math.inf
    hi = torch.where(finite, x[0], plain)
    return hi, torch.where(finite, x[1], 0.0), torch.where(finite, x[2], 0.0)
