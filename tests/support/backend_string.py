"""Optimizers whose steps are compiled by the backend string, and how far they get."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, optim
from torch.optim import Optimizer

import collage_fx

LR = 1e-4
"""Rate at which bf16 weights of one lose every update."""


class Data(Optimizer):
    """Written as ten years ago."""

    def __init__(self, params: list[Tensor], lr: float = LR) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(p.grad.data, alpha=-group["lr"])


def sparse_adam(params: list[Tensor], lr: float) -> Optimizer:
    return optim.SparseAdam(params, lr=lr)


def lbfgs(params: list[Tensor], lr: float) -> Optimizer:
    return optim.LBFGS(params, lr=lr, max_iter=2)


def string(optimizer: Optimizer) -> Callable[..., Any]:
    step: Callable[..., Any] = torch.compile(optimizer.step, backend="collage")
    return step


def within(optimizer: Optimizer) -> Callable[..., Any]:
    step: Callable[..., Any] = torch.compile(lambda *a: optimizer.step(*a), backend="collage")
    return step


def trained(
    make: Callable[..., Optimizer], way: Callable[[Optimizer], Callable[..., Any]], steps: int = 6
) -> tuple[Tensor, Optimizer]:
    """Return how far parameters of one came, residuals included."""
    torch.compiler.reset()
    params = [torch.ones(4, 3).bfloat16().requires_grad_() for _ in range(2)]
    optimizer = make(params, lr=LR)
    step = way(optimizer)

    def closure() -> Tensor:
        for p in params:
            g = torch.linspace(0.5, 1.5, 12).view(4, 3).bfloat16()
            p.grad = g.to_sparse() if make is sparse_adam else g
        return torch.tensor(1.0)

    for _ in range(steps):
        if make is lbfgs:
            step(closure)
        else:
            closure()
            step()
    return torch.cat([1 - collage_fx.value(p).detach() for p in params]), optimizer
