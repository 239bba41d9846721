"""Small parameters with gradients."""

import torch
from torch import Tensor


def bf16(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16().requires_grad_()


def with_grads(params: list[Tensor]) -> list[Tensor]:
    for p in params:
        p.grad = torch.randn_like(p)
    return params


def error(found: Tensor, exact: Tensor) -> float:
    """The relative error of the norm."""
    return float((found - exact).norm() / exact.norm())
