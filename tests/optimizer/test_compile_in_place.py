"""compile_(optimizer): the step is assigned, whatever stands around the optimizer already.

For api and step.distributed_wrappers.
"""

import warnings
from typing import Any

import pytest
import torch
from tensors import bf16, with_grads
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR

import collage_fx
from collage_fx.errors import OptionError, SubjectError
from collage_fx.runtime.residuals.checks import Checks


class Wrapper:
    """Has an optimizer, and borrows its groups, as AcceleratedOptimizer does."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups

    def step(self) -> None:
        self.optimizer.step()


@pytest.mark.parametrize(("scheduled", "wrapped"), [("before", True), ("after", False)])
def test_a_scheduler_may_be_there_or_come(scheduled: str, wrapped: bool) -> None:
    optimizer = SGD(with_grads([bf16(8)]), lr=1e-3)
    before = [StepLR(optimizer, 2)] if scheduled == "before" else []
    given = Wrapper(optimizer) if wrapped else optimizer
    assert collage_fx.compile_(given, storage="remainder16") is given
    schedulers = before or [StepLR(optimizer, 2)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # PyTorch has one for either order
        for _ in range(4):
            given.step()
            schedulers[0].step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-5)
    (state,) = collage_fx.report(given).states
    assert state.compensated and state.steps == 4
    (low,) = collage_fx.residuals(optimizer.param_groups[0]["params"][0])
    assert low.dtype == torch.int16 and bool(low.any())


def test_a_scheduler_that_comes_first_is_warned_of_without() -> None:
    """The control: the step that was not taken through ours."""
    optimizer = SGD(with_grads([bf16(8)]), lr=1e-3)
    scheduler = StepLR(optimizer, 2)
    optimizer.step = lambda: None  # type: ignore[method-assign, assignment, misc]
    with pytest.warns(UserWarning, match="has been overridden"):
        scheduler.step()


def test_an_optimizer_of_deepspeed_is_refused_by_name() -> None:
    class ZeroOptimizer(Wrapper):
        __module__ = "deepspeed.runtime.zero.stage_1_and_2"

    within = ZeroOptimizer(SGD([bf16(2)]))
    for given in (within, Wrapper(within)):
        with pytest.raises(SubjectError, match="ZeroOptimizer of DeepSpeed keeps fp32 copies"):
            collage_fx.compile_(given)
        with pytest.raises(SubjectError, match="DeepSpeed"):
            collage_fx.compile(given)  # type: ignore[arg-type]


def test_what_is_no_optimizer_is_refused() -> None:
    for given in (torch.nn.Linear(2, 2), lambda: None, 3):
        with pytest.raises(SubjectError, match="takes an optimizer"):
            collage_fx.compile_(given)  # type: ignore[type-var]
    with pytest.raises(OptionError):
        collage_fx.compile_(SGD([bf16(2)]), storage="none")


class Ahead(torch.optim.Optimizer):
    """Writes the parameters of the optimizer that it wraps every third step, as Lookahead does."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.taken = optimizer, 0
        self.slow = [p.detach().clone() for p in self.param_groups[0]["params"]]

    state = property(lambda self: self.optimizer.state)  # type: ignore[assignment]
    param_groups = property(lambda self: self.optimizer.param_groups)  # type: ignore[assignment]
    defaults = property(lambda self: self.optimizer.defaults)  # type: ignore[assignment]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step(closure)
        self.taken += 1
        if self.taken % 3 == 0:
            for slow, p in zip(self.slow, self.param_groups[0]["params"], strict=True):
                slow.add_(p - slow, alpha=0.5)
                p.copy_(slow)


class HandsOn(Ahead):
    """Only hands steps on, as AcceleratedOptimizer does."""

    def step(self, closure: Any = None) -> None:
        if self.taken >= 0:
            self.optimizer.step(closure)


@pytest.mark.filterwarnings("error:.*was cleared")
def test_a_wrapper_that_writes_parameters_has_its_own_step_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Control: with the step of what it wraps compiled its writes are from outside."""

    def moved(dtype: torch.dtype, wrap: Any) -> torch.Tensor:
        p = torch.nn.Parameter(torch.linspace(1, 2, 8).bfloat16().to(dtype))
        optimizer = SGD([p], lr=1e-4)
        begin, given = p.detach().double().clone(), wrap(Ahead(optimizer))
        for k in range(12):
            p.grad = torch.full_like(p, 0.25 + k % 3)
            given.step()
        return collage_fx.value(p).double() - begin

    def compiled(wrapper: Ahead) -> Any:
        return collage_fx.compile_(wrapper, storage="remainder16", record=True)

    def within(wrapper: Ahead) -> Any:
        collage_fx.compile_(wrapper.optimizer, storage="remainder16", record=True)
        return wrapper

    exact = moved(torch.float64, lambda wrapper: wrapper)
    assert (moved(torch.bfloat16, compiled) - exact).norm() < 5e-3 * exact.norm()
    monkeypatch.setattr(Checks, "of", lambda *_: None)  # by which weights are what they were
    with pytest.warns(collage_fx.CollageWarning, match="was cleared"):
        assert (moved(torch.bfloat16, within) - exact).norm() > 0.2 * exact.norm()


def test_one_that_only_hands_steps_on_has_not() -> None:
    wrapper = HandsOn(SGD([bf16(8)], lr=1e-3))
    assert collage_fx.compile_(wrapper) is wrapper
    assert "step" in vars(wrapper.optimizer) and "step" not in vars(wrapper)
