"""A compiled step within the step of another optimizer, or of a function: a part of that one.

For step.compiled_step.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import collage_fx

STEPS = 6


class Averaged(Optimizer):
    """Has another optimizer take its step, and averages the parameters."""

    def __init__(self, params: list[Tensor], inner: Callable[[], Any]) -> None:
        super().__init__(params, {"lr": 1e-3})
        self.inner = inner

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        self.inner()
        self._average()

    @torch.compiler.disable(recursive=False)
    def _average(self) -> None:
        for p in self.param_groups[0]["params"]:
            if not self.state[p]:
                self.state[p]["average"] = p.clone()
            self.state[p]["average"].lerp_(p, 0.01)


def adamw(params: list[Tensor], **options: Any) -> Optimizer:
    return AdamW(params, lr=1e-3, **options)


def momentum(params: list[Tensor]) -> Optimizer:
    return SGD(params, lr=1e-3, momentum=0.9)


def fused(params: list[Tensor]) -> Optimizer:
    return adamw(params, fused=True)


def train(make: Any, dtype: torch.dtype, inner: str, outer: str) -> tuple[Tensor, Any]:
    """Return how far a parameter and its average have moved, and the outer step.

    Each of the two steps is compiled for a storage, if one is given.
    """
    generator = torch.Generator().manual_seed(0)
    start = (torch.rand(6, generator=generator) + 1).bfloat16().double()
    p = nn.Parameter(start.bfloat16().to(dtype))
    optimizer = make([p])
    take = collage_fx.compile(optimizer, storage=inner) if inner else optimizer.step
    averaged = Averaged([p], take)
    step = collage_fx.compile(averaged, storage=outer) if outer else averaged.step
    for _ in range(STEPS):
        p.grad = (torch.randn(6, generator=generator) + 1).bfloat16().to(dtype)
        step()
    values = [p, averaged.state[p]["average"]]
    moved = (
        [collage_fx.value(x).double() - start for x in values]
        if outer
        else [x.detach().double() - start for x in values]
    )
    return torch.stack(moved), optimizer if not inner else take


@pytest.mark.slow
@pytest.mark.parametrize("make", [adamw, momentum, fused])
@pytest.mark.parametrize("inner", ["mcf3", "ulp8"])
@pytest.mark.quick("mcf3-fused")
def test_a_step_within_another_is_a_part_of_it(make: Any, inner: str) -> None:
    """Each with a recorder of its own, one would read what the other has not done yet: NaN."""
    exact, _ = train(make, torch.float64, "", "")
    plain, _ = train(make, torch.bfloat16, "", "")
    ours, take = train(make, torch.bfloat16, inner, "mcf3")
    uncompiled, optimizer = train(make, torch.bfloat16, "", "mcf3")
    assert float((ours - exact).norm() / exact.norm()) < 5e-3
    assert float((plain - exact).norm() / exact.norm()) > 0.3
    assert torch.equal(ours, uncompiled)
    saved = any("mcf3" in key for key in optimizer.state_dict()["state"][0])
    assert saved or make is momentum, "which has no state that needs a residual"
    assert "within a step of another it is a part" in str(collage_fx.report(take))


def test_a_step_within_a_compiled_function_is_a_part_of_it() -> None:
    def moved(dtype: torch.dtype, compiled: bool) -> Tensor:
        p = nn.Parameter(torch.ones(4, dtype=dtype))
        optimizer = adamw([p])
        take = collage_fx.compile(optimizer) if compiled else optimizer.step

        def update(p: Tensor, average: Tensor) -> None:
            take()
            with torch.no_grad():
                average.lerp_(p, 0.01)

        average = torch.zeros(4, dtype=dtype)
        call = collage_fx.compile(update) if compiled else update
        for i in range(STEPS):
            p.grad = torch.full_like(p, 0.5 + i / 8)
            call(p, average)
        values = [collage_fx.value(x) if compiled else x.detach() for x in (p, average)]
        return torch.stack([x.double() for x in values]) - torch.tensor([[1.0], [0.0]])

    exact = moved(torch.float64, compiled=False)
    ours, plain = (moved(torch.bfloat16, compiled=c) for c in (True, False))
    assert float((ours - exact).norm() / exact.norm()) < 5e-3
    assert float((plain - exact)[0].norm() / exact[0].norm()) > 0.05
