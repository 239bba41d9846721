"""Clipping where others have a hand in a step: hooks, GradScalers, parts, states, duplicates.

For gradients.clipping and gradients.scaled_step.
"""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import SGD, AdamW, Optimizer

import collage_fx
from collage_fx.errors import CollageWarning, NonFiniteError, OptionError, UnsupportedError


class Plain(Optimizer):
    def __init__(self, params: Any, lr: float = 1.0) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        if closure is not None:
            with torch.enable_grad():
                closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"])


class Adding(Plain):
    """Writes its gradients."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.add_(p, alpha=0.0)
                p.add_(p.grad, alpha=-group["lr"])


def one(value: float = 10.0) -> Tensor:
    """Return a parameter of zeros, whose gradient has the norm ten times the value."""
    p = torch.zeros(100, dtype=torch.bfloat16).requires_grad_()
    p.grad = torch.full((100,), value, dtype=torch.bfloat16)
    return p


def moved(*params: Tensor) -> float:
    return float(torch.stack([collage_fx.value(p).norm() for p in params]).norm())


RECORD = pytest.mark.parametrize("record", ["auto", True])


@RECORD
@pytest.mark.parametrize("kind", [SGD, AdamW, Plain, Adding])
def test_a_shared_gradient_is_multiplied_once(kind: Any, record: Any) -> None:
    p, q = one(), one()
    q.grad = p.grad
    optimizer: Any = kind([p, q], lr=1.0)
    collage_fx.compile_(optimizer, clip_grad_norm=1.0, record=record)
    for k in range(3):
        p.grad = q.grad = torch.full((100,), 10.0, dtype=torch.bfloat16)
        optimizer.step()
        assert float(optimizer.step.grad_norm) == pytest.approx(100 * 2**0.5)
        if kind is not AdamW:
            assert moved(p, q) == pytest.approx(k + 1, rel=1e-2 if kind is Adding else 1e-5)


@RECORD
@pytest.mark.parametrize("kind", [Plain, Adding])
def test_a_parameter_that_is_in_its_group_twice(kind: Any, record: Any) -> None:
    p = one()
    optimizer: Any = kind([p])
    optimizer.param_groups[0]["params"].append(p)
    collage_fx.compile_(optimizer, clip_grad_norm=1.0, record=record)
    for k in range(3):
        p.grad = torch.full((100,), 10.0, dtype=torch.bfloat16)
        optimizer.step()
        assert moved(p) == pytest.approx(2 * k + 2, rel=1e-2 if kind is Adding else 1e-5)


@RECORD
@pytest.mark.parametrize("kind", [SGD, Plain])
@pytest.mark.parametrize("how", ["replaces", "writes"])
def test_a_hook_that_makes_gradients(kind: Any, how: str, record: Any) -> None:
    p = one()
    optimizer: Any = kind([p], lr=1.0)

    def hook(*_: Any) -> None:
        if how == "replaces":
            p.grad = torch.full((100,), 50.0, dtype=torch.bfloat16)
        else:
            p.grad.mul_(5.0)  # type: ignore[union-attr]

    optimizer.register_step_pre_hook(hook)
    collage_fx.compile_(optimizer, clip_grad_norm=1.0, record=record)
    for k in range(4):
        p.grad = torch.full((100,), 10.0, dtype=torch.bfloat16)
        optimizer.step()
        assert float(optimizer.step.grad_norm) == 500
        assert moved(p) == pytest.approx(k + 1, rel=1e-5)


@RECORD
def test_hooks_that_read_gradients_see_them_as_they_are(record: Any) -> None:
    p, seen = one(), list[float]()
    optimizer: Any = Plain([p])

    def hook(*_: Any) -> None:
        seen.append(float(p.grad.float().norm()))  # type: ignore[union-attr]
        seen.append(float(p.grad.clone().data.sum()))  # type: ignore[union-attr]

    optimizer.register_step_pre_hook(hook)
    optimizer.register_step_post_hook(hook)
    collage_fx.compile_(optimizer, clip_grad_norm=1.0, record=record)
    for k in range(3):
        p.grad = torch.full((100,), 10.0, dtype=torch.bfloat16)
        optimizer.step()
        assert moved(p) == pytest.approx(k + 1, rel=1e-5)
    assert seen == [100.0, 1000.0] * 6


def test_a_gradient_that_is_kept_is_refused() -> None:
    class Keeping(Plain):
        @torch.no_grad()
        def step(self) -> None:  # type: ignore[override]
            for p in self.param_groups[0]["params"]:
                state = self.state[p]
                p.sub_(p.grad + state["before"] if "before" in state else p.grad)
                state["before"] = p.grad

    expected = [1.0, 3.0, 5.0, 7.0]
    found = []
    p = one()
    optimizer: Any = Keeping([p])
    collage_fx.compile_(optimizer, clip_grad_norm=1.0, record=True)
    for _ in expected:
        p.grad = torch.full((100,), 10.0, dtype=torch.bfloat16)
        optimizer.step()
        found.append(moved(p))
    assert found == pytest.approx(expected, rel=1e-4)
    p = one()
    optimizer = Keeping([p])
    collage_fx.compile_(optimizer, clip_grad_norm=1.0)
    with pytest.raises(UnsupportedError, match="itself as before of"):
        for _ in expected:
            p.grad = torch.full((100,), 10.0, dtype=torch.bfloat16)
            optimizer.step()


def test_gradients_that_are_elsewhere_are_told_of() -> None:
    class Given(Plain):
        @torch.no_grad()
        def step(self, gradients: Any) -> None:  # type: ignore[override]
            for p, g in zip(self.param_groups[0]["params"], gradients, strict=True):
                p.sub_(g)

    p = one()
    given, p.grad = p.grad, None
    optimizer: Any = collage_fx.compile_(Given([p]), clip_grad_norm=1.0)
    with pytest.warns(CollageWarning, match="nothing is clipped"):
        optimizer.step([given])


@pytest.mark.filterwarnings("ignore:collage_fx. Plain.step was called")
def test_a_step_that_does_not_clip_leaves_gradients_to_the_scaler() -> None:
    for undo in (lambda o: collage_fx.compile_(o), lambda o: vars(o).pop("step")):
        p = one()
        optimizer: Any = collage_fx.compile_(Plain([p]), clip_grad_norm=1.0)
        assert optimizer._step_supports_amp_scaling
        assert not getattr(copy.deepcopy(optimizer), "_step_supports_amp_scaling", False)
        assert pickle.loads(pickle.dumps(vars(optimizer)["_step_supports_amp_scaling"])) is False
        undo(optimizer)
        scaler = GradScaler("cpu", init_scale=1024.0)
        scaler.scale(torch.ones(1))
        p.grad = torch.full((100,), 10.0 * 1024, dtype=torch.bfloat16)
        scaler.step(optimizer)
        assert moved(p) == 100
        scaler.update()
        p.grad = torch.full((100,), torch.inf, dtype=torch.bfloat16)
        scaler.step(optimizer)
        assert moved(p) == 100


@pytest.mark.parametrize("options", [{"clip_grad_norm": 1.0}, {"zero_grads": True}])
def test_parts_of_a_step_that_are_called_by_themselves_are_refused(options: Any) -> None:
    class Sam(Plain):
        @torch.no_grad()
        def first_step(self) -> None:
            for p in self.param_groups[0]["params"]:
                p.add_(p.grad)

    optimizer: Any = collage_fx.compile_(Sam([one()]), **options)
    with pytest.raises(OptionError, match=r"first_step\(\) reads gradients by itself"):
        optimizer.first_step()
    assert not optimizer.param_groups[0]["params"][0].any()


def test_an_error_before_a_closure_would_never_end() -> None:
    p = one(torch.inf)
    optimizer: Any = Plain([p])
    collage_fx.compile_(optimizer, clip_grad_norm=1.0, error_if_nonfinite=True)

    def closure(value: float) -> Callable[[], None]:
        def computes() -> None:
            p.grad = torch.full((100,), value, dtype=torch.bfloat16)

        return computes

    optimizer.step(closure(10.0))
    with pytest.raises(NonFiniteError):
        optimizer.step(closure(torch.inf))
    assert moved(p) == pytest.approx(1, rel=1e-5)
    optimizer.step(closure(10.0))
    assert moved(p) == pytest.approx(2, rel=1e-5)


@pytest.mark.parametrize("own", [0, 1])
def test_gradients_of_wrapped_optimizers_are_zeroed(own: int) -> None:
    class Both(Optimizer):
        def __init__(self, *optimizers: Optimizer) -> None:
            self.optimizers = list(optimizers)
            super().__init__(
                [{"params": o.param_groups[0]["params"]} for o in optimizers[:own]]
                or [{"params": [torch.zeros(1).requires_grad_()]}],
                {},
            )

        def step(self) -> None:  # type: ignore[override]
            for optimizer in self.optimizers:
                optimizer.step()

    p, q = one(), one()
    optimizer: Any = collage_fx.compile_(Both(Plain([p]), Plain([q])), zero_grads=True)
    for _ in range(3):
        p.grad, q.grad = (torch.full((100,), 10.0, dtype=torch.bfloat16) for _ in range(2))
        optimizer.step()
        assert not p.grad.any() and not q.grad.any()


@pytest.mark.parametrize("kind", [SGD, Plain])
def test_checked_steps_with_a_scaler(kind: Any) -> None:
    p = one()
    optimizer: Any = kind([p], lr=1.0)
    collage_fx.compile_(optimizer, clip_grad_norm=1.0, verify=3)
    scaler = GradScaler("cpu", init_scale=4.0)
    for _ in range(3):
        scaler.scale(torch.ones(1))
        p.grad = torch.full((100,), 40.0, dtype=torch.bfloat16)
        scaler.step(optimizer)
        scaler.update()
    assert "steps 1, 2, 3 are as in float64" in str(collage_fx.report(optimizer).notes)
    assert moved(p) == pytest.approx(3, rel=1e-5)


def test_a_copy_made_within_a_step_is_of_its_own() -> None:
    copies = list[Any]()

    class Copying(Plain):
        def step(self) -> None:  # type: ignore[override]
            copies.append(copy.deepcopy(vars(self)["_collage_multiplied"]))
            super().step()

    p = one()
    optimizer: Any = collage_fx.compile_(Copying([p]), clip_grad_norm=1.0, record=True)
    for _ in range(2):
        optimizer.step()
    assert [one.storages for one in copies] == [{}, {}]
    assert moved(p) == pytest.approx(2, rel=1e-5)


@RECORD
@pytest.mark.parametrize("kind", [SGD, Plain])
def test_a_hook_beside_a_scaler(kind: Any, record: Any) -> None:
    p = one()
    optimizer: Any = kind([p], lr=1.0)
    optimizer.register_step_pre_hook(lambda *_: None)
    collage_fx.compile_(optimizer, clip_grad_norm=1.0, record=record)
    scaler = GradScaler("cpu", init_scale=1024.0)
    for k in range(3):
        scaler.scale(torch.ones(1))
        p.grad = torch.full((100,), 10.0 * 1024, dtype=torch.bfloat16)
        scaler.step(optimizer)
        scaler.update()
        assert float(optimizer.step.grad_norm) == 100
        assert moved(p) == pytest.approx(k + 1, rel=1e-5)
