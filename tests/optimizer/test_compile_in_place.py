"""compile_(optimizer): the step is assigned, whatever stands around the optimizer already."""

import warnings
from typing import Any

import pytest
import torch
from tensors import bf16, with_grads
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR

import collage_fx
from collage_fx.errors import OptionError, SubjectError


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
