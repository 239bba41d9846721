"""Weights that others write between steps, and that are what they were, keep their residuals."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import collage_fx
from collage_fx.binding import bound_graph, bound_kernels
from collage_fx.runtime.residuals.residual import Residual
from collage_fx.runtime.storage.state_name import StateName

STEPS = 60
Event = Callable[[list[nn.Parameter], list[Tensor]], None]


def nothing(_: list[nn.Parameter], __: list[Tensor]) -> None:
    """Leave weights alone."""


@torch.no_grad()
def restored(params: list[nn.Parameter], noise: list[Tensor]) -> None:
    """As weight noise and adversarial perturbation do."""
    old = [p.clone() for p in params]
    for p, n in zip(params, noise, strict=True):
        p.add_(n)
    for p, x in zip(params, old, strict=True):
        p.copy_(x)


@torch.no_grad()
def swapped(params: list[nn.Parameter], noise: list[Tensor]) -> None:
    """As SAM by `.data` does, and averages that are put in the place of weights and taken out."""
    old = [p.data for p in params]
    for p, n in zip(params, noise, strict=True):
        p.data = n.clone()
    for p, x in zip(params, old, strict=True):
        p.data = x.clone()


@torch.no_grad()
def masked(params: list[nn.Parameter], _: list[Tensor]) -> None:
    """As pruning and AdaLoRA do: some rows stay zero."""
    for p in params:
        p[::3] = 0


def trained(
    dtype: torch.dtype, event: Event, every: int = 1, **options: Any
) -> tuple[list[Tensor], list[Tensor], Any]:
    """Return whole weights, and those at the beginning, of the rows that nobody masks."""
    grads, noises = torch.Generator().manual_seed(0), torch.Generator().manual_seed(1)
    start = [1 + 0.25 * torch.randn(8, 8, generator=grads) for _ in range(2)]
    params = [nn.Parameter(x.bfloat16().to(dtype)) for x in start]
    first = [p.detach().double()[1::3].clone() for p in params]
    optimizer = optim.AdamW(params, lr=1e-4)
    step = collage_fx.compile(optimizer, **options) if options else optimizer.step
    for k in range(STEPS):
        for p in params:
            p.grad = (0.3 + torch.randn(8, 8, generator=grads)).bfloat16().to(dtype)
        step()
        noise = [0.1 * torch.randn(8, 8, generator=noises).to(dtype) for _ in params]
        if k % every == 0:
            event(params, noise)
    return [collage_fx.value(p).double()[1::3] for p in params], first, step


def error(event: Event, every: int = 1, **options: Any) -> float:
    """Return how much of the way the weights are off."""
    exact, start, _ = trained(torch.float64, event, every)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*written from outside")
        found, *_ = trained(torch.bfloat16, event, every, **options)
    off = sum(float((f - x).norm()) for f, x in zip(found, exact, strict=True))
    return off / sum(float((x - s).norm()) for x, s in zip(exact, start, strict=True))


ONE_STEP = 4 / STEPS
"""The share of the way that the first event may cost: it clears what the first step has left."""
FULL: dict[str, Any] = {"without": ("repeat",)}


@pytest.mark.quick("remainder16-swapped", "ulp8*-masked")
@pytest.mark.parametrize("event", [restored, swapped, masked])
@pytest.mark.parametrize(
    "options",
    [
        {"storage": "remainder16", **FULL},
        {"storage": "mcf3", **FULL},
        {"storage": "ulp8", "stochastic_rounding": True, "record": True},
        {"storage": "remainder16", "record": True, "arithmetic": "wide"},
    ],
    ids=lambda o: f"{o['storage']}{', recorded' if 'record' in o else ''}",
)
def test_what_a_write_leaves_or_restores_keeps_its_residual(
    event: Event, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: without the copy of the bits each event clears all."""
    undisturbed = error(nothing, **options)
    assert error(event, **options) < 2 * undisturbed + ONE_STEP
    monkeypatch.setattr(Residual, "keep", lambda *_: None)
    assert error(event, **options) > 0.3


@pytest.mark.kernels
def test_repeated_steps_keep_the_bits_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: the copy is that of the last step that was done in full."""
    options = {"storage": "remainder16"}
    assert error(restored, 12, **options) < 2 * error(nothing, **options) + ONE_STEP
    for place in (bound_graph, bound_kernels):
        monkeypatch.setattr(place, "kept_of", lambda _: [])
    assert error(restored, 12, **options) > 0.1


def test_it_is_said_once_and_lost_elements_are_counted() -> None:
    def three(params: list[nn.Parameter], _: list[Tensor]) -> None:
        with torch.no_grad():
            params[0][0, :3] += 0.5

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        *_, step = trained(torch.bfloat16, three, 20, storage="remainder16", **FULL)
    said = [str(w.message) for w in caught if "was cleared" in str(w.message)]
    assert len(said) == 1 and "From now on a copy of its bits is kept" in said[0]
    note = collage_fx.report(step).notes[-1]
    # Of three events the first clears all.
    assert "128 bytes; 6 elements have lost" in note


def test_equal_bits_elsewhere_are_no_reason_to_keep() -> None:
    """Rows in another order, NaN, -0.0 for 0.0; what is seen is the bits of each element."""
    p = torch.tensor([[1.0, 2.0], [3.0, 0.0], [torch.nan, 5.0]], dtype=torch.bfloat16)
    residual = Residual(p, "mcf2", StateName("p"))
    residual.keep(p)
    residual.components[0].fill_(0.25)
    for change, left in (
        (lambda: p.copy_(p.clone()), [[1, 1], [1, 1], [1, 1]]),
        (lambda: p[1, 1].neg_(), [[1, 1], [1, 0], [1, 1]]),
        (lambda: p.copy_(p[[1, 0, 2]]), [[0, 0], [0, 0], [1, 1]]),
    ):
        change()
        residual.clear_changed(p)
        residual.settle(p)
        assert torch.equal(residual.components[0] != 0, torch.tensor(left, dtype=torch.bool))
    assert int(residual.lost) == 4
