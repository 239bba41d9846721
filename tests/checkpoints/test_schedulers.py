"""A run that is resumed under a learning rate schedule is the one that never stopped.

For optimizer.checkpoints.history.
"""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from checkpoints import Run, compiled, plain, train, words
from interpreter import without_compiler
from torch.optim import Optimizer, lr_scheduler

from collage_fx.optimizer.checkpoints.history import History, set_history


def by_hand(optimizer: Optimizer) -> Any:
    """No scheduler at all: who trains sets the rate."""
    return None


SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "by hand": by_hand,
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 1e-2, total_steps=12),
}
MORE: dict[str, Callable[[Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda k: min(1.0, (k + 1) / 5)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda k: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 3, 0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 5], 0.5),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, total_iters=5),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=6),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 7),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 1e-3, 1e-2, step_size_up=2),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ExponentialLR(o, 0.9), lr_scheduler.StepLR(o, 3)]
    ),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
}
HALF, END = 4, 8
RATES = (3e-2, 3e-2, 1.1e-2, 2.3e-2, 2.3e-2, 2.3e-2, 2.3e-2, 3e-2)
"""Rates that are set by hand: changed by then, and in the end the first value again."""


@pytest.fixture(autouse=True)
def _interpreted() -> Iterator[None]:
    with without_compiler():
        yield


def steps(run: Run, scheduler: Any, first: int, last: int) -> None:
    for k in range(first, last):
        if scheduler is None:
            run[1].param_groups[0]["lr"] = RATES[k]
        train(run, k, k + 1)
        if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
            scheduler.step(1.0)
        elif scheduler is not None:
            scheduler.step()


def begun(make: Callable[[Optimizer], Any], seed: int) -> tuple[Run, Any]:
    run = compiled(plain(seed), arithmetic="eft")
    return run, make(run[1])


def resumed(make: Callable[[Optimizer], Any], saved: Any, forget: bool = False) -> Run:
    torch.compiler.reset()  # as in another process
    weights, states, schedule = saved
    run, scheduler = begun(make, 1)
    run[0].load_state_dict(weights)
    run[1].load_state_dict(copy.deepcopy(states))
    if scheduler is not None:
        scheduler.load_state_dict(schedule)
    if forget:
        set_history(run[1], History())
    steps(run, scheduler, HALF, END)
    return run


def halfway(make: Callable[[Optimizer], Any]) -> tuple[Run, Any]:
    """An unbroken run, and its checkpoint from the middle."""
    torch.compiler.reset()
    run, scheduler = begun(make, 0)
    steps(run, scheduler, 0, HALF)
    parts = [*run, scheduler] if scheduler is not None else [*run]
    saved = copy.deepcopy([part.state_dict() for part in parts])
    steps(run, scheduler, HALF, END)
    return run, (*saved, None)[:3]


@pytest.mark.parametrize(
    "name", [*SCHEDULERS, *(pytest.param(n, marks=pytest.mark.slow) for n in MORE)]
)
@pytest.mark.quick("by hand")
def test_a_resumed_run_has_the_bits_of_the_unbroken_one(name: str) -> None:
    make = (SCHEDULERS | MORE)[name]
    run, saved = halfway(make)
    assert all(map(torch.equal, words(run), words(resumed(make, saved))))


def test_all_schedulers_of_pytorch_are_here() -> None:
    known = {"LRScheduler", "by hand"}
    assert {*SCHEDULERS, *MORE} | known == {*lr_scheduler.__all__} | known


@pytest.mark.slow
def test_it_has_others_if_nobody_remembers_which_rates_have_changed() -> None:
    """The negative control, and what Dynamo does: a rate is a constant until it changes."""
    run, saved = halfway(by_hand)
    found = words(resumed(by_hand, saved, forget=True))
    assert not all(map(torch.equal, words(run), found))
