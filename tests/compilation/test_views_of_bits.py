"""Operations that overwrite a part of a joined value: Inductor has such memory made.

For passes.codegen.inductor_compile.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

import collage_fx
from collage_fx.errors import CollageWarning
from collage_fx.passes.codegen import inductor_compile
from collage_fx.runtime.torch_versions import installed

pytestmark = [pytest.mark.kernels, pytest.mark.filterwarnings("ignore:.*belong to no torch.optim")]
STEPS = 6


def masked(p: Tensor) -> None:
    p[p > 0] *= 0.99


def by_place(p: Tensor) -> None:
    p.index_put_((torch.arange(0, 64, 3),), -p[torch.arange(0, 64, 3)] * 0.01, accumulate=True)


def added(p: Tensor) -> None:
    p.index_add_(0, torch.arange(5), p[:5].clone(), alpha=-0.01)


def of_its_own(p: Tensor) -> None:
    """Put zeros into a value of bits that is made by the step itself."""
    whole = (p.float().view(torch.int32) + 0).view(torch.float32)
    p.copy_(whole.index_put((p > 0,), torch.zeros(())))


class Update(Optimizer):
    def __init__(self, p: Tensor, update: Callable[[Tensor], None]) -> None:
        super().__init__([p], {})
        self.update = update

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                self.update(p)


def error(update: Callable[[Tensor], None], **options: Any) -> float:
    """Return the error of some steps, relative to the way in float64."""
    torch.manual_seed(0)
    start = torch.randn(64).bfloat16()
    p = torch.nn.Parameter(start.clone())
    exact = torch.nn.Parameter(start.double())
    ours, theirs = Update(p, update), Update(exact, update)
    collage_fx.compile_(ours, **options)
    for _ in range(STEPS):
        for x in (p, exact):
            x.grad = torch.zeros_like(x)
        ours.step()
        theirs.step()
    off = (collage_fx.value(p) - exact).norm() / (exact - start).norm()
    return float(off.detach())


@pytest.mark.parametrize("record", [True, "auto"])
@pytest.mark.parametrize("update", [masked, by_place, added, of_its_own])
@pytest.mark.quick("masked-*", "added-True", "of_its_own-*")
def test_a_part_is_overwritten(update: Callable[[Tensor], None], record: Any) -> None:
    assert error(update, record=record) < 2.0**-16


@pytest.mark.skipif(installed() >= (2, 14), reason="torch does it right by itself there")
def test_control_inductor_cannot_overwrite_views_of_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor_compile, "make_values_of_views", lambda gm: None)
    with pytest.warns(CollageWarning, match=r"torch\.compile fails on a part of the step"):
        error(of_its_own, record=True)
