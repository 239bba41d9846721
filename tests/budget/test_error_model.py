"""Variances and errors of the model of budgets, held against roundings that are drawn.

For budget.error_model and budget.samples.
"""

import math

import pytest
import torch
from torch import Tensor

from collage_fx.budget.error_model import (
    Moves,
    Way,
    expected_way,
    parameter_error,
    state_error,
    sums_of,
)
from collage_fx.runtime.expansion.stochastic import Seeds
from collage_fx.runtime.storage.registry import STORAGES, value_in_float64

BF16, ELEMENTS = torch.bfloat16, 4096


def stored(x: Tensor, storage: str, draw: int) -> Tensor:
    """Return the value of x in a storage, rounded by chance."""
    (seed,) = Seeds(draw, [x.device]).draw(0)
    hi, *lows = STORAGES[storage].draw(x.float(), BF16, seed, None)
    return value_in_float64(storage, hi, [*STORAGES[storage].words(hi, lows)])


def moves_of(x: Tensor, d: Tensor) -> Moves:
    return Moves(*sums_of(x[None].double(), (x + d)[None].double(), BF16)[0].tolist())


def start() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return 1 + torch.rand(ELEMENTS, generator=generator, dtype=torch.float64) / 2


@pytest.mark.parametrize("storage", ["sr", "ulp4", "ulp8"])
@pytest.mark.parametrize("units", [0.01, 0.2, 8.0])
def test_the_variance_of_a_store_is_that_of_roundings(storage: str, units: float) -> None:
    x = stored(start(), storage, 0)
    unit = 2.0 * 2.0 ** -STORAGES[storage].precision[BF16]
    d = units * unit * torch.linspace(0.9, 1.1, ELEMENTS, dtype=torch.float64)
    found = (stored(x + d, storage, 1) - (x + d)).square().mean()
    moves = moves_of(x, d)
    assert moves.variance(BF16, storage) == pytest.approx(float(found), rel=0.2)
    # The control: of another storage it is another one.
    other = "ulp8" if storage == "sr" else "sr"
    assert moves.variance(BF16, other) != pytest.approx(float(found), rel=0.5)


@pytest.mark.parametrize("rate", [1e-2, 1e-4])
def test_the_error_of_a_parameter_adds_up(rate: float) -> None:
    steps, x = 64, stored(start(), "ulp4", 0)
    begin, exact, moves = x, x.clone(), Moves()
    for k in range(steps):
        d = rate * torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(k)).double()
        moves += moves_of(x, d)
        x, exact = stored(x + d, "ulp4", 1 + k), exact + d
    length = float((exact - begin).square().mean().sqrt())
    found = (x - exact).square().mean()
    predicted = parameter_error(Way(steps, moves, length), BF16, "ulp4")
    assert predicted == pytest.approx(float(found), rel=0.3)
    # The control: one store makes less.
    assert parameter_error(Way(1, moves, length), BF16, "ulp4") < found / 8


@pytest.mark.parametrize("decay", [0.9, 0.99])
def test_an_average_passes_its_relative_error_on(decay: float) -> None:
    """The parameter adds up an average of noise with a mean."""
    steps, m = 400, torch.zeros(ELEMENTS, dtype=torch.float64)
    exact, way, noisy_way = m, m, m
    moves, own = Moves(), Moves()
    for k in range(steps):
        g = 0.3 + torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(k)).double()
        new = stored(decay * m + (1 - decay) * g, "sr", k)
        if k > steps // 4:
            own += moves_of(m, new - m)
            moves += moves_of(torch.ones_like(m), exact)
        m, exact = new, decay * exact + (1 - decay) * g
        way, noisy_way = way + exact, noisy_way + m
    whole = Way(steps, moves, float(way.square().mean().sqrt()))
    found = float((noisy_way - way).square().mean().sqrt())
    predicted = math.sqrt(state_error(whole, own, BF16, "sr", decay))
    assert 0.5 < predicted / found < 2
    # The control: without the decay errors would stay.
    assert not 0.5 < math.sqrt(state_error(whole, own, BF16, "sr", 1.0)) / found < 2


def test_what_begins_at_zero_is_expected_in_larger_units() -> None:
    zeros = torch.zeros(ELEMENTS, dtype=torch.float64)
    moves = moves_of(zeros, torch.full((ELEMENTS,), 1e-3))
    way = expected_way(moves, 100)
    assert way.moves.variance(BF16, "sr") > 1e6 * moves.variance(BF16, "sr")
    assert expected_way(Moves(), 100).length == 0
