"""Optimizers of one parameter each, stepped in the backward pass, and what they leave."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

import collage_fx

SHAPES = [(4, 3), (7,), (2, 3, 2), (9,), (3, 5), (16,), (2, 2, 2, 2), (33,)]
"""Shapes, as many as a class has at least that is compiled once."""
Make = Callable[[list[Tensor]], Optimizer]
Change = Callable[[list[Optimizer], int], None]


def parameters(shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [Parameter(torch.randn(s, generator=generator).bfloat16()) for s in shapes]


def compiled(make: Make, params: Sequence[Tensor], **options: Any) -> list[Optimizer]:
    """One optimizer for each parameter, its step compiled in place."""
    return [collage_fx.compile_(make([p]), **options) for p in params]


def params_of(optimizers: Sequence[Optimizer]) -> list[Tensor]:
    return [p for one in optimizers for group in one.param_groups for p in group["params"]]


def loss(params: Sequence[Tensor], seed: int) -> Tensor:
    """One whose gradients are random numbers."""
    generator = torch.Generator().manual_seed(seed)
    found: Any = sum((p.float() * torch.randn(p.shape, generator=generator)).sum() for p in params)
    return found


def in_backward(optimizers: Sequence[Optimizer], every: int = 1) -> list[Any]:
    """Have each parameter updated as soon as its gradient is there; return the handles.

    Args:
        optimizers: of one parameter each.
        every: over how many backward passes gradients are summed up.
    """
    seen = dict.fromkeys(map(id, params_of(optimizers)), 0)
    handles = []
    for one in optimizers:

        def hook(p: Tensor, one: Optimizer = one) -> None:
            seen[id(p)] += 1
            if seen[id(p)] % every == 0:
                one.step()
                one.zero_grad()

        (p,) = params_of([one])
        handles.append(p.register_post_accumulate_grad_hook(hook))
    return handles


def nothing(optimizers: list[Optimizer], step: int) -> None:
    """Leave them as they are."""


def train(
    optimizers: list[Optimizer], steps: int = 4, change: Change = nothing, every: int = 1
) -> list[Optimizer]:
    """Take steps in backward passes."""
    handles = in_backward(optimizers, every)
    for i in range(steps):
        change(optimizers, i)
        loss(params_of(optimizers), i).backward()
    for handle in handles:
        handle.remove()
    return optimizers


def train_together(
    make: Make, chosen: slice = slice(None), change: Change = nothing, steps: int = 4
) -> Optimizer:
    """One optimizer of some of the parameters, with the gradients that they have among all."""
    params = parameters()
    one = collage_fx.compile_(make(params[chosen]))
    for i in range(steps):
        change([one], i)
        loss(params, i).backward()
        one.step()
        for p in params:
            p.grad = None
    return one


def step_all(optimizers: Sequence[Optimizer], seed: int) -> None:
    """Give gradients and step, outside of a backward pass."""
    generator = torch.Generator().manual_seed(seed)
    for p in params_of(optimizers):
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
    for one in optimizers:
        one.step()


def bits(optimizers: Sequence[Optimizer]) -> list[Tensor]:
    """All that steps leave: values, residuals and versions."""
    found = []
    for one in optimizers:
        for p in params_of([one]):
            states = [t for t in one.state[p].values() if isinstance(t, Tensor)]
            for t in (p, *states):
                found += [t, *collage_fx.residuals(t), torch.tensor(t._version)]
    return [t.detach().clone() for t in found]


def same(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))
