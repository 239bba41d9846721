"""Calls of functions that are done by one Dynamo graph, bound to their tensors.

For binding.bound_graph, runtime.kernels.tensor_snapshot and step.compiled_step.
"""

import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from repeated_steps import SIZES, counted
from torch import Tensor

import collage_fx
from collage_fx.runtime.kernels.tensor_snapshot import TensorSnapshot

pytestmark = pytest.mark.kernels


def update(params: list[Tensor], grads: list[Tensor], means: dict[int, Tensor], lr: float) -> None:
    """Momentum, as a function of a user's own."""
    with torch.no_grad():
        for i, (p, g) in enumerate(zip(params, grads, strict=True)):
            means[i].lerp_(g, 0.1)
            p.add_(means[i], alpha=-lr)


class Run:
    """Tensors, and the calls of a function with them."""

    def __init__(self, function: Callable[..., Any]) -> None:
        generator = torch.Generator().manual_seed(0)
        self.function = function
        self.params = [torch.randn(n, generator=generator).bfloat16() for n in SIZES]
        self.means = {i: torch.zeros_like(p) for i, p in enumerate(self.params)}

    def call(self, i: int, lr: float = 1e-3) -> Any:
        generator = torch.Generator().manual_seed(i)
        grads = [torch.randn(p.shape, generator=generator).bfloat16() for p in self.params]
        return self.function(self.params, grads, self.means, lr)

    def bits(self) -> list[Tensor]:
        every = [*self.params, *self.means.values()]
        return [x.clone() for t in every for x in (t, *collage_fx.residuals(t))]


def compared(
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Run, int], Any] = lambda *_: None,
    function: Callable[..., Any] = update,
    count: int = 10,
) -> list[int]:
    """Assert that repeated calls leave the bits of others; return which were repeated."""
    found = []
    for allowed in (True, False):
        torch.compiler.reset()
        with counted(monkeypatch, allowed=allowed) as repeats:
            run = Run(collage_fx.compile(function))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # residuals are cleared
                for i in range(count):
                    change(run, i)
                    run.call(i, 1e-3 / (1 + i))
            found.append((run.bits(), str(collage_fx.report(run.function)), repeats))
    (bits, report, repeats), (others, other_report, none) = found
    assert len(bits) == len(others) and all(map(torch.equal, bits, others))
    assert report == other_report and not none
    return repeats


def test_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """With gradients at other addresses and another rate in each call."""
    assert {*range(4, 10)} <= {*compared(monkeypatch)}


def test_other_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state written, replaced, or in the place of another is seen."""

    def change(run: Run, i: int) -> None:
        if i == 5:
            run.params[3].mul_(0.5)
        if i == 10:
            run.means[2] = run.means[2].clone()
        if i == 15:
            run.means[0], run.params[0] = run.params[0], run.means[0]

    repeats = compared(monkeypatch, change, count=28)
    assert {5, 10, 15}.isdisjoint(repeats) and {9, 14, 27} <= {*repeats}, repeats


def test_control(monkeypatch: pytest.MonkeyPatch) -> None:
    """If nothing were compared, a residual would be added to a value that it does not belong to."""
    own = TensorSnapshot.holds
    monkeypatch.setattr(TensorSnapshot, "holds", lambda self, args: own(self, args) or True)
    with pytest.raises(AssertionError):
        compared(monkeypatch, lambda run, i: run.params[3].mul_(0.5) if i == 5 else None)


def test_two_sets_of_tensors_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each keeps its own residuals, as if it were alone."""
    alone = Run(collage_fx.compile(update))
    for i in range(8):
        alone.call(i)
    step = collage_fx.compile(update)
    runs = [Run(step), Run(step)]
    for i in range(8):
        for run in runs:
            run.call(i)
    assert all(map(torch.equal, runs[0].bits(), alone.bits()))
    assert all(map(torch.equal, runs[1].bits(), alone.bits()))


def test_keeps_no_tensor_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors go with their last user, and others that come to their places are others."""
    step = collage_fx.compile(update)
    with counted(monkeypatch, allowed=True) as repeats:
        run = Run(step)
        for i in range(6):
            run.call(i)
    assert repeats
    residual = collage_fx.residuals(run.params[7])[0]
    there = [weakref.ref(t) for t in (*run.params, *run.means.values(), residual)]
    del run, residual
    gc.collect()
    assert not any(find() is not None for find in there)
    again, alone = Run(step), Run(collage_fx.compile(update))
    for i in range(6):
        again.call(i)
        alone.call(i)
    assert all(map(torch.equal, again.bits(), alone.bits()))


def test_results_are_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """A norm that is returned is that of its own call; a function that returns what
    may be a state is not bound.
    """

    def normed(params: Any, grads: Any, means: Any, lr: float) -> Tensor:
        update(params, grads, means, lr)
        return torch.stack([g.float().norm() for g in grads]).norm()

    def returning(params: Any, grads: Any, means: Any, lr: float) -> list[Tensor]:
        update(params, grads, means, lr)
        return [g * 2 for g in grads]

    for function, bound in ((normed, True), (returning, False)):
        torch.compiler.reset()
        with counted(monkeypatch, allowed=True) as repeats:
            run = Run(collage_fx.compile(function))
            results = [run.call(i) for i in range(6)]
        assert bool(repeats) == bound
        plain = Run(function)
        expected = [plain.call(i) for i in range(6)]
        torch.testing.assert_close(results, expected)


@pytest.mark.parametrize("before", [1, 6])
def test_a_tensor_with_a_residual_comes_later(before: int) -> None:
    """Such a tensor is read whole, though those before had no residual; by a bound call too."""

    def add(p: Tensor, q: Tensor) -> None:
        with torch.no_grad():
            p.add_(q)

    torch.compiler.reset()
    plain, whole = (torch.nn.Parameter(torch.ones(32, dtype=torch.bfloat16)) for _ in range(2))
    optimizer = torch.optim.SGD([whole], lr=1e-4)
    collage_fx.compile_(optimizer)
    for _ in range(20):
        whole.grad = torch.ones_like(whole)
        optimizer.step()
    step, p = collage_fx.compile(add), torch.zeros(32, dtype=torch.bfloat16)
    for _ in range(before):
        step(p, plain)
    step(p, whole)
    expected = before + collage_fx.value(whole)
    assert (collage_fx.value(p) - expected).abs().max() < 1e-6
    # The control: the high word is another number.
    assert (collage_fx.value(p) - before - whole.double()).abs().max() > 1e-3
