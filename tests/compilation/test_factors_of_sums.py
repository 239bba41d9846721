"""Matrix products that are added with a factor: Inductor's fusion with the sum drops it.

For passes.codegen.inductor_compile.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

import collage_fx
from collage_fx.passes.codegen import inductor_compile

pytestmark = pytest.mark.kernels


class Projected(Optimizer):
    """Takes the part of a gradient that two columns span, as GaLore does."""

    def __init__(self, p: Tensor, add: Callable[[Tensor, Tensor], None]) -> None:
        super().__init__([p], {})
        self.add = add

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                self.add(p, p.grad[:, :2] @ (p.grad[:, :2].T @ p.grad))


def in_place(p: Tensor, update: Tensor) -> None:
    p.add_(update, alpha=-1e-4)


def the_other_way(p: Tensor, update: Tensor) -> None:
    p.copy_(update.mul(-1e-4).add(p, alpha=0.5) + 0.5 * p)


def way(add: Callable[[Tensor, Tensor], None], dtype: torch.dtype, **options: Any) -> Tensor:
    """Return where a parameter has moved to in three steps."""
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(8, 8).bfloat16().to(dtype))
    optimizer = Projected(p, add)
    if options:
        collage_fx.compile_(optimizer, **options)
    for _ in range(3):
        p.grad = torch.randn(8, 8).bfloat16().to(dtype)
        optimizer.step()
    return collage_fx.value(p).detach() - way_from()


def way_from() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(8, 8).bfloat16().double()


def error(add: Callable[[Tensor, Tensor], None], **options: Any) -> float:
    exact = way(add, torch.float64)
    return float((way(add, torch.float32, **options) - exact).norm() / exact.norm())


@pytest.mark.filterwarnings("ignore:.*nothing needed compensation:collage_fx.CollageWarning")
@pytest.mark.parametrize("record", [True, "auto"])
@pytest.mark.parametrize("add", [in_place, the_other_way])
@pytest.mark.quick("in_place-auto")
def test_the_factor_is_kept(add: Callable[[Tensor, Tensor], None], record: Any) -> None:
    assert error(add, record=record) < 1e-3


@pytest.mark.filterwarnings("ignore:.*nothing needed compensation:collage_fx.CollageWarning")
def test_control_stock_inductor_drops_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, torch has mended it: docs/stock-defects.md and `keep_factors` can go."""
    monkeypatch.setattr(inductor_compile, "keep_factors", lambda gm: None)
    assert error(in_place, record="auto") > 0.5
