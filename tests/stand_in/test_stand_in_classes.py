"""Steps that are traced whole, and what becomes of the optimizer in those that are not.

For stand_in.steps and stand_in.members.
"""

import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from representative_runs import SHAPES, give_gradients, parameters, run, same
from torch.nn import Parameter
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

import collage_fx
from collage_fx import CollageError
from collage_fx.stand_in import steps as stand_in_steps


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
@pytest.mark.quick("hook")
def test_steps_that_are_traced_whole(spoil: Callable[[Optimizer], None], traced: list[int]) -> None:
    """Others look at the optimizer, memory overlaps, or class or step are not torch's."""
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
    """Such a hook is not collage_fx's."""
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


@pytest.mark.slow
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
    """The optimizer's groups, states and attributes are its own, and all is let go of with it."""
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
    # For schedulers, and for copies.
    assert set(vars(optimizer)) - attributes <= {"_opt_called", "__getstate__"}
    params = [weakref.ref(p) for p in group["params"]]
    del optimizer, groups, group, state, step
    gc.collect()
    assert not any(p() is not None for p in params)


def test_frames_that_the_steps_share(traced: list[int]) -> None:
    """Of a step that Dynamo cuts, at a sparse gradient, stand-ins are not to be seen anywhere."""
    params = parameters([(4, 3)] * 22)
    rare = parameters([(6, 3)])
    optimizer = SGD([{"params": params[:2]}, {"params": rare}, {"params": params[2:]}], lr=0.1)
    step = collage_fx.compile(optimizer)
    for i in range(3):
        give_gradients(optimizer, i)
        rare[0].grad = torch.eye(6, 3).bfloat16().to_sparse()
        before = [collage_fx.value(p) for p in (*params, *rare)]
        step()
        for p, old in zip((*params, *rare), before, strict=True):
            grad = p.grad.to_dense().double()  # type: ignore[union-attr]
            assert torch.allclose(collage_fx.value(p), old - 0.1 * grad, atol=1e-3)


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.quick("True")
def test_what_the_engine_does_it_does_to_all_alike(foreach: bool, traced: list[int]) -> None:
    """A first graph that would hand on the second moment without its low word is left to it."""
    optimizer = Adam(parameters([(4, 3)] * 20), amsgrad=True, foreach=foreach)
    with torch.no_grad():
        for p in optimizer.param_groups[0]["params"]:
            p.fill_(1.0)
    step = collage_fx.compile(optimizer)
    for i in range(3):
        give_gradients(optimizer, i)
        for p in optimizer.param_groups[0]["params"]:
            p.grad.fill_(0.5 + i)
        step()
    assert max(traced) < 80
    for key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
        states = [optimizer.state[p][key] for p in optimizer.param_groups[0]["params"]]
        assert len({len(collage_fx.residuals(x)) for x in states}) == 1
        assert all(torch.equal(collage_fx.value(x), collage_fx.value(states[0])) for x in states)


@pytest.mark.slow
def test_a_residual_that_some_of_a_class_are_given_stays() -> None:
    """The class is no class any more; nothing is dropped, and nothing warns."""
    optimizer = AdamW(parameters([(4, 3)] * 20))
    step = collage_fx.compile(optimizer)
    for i in range(4):
        give_gradients(optimizer, i)
        if i == 2:
            moment = optimizer.state[optimizer.param_groups[0]["params"][6]]["exp_avg"]
            collage_fx.load_residuals(moment, [torch.full_like(moment, 1e-5)])
        step()
    assert bool(collage_fx.residuals(moment)[0].any())


def test_states_that_were_only_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    """`state` is a defaultdict: to look at an entry makes it, empty."""

    def touch(optimizer: Optimizer, i: int) -> None:
        assert all(optimizer.state[p] is not None for p in optimizer.param_groups[0]["params"])

    make = functools.partial(SGD, lr=1e-3, momentum=0.9)
    found, expected = (run(make, monkeypatch, whole=w, change=touch) for w in (False, True))
    assert same(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("whole", [False, True])
def test_gradients_whose_strides_change(whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo guards nothing of an optimizer's gradients but that there are any."""
    if whole:
        monkeypatch.setattr(stand_in_steps, "serves", lambda *_: False)
    params = [Parameter(p.detach().t()) for p in parameters([(4, 3)] * 10)]
    exact = [p.detach().double() for p in params]
    step = collage_fx.compile(SGD(params, lr=0.1))
    for i in range(4):
        for k, (p, x) in enumerate(zip(params, exact, strict=True)):
            grad = torch.arange(12.0).view(3, 4).add(i).div(64).bfloat16()
            p.grad = grad if (i + k) % 2 else grad.t().contiguous().t()
            x -= 0.1 * grad.double()
        step()
    assert all(
        torch.allclose(collage_fx.value(p), x, atol=1e-3)
        for p, x in zip(params, exact, strict=True)
    )


@pytest.mark.slow
def test_other_strides_with_the_backend_string() -> None:
    """Nothing is recorded: a step that Dynamo has no right graph for is an error."""
    params = [Parameter(p.detach().t()) for p in parameters([(4, 3)] * 10)]
    optimizer = SGD(params, lr=0.1)
    step = torch.compile(optimizer.step, backend="collage")
    for i in range(4):
        give_gradients(optimizer, i)
        for p in params:
            grad = p.grad.div(8)  # type: ignore[union-attr]
            p.grad = grad if i % 2 else grad.t().contiguous().t()
        exact = [collage_fx.value(p) for p in params]
        try:
            step()
        except CollageError as error:
            assert "other strides" in str(error)
        else:
            exact = [x - 0.1 * p.grad.double() for x, p in zip(exact, params, strict=True)]  # type: ignore[union-attr]
        for p, x in zip(params, exact, strict=True):
            assert torch.allclose(collage_fx.value(p), x, atol=1e-3)
