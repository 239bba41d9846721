"""Sums over updates in compiled C++: those of PyTorch's operations, and of exact rationals.

For runtime.kernels.update_sums and inspection.update_stats.
"""

import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from collage_fx.inspection.update_stats import _LEAST, _sums, stats_of
from collage_fx.runtime.kernels import update_sums as update_sums_module
from collage_fx.runtime.kernels.update_sums import update_sums


def _states(size: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """Values with residuals, of which some do not move and some updates are lost."""
    generator = torch.Generator().manual_seed(size)

    def drawn() -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    whole = drawn() * 10 ** drawn()
    update = drawn() * whole * 1e-3 * (torch.rand(size, generator=generator) > 0.1)
    exact, high = whole + update, whole.to(dtype)
    now = exact.to(dtype)
    after = now.double() + (exact - now.double()).to(dtype).double()
    after = torch.where(torch.rand(size, generator=generator) < 0.1, whole, after)
    return [high, whole, now, after, exact]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1, 7, 511, 512, 513, 5000])
def test_sums_are_those_of_pytorch(size: int, dtype: torch.dtype) -> None:
    states = _states(size, dtype)
    found = update_sums(states, 2.0**_LEAST)
    expected = _sums(*states).tolist()
    assert found is not None
    # In units of the first place, not of the last.
    found[6] -= math.log2(torch.finfo(dtype).eps) * found[0]
    assert found.pop(6) == pytest.approx(expected.pop(6), rel=1e-5, abs=1e-4), "in fp32 there"
    assert found[:8] == pytest.approx(expected, rel=1e-5, abs=1e-300)
    assert found[8] == 0
    if size == 5000:
        assert 0 < found[2] < found[1] < found[0] < size, "the control: all kinds are there"


def test_squares_are_those_of_rationals() -> None:
    _, whole, _, after, exact = (t.tolist() for t in _states(100))
    updates = [Fraction(e) - Fraction(w) for e, w in zip(exact, whole, strict=True)]
    stored = [Fraction(a) - Fraction(w) for a, w in zip(after, whole, strict=True)]
    found = update_sums(_states(100), 2.0**_LEAST)
    assert found is not None
    assert found[3] == pytest.approx(float(sum(u * u for u in updates)), rel=1e-9)
    pairs = zip(updates, stored, strict=True)
    assert found[5] == pytest.approx(float(sum(u * s for u, s in pairs)), rel=1e-9)
    pairs = zip(updates, stored, strict=True)
    assert found[8] == pytest.approx(float(sum((s - u) ** 2 for u, s in pairs)), rel=1e-6)


@pytest.mark.parametrize("compiler", [True, False])
def test_what_is_not_finite_is_left_out(compiler: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiler:
        monkeypatch.setattr(update_sums_module, "_library", lambda dtype: None)
    states = _states(600)
    expected = stats_of(*(t[2:] for t in states))
    states[2][0], states[4][1] = math.inf, math.nan
    found = stats_of(*states)
    assert found.infinities == 1 and expected.infinities == 0
    assert found.count == expected.count and found.dot == pytest.approx(expected.dot)
    assert found.ulps_log2 == pytest.approx(expected.ulps_log2)


def test_tiny_and_large_ratios_keep_their_logarithm_finite() -> None:
    whole = torch.zeros(64, dtype=torch.float64)
    for update in (1e-300, 1e30):
        exact = whole + update
        stats = stats_of(whole.bfloat16(), whole, exact.bfloat16(), exact, exact)
        assert math.isfinite(stats.ulps_log2) and stats.count == 64
