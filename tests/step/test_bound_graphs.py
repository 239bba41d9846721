"""Steps of users' optimizers that are done by one Dynamo graph, bound to its tensors.

For binding.bound_graph, binding.bound_kernels and binding.backoff.
"""

import functools
import gc
import weakref
from typing import Any

import pytest
import torch
from repeated_steps import (
    CHANGES,
    SIZES,
    by_turns,
    changing,
    compare,
    counted,
    give_gradients,
    made,
    params,
    params_of,
    trained,
    values,
    write,
)
from torch.optim import Optimizer

import collage_fx
from collage_fx.runtime.kernels.cpp_loop import Loop
from collage_fx.runtime.kernels.tensor_snapshot import TensorSnapshot

pytestmark = pytest.mark.kernels


LONG = [p for p in params(0) if p.dim() == 1 and p.numel() > 2] * 2
"""Parameters of which eight and more get one shape."""


class Signs(Optimizer):
    """Lion: updates in place."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "maximize": False})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state, (b1, b2) = self.state[p], group["betas"]
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
                g = -p.grad if group["maximize"] else p.grad
                average = state["exp_avg"]
                state["exp_avg_sq"].mul_(0.99).addcmul_(g, g, value=0.01)
                p.mul_(1 - group["lr"] * 0.01)
                p.add_((average * b1 + g * (1 - b1)).sign_(), alpha=-group["lr"])
                average.mul_(b2).add_(g, alpha=1 - b2)


class Counts(Optimizer):
    """Adam through `.data`, with a count of steps that Python keeps: an input and a result."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(step=0, m=torch.zeros_like(p.data), v=torch.zeros_like(p.data))
                state["step"] += 1
                g = p.grad.data
                state["m"].mul_(0.9).add_(g, alpha=0.1)
                state["v"].mul_(0.999).addcmul_(g, g, value=0.001)
                rate = group["lr"] / (1 - 0.9 ** state["step"])
                p.data.addcdiv_(state["m"], state["v"].sqrt().add_(1e-8), value=-rate)


class Ratios(Signs):
    """LAMB: reduces, so that Inductor does what our own kernels do not."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in (p for group in self.param_groups for p in group["params"]):
            if p.grad is not None:
                state = self.state[p]
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
                state["exp_avg"].mul_(0.9).add_(p.grad, alpha=0.1)
                state["exp_avg_sq"].mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
                update = state["exp_avg"] / (state["exp_avg_sq"].sqrt() + 1e-6)
                p.add_(update * (p.norm() / update.norm()), alpha=-self.param_groups[0]["lr"])


def ratios(params: Any, lr: float) -> Optimizer:
    """Of a few: Inductor's kernels take their time."""
    return Ratios(params[:3], lr)


def of_one_shape() -> Optimizer:
    """One that is compiled in parts: members that reduce are called one after the other."""
    optimizer = Ratios([torch.nn.Parameter(p.detach()[:3].clone()) for p in LONG], lr=1e-3)
    optimizer.step = collage_fx.compile(optimizer)  # type: ignore[method-assign]
    return optimizer


def signs() -> Optimizer:
    """Of five: Dynamo traces each, and CHANGES are of the first five but for one."""
    return made(Signs, "mcf2", sizes=SIZES[:5], lr=1e-3)


@pytest.mark.parametrize("kind", [Signs, Counts, ratios])
@pytest.mark.parametrize("options", [{}, {"by_chance": True}], ids=["nearest", "by chance"])
@pytest.mark.quick("nearest-ratios")
def test_same_bits(monkeypatch: pytest.MonkeyPatch, kind: Any, options: dict[str, Any]) -> None:
    make = functools.partial(made, kind, "mcf2", sizes=SIZES[:5], lr=1e-3, **options)
    repeats = compare(monkeypatch, make, 12)
    assert len(repeats) >= 6


@pytest.mark.slow
def test_kernels_of_numbers_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two counts: their sizes are known of what Inductor's part makes, not of an argument."""

    def two(params: Any, lr: float) -> Optimizer:
        return Counts(params[:2], lr)

    assert len(compare(monkeypatch, lambda: made(two, "mcf2", lr=1e-3), 8)) >= 4


@pytest.mark.slow
def test_what_has_changed_by_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {7: "written", 13: "residual", 19: "transposed gradient"}
    repeats = compare(monkeypatch, signs, 21, by_turns(names))
    assert all(i - 1 in repeats and i not in repeats for i in names), repeats


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES)
def test_what_has_changed(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    repeats = compare(monkeypatch, signs, 14, changing(name, 7))
    # Dynamo sees a context in which gradients are off anyway, and a number that no graph has.
    assert 6 in repeats and (7 not in repeats or name in ("gradients off", "wrong call"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["written", "transposed gradient", "state", "no gradient"])
def test_what_has_changed_of_a_step_that_reduces(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    make = functools.partial(made, Ratios, "mcf2", lr=1e-3)
    repeats = compare(monkeypatch, make, 14, changing(name, 7))
    assert 6 in repeats and 7 not in repeats


@pytest.mark.slow
def test_same_bits_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    repeats = compare(monkeypatch, of_one_shape, 12, lambda o, i: i == 7 and write(o))
    assert len(repeats) >= 5 and 7 not in repeats


def test_control(monkeypatch: pytest.MonkeyPatch) -> None:
    """If nothing were compared, a residual would be added to a value that it does not belong to."""
    own = TensorSnapshot.holds
    monkeypatch.setattr(TensorSnapshot, "holds", lambda self, args: own(self, args) or True)
    with pytest.raises(AssertionError):
        compare(monkeypatch, signs, 10, lambda optimizer, i: write(optimizer) if i == 7 else None)


@pytest.mark.slow
def test_an_error_after_the_graph_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(optimizer: Optimizer, i: int) -> None:
        def fail(*_: Any) -> None:
            raise KeyError(i)

        if i in (7, 8):
            handle = optimizer.register_step_post_hook(fail)
            with pytest.raises(KeyError):
                optimizer.step()
            handle.remove()

    compare(monkeypatch, signs, 14, change)


@pytest.mark.slow
def test_gradients_that_are_missing_by_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(optimizer: Optimizer, i: int) -> None:
        if i % 3 == 2:
            params_of(optimizer)[i % 4].grad = None

    compare(monkeypatch, signs, 16, change)


@pytest.mark.slow
def test_a_monitor_sees_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = signs()
    trained(optimizer, 6)
    with (
        counted(monkeypatch, allowed=True) as repeats,
        collage_fx.monitor(optimizer, every=1) as monitor,
    ):
        trained(optimizer, 3)
    assert not repeats and len(monitor.history) == 3
    with counted(monkeypatch, allowed=True) as repeats:
        trained(optimizer, 6)
    assert repeats


@pytest.mark.slow
def test_is_let_go_of() -> None:
    """A bound graph keeps no optimizer alive that nobody else needs, nor old gradients."""
    optimizer = signs()
    trained(optimizer, 6)
    gradient: Any = weakref.ref(params_of(optimizer)[0].grad)
    optimizer.zero_grad()
    assert gradient() is None
    gone = [weakref.ref(optimizer), *map(weakref.ref, params_of(optimizer))]
    del optimizer
    gc.collect()
    assert not any(reference() is not None for reference in gone)


@pytest.mark.slow
def test_left_out_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with counted(monkeypatch, allowed=True) as repeats:
        optimizer = signs()
        optimizer.step = collage_fx.compile(optimizer, without=("repeat",))  # type: ignore[method-assign]
        trained(optimizer, 6)
    assert not repeats


def test_kernels_that_fail_write_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison comes before anything is written, and an error of it comes up."""
    optimizer = signs()
    trained(optimizer, 6)
    give_gradients(optimizer, 6)
    before = values(optimizer)

    def fail(self: Loop, *args: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(Loop, "launch", fail)
        with pytest.raises(MemoryError):
            optimizer.step()
    assert all(map(torch.equal, before, values(optimizer)))
    said = trained(optimizer, 2)
    assert not said
