"""Gradients of which memory has the negatives, as autograd makes of conjugated complex numbers.

For gradients.norm.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer

import collage_fx

pytestmark = pytest.mark.kernels


class Own(Optimizer):
    """An optimizer of a user's own."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"])


def moved(kind: Any, *, negated: range, sums: bool = False) -> Tensor:
    """Return how far ones have come by eight steps along gradients of one."""
    torch.compiler.reset()
    params = [torch.nn.Parameter(torch.ones(16, dtype=torch.bfloat16)) for _ in range(3)]
    optimizer = kind(params, lr=2**-6)
    collage_fx.compile_(optimizer)
    if sums:
        collage_fx.accumulate(optimizer)
    for i in range(8):
        optimizer.zero_grad()
        for p in params:
            one = torch.ones_like(p)
            p.grad = torch._neg_view(-one) if i in negated else one
            if sums:
                p.backward(one)
        optimizer.step()
    return torch.stack([collage_fx.value(p) for p in params]) - 1


@pytest.mark.parametrize("kind", [SGD, AdamW, Own])
@pytest.mark.parametrize("negated", [range(8), range(5, 6)], ids=["all", "one"])
@pytest.mark.quick("all-SGD")
def test_same_steps(kind: Any, negated: range) -> None:
    expected = moved(kind, negated=range(0))
    assert (expected < -0.1).all()
    torch.testing.assert_close(moved(kind, negated=negated), expected, rtol=0, atol=1e-6)


def test_control(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels read memory."""
    for module in ("step.compiled_step", "stand_in.steps"):
        monkeypatch.setattr(f"collage_fx.{module}.resolve_gradients", lambda *_: None)
    found = moved(SGD, negated=range(5, 6))
    assert (found > -0.1).all()


def test_sums() -> None:
    expected = moved(SGD, negated=range(0), sums=True)
    assert torch.equal(moved(SGD, negated=range(8), sums=True), expected)


def test_a_function() -> None:
    """A function that is given one is recorded."""

    def add(p: Tensor, g: Tensor) -> None:
        with torch.no_grad():
            p.add_(g, alpha=-(2**-6))

    torch.compiler.reset()
    step, p = collage_fx.compile(add), torch.ones(16, dtype=torch.bfloat16)
    for _ in range(4):
        step(p, torch._neg_view(-torch.ones(16, dtype=torch.bfloat16)))
    assert ((collage_fx.value(p) - 1 + 4 * 2**-6).abs() < 1e-6).all()
