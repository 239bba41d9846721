"""Quotients and roots of two components: careless, approximate and special ones.

test_bounds.py has the bounds.

For runtime.expansion.arithmetic.
"""

from collections.abc import Callable

import pytest
import torch
from floats import BF16, FP16, FP32, Format, Pair, accurate_sum
from torch import Generator, Tensor

from collage_fx.runtime.expansion.arithmetic import div, normalize, sqrt

COUNT = 10**6
FORMATS = pytest.mark.parametrize("f", [BF16, FP16, FP32], ids=["bf16", "fp16", "fp32"])
SHORT = pytest.mark.parametrize("f", [BF16, FP16], ids=["bf16", "fp16"])


def backward_error(terms: list[Tensor], x: Pair, f: Format) -> Tensor:
    """|sum(terms) - x| / |x| in u^2: the relative error of q for q*y = x, to first order."""
    exact = accurate_sum(*(v.double() for v in x))
    difference = accurate_sum(*terms, *(-v.double() for v in x))
    return torch.where(difference == 0, 0.0, (difference / exact).abs()) / f.u**2


def in_range(hi: Tensor, f: Format) -> Tensor:
    """Return the mask of results whose low word is normal, and so not rounded more coarsely."""
    return hi.isfinite() & (hi.double().abs() >= 2.0 ** (f.emin + f.p))


def quotient_error(f: Format, y_lo: float, op: Callable[..., Pair] = div) -> tuple[float, Tensor]:
    g = torch.Generator().manual_seed(0)
    x, y = f.expansions(COUNT, g), f.expansions(COUNT, g)
    y = y[0], y[1] * y_lo
    q = op(*x, *y)
    valid = in_range(q[0], f) & (y[0] != 0)
    assert valid.double().mean() > 0.3
    assert f.is_normalized(*q)[q[0].isfinite()].all() or f is FP32
    assert q[1].isfinite().all() and not q[1][~q[0].isfinite()].any()
    error = backward_error([a.double() * b.double() for a in q for b in y], x, f)
    return float(error[valid].max()), valid


def roots(f: Format, g: Generator) -> Pair:
    hi, lo = f.expansions(COUNT, g)
    return hi.abs(), torch.where(hi < 0, -lo, lo)


@FORMATS
@pytest.mark.quick("bf16")
def test_check_fails_for_a_division_without_the_divisors_low_word(f: Format) -> None:
    def careless(hi: Tensor, lo: Tensor, b_hi: Tensor, b_lo: Tensor) -> Pair:
        return div(hi, lo, b_hi, 0.0)

    assert quotient_error(f, 1, careless)[0] > 100


@SHORT
@pytest.mark.quick("bf16")
def test_check_fails_for_a_root_without_its_remainder(f: Format) -> None:
    x = roots(f, torch.Generator().manual_seed(0))
    s = normalize(x[0].sqrt(), x[1] / (2 * x[0].sqrt()))
    error = backward_error([a.double() * b.double() for a in s for b in s], x, f) / 2
    assert float(error[in_range(s[0], f)].max()) > 100


@SHORT
@pytest.mark.quick("bf16")
def test_an_approximate_division_is_corrected(f: Format) -> None:
    """As on a device whose fp32 quotient is off by some ulps: the remainder makes up for it."""

    def approximate(hi: Tensor, lo: Tensor, b_hi: Tensor, b_lo: Tensor) -> Pair:
        q = (hi.float() / b_hi.float() * (1 + 2.0**-21)).to(f.dtype)
        wide = [v.float() for v in (hi, lo, b_hi, b_lo, q)]
        rest = ((wide[0] - wide[4] * wide[2]) + wide[1]) - wide[4] * wide[3]
        return normalize(q, (rest / (wide[2] + wide[3]) * (1 + 2.0**-21)).to(f.dtype))

    assert quotient_error(f, 1, approximate)[0] <= 3 + 8 * f.u


def same(a: Tensor, b: Tensor) -> Tensor:
    return (a == b) | (a.isnan() & b.isnan())


@SHORT
def test_special_values_are_those_of_plain_arithmetic(f: Format) -> None:
    n = len(f.special)
    a, b = f.special.repeat_interleave(n), f.special.repeat(n)
    hi, lo = div(a, torch.zeros_like(a), b, torch.zeros_like(b))
    assert same(hi, a / b).all()
    assert lo.isfinite().all() and not lo[~hi.isfinite()].any()
    root, rest = sqrt(f.special, torch.zeros_like(f.special))
    plain = f.special.sqrt()
    assert same(root, plain)[~plain.isfinite() | (plain == 0)].all()
    assert rest.isfinite().all() and not rest[~root.isfinite()].any()


@SHORT
def test_high_word_of_a_root_is_correctly_rounded(f: Format) -> None:
    """All 65536 of them: eager fp32 sqrt is off by an ulp at times, which 16 bits do not show."""
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(f.dtype)
    assert same(x.sqrt(), x.double().sqrt().to(f.dtype)).all()
