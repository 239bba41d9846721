"""Optimizers that do by each parameter what a test says, and how far they get."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

import collage_fx

LR = 1e-4
"""Rate at which bf16 weights of about one lose every update."""
STEPS = 10


class Each(Optimizer):
    """Calls a function with each parameter, its gradient and its state."""

    def __init__(self, params: list[Tensor], update: Callable[..., None]) -> None:
        super().__init__(params, {"lr": LR})
        self.update = update

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            self.update(p, p.grad, self.state[p])


def from_state(p: Tensor, g: Tensor, state: Any) -> None:
    """Compute the parameter anew from an average and what it averages."""
    if not state:
        state["z"], state["x"] = p.clone(), p.clone()
    z, x = state["z"], state["x"]
    z.sub_(g, alpha=LR)
    x.mul_(0.5).add_(z, alpha=0.5)
    p.copy_(x.mul(0.75).add_(z, alpha=0.25))


def start(dtype: torch.dtype, shape: tuple[int, ...] = (4, 3), count: int = 2) -> list[Tensor]:
    """Return parameters of about one, the same in each dtype."""
    made = torch.Generator().manual_seed(1)
    values = [1 + 0.25 * torch.rand(shape, generator=made) for _ in range(count)]
    return [v.bfloat16().to(dtype).requires_grad_() for v in values]


def train(
    update: Callable[..., None],
    dtype: torch.dtype = torch.bfloat16,
    *,
    params: list[Tensor] | None = None,
    steps: int = STEPS,
    **options: Any,
) -> tuple[Tensor, Any]:
    """Take steps; return the values of all parameters, and the step.

    Args:
        update: see `Each`.
        dtype: of the parameters; in float64 PyTorch does the steps, as with options None.
        params: those to begin with.
        steps: how many.
        options: of collage_fx.compile.
    """
    params = params or start(dtype)
    optimizer = Each(params, update)
    plain = dtype == torch.float64 or options.pop("plain", False)
    step = optimizer.step if plain else collage_fx.compile(optimizer, **options)
    for k in range(steps):
        made = torch.Generator().manual_seed(100 + k)
        for p in params:
            g = 0.5 + torch.rand(p.shape, generator=made)
            p.grad = g.bfloat16().to(p.dtype)
        step()
    return torch.cat([collage_fx.value(p).detach().double().flatten() for p in params]), step


def interpreted(update: Callable[..., None], steps: int, **options: Any) -> dict[str, Any]:
    """Take steps of a parameter in bf16 that nothing compiles; return its state.

    Args:
        update: see `Each`.
        steps: how many.
        options: of collage_fx.compile; PyTorch does the steps without any.
    """
    p = torch.linspace(1, 2, 4).bfloat16().requires_grad_()
    optimizer = Each([p], update)
    step = collage_fx.compile(optimizer, **options) if options else optimizer.step
    with torch.compiler.set_stance("force_eager"):
        for _ in range(steps):
            p.grad = torch.full_like(p, 0.3)
            step()
    return optimizer.state[p]


def off(found: Tensor, exact: Tensor, begin: Tensor) -> float:
    """Return the error as a share of the way that parameters went."""
    return float((found - exact).norm() / (exact - begin).norm())
