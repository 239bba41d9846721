"""`torch.compile(optimizer.step, backend="collage")` does what `collage_fx.compile` does.

For hooks.step_substitution and hooks.optimizer_hooks.
"""

import gc
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from backend_string import LR, Data, lbfgs, sparse_adam, string, trained, within
from torch import Tensor, optim
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ConstantLR

import collage_fx
from collage_fx.errors import CollageWarning
from collage_fx.hooks import optimizer_hooks


class Helped(Data):
    """Has each parameter updated by a function, of which Dynamo makes a graph each."""

    def update(self, p: Tensor, k: int) -> None:
        if float(p.grad.abs().max().item()) > 0:
            p.sub_(p.grad, alpha=LR)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for k, p in enumerate(self.param_groups[0]["params"]):
            self.update(p, k)


class Derived(Data):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()


def fused(params: list[Tensor], lr: float) -> Optimizer:
    return optim.AdamW(params, lr=lr, fused=True)


class Counts(Data):
    """Counts its steps in an attribute, which Dynamo would not write back."""

    k = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.k += 1
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad, alpha=LR * self.k)


# Before 2.13 Dynamo fails on what Counts assigns.
pytestmark = pytest.mark.filterwarnings("ignore:.*Attempted setattr")

KINDS = [optim.Adafactor, sparse_adam, lbfgs, optim.Adamax, fused, Data, Helped, Derived, Counts]


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.quick("Data")
def test_the_string_does_what_compile_does(make: Any) -> None:
    expected, _ = trained(make, collage_fx.compile)
    found, optimizer = trained(make, string)
    assert torch.equal(found, expected) and bool((found != 0).all())
    report = collage_fx.report(optimizer)
    params = [s for s in report.states if s.name.startswith("param_groups")]
    assert len(params) == 2 and all(s.compensated and not s.unaccounted for s in params)


def test_without_it_such_a_step_runs_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_hooks, "can_substitute", lambda optimizer: False)
    monkeypatch.setattr(optimizer_hooks._Watch, "functions", Counter())
    with pytest.warns(CollageWarning, match="Data runs without compensation"):
        found, _ = trained(Data, string)
    assert not bool(found.any())


@pytest.mark.parametrize("make", [optim.Adafactor, Data, lbfgs, sparse_adam])
@pytest.mark.quick("Data")
def test_so_does_a_function_that_dynamo_cuts_at_the_step(make: Any) -> None:
    assert torch.equal(trained(make, within)[0], trained(make, string)[0])


def test_options_and_schedulers_and_hooks() -> None:
    calls: list[str] = []

    def way(optimizer: Optimizer) -> Callable[..., Any]:
        optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
        optimizer.register_step_post_hook(lambda *_: calls.append("after"))
        ConstantLR(optimizer, factor=1.0)
        step: Callable[..., Any] = torch.compile(
            optimizer.step, backend="collage", options={"storage": "remainder16"}
        )
        return step

    found, optimizer = trained(optim.Adafactor, way)
    assert bool((found != 0).all()) and calls == ["before", "after"] * 6
    (p, *_) = optimizer.param_groups[0]["params"]
    assert collage_fx.residuals(p)[0].dtype is torch.int16


def test_a_plain_step_beside_it_stays_plain() -> None:
    _, optimizer = trained(Data, string, steps=1)
    params = optimizer.param_groups[0]["params"]
    before = [collage_fx.value(p).clone() for p in params]
    optimizer.step()  # with the same gradients, whose updates bf16 loses
    assert all(map(torch.equal, map(collage_fx.value, params), before))


def test_all_optimizers_of_a_class_are_served_past_the_recompile_limit() -> None:
    with torch._dynamo.config.patch(recompile_limit=1), warnings.catch_warnings():
        warnings.simplefilter("error", CollageWarning)
        for _ in range(3):
            p = torch.ones(3).bfloat16().requires_grad_()
            step = string(Data([p]))
            for _ in range(2):
                p.grad = torch.ones_like(p)
                step()
            assert float(1 - collage_fx.value(p)[0].detach()) == pytest.approx(2 * LR, rel=0.02)


def test_each_way_of_compiling_has_its_options() -> None:
    p = torch.ones(3).bfloat16().requires_grad_()
    optimizer = Data([p])
    steps = [
        torch.compile(optimizer.step, backend="collage", options={"storage": storage})
        for storage in ("mcf2", "remainder16")
    ]
    for step, dtype in zip(steps, (torch.bfloat16, torch.int16), strict=True):
        for _ in range(3):
            p.grad = torch.ones_like(p)
            step()
        assert collage_fx.residuals(p)[0].dtype is dtype
    assert float(1 - collage_fx.value(p)[0].detach()) == pytest.approx(6 * LR, rel=0.02)


def test_an_error_in_a_step_passes_through() -> None:
    _, optimizer = trained(Data, string, steps=2)
    step = string(optimizer)
    (p, q) = optimizer.param_groups[0]["params"]
    p.grad, q.grad = torch.ones_like(p), None
    with pytest.raises(AttributeError, match="data"):
        step()
    q.grad = torch.ones_like(q)
    before = collage_fx.value(q).clone()
    step()
    assert bool((collage_fx.value(q) < before).all())


def test_what_runs_with_nothing_compiled_is_recorded() -> None:
    p = torch.ones(3).bfloat16().requires_grad_()
    p.grad = torch.ones_like(p)
    step = string(Data([p]))
    for stance in ("default", "force_eager", "default"):
        with torch.compiler.set_stance(stance):
            for _ in range(3):
                step()
    assert float(1 - collage_fx.value(p)[0].detach()) == pytest.approx(9 * LR, rel=0.02)


def test_another_backend_gets_the_optimizer_s_own_step() -> None:
    graphs: list[Any] = []

    def other(gm: Any, inputs: Any) -> Any:
        graphs.append(gm)
        return gm

    _, optimizer = trained(Helped, string, steps=2)
    (p, *_) = optimizer.param_groups[0]["params"]
    before = collage_fx.value(p).clone()
    step: Any = torch.compile(optimizer.step, backend=other)
    step()
    # bf16 loses what it does, and the residual is still of these bits.
    assert graphs and torch.equal(p, torch.ones_like(p))
    assert torch.equal(collage_fx.value(p), before)
    assert not torch.equal(before, torch.ones(4, 3).double())


class Around(Optimizer):
    """Looks like the optimizer that it holds, as lookahead does."""

    def __init__(self, inner: Optimizer) -> None:
        self.__dict__["inner"] = inner
        super().__init__(inner.param_groups, {})

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.__dict__["inner"].step()


def test_a_wrapper_of_an_optimizer_that_was_compiled_is_compiled_too() -> None:
    p = torch.ones(3).bfloat16().requires_grad_()
    p.grad = torch.ones_like(p)
    optimizer = Data([p])
    string(optimizer)()
    step = string(Around(optimizer))
    for _ in range(4):
        step()
    assert float(1 - collage_fx.value(p)[0].detach()) == pytest.approx(5 * LR, rel=0.02)


@pytest.mark.parametrize("make", [Helped, Counts, optim.Adafactor])
@pytest.mark.quick("Counts")
def test_optimizers_and_parameters_are_freed(make: Any) -> None:
    def once() -> list[weakref.ref[Any]]:
        p = torch.ones(4, 3).bfloat16().requires_grad_()
        optimizer = make([p], lr=LR)
        step = string(optimizer)
        for _ in range(3):
            p.grad = torch.ones_like(p)
            step()
        return [weakref.ref(p), weakref.ref(optimizer)]

    found = [r for _ in range(2) for r in once()]
    gc.collect()
    assert not any(r() is not None for r in found)
