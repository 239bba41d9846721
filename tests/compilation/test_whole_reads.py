"""States that a step reads and does not write come with the residuals that they have.

For passes.frontend.whole_reads and passes.rewrite.residual_inputs.
"""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import collage_fx

WEIGHT = 0.01


def together(averages: list[Tensor], values: list[Tensor]) -> None:
    torch._foreach_lerp_(averages, values, WEIGHT)


def each(averages: list[Tensor], values: list[Tensor]) -> None:
    for average, value in zip(averages, values, strict=True):
        average.lerp_(value, WEIGHT)


def by_rows(averages: list[Tensor], values: list[Tensor]) -> None:
    for average, value in zip(averages, values, strict=True):
        average.add_((value - average) * WEIGHT + 0 * value.sum(0))


def twice(averages: list[Tensor], values: list[Tensor]) -> None:
    for average, value in zip(averages[:5], values, strict=False):
        average.lerp_(values[0] + 0 * value, WEIGHT)
    for average in averages[5:]:
        average.mul_(1 - WEIGHT).add_(values[0], alpha=WEIGHT)


class Average(Optimizer):
    """Averages of tensors that are in the places of gradients."""

    def __init__(self, params: list[Tensor]) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.lerp_(p.grad, WEIGHT)


def trained(count: int, **options: Any) -> tuple[list[nn.Parameter], Callable[[], None]]:
    """Parameters, and a compiled step that moves them by a hundredth of an ulp and more."""
    torch.manual_seed(0)
    params = [nn.Parameter((torch.rand(6, 5) + 1).bfloat16()) for _ in range(count)]
    optimizer = SGD(params, lr=1e-3)
    collage_fx.compile_(optimizer, **options)

    def step() -> None:
        for p in params:
            p.grad = torch.randn_like(p).abs()
        optimizer.step()

    return params, step


def errors(
    function: Any, count: int = 10, *, late: bool = False, steps: int = 60, **options: Any
) -> tuple[float, float, str]:
    """Errors of averages of whole values and of high words, over the way; the report as text.

    Args:
        function: that updates averages, or an optimizer that does.
        count: of parameters.
        late: whether the averages begin before the parameters have residuals.
        steps: of the optimizer.
        options: of the optimizer's compiled step.
    """
    params, step = trained(count, **options)
    averages = [nn.Parameter(p.detach().clone()) for p in params]
    highs = [a.detach().clone() for a in averages]
    exact = [a.detach().double() for a in averages]
    start = [a.clone() for a in exact]
    if function is Average:
        optimizer = Average(averages)
        for a, p in zip(averages, params, strict=True):
            a.grad = p
        collage_fx.compile_(optimizer, level="all")
        update, subject = optimizer.step, optimizer
    else:
        compiled = collage_fx.compile(torch.no_grad()(function), level="all")
        update, subject = lambda: compiled(averages, params), compiled
    of_highs = collage_fx.compile(torch.no_grad()(together), level="all")
    plain = each if function is Average else function
    for k in range(steps):
        if k or not late:
            step()
        update()
        of_highs(highs, [p.detach().clone() for p in params])
        with torch.no_grad():
            plain(exact, [collage_fx.value(p) for p in params])
    way = max(float((e - s).abs().max()) for e, s in zip(exact, start, strict=True))

    def off(found: list[Any]) -> float:
        values = map(collage_fx.value, found)
        return max(float((v - e).abs().max()) for v, e in zip(values, exact, strict=True)) / way

    return off(averages), off(highs), str(collage_fx.report(subject))


@pytest.mark.parametrize("function", [together, each, by_rows, Average])
@pytest.mark.parametrize("storage", ["remainder16", "mcf2", "ulp8", "ulp4"])
@pytest.mark.quick("remainder16-*", "mcf2-each", "ulp4-each")
def test_whole_values_are_averaged(storage: str, function: Any) -> None:
    found, high, text = errors(function, storage=storage)
    assert found < (2e-3 if storage == "ulp4" else 1e-4) and "0 joined" in text
    assert high > 0.01, "control: high words alone"


@pytest.mark.parametrize("count", [1, 3])
def test_few_parameters(count: int) -> None:
    found, high, _ = errors(each, count)
    assert found < 1e-4 and high > 0.01


def test_a_residual_that_comes_later() -> None:
    found, high, _ = errors(together, late=True)
    assert found < 1e-4 and high > 0.01


def test_one_tensor_that_several_classes_read() -> None:
    found, _, _ = errors(twice)
    assert found < 1e-4


def test_members_share_one_kernel_without_inductor() -> None:
    params, step = trained(12)
    step()
    averages = [p.detach().clone() for p in params]
    kernels = collage_fx.explain(torch.no_grad()(together), averages, params, level="all")
    assert "class 1: 12 members, one kernel for all" in str(kernels)


def test_what_is_read_is_not_written() -> None:
    params, step = trained(3)
    step()
    averages = [p.detach().clone() for p in params]
    update = collage_fx.compile(torch.no_grad()(each), level="all")
    for _ in range(3):
        before = [
            (p._version, p.detach().clone(), collage_fx.residuals(p)[0].clone()) for p in params
        ]
        update(averages, params)
        for p, (version, high, low) in zip(params, before, strict=True):
            assert p._version == version and torch.equal(p, high)
            assert torch.equal(collage_fx.residuals(p)[0], low)
        step()


@pytest.mark.parametrize("storages", [("mcf2", "remainder16"), ("remainder16", "mcf2")])
def test_a_reader_leaves_residuals_in_the_storage_that_they_get(storages: tuple[str, str]) -> None:
    params, step = trained(3, storage=storages[0])
    averages = [p.detach().clone() for p in params]
    update = collage_fx.compile(torch.no_grad()(each), level="all", storage="ulp8")
    for _ in range(3):
        step()
        update(averages, params)
    optimizer = SGD(params, lr=1e-3)
    collage_fx.compile_(optimizer, storage=storages[1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", collage_fx.CollageWarning)  # of a coarser storage
        optimizer.step()
    for _ in range(2):
        before = [(collage_fx.residuals(p)[0].dtype, collage_fx.value(p)) for p in params]
        update(averages, params)
        for p, (dtype, value) in zip(params, before, strict=True):
            assert collage_fx.residuals(p)[0].dtype == dtype
            assert torch.equal(collage_fx.value(p), value)
        optimizer.step()


def by_parts(averages: list[Tensor], values: list[Tensor]) -> None:
    for average, value in zip(averages, values, strict=True):
        average[:2].lerp_(value[:2], WEIGHT)
        average[2:].lerp_(value[2:], WEIGHT)


def in_one_row(averages: list[Tensor], values: list[Tensor]) -> None:
    for average, value in zip(averages, values, strict=True):
        average.view(-1).lerp_(value.reshape(-1), WEIGHT)


@pytest.mark.parametrize("function", [by_parts, in_one_row])
def test_views_of_whole_values(function: Any) -> None:
    found, high, _ = errors(function)
    assert found < 1e-4 and high > 0.01
