"""Steps in fp16, arithmetic eft: no intermediate is rounded to infinity at small learning rates.

For passes.frontend.decompose.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Adamax, AdamW, Optimizer

import collage_fx
from collage_fx.passes.frontend import decompose

START = torch.linspace(-0.1, 0.1, 12).half()


def moved(kind: type[Optimizer], dtype: torch.dtype, *, foreach: bool) -> Tensor:
    """Return by how much a parameter has moved after some steps with gradients above one."""
    torch.compiler.reset()
    generator = torch.Generator().manual_seed(0)
    p = START.clone().to(dtype).requires_grad_()
    optimizer: Any = kind([p], lr=1e-5, foreach=foreach)
    step = optimizer.step
    if dtype.itemsize == 2:
        step = collage_fx.compile(optimizer, level="all", storage="mcf2")
    for _ in range(8):
        p.grad = (2 + torch.rand(12, generator=generator)).half().to(dtype)
        step()
    return collage_fx.value(p).detach() - START.double()


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("kind", [AdamW, Adamax])
@pytest.mark.quick("AdamW-True")
def test_a_gradient_over_a_small_rate_does_not_overflow(
    kind: type[Optimizer], foreach: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = moved(kind, torch.float64, foreach=foreach)
    ours = moved(kind, torch.float16, foreach=foreach)
    assert (ours - exact).norm() < 2e-3 * exact.norm()
    monkeypatch.setattr(decompose, "_divisor", lambda builder, out, x: x)
    overflowing = moved(kind, torch.float16, foreach=foreach)
    assert (overflowing - exact).norm() > 0.5 * exact.norm()
