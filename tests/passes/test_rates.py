"""Rates by which high words enter a state: small when a step is compiled, and large later.

For passes.analysis.factors.
"""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from interpreter import without_compiler
from scaled_states import TURN
from torch import Tensor

import collage_fx
from collage_fx.passes.analysis import factors

SHAPE = 8, 16
GROWING = [1e-3 + 1e-5 * k for k in range(6)] + [0.5 + 1e-3 * k for k in range(10)]
TENTH = [0.1 + 1e-3 * k for k in range(16)]
TARGET = (0.6 + 0.5 * torch.rand(SHAPE, generator=torch.Generator().manual_seed(3))).bfloat16()
Update = Callable[[Tensor, float], None]


def turned_a_little(p: Tensor, lr: float) -> None:
    p.mul_(1 - lr).add_(p @ TURN.to(p.dtype), alpha=lr)


def half_anew(p: Tensor, lr: float) -> None:
    p.mul_(0.5).add_(TARGET.to(p.dtype), alpha=0.5).add_(p @ TURN.to(p.dtype), alpha=lr)


class Rated(torch.optim.Optimizer):
    """Calls a function with each parameter and the rate of its group."""

    def __init__(self, params: list[Tensor], update: Update) -> None:
        super().__init__(params, {"lr": 0.0})
        self.update = update

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=1e-3)
                self.update(p, group["lr"])


def way(update: Update, rates: list[float], dtype: torch.dtype, options: Any) -> Tensor:
    """Return the parameter after steps; PyTorch takes them if options are None."""
    torch.compiler.reset()
    generator = torch.Generator().manual_seed(0)
    start = (0.6 + 0.5 * torch.rand(SHAPE, generator=generator)).bfloat16()
    p = torch.nn.Parameter(start.to(dtype, copy=True))
    optimizer = Rated([p], update)
    step = optimizer.step if options is None else collage_fx.compile(optimizer, **options)
    with without_compiler():
        for lr in rates:
            optimizer.param_groups[0]["lr"] = lr
            p.grad = (0.1 * torch.randn(SHAPE, generator=generator)).bfloat16().to(dtype)
            step()
    return collage_fx.value(p).detach()


@functools.cache
def exact(update: Update, rates: tuple[float, ...]) -> Tensor:
    return way(update, list(rates), torch.float64, None)


def error(update: Update, rates: list[float], options: Any) -> float:
    """Return the error of the parameter, relative to it."""
    want = exact(update, tuple(rates))
    return float((way(update, rates, torch.bfloat16, options) - want).norm() / want.norm())


OPTIONS = [{"storage": "remainder16"}, {"storage": "remainder16", "record": True}]


@pytest.mark.parametrize("options", OPTIONS, ids=["traced", "recorded"])
@pytest.mark.parametrize(
    ("update", "rates"),
    [(half_anew, GROWING), (turned_a_little, TENTH), (turned_a_little, GROWING)],
)
@pytest.mark.quick("turned_a_little-rates1-traced")
def test_what_a_rate_scales_has_its_low_word(update: Update, rates: Any, options: Any) -> None:
    assert error(update, rates, options) < 2e-6
    assert error(update, rates, None) > 1e-4


@pytest.mark.parametrize("options", OPTIONS, ids=["traced", "recorded"])
@pytest.mark.quick("traced")
def test_it_has_not_if_a_rate_stays_small(options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factors, "_size", lambda now, grown: factors.RATE)
    monkeypatch.setattr(factors, "_followed", lambda new: frozenset())
    assert error(half_anew, GROWING, options) > 1e-4
