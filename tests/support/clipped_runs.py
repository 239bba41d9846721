"""Runs of optimizers whose gradients are clipped in the step, and the same in float64."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

import collage_fx

SHAPES = ((6, 5), (6, 5), (7,), (11,), (11,))
NORM, LR = 0.5, 0.25
"""Most that the norm may be; a rate at which eight steps of that go far beside 2^-24."""


class Descent(Optimizer):
    """Cuts Dynamo's graph, and takes its update from all gradients."""

    def __init__(self, params: Any, lr: float = LR) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if not bool((p.grad.abs() < 1e9).all()):
                    raise ArithmeticError
                p.add_(p.grad, alpha=-group["lr"])
        return loss


class Writing(Optimizer):
    """Adds decay to the gradients themselves, which are the user's to see."""

    def __init__(self, params: Any, lr: float = LR) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.add_(p, alpha=0.5)
                p.add_(p.grad, alpha=-group["lr"])


class Zeroing(Writing):
    """Leaves zeros where it has read a gradient."""

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"])
                p.grad.zero_()


class Flat(Writing):
    """Reads the memory that its gradients are parts of."""

    flat: Tensor

    @torch.no_grad()
    def step(self) -> None:
        first = 0
        for group in self.param_groups:
            for p in group["params"]:
                size = p.numel()
                p.add_(self.flat[first : first + size].view_as(p), alpha=-group["lr"])
                first += size


def params(dtype: torch.dtype = torch.bfloat16, shapes: Sequence[Any] = SHAPES) -> list[Tensor]:
    """Return parameters, the same of whatever dtype."""
    generator = torch.Generator().manual_seed(1)
    values = [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]
    return [v.to(dtype).requires_grad_() for v in values]


def gradients(k: int, shapes: Sequence[Any] = SHAPES) -> list[Tensor]:
    """Return the gradients of a step, in bf16."""
    generator = torch.Generator().manual_seed(100 + k)
    return [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]


def give(optimizer: Optimizer, k: int) -> list[Tensor]:
    """Give an optimizer the gradients of a step; return these."""
    given = [p for group in optimizer.param_groups for p in group["params"]]
    for p, g in zip(given, gradients(k, [p.shape for p in given]), strict=True):
        p.grad = g.to(p.dtype, copy=True)
    return [p.grad for p in given]  # type: ignore[misc]


def norm_of(found: Sequence[Tensor]) -> Tensor:
    """Return the norm of tensors together, in float64."""
    return torch.stack([g.double().norm() for g in found]).norm()


def exactly(make: Callable[[list[Tensor]], Optimizer] = SGD, steps: int = 8, **kwargs: Any) -> Any:
    """Return an optimizer of float64 parameters after steps with clipped gradients."""
    exact = make(params(torch.float64), **kwargs)
    for k in range(steps):
        found = give(exact, k)
        torch._foreach_mul_(found, min(1.0, NORM / (float(norm_of(found)) + 1e-6)))
        exact.step()
    return exact


def error(found: Optimizer, exact: Optimizer) -> float:
    """Return the error of the parameters beside the way that they went."""
    pairs = zip(found.param_groups[0]["params"], exact.param_groups[0]["params"], strict=True)
    begin = params(torch.float64)
    off = [(collage_fx.value(p).double() - x) for p, x in pairs]
    moved = [x - b for x, b in zip(exact.param_groups[0]["params"], begin, strict=True)]
    return float(norm_of([t.detach() for t in off]) / norm_of([t.detach() for t in moved]))
