"""Which steps are traced whole, and what becomes of the optimizer in those that are not."""

import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from representative_runs import SHAPES, give_gradients, parameters
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

import collage_fx


def hook(optimizer: Optimizer) -> None:
    optimizer.register_step_pre_hook(lambda *_: None)


def overlap(optimizer: Optimizer) -> None:
    params = optimizer.param_groups[0]["params"]
    params[1].data = params[0].data.view(-1)[:7]


def subclass(optimizer: Optimizer) -> None:
    optimizer.__class__ = type("Derived", (AdamW,), {})


def wrapped(optimizer: Optimizer) -> None:
    step = AdamW.step

    @functools.wraps(step)
    def logged(self: Optimizer, closure: Any = None) -> Any:
        return step(self, closure)

    AdamW.step = logged  # type: ignore[method-assign]


@pytest.fixture
def _class_as_it_was() -> Iterator[None]:
    step = AdamW.step
    yield
    AdamW.step = step  # type: ignore[method-assign]


@pytest.mark.usefixtures("_class_as_it_was")
@pytest.mark.parametrize("spoil", [hook, overlap, subclass, wrapped])
def test_steps_that_are_traced_whole(spoil: Callable[[Optimizer], None], traced: list[int]) -> None:
    """Where others look at the optimizer, memory overlaps, or class or step are not torch's."""
    optimizer = AdamW(parameters(SHAPES * 4))
    spoil(optimizer)
    give_gradients(optimizer, 0)
    if spoil is overlap:
        with pytest.warns(collage_fx.CollageWarning, match="overlap in memory"):
            collage_fx.compile(optimizer)()
    else:
        collage_fx.compile(optimizer)()
    assert max(traced) == 80


def test_a_hook_of_all_optimizers_sees_all_parameters() -> None:
    """It is no hook of ours."""
    seen: list[int] = []
    handle = register_optimizer_step_post_hook(
        lambda optimizer, *_: seen.append(len(optimizer.param_groups[0]["params"]))
    )
    try:
        optimizer = SGD(parameters(SHAPES * 4))
        give_gradients(optimizer, 0)
        collage_fx.compile(optimizer)()
    finally:
        handle.remove()
    assert set(seen) == {20}


def test_a_closure_is_called_once_and_its_gradients_are_used(traced: list[int]) -> None:
    """Before the parameters are looked at; its loss is returned."""
    optimizers = [AdamW(parameters(SHAPES * 4)) for _ in range(2)]
    calls: list[int] = []

    def closure(optimizer: Optimizer) -> int:
        give_gradients(optimizer, len(calls))
        calls.append(torch.is_grad_enabled())
        return len(calls)

    step = collage_fx.compile(optimizers[0])
    losses = [step(lambda: closure(optimizers[0])) for _ in range(3)]
    assert losses == [1, 2, 3] and calls == [True] * 3
    assert max(traced) < 80
    other = collage_fx.compile(optimizers[1])
    for i in range(3):
        give_gradients(optimizers[1], i)
        other()
    for p, q in zip(*(o.param_groups[0]["params"] for o in optimizers), strict=True):
        assert torch.equal(collage_fx.value(p), collage_fx.value(q))


def test_the_optimizer_stays_the_users(traced: list[int]) -> None:
    """Its groups, states and attributes are its own, and all is let go of with it."""
    optimizer = SGD(parameters(SHAPES * 4), momentum=0.9)
    groups, group, state = optimizer.param_groups, optimizer.param_groups[0], optimizer.state
    attributes = set(vars(optimizer))
    step = collage_fx.compile(optimizer)
    for i in range(3):
        give_gradients(optimizer, i)
        step()
    assert max(traced) < 60
    assert optimizer.param_groups is groups and optimizer.state is state and groups[0] is group
    assert len(group["params"]) == len(state) == 20
    assert set(vars(optimizer)) - attributes <= {"_opt_called"}
    params = [weakref.ref(p) for p in group["params"]]
    del optimizer, groups, group, state, step
    gc.collect()
    assert not any(p() is not None for p in params)
