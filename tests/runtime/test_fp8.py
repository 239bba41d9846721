"""fp8 words, all of them: conversions, splitting and joining, sums and products of two.

For runtime.storage.layouts and runtime.expansion.eft.
"""

from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from collage_fx.runtime.expansion.eft import FP8
from collage_fx.runtime.storage.layouts import LAST, join8, split8
from collage_fx.runtime.storage.registry import STORAGES

E4M3, E5M2 = FP8
SMALLEST = {E4M3: 2.0**-9, E5M2: 2.0**-16}
MOST = {E4M3: 464.0, E5M2: 60928.0}
"""The largest value that words hold and keep."""
BITS = {(E4M3, 1): 9, (E4M3, 2): 14, (E5M2, 1): 7, (E5M2, 2): 11}
FROM = {(E4M3, 1): 2.0**-5, (E4M3, 2): 2.0**-4, (E5M2, 1): 2.0**-13, (E5M2, 2): 2.0**-12}
"""Smallest value at which as many bits are kept; below, the error is half the smallest word."""

formats = pytest.mark.parametrize("dtype", FP8, ids=["e4m3fn", "e5m2"])
counts = pytest.mark.parametrize("count", [1, 2], ids=["two", "three"])


def words(dtype: torch.dtype) -> Tensor:
    return torch.arange(256).to(torch.uint8).view(dtype)


def numbers(dtype: torch.dtype) -> Tensor:
    """The finite words; zero in both signs."""
    every = words(dtype)
    return every[every.float().isfinite()]


def absolute(dtype: torch.dtype, count: int) -> float:
    """Half the smallest number of the last low word, scaled."""
    return SMALLEST[dtype] / 2 * 2.0 ** (-count * FP8[dtype])


def close(found: Fraction, exact: Fraction, dtype: torch.dtype, count: int) -> bool:
    """Return True if a value is off by no more than its words leave out."""
    relative = abs(exact) / 2 ** BITS[dtype, count]
    within = relative if abs(exact) >= FROM[dtype, count] else Fraction(absolute(dtype, count))
    return abs(found - exact) <= max(within, relative)


@formats
def test_pytorch_converts_to_the_nearest_ties_to_even(dtype: torch.dtype) -> None:
    """The oracle that all else rests on: the middle of every two neighbours, and beside it."""
    values = sorted({Fraction(v) for v in numbers(dtype).float().tolist()})
    even = {
        Fraction(float(w)): not i & 1 for i, w in enumerate(words(dtype).float()) if w.isfinite()
    }
    even[Fraction(0)] = True
    for low, high in pairwise(values):
        middle = (low + high) / 2
        tiny = (high - low) / 1024
        tie = low if even[low] else high
        for x, expected in ((middle - tiny, low), (middle, tie), (middle + tiny, high)):
            assert Fraction(torch.tensor(float(x)).to(dtype).item()) == expected, x


@formats
@counts
def test_every_pair_of_words_that_is_a_split_comes_back(dtype: torch.dtype, count: int) -> None:
    """All words times all words (times some): normalized ones come back, others by their value."""
    every = numbers(dtype)
    thirds = every[::17] if count == 2 else every[:1]
    total = 0
    for third in thirds:
        hi, lo = (w.flatten() for w in torch.meshgrid(every.float(), every.float(), indexing="ij"))
        lows = (lo.to(dtype), torch.full_like(hi, third.item()).to(dtype))[:count]
        hi = hi.to(dtype)
        exact = hi.double()
        for i, low in enumerate(lows, 1):
            exact += low.double() * 2.0 ** (-i * FP8[dtype])
        whole = join8(hi, *lows)
        again = split8(whole, dtype, count)
        fits = whole.double() == exact
        size = hi.double().abs() + lo.double().abs() + abs(third.item())
        assert ((whole.double() - exact).abs() <= 2.0**-23 * size).all()
        assert fits.all() or (count, dtype) != (1, E4M3)
        parts = (w.float() for w in again)
        assert all(w.isfinite().all() for w in list(parts)[1:])
        mine = fits & (exact.abs() <= MOST[dtype]) & (exact.float().to(dtype).float() == hi.float())
        rest = (exact - hi.double()) * 2.0 ** FP8[dtype]
        mine &= rest.float().to(dtype).float() == lows[0].float()
        total += int(mine.sum())
        for mine_word, its in zip((hi, *lows), again, strict=True):
            assert torch.equal(mine_word.float()[mine], its.float()[mine])
    assert total > 20000, total


@formats
@counts
@pytest.mark.parametrize("operation", ["add", "mul"])
@pytest.mark.parametrize("stride", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_sums_and_products_of_pairs(
    dtype: torch.dtype, count: int, operation: str, stride: int
) -> None:
    """Join two fp8 states, compute in fp32, and split, as a step does; against rationals.

    Of all pairs where it may be slow.
    """
    every = numbers(dtype)[::stride]
    zeros = [torch.zeros_like(every)] * count
    storage = STORAGES["mcf2" if count == 1 else "mcf3"]
    x = storage.join(every, *zeros)
    result = getattr(torch, operation)(x[:, None], x[None, :])
    split = storage.split(result, dtype)
    found = storage.join(*split)
    lost = 0
    values = [Fraction(v) for v in x.tolist()]
    for a, row, highs in zip(values, found.tolist(), split[0].float().tolist(), strict=True):
        for b, got, high in zip(values, row, highs, strict=True):
            exact = a + b if operation == "add" else a * b
            if abs(exact) <= 448 or (dtype == E5M2 and abs(exact) <= 57344):
                assert close(Fraction(got), exact, dtype, count), (a, b, got)
                # The control: the high word alone, with as many bits as fp8 has.
                lost += not close(Fraction(high), exact, dtype, count)
    assert lost > 5000 / stride**2


@formats
@counts
def test_the_edges_of_the_range(dtype: torch.dtype, count: int) -> None:
    last, largest = LAST[dtype], torch.finfo(dtype).max
    x = torch.tensor([last, -last, torch.inf, -torch.inf, torch.nan, 2 * last, 1e38])
    hi, *lows = split8(x, dtype, count)
    assert hi.float()[:2].tolist() == [largest, -largest]
    assert torch.equal(hi.view(torch.uint8), x.to(dtype).view(torch.uint8))
    assert all(low.float()[0] != 0 for low in lows[:1])
    assert not any(low.float()[2:].any() for low in lows)
    following = torch.tensor(last).nextafter(torch.tensor(torch.inf))
    assert dtype == E4M3 or following.to(dtype).float().isinf()
    assert split8(following, dtype, count)[1].float() == 0
    most = join8(*split8(x[:2], dtype, count))
    assert torch.equal(join8(*split8(most, dtype, count)), most)
    assert close(Fraction(most[0].item()), Fraction(464 if dtype == E4M3 else 60928), dtype, count)


@formats
@counts
def test_below_the_smallest_number_words_hold_what_they_can(dtype: torch.dtype, count: int) -> None:
    step = 2 * absolute(dtype, count)
    most = round(3 * FROM[dtype, count] / step)
    x = torch.arange(-most, most, dtype=torch.float32) * (step / 3)
    error = (join8(*split8(x, dtype, count)) - x).abs().max().item()
    assert 0.3 * step < error <= absolute(dtype, count)


@formats
@counts
def test_residuals_without_a_scale_would_be_lost(dtype: torch.dtype, count: int) -> None:
    """The control of the scale: a second word as it stands is below the smallest number."""
    x = 3 * SMALLEST[dtype] * (1 + torch.arange(64) / 64)
    hi = x.to(dtype)
    unscaled = hi.float() + (x - hi.float()).to(dtype).float()
    scaled = join8(*split8(x, dtype, count))
    assert (unscaled - x).abs().max() > 2 * (scaled - x).abs().max()
