"""Steps in some of which two parameters have one tensor as gradient, or one is that of another.

For hooks.traces.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from interpreter import without_compiler
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer, RMSprop

import collage_fx
from collage_fx.dynamo import backend
from collage_fx.hooks import traces

RATE = 1e-2
STEPS = 9


class Signs(Optimizer):
    """An optimizer that Dynamo traces as it is written."""

    def __init__(self, params: list[Tensor]) -> None:
        super().__init__(params, {"lr": RATE})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad.sign(), alpha=-group["lr"])  # type: ignore[union-attr]


def adamw(params: list[Tensor]) -> Optimizer:
    return AdamW(params, lr=RATE)


def rmsprop(params: list[Tensor]) -> Optimizer:
    return RMSprop(params, lr=RATE)


def one_for_two(params: list[Tensor]) -> None:
    params[1].grad = params[0].grad
    params[8].grad = params[7].grad


def parameters(params: list[Tensor]) -> None:
    params[1].grad = params[0]


def values(
    make: Callable[[list[Tensor]], Optimizer],
    share: Callable[[list[Tensor]], None],
    first: int,
    dtype: torch.dtype,
) -> list[Tensor]:
    """Return the parameters after steps of which those from `first` to 5 share gradients."""
    torch.compiler.reset()
    generator = torch.Generator().manual_seed(0)
    begin = [torch.randn(3, 2, generator=generator).bfloat16().to(dtype) for _ in range(9)]
    params: list[Tensor] = [nn.Parameter(t) for t in begin]
    optimizer = make(params)
    compiled = dtype is torch.bfloat16
    step: Any = collage_fx.compile(optimizer) if compiled else optimizer.step
    for i in range(STEPS):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).bfloat16().to(dtype)
        if first <= i < 6:
            share(params)
        step()
    return [collage_fx.value(p) for p in params]


def far(*args: Any) -> float:
    """Return the largest distance from the trajectory in float64."""
    expected, found = values(*args, torch.float64), values(*args, torch.bfloat16)
    return max((a - b).abs().max().item() for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("make", "share", "first"),
    [
        *((make, one_for_two, first) for make in (Signs, adamw, rmsprop) for first in (0, 3)),
        (adamw, parameters, 0),
    ],
)
@pytest.mark.quick("Signs-*")
def test_each_parameter_has_its_own_again(
    make: Any, share: Any, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with without_compiler():
        assert far(make, share, first) < 0.2 * RATE
        if not first:  # the control: what PyTorch guards by itself
            monkeypatch.setattr(backend, "_shares_gradients", lambda _: False)
            monkeypatch.setattr(traces, "_is_listed", lambda _: True)
            assert far(make, share, first) > RATE
