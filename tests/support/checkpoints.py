"""Small runs whose checkpoints are taken apart."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

import collage_fx

Run = tuple[nn.Module, Optimizer]
STORAGES = {"param": "remainder16", "exp_avg": "mcf2", "exp_avg_sq": "ulp8"}
"""Residuals of three dtypes."""


def plain(seed: int) -> Run:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 9), nn.LayerNorm(9)).bfloat16()
    return model, AdamW(model.named_parameters(), lr=1e-3)


def compiled(run: Run, **options: Any) -> Run:
    _, optimizer = run
    options = options or {"storage": STORAGES, "level": "all"}
    optimizer.step = collage_fx.compile(optimizer, **options)  # type: ignore[method-assign]
    return run


def take_steps(model: nn.Module, step: Callable[[], Any], first: int, last: int) -> None:
    """Steps first to last - 1 of a fixed stream of gradients."""
    for k in range(first, last):
        generator = torch.Generator().manual_seed(k)
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator).bfloat16()
        step()


def train(run: Run, first: int, last: int) -> None:
    """The same of a run."""
    model, optimizer = run
    take_steps(model, optimizer.step, first, last)


def words(run: Run) -> list[Tensor]:
    """All bits of the parameters, the states and their residuals."""
    model, optimizer = run
    return [
        word.detach().clone()
        for p in model.parameters()
        for t in (p, *optimizer.state[p].values())
        for word in (t, *collage_fx.residuals(t))
    ]
