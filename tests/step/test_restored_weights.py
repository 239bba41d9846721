"""Weights that others write between steps, and that are what they were, keep their residuals.

For runtime.residuals.checks and runtime.residuals.residual.
"""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import collage_fx
from collage_fx.binding import bound_graph, bound_kernels, launches
from collage_fx.runtime.residuals.checks import Checks
from collage_fx.runtime.residuals.checksum import bits_of
from collage_fx.runtime.residuals.residual import Residual
from collage_fx.runtime.residuals.store import STORE
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
    dtype: torch.dtype, event: Event, every: int = 1, first: int = 0, **options: Any
) -> tuple[list[Tensor], list[Tensor], Any]:
    """Return whole weights, and those at the beginning, of the rows that nobody masks."""
    grads, noises = torch.Generator().manual_seed(0), torch.Generator().manual_seed(1)
    start = [1 + 0.25 * torch.randn(8, 8, generator=grads) for _ in range(2)]
    params = [nn.Parameter(x.bfloat16().to(dtype)) for x in start]
    begin = [p.detach().double()[1::3].clone() for p in params]
    optimizer = optim.AdamW(params, lr=1e-4)
    step = collage_fx.compile(optimizer, **options) if options else optimizer.step
    for k in range(STEPS):
        for p in params:
            p.grad = (0.3 + torch.randn(8, 8, generator=grads)).bfloat16().to(dtype)
        step()
        noise = [0.1 * torch.randn(8, 8, generator=noises).to(dtype) for _ in params]
        if k % every == first:
            event(params, noise)
    return [collage_fx.value(p).double()[1::3] for p in params], begin, step


def error(event: Event, every: int = 1, first: int = 0, **options: Any) -> float:
    """Return how much of the way the weights are off."""
    exact, start, _ = trained(torch.float64, event, every, first)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*written from outside")
        found, *_ = trained(torch.bfloat16, event, every, first, **options)
    off = sum(float((f - x).norm()) for f, x in zip(found, exact, strict=True))
    return off / sum(float((x - s).norm()) for x, s in zip(exact, start, strict=True))


ONE_STEP = 4 / STEPS
"""The share of the way that the first event may cost: it clears what the first step has left."""


def no_checks(*_: Any) -> None:
    """Stand for `Checks.of` on a device where there are none."""


FULL: dict[str, Any] = {"without": ("repeat",)}


@pytest.mark.quick("remainder16-swapped")
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
    """Without checks the first event clears all. Control: without a copy of the bits each does."""
    undisturbed = error(nothing, **options)
    # The first event clears a chunk where it changes an element, and all of this is one.
    assert error(event, **options) < 2 * undisturbed + ONE_STEP * (event is masked)
    monkeypatch.setattr(Checks, "of", no_checks)
    assert error(event, **options) < 2 * undisturbed + ONE_STEP
    monkeypatch.setattr(Residual, "keep", lambda *_: None)
    assert error(event, **options) > 0.3


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"storage": "remainder16"}, {"record": True}])
def test_one_event_late_in_training_costs_nothing(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: without checks it costs the way before it, half of all."""
    undisturbed = error(nothing, **options)
    for event in (restored, swapped):
        assert error(event, 30, 29, **options) < 2 * undisturbed
    monkeypatch.setattr(Checks, "of", no_checks)
    assert error(restored, 30, 29, **options) > 0.3


@pytest.mark.kernels
def test_kernels_note_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: those of the last step that was done in full know nothing of the present bits."""
    options = {"storage": "remainder16"}
    undisturbed = error(nothing, **options)
    assert error(restored, 30, 29, **options) < 2 * undisturbed
    passes: list[int] = []
    monkeypatch.setattr(bound_kernels, "note", lambda pairs: passes.append(len(pairs)))
    assert error(restored, 30, 29, **options) < 2 * undisturbed and not passes
    monkeypatch.setattr(launches._Rows, "checked", lambda *_: {})
    assert error(restored, 30, 29, **options) > 0.3 and sum(passes) > STEPS


@pytest.mark.kernels
def test_repeated_steps_keep_the_bits_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: the copy is that of the last step that was done in full."""
    monkeypatch.setattr(Checks, "of", no_checks)
    options = {"storage": "remainder16"}
    assert error(restored, 12, **options) < 2 * error(nothing, **options) + ONE_STEP
    for place in (bound_graph, bound_kernels):
        monkeypatch.setattr(place, "settling", lambda snapshot, *_: snapshot.settle)
    assert error(restored, 12, **options) > 0.1


@pytest.mark.kernels
@pytest.mark.filterwarnings("ignore:.*written from outside")
def test_repeated_steps_learn_of_a_copy_that_others_began() -> None:
    """As by a checkpoint, between a write and the step that would see it."""
    model = nn.ParameterList([torch.ones(8, 8).bfloat16() for _ in range(2)])
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    step = collage_fx.compile(optimizer)
    for k in range(12):
        for p in model:
            p.grad = torch.full_like(p, 1.0 - k % 3)
        if k == 8:
            with torch.no_grad():
                for p in model:
                    p.mul_(1.25)
            collage_fx.master_state_dict(model)
        step()
    residuals = STORE.of(list(model))
    assert all(r is not None and r.is_present(p) for p, r in zip(model, residuals, strict=True))
    kept = [r.kept for r in residuals if r is not None and r.kept is not None]
    assert len(kept) == 2
    assert all(torch.equal(x, bits_of(p)) for p, x in zip(model, kept, strict=True))


@pytest.mark.filterwarnings("ignore:.*written from outside")
def test_a_functions_argument_is_another_value_in_each_call() -> None:
    def add(x: Tensor) -> None:
        x.add_(0.001)

    step, x = collage_fx.compile(add), torch.empty(4, dtype=torch.bfloat16)
    values = []
    for _ in range(6):
        x.fill_(1.0)
        step(x)
        values.append(float(collage_fx.value(x)[0]))
    # The second call sees its bits only, which are those of before.
    assert values[2:] == [values[0]] * 4 and values[0] == pytest.approx(1.001, abs=1e-6)


@pytest.mark.filterwarnings("ignore:.*written from outside")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_a_parameter_of_another_dtype_has_no_residual(dtype: torch.dtype) -> None:
    model = nn.Linear(4, 4, bias=False).bfloat16()
    optimizer = optim.SGD(model.parameters(), lr=1e-3)
    step = collage_fx.compile(optimizer, record=True)
    for _ in range(2):
        model.weight.grad = torch.ones_like(model.weight)
        step()
        with torch.no_grad():
            model.weight.mul_(1)
    model.to(dtype)
    assert collage_fx.residuals(model.weight) == ()
    assert torch.equal(collage_fx.value(model.weight), model.weight.double())
    copy.deepcopy(optimizer)


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
    # Of three events the first clears the chunk, which is all.
    assert "in 64 elements, in or near those that have changed" in said[0]
    assert "128 bytes; 6 elements have lost" in note


def test_equal_bits_elsewhere_are_no_reason_to_keep() -> None:
    """Rows in another order, NaN, -0.0 for 0.0; what is seen is the bits of each element."""
    p = torch.tensor([[1.0, 2.0], [3.0, 0.0], [torch.nan, 5.0]], dtype=torch.bfloat16)
    residual = Residual(p, "mcf2", StateName("p"))
    residual.keep(p)
    residual.components[0].fill_(0.25)
    lost = 0
    for change, left in (
        (lambda: p.copy_(p.clone()), [[1, 1], [1, 1], [1, 1]]),
        (lambda: p[1, 1].neg_(), [[1, 1], [1, 0], [1, 1]]),
        (lambda: p.copy_(p[[1, 0, 2]]), [[0, 0], [0, 0], [1, 1]]),
    ):
        change()
        lost += int(residual.clear_changed(p))
        residual.settle(p)
        assert torch.equal(residual.components[0] != 0, torch.tensor(left, dtype=torch.bool))
    assert lost == 4


@pytest.mark.filterwarnings("ignore:.*was cleared")
@pytest.mark.parametrize("how", ["expanded", "sliced"])
def test_other_strides_are_no_memory_to_read(how: str) -> None:
    p = nn.Parameter(torch.ones(64, 64).bfloat16())
    optimizer = optim.SGD([p], lr=1e-3)
    step = collage_fx.compile(optimizer, record=True)
    for k in range(4):
        p.grad = torch.full_like(p, 0.3)
        step()
        if k == 2:
            p.data = {
                "expanded": torch.ones(1).bfloat16().expand(64, 64),
                "sliced": torch.ones(64, 128).bfloat16()[:, ::2],
            }[how]
            assert not collage_fx.residuals(p)
            if how == "expanded":
                return
    assert float(collage_fx.value(p)[0, 0]) < 1
