"""Arguments of a compiled function that are parameters by another name, or parts of them.

For optimizer.ownership, runtime.residuals.aliases and runtime.residuals.store.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from interpreter import without_compiler
from torch import Tensor
from torch.nn import Linear, Module

import collage_fx
from collage_fx.runtime.residuals.aliases import Aliases

STEPS = 24
NAMES: dict[str, Callable[[Module], list[Tensor]]] = {
    "state_dict": lambda model: list(model.state_dict().values()),
    "data": lambda model: [p.data for p in model.parameters()],
    "detached": lambda model: [p.detach() for p in model.parameters()],
    "flat": lambda model: [p.data.view(-1) for p in model.parameters()],
    "rows": lambda model: [p.data[:2] for p in model.parameters()],
    "every second": lambda model: [p.data[::2] for p in model.parameters()],
    "transposed": lambda model: [p.detach().t() for p in model.parameters()],
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
    dtype: torch.dtype,
    named: Callable[[Module], list[Tensor]],
    *,
    compiled: bool,
    first: bool = False,
    moves: bool = False,
    **options: Any,
) -> Tensor:
    """Return how far averages and weights have moved, after steps of an optimizer between calls.

    Args:
        dtype: of the weights.
        named: returns what functions are given.
        compiled: whether optimizer and functions are.
        first: whether functions are called before the first step.
        moves: whether weights get other memory in between.
        options: of compiled ones.
    """
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
            if moves and i % 5 == 2:
                p.data = p.data.clone()
        if i or not first:
            optimizer.step()
        mean(means, named(model))
        scale(named(model))
    found = [collage_fx.value(x).double().flatten() for x in (*means, *model.parameters())]
    return torch.cat(found).detach() - torch.cat(start)


def error(name: str, *, first: bool = False, moves: bool = False, **options: Any) -> float:
    when = {"first": first, "moves": moves}
    exact = trained(torch.float64, NAMES[name], compiled=False, **when)
    with without_compiler():
        found = trained(torch.bfloat16, NAMES[name], compiled=True, **when, **options)
    return float((found - exact).norm() / exact.norm())


@pytest.mark.parametrize("options", [{}, {"record": True}], ids=str)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.quick("state_dict-{}", "flat-*True}", "rows-{}", "transposed-{}")
def test_they_have_the_residuals_of_parameters(name: str, options: dict[str, Any]) -> None:
    assert error(name, **options) < 0.01


@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.quick("data-True", "rows-True")
@pytest.mark.filterwarnings("error:.*residual of:collage_fx.CollageWarning")
def test_they_are_met_before_the_first_step(name: str, moves: bool) -> None:
    assert error(name, first=True, moves=moves) < 0.01


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("within", [slice(None), slice(40)], ids=["all", "two"])
@pytest.mark.quick("all-False", "two-True")
@pytest.mark.filterwarnings("error:.*residual of:collage_fx.CollageWarning")
def test_a_buffer_of_several_parameters(within: slice, first: bool) -> None:
    def moved(dtype: torch.dtype, *, compiled: bool) -> Tensor:
        torch.manual_seed(0)
        buffer = (torch.rand(64) + 1).bfloat16().to(dtype)
        start = buffer.double().clone()
        params = [torch.nn.Parameter(x) for x in buffer.split([16, 24, 24])]
        optimizer, scale = torch.optim.SGD(params, lr=1e-4), decay
        if compiled:
            collage_fx.compile_(optimizer)
            scale = collage_fx.compile(decay)
        for i in range(STEPS):
            for p in params:
                p.grad = p.detach().clone()
            if i or not first:
                optimizer.step()
            scale([buffer[within]])
        return torch.cat([collage_fx.value(p).double() for p in params]).detach() - start

    exact = moved(torch.float64, compiled=False)
    with without_compiler():
        found = moved(torch.bfloat16, compiled=True)
    assert float((found - exact).norm() / exact.norm()) < 0.01


@pytest.mark.parametrize("storage", ["mcf2", "ulp8", "ulp4"])
@pytest.mark.parametrize("name", ["rows", "every second", "transposed"])
@pytest.mark.quick("rows-mcf2", "every second-ulp4")
def test_what_a_part_had_goes_over_into_another_storage(name: str, storage: str) -> None:
    model = Linear(8, 4).bfloat16()
    start = [p.detach().double() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    collage_fx.compile_(optimizer)
    scale = collage_fx.compile(decay, storage=storage)
    with without_compiler():
        scale(NAMES[name](model))
        kept = [collage_fx.value(x) for x in NAMES[name](model)]
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
    found = [collage_fx.value(x) for x in NAMES[name](model)]
    pairs = zip(model.parameters(), start, strict=True)
    assert any(not torch.equal(collage_fx.value(p), s) for p, s in pairs)
    for x, y in zip(found, kept, strict=True):
        torch.testing.assert_close(x, y, rtol=2**-20, atol=0)


@pytest.mark.parametrize("name", ["rows", "transposed", "flat"])
@pytest.mark.quick("transposed")
def test_a_function_is_called_before_there_is_an_optimizer(name: str) -> None:
    def moved(dtype: torch.dtype, *, compiled: bool) -> Tensor:
        torch.manual_seed(0)
        model, scale = Linear(8, 4).bfloat16().to(dtype), decay
        start = [p.detach().double().clone() for p in model.parameters()]
        scale = collage_fx.compile(decay) if compiled else decay
        scale(NAMES[name](model))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        if compiled:
            collage_fx.compile_(optimizer)
        for _ in range(STEPS):
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            optimizer.step()
            scale(NAMES[name](model))
        pairs = zip(model.parameters(), start, strict=True)
        return torch.cat([(collage_fx.value(p).double() - s).flatten() for p, s in pairs]).detach()

    exact = moved(torch.float64, compiled=False)
    with without_compiler():
        found = moved(torch.bfloat16, compiled=True)
    assert float((found - exact).norm() / exact.norm()) < 0.01


@pytest.mark.filterwarnings("ignore:.*residual of:collage_fx.CollageWarning")
@pytest.mark.parametrize("name", ["state_dict", "rows"])
def test_control_by_themselves_they_have_others(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Aliases, "of", lambda self, tensors: [[t] for t in tensors])
    assert error(name) > 0.1
