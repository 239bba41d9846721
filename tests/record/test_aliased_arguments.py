"""Arguments of a compiled function that are parameters by another name.

For optimizer.ownership and runtime.residuals.store.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from interpreter import without_compiler
from torch import Tensor
from torch.nn import Linear, Module

import collage_fx
from collage_fx.runtime.residuals.store import ResidualStore

STEPS = 24
NAMES: dict[str, Callable[[Module], list[Tensor]]] = {
    "state_dict": lambda model: list(model.state_dict().values()),
    "data": lambda model: [p.data for p in model.parameters()],
    "detached": lambda model: [p.detach() for p in model.parameters()],
    "flat": lambda model: [p.data.view(-1) for p in model.parameters()],
}


@torch.no_grad()
def average(means: list[Tensor], new: list[Tensor]) -> None:
    for mean, x in zip(means, new, strict=True):
        mean.mul_(0.99).add_(x, alpha=0.01)


@torch.no_grad()
def decay(weights: list[Tensor]) -> None:
    for x in weights:
        x.mul_(1 - 1e-4)


def trained(
    dtype: torch.dtype, named: Callable[[Module], list[Tensor]], *, compiled: bool, **options: Any
) -> Tensor:
    """Return how far averages and weights have moved, after steps of an optimizer between calls."""
    torch.manual_seed(0)
    model = Linear(8, 4).bfloat16().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    means, mean, scale = [x.clone() for x in named(model)], average, decay
    start = [x.detach().double().flatten().clone() for x in (*means, *model.parameters())]
    if compiled:
        collage_fx.compile_(optimizer, **options)
        mean, scale = (collage_fx.compile(f, **options) for f in (average, decay))
    for i in range(STEPS):
        for p in model.parameters():
            generator = torch.Generator().manual_seed(i)
            p.grad = torch.randn(p.shape, generator=generator).bfloat16().to(dtype)
        optimizer.step()
        mean(means, named(model))
        scale(named(model))
    found = [collage_fx.value(x).double().flatten() for x in (*means, *model.parameters())]
    return torch.cat(found).detach() - torch.cat(start)


def error(name: str, **options: Any) -> float:
    exact = trained(torch.float64, NAMES[name], compiled=False)
    with without_compiler():
        found = trained(torch.bfloat16, NAMES[name], compiled=True, **options)
    return float((found - exact).norm() / exact.norm())


@pytest.mark.parametrize("options", [{}, {"record": True}], ids=str)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.quick("state_dict-{}", "flat-*True}")
def test_they_have_the_residuals_of_parameters(name: str, options: dict[str, Any]) -> None:
    assert error(name, **options) < 0.01


@pytest.mark.filterwarnings("ignore:.*residual of:collage_fx.CollageWarning")
def test_control_by_themselves_they_have_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ResidualStore, "behind", lambda self, tensor: tensor)
    assert error("state_dict") > 0.1


class Held:
    """Something that keeps a parameter of an optimizer, or a view of it, and writes that."""

    def __init__(self, kept: Tensor) -> None:
        self.kept = [kept]

    @torch.no_grad()
    def decay(self) -> None:
        self.kept[0].mul_(1 - 1e-4)


def held(dtype: torch.dtype, view: bool, hidden: bool, late: int, **options: Any) -> Tensor:
    """Return how far a parameter has moved, in turns of an optimizer and what keeps it.

    Args:
        dtype: bf16 is compiled.
        view: whether a view of it is kept.
        hidden: whether what the function keeps is behind a decorator.
        late: steps before the optimizer is made.
        options: of `compile`.
    """
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(8, 4).bfloat16().to(dtype))
    start, compiled = p.detach().double().clone(), dtype == torch.bfloat16
    keeper = Held(p.data.view(-1) if view else p)
    decay = torch.no_grad()(keeper.decay) if hidden else keeper.decay
    optimizer = None
    if compiled:
        decay = collage_fx.compile(decay, **options)
    for i in range(3 * STEPS):
        if i == late:
            optimizer = torch.optim.SGD([p], lr=1e-4)
            if compiled:
                collage_fx.compile_(optimizer, **options)
        p.grad = torch.randn(8, 4, generator=torch.Generator().manual_seed(i)).bfloat16().to(dtype)
        if optimizer is not None:
            optimizer.step()
        decay()
    return collage_fx.value(p).detach().double() - start


@pytest.mark.parametrize(
    ("view", "hidden", "late"), [(True, False, 0), (False, True, 0), (False, True, STEPS)]
)
@pytest.mark.parametrize("options", [{}, {"record": True}], ids=str)
@pytest.mark.quick("{}-*", "*True}-True-False-0")
def test_what_is_kept_is_written_in_turns(
    view: bool, hidden: bool, late: int, options: dict[str, Any]
) -> None:
    if late and options:
        pytest.skip("what a recorded function is not given, and nobody has, is plain: it warns")
    exact = held(torch.float64, view, hidden, late)
    with without_compiler():
        found = held(torch.bfloat16, view, hidden, late, **options)
    assert float((found - exact).norm() / exact.norm()) < 1e-3
