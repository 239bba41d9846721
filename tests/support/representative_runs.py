"""Steps whose parameters Dynamo sees in part: what they leave."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

import collage_fx
from collage_fx.stand_in import steps as stand_in_steps

SHAPES = [(4, 3), (7,), (3, 1), (2, 3, 2), (9,)]
Change = Callable[[Optimizer, int], None]


def parameters(shapes: list[Any]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [Parameter(torch.randn(s, generator=generator).bfloat16()) for s in shapes]


def give_gradients(optimizer: Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def nothing(optimizer: Optimizer, i: int) -> None:
    """Leave it as it is."""


def run(
    make: Callable[[list[Tensor]], Optimizer],
    monkeypatch: pytest.MonkeyPatch,
    *,
    whole: bool,
    change: Change = nothing,
    steps: int = 4,
    **options: Any,
) -> list[Any]:
    """Return all that some steps leave: values, residuals, versions and the report."""
    torch.compiler.reset()
    with monkeypatch.context() as patch:
        if whole:
            patch.setattr(stand_in_steps, "serves", lambda *_: False)
        optimizer = make(parameters(SHAPES * 3))
        step = collage_fx.compile(optimizer, **options)
        for i in range(steps):
            give_gradients(optimizer, i)
            change(optimizer, i)
            step()
    left: list[Any] = []
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        for x in (p, *optimizer.state.get(p, {}).values()):
            left += [x.detach().float(), *(r.float() for r in collage_fx.residuals(x))]
            left += [torch.tensor(x._version)]
    served = [line for line in str(collage_fx.report(step)).splitlines() if "Dynamo" not in line]
    return [*left, served]


def same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a[:-1], b[:-1])) and a[-1] == b[-1]
