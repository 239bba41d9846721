"""Error-free transformations and expansion arithmetic against exact values, over all exponents.

For runtime.expansion.arithmetic and runtime.expansion.eft.
"""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import pytest
import torch
from floats import BF16, FP16, FP32, Format, Pair, exact_sum, exponent, fraction, relative_error
from torch import Generator, Tensor

from collage_fx.runtime.expansion.arithmetic import add, grow, mul, normalize
from collage_fx.runtime.expansion.components import neg, split_constant
from collage_fx.runtime.expansion.eft import fast_two_sum, two_prod, two_sum

CHUNK = 10**6
SAMPLES = 2000
VOLUMES = [
    pytest.param(range(1), id="1e6"),
    pytest.param(range(1, 101), id="1e8", marks=pytest.mark.slow),
]
SHORT = [BF16, FP16]
NAMES = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}


@dataclass
class Case:
    """Results of one operation, and what they should be."""

    result: Pair
    terms: list[Tensor]
    """float64 tensors whose sum is the exact result."""
    valid: Tensor
    """Mask of the values for which the operation's promise holds."""


Make = Callable[[Format, int, Generator], Case]


def generator(seed: int) -> Generator:
    return torch.Generator().manual_seed(seed)


def partners(f: Format, a: Tensor, g: Generator) -> Tensor:
    """Second operands: any bits, an exponent not far off, and almost -a, a third each."""
    third = len(a) // 3
    near = f.random_near(a[third : 2 * third], -2 * f.p, 2 * f.p, g)
    return torch.cat([f.random(third, g), near, f.near_negative(a[2 * third :], 4, g)])


def two_sum_case(f: Format, n: int, g: Generator, op: Callable[..., Pair] = two_sum) -> Case:
    a = f.random(n, g)
    b = partners(f, a, g)
    s, t = op(a, b)
    # With |a| the largest number, s - b may overflow although s does not: see the test of it below.
    return Case((s, t), [a.double(), b.double()], s.isfinite() & (a.abs() != f.largest))


def fast_two_sum_case(f: Format, n: int, g: Generator) -> Case:
    a = f.random(n, g)
    b = partners(f, a, g)
    # The condition is on exponents: a may be the smaller one, within the same binade.
    swap = (exponent(b.double()) > exponent(a.double())) & (a != 0)
    a, b = torch.where(swap, b, a), torch.where(swap, a, b)
    s, t = fast_two_sum(a, b)
    return Case((s, t), [a.double(), b.double()], s.isfinite())


def two_prod_case(f: Format, n: int, g: Generator) -> Case:
    a = f.random(n, g)
    b = partners(f, a, g)
    p, e = two_prod(a, b)
    exact = a.double() * b.double()
    in_range = exponent(a.double()) + exponent(b.double()) >= f.emin + f.p - 1
    return Case((p, e), [exact, torch.zeros_like(exact)], p.isfinite() & (in_range | (exact == 0)))


def normalize_case(f: Format, n: int, g: Generator) -> Case:
    a = f.random(n, g)
    b = partners(f, a, g)
    swap = b.abs() > a.abs()
    a, b = torch.where(swap, b, a), torch.where(swap, a, b)
    hi, lo = normalize(a, b)
    return Case((hi, lo), [a.double(), b.double()], hi.isfinite() & b.isfinite())


EXACT = [
    *((two_sum_case, f) for f in (BF16, FP16, FP32)),
    *((fast_two_sum_case, f) for f in (BF16, FP16, FP32)),
    *((two_prod_case, f) for f in (BF16, FP16, FP32)),
    *((normalize_case, f) for f in SHORT),
]


def named(value: object) -> str | None:
    """A readable parameter id."""
    if isinstance(value, float):
        return f"{value:.2f}u2"
    return NAMES.get(value) if isinstance(value, Format) else getattr(value, "__name__", None)


def inexact(case: Case) -> Tensor:
    """Return the mask of results that differ from the exact sum of two terms."""
    found = exact_sum(*(x.double() for x in case.result))
    expected = exact_sum(*case.terms)
    return case.valid & ~((found[0] == expected[0]) & (found[1] == expected[1]))


def largest_error(case: Case, f: Format) -> tuple[float, str]:
    """The largest valid relative error in units of u^2, and where it was found."""
    errors = relative_error(case.result, case.terms)
    at = int(torch.where(case.valid, errors, -1.0).argmax())
    worst = float(errors[at]) / f.u**2
    operands = [float(t[at]).hex() for t in case.terms]
    return (
        worst,
        f"{worst:.4f} u^2, of the sum of {operands}: {[float(r[at]) for r in case.result]}",
    )


@pytest.mark.parametrize("seeds", VOLUMES)
@pytest.mark.parametrize("make, f", EXACT, ids=named)
@pytest.mark.quick("*-bf16-*", "*-fp32-*")
def test_error_free_transformations_are_exact(make: Make, f: Format, seeds: range) -> None:
    for seed in seeds:
        case = make(f, CHUNK, generator(seed))
        wrong = inexact(case).nonzero().flatten()
        first = [[float(t[i]) for t in (*case.terms, *case.result)] for i in wrong[:3]]
        assert not len(wrong), f"{len(wrong)} of {CHUNK}: {first}"
        assert case.valid.double().mean() > 0.3
        assert f.is_normalized(*case.result)[case.valid].all()


@pytest.mark.parametrize("make, f", EXACT, ids=named)
@pytest.mark.quick("*-bf16")
def test_vectorised_oracles_agree_with_rationals(make: Make, f: Format) -> None:
    case = make(f, 3 * SAMPLES, generator(1000))
    errors = relative_error(case.result, case.terms)
    wrong = inexact(case)
    chosen = case.valid.nonzero().flatten()[torch.randperm(int(case.valid.sum()))[:SAMPLES]]
    assert len(chosen) > SAMPLES // 2
    for i in chosen:
        exact = sum((fraction(t[i]) for t in case.terms), Fraction(0))
        error = abs(sum((fraction(r[i]) for r in case.result), -exact))
        relative = float(error / abs(exact)) if exact else float(error)
        assert float(errors[i]) == pytest.approx(relative, rel=1e-9)
        assert bool(wrong[i]) == (error != 0)


def test_check_fails_for_a_transformation_whose_sum_is_kept_wide() -> None:
    """Do as a fused kernel does: bf16 operations in fp32 registers, rounded when stored."""

    def kept_wide(a: Tensor, b: Tensor) -> Pair:
        s, t = two_sum(a.float(), b.float())
        return s.bfloat16(), t.bfloat16()

    assert inexact(two_sum_case(BF16, CHUNK // 10, generator(0), kept_wide)).double().mean() > 0.1


def scaled(f: Format, *values: float) -> list[Tensor]:
    """The values times every power of two at which the format holds each of them exactly."""
    scale = torch.exp2(torch.arange(2 * f.emin, f.emax + 1, dtype=torch.float64))
    columns = torch.tensor(values, dtype=torch.float64)[:, None] * scale
    return list(columns[:, (f.round(columns) == columns).all(0)])


@pytest.mark.parametrize("f", SHORT, ids=named)
def test_grow_at_its_known_worst_case(f: Format) -> None:
    """Joldes, Muller and Popescu: x = (1, (2^p-1) 2^-2p), a = -(1-u)/2."""
    terms = scaled(f, 1, (2**f.p - 1) * f.u**2, -(1 - f.u) / 2)
    result = grow(*(t.to(f.dtype) for t in terms))
    worst, where = largest_error(Case(result, terms, terms[0] != 0), f)
    assert 2 - 8 * f.u < worst <= 2, where


@pytest.mark.parametrize("f", SHORT, ids=named)
def test_add_at_its_known_worst_case(f: Format) -> None:
    """The same: x = (1, u-u^2), y = (-1/2+u/2, -u^2/2+u^3)."""
    terms = scaled(f, 1, f.u - f.u**2, -(1 - f.u) / 2, -(f.u**2) / 2 + f.u**3)
    result = add(*(t.to(f.dtype) for t in terms))
    worst, where = largest_error(Case(result, terms, terms[0] != 0), f)
    assert 2.5 < worst <= 3 / (1 - 4 * f.u), where


@pytest.mark.parametrize("f", SHORT, ids=named)
def test_neg_is_exact(f: Format) -> None:
    hi, lo = f.expansions(CHUNK, generator(0))
    negative = neg((hi, lo))
    assert torch.equal(negative[0].double(), -hi.double())
    assert torch.equal(negative[1].double(), -lo.double())


@pytest.mark.parametrize("f", SHORT, ids=named)
def test_mul_takes_numbers_for_tensors(f: Format) -> None:
    x = f.expansions(CHUNK, generator(0))
    for c in (0.9, 0.999, -3.0, 0.0):
        hi, lo = split_constant(c, f.dtype, 2)
        with_numbers = mul(*x, hi, lo)
        with_tensors = mul(*x, *(torch.tensor(v).to(f.dtype) for v in (hi, lo)))
        for a, b in zip(with_numbers, with_tensors, strict=True):
            assert torch.equal(a.nan_to_num(), b.nan_to_num())
