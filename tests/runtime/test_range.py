"""Ends of the arithmetic's promises: overflow, underflow, infinities and NaN.

For runtime.expansion.arithmetic and runtime.expansion.eft.
"""

from collections.abc import Callable

import pytest
import torch
from floats import (
    BF16,
    FP16,
    FP32,
    Format,
    Pair,
    accurate_sum,
    exact_sum,
    exponent,
    power_of_two,
    relative_error,
)
from torch import Tensor

from collage_fx.runtime.expansion.arithmetic import add, finite_or_zero, grow, mul, normalize
from collage_fx.runtime.expansion.eft import two_prod, two_sum

COUNT = 10**5
FORMATS = pytest.mark.parametrize("f", [BF16, FP16], ids=["bf16", "fp16"])


def same(a: Tensor, b: Tensor) -> Tensor:
    """Equality in which NaN equals itself."""
    return (a == b) | (a.isnan() & b.isnan())


def special_expansions(f: Format) -> Pair:
    """The special values, each with a zero, an ordinary and a largest possible low word."""
    hi = f.special.repeat_interleave(4)
    ulp = power_of_two(exponent(hi.double()).clamp(min=f.emin) - (f.p - 1))
    lo = ulp * torch.tensor([0.0, 0.25, 0.5 - f.u, -0.5 + f.u]).repeat(len(f.special))
    lo = lo.to(f.dtype)
    return hi, torch.where(hi.isfinite() & f.is_normalized(hi, lo), lo, 0)


def crossed(x: Pair, y: Pair) -> tuple[Pair, Pair]:
    """Every expansion of x with every one of y."""
    n, m = len(x[0]), len(y[0])
    left, right = [v.repeat_interleave(m) for v in x], [v.repeat(n) for v in y]
    return (left[0], left[1]), (right[0], right[1])


def check_specials(f: Format, result: Pair, plain: Tensor, terms: list[Tensor]) -> None:
    """hi that is not finite is plain arithmetic's, or the exact result is beyond the largest."""
    hi, lo = result
    special = ~hi.isfinite()
    beyond = accurate_sum(*terms).abs() >= f.largest * (1 + f.u / 2)
    wrong = special & ~same(hi, plain) & ~(beyond & plain.isfinite())
    assert not wrong.any(), [t[wrong][:3] for t in (*terms, hi, plain)]
    assert lo.isfinite().all()
    assert (lo[special] == 0).all()
    assert f.is_normalized(hi, lo)[~special].all()
    assert special.any()


@FORMATS
def test_grow_of_special_values(f: Format) -> None:
    x, (a, _) = crossed(special_expansions(f), special_expansions(f))
    check_specials(f, grow(*x, a), x[0] + a, [v.double() for v in (*x, a)])


@FORMATS
def test_add_of_special_values(f: Format) -> None:
    x, y = crossed(special_expansions(f), special_expansions(f))
    check_specials(f, add(*x, *y), x[0] + y[0], [v.double() for v in (*x, *y)])


@FORMATS
def test_mul_of_special_values(f: Format) -> None:
    x, y = crossed(special_expansions(f), special_expansions(f))
    terms = [a.double() * b.double() for a in x for b in y]
    check_specials(f, mul(*x, *y), x[0] * y[0], terms)


@FORMATS
def test_normalize_of_any_low_word_is_finite_below(f: Format) -> None:
    (hi, _), (lo, _) = crossed(special_expansions(f), special_expansions(f))
    ordered = ~(lo.abs() > hi.abs())
    result = normalize(hi, lo)
    assert same(result[0], hi)[~hi.isfinite()].all()
    assert result[1].isfinite().all()
    kept = ordered & lo.isfinite() & result[0].isfinite()
    total = hi.double() + lo.double()
    assert torch.equal((result[0].double() + result[1].double())[kept], total[kept])


def test_finite_or_zero() -> None:
    x = torch.tensor([1.0, -0.0, torch.inf, -torch.inf, torch.nan, 3.3e38])
    assert torch.equal(finite_or_zero(x), torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0, 3.3e38]))


def test_two_sum_next_to_the_largest_number() -> None:
    """The one case in which 2Sum fails although the sum is finite (Boldo, Graillat, Muller 2017).

    s - b overflows where |a| is the largest number and b about minus an ulp and a half. Grow then
    loses its residual, and stays finite.
    """
    a = BF16.special.new_tensor([BF16.largest])
    b = -1.5 * 2.0 ** (127 - 7) * torch.ones_like(a)
    s, t = two_sum(a, b)
    assert s.isfinite() and not t.isfinite()
    s, t = two_sum(b, a)
    assert torch.equal(s.double() + t.double(), a.double() + b.double())
    hi, lo = grow(a, torch.zeros_like(a), b)
    assert hi.isfinite() and lo == 0


def products_near(f: Format, k: int) -> tuple[Pair, Pair]:
    """Expansions with |x_hi * y_hi| in [2^k, 2^(k+1))."""
    g = torch.Generator().manual_seed(k)
    x, unit = f.expansions(COUNT, g)[0], torch.ones(COUNT, dtype=f.dtype)
    carry = torch.randint(0, 2, x.shape, generator=g)
    shift = power_of_two(k - carry - exponent(x.double()))
    y = f.random_near(unit, 0, 0, g).double() * shift
    rounded = y.to(f.dtype)
    fits = (rounded.double() == y) & (exponent(x.double() * y) == k)
    x, rounded = x[fits], rounded[fits]
    assert len(x) > 1000
    return (x, f.residuals(x, g)), (rounded, f.residuals(rounded, g))


def share_exact(f: Format, k: int) -> float:
    (a, _), (b, _) = products_near(f, k)
    p, e = two_prod(a, b)
    total, error = exact_sum(p.double(), e.double())
    return float(((total == a.double() * b.double()) & (error == 0)).double().mean())


@pytest.mark.parametrize("f", [BF16, FP16, FP32], ids=["bf16", "fp16", "fp32"])
def test_two_prod_is_exact_from_the_edge_of_its_range_on(f: Format) -> None:
    edge = f.emin + f.p
    assert share_exact(f, edge) == 1
    assert share_exact(f, edge + 1) == 1
    assert 0.5 < share_exact(f, edge - 1) < 1
    assert share_exact(f, edge - 2) < share_exact(f, edge - 1)


def worst_product(f: Format, k: int, error: Callable[..., Tensor]) -> float:
    x, y = products_near(f, k)
    terms = [a.double() * b.double() for a in x for b in y]
    return float(error(mul(*x, *y), terms).max())


@FORMATS
def test_mul_keeps_its_bound_from_that_edge_on_and_not_below(f: Format) -> None:
    edge = f.emin + f.p
    for k in (edge, edge + 1, edge + f.p):
        worst = worst_product(f, k, relative_error) / f.u**2
        assert worst <= 5, (k, worst)
    assert worst_product(f, edge - 2, relative_error) / f.u**2 > 10


@FORMATS
def test_mul_loses_at_most_three_half_last_places_where_it_underflows(f: Format) -> None:
    def absolute(result: Pair, terms: list[Tensor]) -> Tensor:
        return accurate_sum(*terms, *(-v.double() for v in result)).abs()

    for k in range(f.emin - 2, f.emin + f.p):
        worst = worst_product(f, k, absolute)
        assert worst <= 1.5 * f.smallest + 5 * f.u**2 * 2.0 ** (k + 1), (k, worst / f.smallest)
