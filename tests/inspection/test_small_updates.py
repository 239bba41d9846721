"""The warning about lost updates: beside a float64 trajectory, whom it names, and when.

For step.small_updates and runtime.residuals.lost_share.
"""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import collage_fx
from collage_fx.step import small_updates
from collage_fx.step.small_updates import SmallUpdates

KEPT = 2.0**-16
"""Smallest relative change that ulp8 keeps of a value."""


@pytest.fixture(autouse=True)
def judged(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, float]]]:
    """Judge after ten steps; return the shares that were seen."""
    for name, value in (("FIRST", 3), ("EVERY", 1)):
        monkeypatch.setattr(small_updates, name, value)
    found: list[dict[str, float]] = []
    judge = SmallUpdates._judge

    def spy(self: SmallUpdates, optimizer: Any) -> None:
        judged = small_updates._judged(self.seen)
        found.append({owned.name: share for owned, _, _, share in judged})
        judge(self, optimizer)

    monkeypatch.setattr(SmallUpdates, "_judge", spy)
    yield found


def sgd(params: list[Tensor], rate: float = 1.0, storage: str = "ulp8", **options: Any) -> Any:
    optimizer = torch.optim.SGD([p.requires_grad_() for p in params], lr=rate)
    return collage_fx.compile_(optimizer, storage=storage, **options)


def ones(count: int = 1000) -> Tensor:
    """Values of which changes of `KEPT` and more are kept, and other values in a larger tensor."""
    return torch.linspace(1.0, 1.9, count).bfloat16()


def train(
    optimizer: Any, gradient: Callable[[int, Tensor], Tensor], steps: int = 12
) -> list[Tensor]:
    """Take steps on these gradients; return how far float64 would have gone in those looked at."""
    params = optimizer.param_groups[0]["params"]
    ways = [torch.zeros_like(p, dtype=torch.float64) for p in params]
    for step in range(1, steps + 1):
        for p, way in zip(params, ways, strict=True):
            p.grad = gradient(step, p).to(p.dtype)
            if step >= small_updates.FIRST:
                way -= optimizer.param_groups[0]["lr"] * p.grad.double()
        optimizer.step()
    return ways


def said(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(w.message) for w in caught if "of the way of" in str(w.message)]


@pytest.mark.parametrize("size", [0.5, 1.3, 2.0, 8.0])
@pytest.mark.parametrize("uniform", [True, False], ids=["uniform", "normal"])
@pytest.mark.parametrize("storage", ["ulp8", "remainder16"])
@pytest.mark.quick("*-uniform-0.5", "ulp8-uniform-1.3", "ulp8-*-2.0")
def test_the_share_is_that_of_a_float64_trajectory(
    storage: str, uniform: bool, size: float, judged: list[dict[str, float]]
) -> None:
    """Of updates up to so many of the smallest that are kept, or normal with half their size."""
    draw = torch.Generator().manual_seed(3)
    sizes = 0.5 + torch.rand(1000, generator=draw) / 2
    if not uniform:
        sizes = torch.randn(1000, generator=draw).abs() / 2
    p = ones()
    optimizer = sgd([p], storage=storage)
    train(optimizer, lambda step, p: torch.zeros_like(p), small_updates.FIRST - 1)
    start = collage_fx.value(p).clone()
    push = sizes * size * KEPT
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(optimizer, lambda step, p: push, small_updates.LOOKS)
    meant = -push.bfloat16().double() * small_updates.LOOKS
    moved = collage_fx.value(p) - start
    share = 1 - float((moved * meant).sum() / (meant * meant).sum())
    found = next(iter(judged[0].values()))
    assert found > share - 0.05
    if uniform:
        assert found < share + 0.05
        assert bool(said(caught)) == (storage == "ulp8" and size < 1) == (share > 0.3)


def test_every_parameter_is_looked_at() -> None:
    """The large ones keep their updates; the smallest loses them."""
    large = [torch.full((4000,), 0.01).bfloat16() for _ in range(20)]
    optimizer = sgd([*large, ones(3)], rate=KEPT / 4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(optimizer, lambda step, p: torch.ones_like(p))
    (text,) = said(caught)
    assert "of the last 10 steps 100% of the way of param_groups[0].params[20] was lost:" in text
    assert "'mcf2' or 'mcf3' or 'remainder16' keeps more" in text
    assert "stochastic_rounding=True keeps them on average" in text
    (note,) = (n for n in collage_fx.report(optimizer).notes if "of the way of" in n)
    assert note in text


def test_said_again_when_twice_as_much_is_lost(judged: list[dict[str, float]]) -> None:
    optimizer = sgd([ones()])
    push = torch.randn(1000, generator=torch.Generator().manual_seed(3)).abs() * KEPT
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for size, steps, count in ((0.8, 12, 1), (0.8, 24, 1), (0.1, 40, 2), (0.1, 90, 2)):
            train(optimizer, lambda step, p, size=size: size * push, steps)
            assert len(said(caught)) == count
    first, *_, last = (share for one in judged for share in one.values())
    assert small_updates.LOST < first < 0.5 and last == 1.0


@pytest.mark.parametrize("rates", ["rise", "fall", "stay"])
@pytest.mark.quick("rise")
def test_rates_that_change(rates: str) -> None:
    """A rate that warms up will be larger; what one that has decayed loses was little."""
    optimizer = sgd([ones()], rate=KEPT / 4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(40):
            if rates == "rise":
                optimizer.param_groups[0]["lr"] = KEPT / 4 * (1 + step / 40)
            elif rates == "fall":
                optimizer.param_groups[0]["lr"] = 8 * KEPT if step < 12 else KEPT / 4
            train(optimizer, lambda step, p: torch.ones_like(p), 1)
    assert bool(said(caught)) == (rates == "stay")


@pytest.mark.parametrize("rate", [None, [1e-3], torch.tensor([1e-3, 1e-3]), lambda: 1e-3])
def test_a_rate_need_be_no_number(rate: Any) -> None:
    """As of transformers' Adafactor, which computes its own."""

    class Own(torch.optim.SGD):
        @torch.no_grad()
        def step(self) -> None:  # type: ignore[override]
            for p in self.param_groups[0]["params"]:
                p.sub_(self.param_groups[0]["rate"] * p.grad)

    mine = Own([ones().requires_grad_()], lr=1.0)
    mine.param_groups[0] |= {"lr": rate, "rate": KEPT / 4}
    collage_fx.compile_(mine, storage="ulp8")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(12):
            mine.param_groups[0]["params"][0].grad = torch.ones(1000).bfloat16()
            mine.step()
    assert said(caught)


@pytest.mark.filterwarnings("ignore:.*torch.compile fails on a part of the step")
def test_a_gradient_may_be_of_another_dtype() -> None:
    p = ones().requires_grad_()
    p.grad_dtype = None
    optimizer = collage_fx.compile_(torch.optim.SGD([p], lr=8 * KEPT), storage="ulp8")
    for _ in range(12):
        p.grad = torch.ones(1000, dtype=torch.float64)
        optimizer.step()


def test_a_few_that_are_much_larger_are_the_way() -> None:
    push = torch.full((1000,), 0.02 * KEPT)
    push[::50] = 30 * KEPT
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(sgd([ones()]), lambda step, p: push)
    assert not said(caught)
