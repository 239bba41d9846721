"""Steps that are repeated without Python read the residuals of sums, other tensors in each step.

For binding.read_gradients.
"""

import copy
import functools
from typing import Any

import pytest
import torch
from repeated_steps import SIZES, compare, counted, made, params, params_of
from torch.optim import SGD, AdamW, Optimizer

import collage_fx
from collage_fx.binding.read_gradients import Pairs, ReadGradients
from collage_fx.runtime.residuals.store import STORE

pytestmark = pytest.mark.kernels


class Moves(Optimizer):
    """An optimizer of a user's own, with an average, that may divide updates by their norm."""

    def __init__(self, params: Any, lr: float, *, divides: bool = False) -> None:
        super().__init__(params, {"lr": lr, "divides": divides})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
                state["m"].mul_(0.9).add_(p.grad, alpha=0.1)
                state["v"].mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
                update = state["m"] / (state["v"].sqrt() + 1e-6)
                scale = p.norm() / update.norm() if group["divides"] else 1.0
                p.add_(update * scale, alpha=-group["lr"])


def of_one_shape(_: Any, **options: Any) -> Optimizer:
    """One that is compiled in parts, called one after the other."""
    return Moves(params(0, [(4, 3)] * 10), divides=True, **options)


def few(given: Any, **options: Any) -> Optimizer:
    return Moves(given[:3], divides=True, **options)


def add_up(optimizer: Optimizer, i: int) -> None:
    """Give the gradients of two or three backward passes, in some steps of one, to some."""
    wanted = params_of(optimizer)
    optimizer.zero_grad()
    for k in range(1 if i in (9, 14) else 2 + i % 2):
        generator = torch.Generator().manual_seed(100 * i + k)
        given = [torch.randn(p.shape, generator=generator).bfloat16() for p in wanted]
        some = slice(1, None) if i == 10 and k == 1 else slice(None)
        torch.autograd.backward(wanted[some], given[some])


def with_sums(kind: Any, storage: str = "remainder16", **options: Any) -> Optimizer:
    optimizer = made(kind, storage, lr=1e-3, **options)
    collage_fx.accumulate(optimizer)
    return optimizer


KINDS = {"AdamW": AdamW, "Moves": Moves, "reduces": few, "in parts": of_one_shape}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.quick("AdamW")
def test_same_bits(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Beside steps in full; after single backward passes too, by which no residual is made."""
    make = functools.partial(with_sums, KINDS[kind], sizes=SIZES)
    repeats = compare(monkeypatch, make, 16, add_up)
    assert {8, 9, 11, 14, 15} <= {*repeats}, repeats


def test_control(monkeypatch: pytest.MonkeyPatch) -> None:
    """The residuals of an earlier step would be added to gradients that they do not belong to."""
    own, kept = ReadGradients.find, dict[int, Pairs]()

    def first(self: ReadGradients, given: Any) -> Any:
        found = own(self, given)
        return found and kept.setdefault(id(self), [(t, copy.copy(r)) for t, r in found])

    monkeypatch.setattr(ReadGradients, "find", first)
    with pytest.raises(AssertionError):
        compare(monkeypatch, functools.partial(with_sums, SGD), 16, add_up)


def test_gradients_get_residuals_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that reads gradients as they are is compiled again once they are sums."""

    def change(optimizer: Optimizer, i: int) -> None:
        if i == 8:
            collage_fx.accumulate(optimizer)
        if i >= 8:
            add_up(optimizer, i)

    repeats = compare(monkeypatch, lambda: made(Moves, "remainder16", lr=1e-3), 16, change)
    assert 7 in repeats and 8 not in repeats and 15 in repeats


def test_a_sum_that_others_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """The residual is cleared, with a warning, by a step in full, or as one that is bound anew."""

    def change(optimizer: Optimizer, i: int) -> None:
        add_up(optimizer, i)
        if i == 8:
            params_of(optimizer)[2].grad.mul_(0.5)  # type: ignore[union-attr]

    repeats = compare(monkeypatch, functools.partial(with_sums, Moves), 12, change)
    assert 7 in repeats and 8 not in repeats
    compare(monkeypatch, functools.partial(with_sums, AdamW), 12, change)


def test_the_step_after_a_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """A load does not compile anything: the step is bound to other tensors."""

    def change(optimizer: Optimizer, i: int) -> None:
        add_up(optimizer, i)
        if i == 8:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    repeats = compare(monkeypatch, functools.partial(with_sums, AdamW), 12, change)
    assert {8, 9, 11} <= {*repeats}, repeats


def test_keeps_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients of the step that it was bound to are let go of."""
    for kind in (AdamW, few):
        optimizer = with_sums(kind)
        with counted(monkeypatch, allowed=True) as repeats:
            for i in range(6):
                add_up(optimizer, i)
                optimizer.step()
        assert repeats
        optimizer.zero_grad()
        held = [r for _, r in STORE if r.of_gradient]
        assert not held


def test_zeroed_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients that the step sets to zero are the same tensors in each step."""

    def change(optimizer: Optimizer, i: int) -> None:
        if i == 0:
            optimizer.zero_grad(set_to_none=False)
        wanted = params_of(optimizer)
        for k in range(2):
            draw = torch.Generator().manual_seed(100 * i + k)
            given = [torch.randn(p.shape, generator=draw).bfloat16() for p in wanted]
            torch.autograd.backward(wanted, given)

    def make() -> Optimizer:
        optimizer = AdamW(params(0), lr=1e-3)
        collage_fx.compile_(optimizer, zero_grads=True)
        collage_fx.accumulate(optimizer)
        return optimizer

    monkeypatch.setattr("repeated_steps.give_gradients", lambda *_: None)
    assert {8, 11} <= {*compare(monkeypatch, make, 12, change)}


def as_sparse(p: torch.Tensor, optimizer: Optimizer) -> None:
    p.grad = p.grad.to_sparse()  # type: ignore[union-attr]


def as_state(p: torch.Tensor, optimizer: Optimizer) -> None:
    p.grad = optimizer.state[p]["momentum_buffer"]


def in_fp32(p: torch.Tensor, optimizer: Optimizer) -> None:
    given, p.grad = p.grad, None
    p.grad_dtype = torch.float32  # type: ignore[attr-defined]
    p.grad = given.float()  # type: ignore[union-attr]


@pytest.mark.parametrize("replace", [as_sparse, as_state, in_fp32])
def test_other_gradients(monkeypatch: pytest.MonkeyPatch, replace: Any) -> None:
    """Tensors that are no sums get no residual by being looked at."""
    if replace is in_fp32 and not hasattr(torch.Tensor, "grad_dtype"):
        pytest.skip("this torch has gradients in the dtype of the parameter only")

    def change(optimizer: Optimizer, i: int) -> None:
        p = params_of(optimizer)[2]
        add_up(optimizer, i)
        if i == 8:
            replace(p, optimizer)

    make = functools.partial(with_sums, SGD, momentum=0.0 if replace is as_sparse else 0.9)
    repeats = compare(monkeypatch, make, 9, change)
    assert 7 in repeats and 8 not in repeats
