"""Short runs of an optimizer whose states are kept in one storage or another."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

import collage_fx

MEMBERS = {"each": 2, "shared": 9, "eager": 2}
WAYS = pytest.mark.parametrize(
    "way", ["each", pytest.param("shared", marks=pytest.mark.kernels), "eager"]
)
BITS = ("mcf2", "mcf3", "remainder16", "ulp8")
LR = 1e-5
"""Rate at which bf16 loses everything, ulp8 much, mcf2 little and 24 bits nothing."""


def start(count: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(7, 5, generator=generator).bfloat16() for _ in range(count)]
    return [v.to(dtype).requires_grad_() for v in values]


def steps(optimizer: Optimizer, step: Any, first: int = 0, last: int = 20) -> None:
    """Steps on a fixed stream of gradients."""
    for k in range(first, last):
        generator = torch.Generator().manual_seed(100 + k)
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.randn(p.shape, generator=generator).bfloat16().to(p.dtype)
        step()


def compiled(optimizer: Optimizer, way: str, **options: Any) -> Any:
    if way == "each":  # by Inductor's kernels
        options.setdefault("multi_tensor", False)
    step = collage_fx.compile(optimizer, **options)
    if way != "eager":
        return step

    def run() -> Any:
        with torch.compiler.set_stance("force_eager"):
            return step()

    return run


def trained(way: str, dtype: torch.dtype = torch.bfloat16, **options: Any) -> list[Tensor]:
    params = start(MEMBERS[way], dtype)
    optimizer = torch.optim.AdamW(params, lr=LR, foreach=way != "eager", weight_decay=0.0)
    steps(optimizer, compiled(optimizer, way, **options) if options else optimizer.step)
    return [collage_fx.value(p).detach() for p in params]


def lost(found: list[Tensor], exact: list[Tensor]) -> float:
    """Return the error relative to the way that the parameters went."""
    begin = [p.detach() for p in start(len(exact), torch.float64)]
    off = torch.cat([(f - e).flatten() for f, e in zip(found, exact, strict=True)])
    way = torch.cat([(e - b).flatten() for e, b in zip(exact, begin, strict=True)])
    return float(off.norm() / way.norm())
