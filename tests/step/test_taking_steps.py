"""Methods that take the step of an optimizer within, as SAM's: they are steps themselves.

For step.other_methods.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from interpreter import without_compiler
from recorded_steps import off, start
from torch import Tensor
from torch.optim import SGD, Optimizer

import collage_fx
from collage_fx.errors import CollageWarning
from collage_fx.step import other_methods

LR, STEPS = 1e-4, 8


class Sharp(Optimizer):
    """Takes the gradient where the loss is sharper: sharpness-aware minimization."""

    def __init__(self, params: list[Tensor], restore: Callable[[Any, Tensor], None]) -> None:
        super().__init__(params, {"rho": 0.05, "lr": LR})
        self.within = SGD(self.param_groups, lr=LR, momentum=0.9)
        self.param_groups = self.within.param_groups
        self.restore = restore

    @torch.no_grad()
    def first_step(self) -> None:
        params = self.param_groups[0]["params"]
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        for p in params:
            self.state[p]["old"] = p.detach().clone()
            p.add_(p.grad * (self.param_groups[0]["rho"] / norm))

    @torch.no_grad()
    def second_step(self) -> None:
        for p in self.param_groups[0]["params"]:
            self.restore(p, self.state[p]["old"])
        self.within.step()

    @torch.no_grad()
    def step(self, closure: Callable[[], None]) -> None:  # type: ignore[override]
        self.first_step()
        closure()
        self.second_step()


def copied(p: Tensor, old: Tensor) -> None:
    p.copy_(old)


def replaced(p: Any, old: Tensor) -> None:
    p.data = old


def called(optimizer: Sharp, gradients: Callable[[], None]) -> None:
    gradients()
    optimizer.first_step()
    gradients()
    optimizer.second_step()


def at_once(optimizer: Sharp, gradients: Callable[[], None]) -> None:
    gradients()
    optimizer.step(gradients)


def run(dtype: torch.dtype, take: Any, restore: Any, **options: Any) -> tuple[Tensor, Any]:
    """Take steps towards random weights; return where they lead, and the optimizer."""
    params = start(dtype)
    optimizer = Sharp(params, restore)
    made = torch.Generator().manual_seed(5)
    targets = [torch.randn(p.shape, generator=made).bfloat16().to(dtype) for p in params]
    if options:
        collage_fx.compile_(optimizer, **options)

    def gradients() -> None:
        for p, target in zip(params, targets, strict=True):
            p.grad = p.detach() - target

    for _ in range(STEPS):
        take(optimizer, gradients)
    return torch.cat([collage_fx.value(p).detach().double().flatten() for p in params]), optimizer


def error(take: Any, restore: Any = copied) -> tuple[float, str]:
    """Return the error as a share of the way, and the report."""
    begin = torch.cat([p.detach().double().flatten() for p in start(torch.float64)])
    with without_compiler():
        found, optimizer = run(torch.bfloat16, take, restore, storage="remainder16")
    want, _ = run(torch.float64, take, copied)
    return off(found, want, begin), str(collage_fx.report(optimizer))


@pytest.mark.slow
def test_the_halves_of_a_step_that_are_called_one_by_one_are_steps() -> None:
    found, report = error(called)
    assert found < 5e-3
    assert f"{2 * STEPS} joined" in report or f"{STEPS} joined" in report
    whole, _ = error(at_once)
    assert whole < 5e-3


def test_they_lose_everything_where_they_are_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control."""
    monkeypatch.setattr(other_methods, "_takes_step", lambda method: False)
    with pytest.warns(CollageWarning, match=r"SGD.step was called, without compensation"):
        found, _ = error(called)
    assert found > 0.5


@pytest.mark.filterwarnings("error:.*and wrote it:collage_fx.errors.CollageWarning")
def test_a_half_that_puts_back_the_memory_of_before_keeps_its_low_words() -> None:
    found, report = error(called, replaced)
    assert found < 5e-3
    assert "states take the memory of others" in report


class Halves(SGD):
    """Calls what takes a step in its own."""

    def take_half(self) -> None:
        super().step()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.take_half()


def test_a_step_that_calls_such_a_method_is_traced() -> None:
    (p,) = start(torch.bfloat16, count=1)
    optimizer = collage_fx.compile_(Halves([p], lr=LR))
    with without_compiler():
        for _ in range(3):
            p.grad = torch.ones_like(p)
            optimizer.step()
        (state,) = collage_fx.report(optimizer).states
        assert state.graph == 3 and state.compensated
        optimizer.take_half()
    (state,) = collage_fx.report(optimizer).states
    assert state.steps == 4 and state.compensated
    way = start(torch.float64, count=1)[0] - collage_fx.value(p)
    assert float(way.detach().mean()) == pytest.approx(4 * LR, rel=0.02)
