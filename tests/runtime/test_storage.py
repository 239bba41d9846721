"""Conversions between an expansion and one wide value, and constants as expansions.

For runtime.storage.layouts and runtime.expansion.components.
"""

from fractions import Fraction

import pytest
import torch
from floats import (
    BF16,
    FP16,
    FP32,
    Format,
    exact_sum,
    exponent,
    last_place,
    power_of_two,
    relative_error,
)
from torch import Generator, Tensor

from collage_fx.runtime.expansion.components import split_constant
from collage_fx.runtime.storage.layouts import decay, join, split

COUNT = 10**6
FORMATS = pytest.mark.parametrize("f", [BF16, FP16], ids=["bf16", "fp16"])


def generator() -> Generator:
    return torch.Generator().manual_seed(0)


def wide_values(f: Format, g: Generator) -> Tensor:
    """Random bits of fp32, half of them near the range of the format."""
    inside = f.random(COUNT // 2, g).float()
    return torch.cat([FP32.random(COUNT // 2, g), FP32.random_near(inside, 0, 0, g)])


def equal(a: Tensor, b: Tensor) -> bool:
    """Equality in which NaN equals itself."""
    return torch.allclose(a.double(), b.double(), rtol=0, atol=0, equal_nan=True)


@FORMATS
def test_join_is_exact_for_neighbouring_words(f: Format) -> None:
    hi, lo = f.expansions(COUNT, generator())
    gap = exponent(hi.double()) - exponent(lo.double())
    near = (gap <= 24 - f.p) | (lo == 0)
    total, error = exact_sum(hi.double(), lo.double())
    assert near.double().mean() > 0.3
    assert torch.equal(join(hi, lo)[near].double(), total[near])
    assert (error[near] == 0).all()


@FORMATS
def test_join_rounds_once(f: Format) -> None:
    hi, lo = f.expansions(COUNT, generator())
    worst = relative_error((join(hi, lo), torch.zeros_like(hi)), [hi.double(), lo.double()]).max()
    assert worst <= 2.0**-24, float(worst) * 2**24


@FORMATS
def test_split_rounds_to_nearest_twice(f: Format) -> None:
    x = wide_values(f, generator())
    hi, lo = split(x, f.dtype)
    assert hi.dtype == lo.dtype == f.dtype
    assert equal(hi, f.round(x.double()))
    rest = f.round(x.double() - hi.double())
    assert equal(lo, torch.where(hi.isfinite(), rest, 0.0))


@FORMATS
def test_split_keeps_its_bound(f: Format) -> None:
    x = wide_values(f, generator())
    hi, lo = split(x, f.dtype)
    assert lo.isfinite().all()
    normal = hi.isfinite() & (x.abs() >= 2.0 ** (f.emin + f.p + 1))
    worst = relative_error((hi, lo), [x.double()])[normal].max() / f.u**2
    assert 0.4 < worst <= 0.5, float(worst)


@FORMATS
def test_split_makes_a_normalized_expansion_but_for_ties(f: Format) -> None:
    """If lo rounds up to half an ulp below an odd hi, hi + lo is a tie that rounds away."""
    hi, lo = split(wide_values(f, generator()), f.dtype)
    half_ulp = power_of_two(last_place(hi.double(), f) - 1)
    tie = lo.double().abs() == half_ulp
    assert (f.is_normalized(hi, lo) | tie)[hi.isfinite()].all()
    assert tie.double().mean() < 0.05


@FORMATS
def test_split_gives_back_what_join_held_exactly(f: Format) -> None:
    hi, lo = f.expansions(COUNT, generator())
    total, error = exact_sum(hi.double(), lo.double())
    exact = (join(hi, lo).double() == total) & (error == 0)
    again = split(join(hi, lo), f.dtype)
    assert exact.double().mean() > 0.3
    assert torch.equal(again[0][exact], hi[exact])
    assert torch.equal(again[1][exact], lo[exact])


@FORMATS
def test_decay_is_the_product_with_the_whole_expansion(f: Format) -> None:
    hi, lo = f.expansions(COUNT, generator())
    for gap in (-0.001, -1e-5, 0.5):
        number = torch.tensor(gap)
        expected = (hi.double() + lo.double()) * number.double()
        normal = expected.abs() >= 2.0 ** (FP32.emin + 1)
        error = (decay((hi, lo), gap).double() - expected).abs()[normal] / expected.abs()[normal]
        assert error.max() <= 2.0**-23, gap
        assert torch.equal(decay((hi, lo), gap), decay((hi, lo), number))


@FORMATS
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_has_no_low_word(f: Format, value: float) -> None:
    hi, lo = split(torch.tensor([value]), f.dtype)
    assert equal(hi, torch.tensor([value]))
    assert lo == 0
    assert decay((hi, lo), -0.001) == 0


@FORMATS
def test_split_of_what_overflows_is_infinite(f: Format) -> None:
    x = torch.tensor([f.largest, f.largest * (1 + 0.4 * f.u), f.largest * (1 + 0.9 * f.u)])
    hi, lo = split(x, f.dtype)
    assert hi.isfinite().tolist() == [True, True, False]
    assert lo[2] == 0


@pytest.mark.parametrize(
    "c, hi, lo",
    [
        (0.9, 0.8984375, 0.001564026),
        (0.95, 0.94921875, 0.000782013),
        (0.99, 0.98828125, 0.001716614),
        (0.999, 1.0, -0.000999451),
    ],
)
def test_constants_in_bf16(c: float, hi: float, lo: float) -> None:
    assert split_constant(c, BF16.dtype, 2) == (hi, pytest.approx(lo, abs=1e-9))


@FORMATS
def test_constants_keep_their_bound(f: Format) -> None:
    g = generator()
    fractions = torch.rand(2000, generator=g, dtype=torch.float64) + 0.5
    exponents = torch.randint(f.emin + f.p + 1, f.emax, (2000,), generator=g)
    worst = Fraction(0)
    for c in (fractions * torch.exp2(exponents.double())).tolist():
        hi, lo = split_constant(c, f.dtype, 2)
        assert torch.tensor([hi, lo]).to(f.dtype).tolist() == [hi, lo]
        worst = max(worst, abs(Fraction(hi) + Fraction(lo) - Fraction(c)) / abs(Fraction(c)))
    assert worst <= Fraction(f.u) ** 2, float(worst / Fraction(f.u) ** 2)
