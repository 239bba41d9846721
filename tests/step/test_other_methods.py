"""Methods of an optimizer beside its step: what they write keeps low words.

For step.other_methods.
"""

import copy
import gc
import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from recorded_steps import off, start
from torch import Tensor
from torch.optim import Optimizer

import collage_fx
from collage_fx.runtime.residuals.checks import Checks
from collage_fx.step import other_methods

BETA, LR = 0.9, 1e-2


class Averaged(Optimizer):
    """Steps on z, and has gradients taken between z and its average x, as Schedule-Free does."""

    def __init__(self, params: list[Tensor]) -> None:
        super().__init__(params, {"lr": LR, "k": 0, "trains": True})

    def make_states(self, p: Tensor) -> dict[str, Tensor]:
        """Called in the step."""
        state = self.state[p]
        if not state:
            state["z"] = p.detach().clone()
        return state

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        group["k"] += 1
        for p in group["params"]:
            z, share = self.make_states(p)["z"], 1 / group["k"]
            p.lerp_(z, share).add_(p.grad, alpha=group["lr"] * (BETA * (1 - share) - 1))
            z.sub_(p.grad, alpha=group["lr"])

    def _between(self, weight: float) -> None:
        for p in self.param_groups[0]["params"]:
            if self.state[p]:
                p.lerp_(self.state[p]["z"], weight)

    @torch.no_grad()
    def eval(self) -> None:
        if self.param_groups[0]["trains"]:
            self._between(1 - 1 / BETA)
        self.param_groups[0]["trains"] = False

    @torch.no_grad()
    def train(self) -> None:
        if not self.param_groups[0]["trains"]:
            self._between(1 - BETA)
        self.param_groups[0]["trains"] = True

    def restart(self) -> None:
        """Write behind the back of version counters."""
        for p in self.param_groups[0]["params"]:
            z = self.state[p]["z"]
            z.data.mul_(0.25).add_(p.data, alpha=0.75)

    @torch.no_grad()
    def swap(self) -> None:
        for p in self.param_groups[0]["params"]:
            z = self.state[p]["z"]
            before = p.clone()
            p.copy_(z)
            z.copy_(before)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        self.eval()
        yield
        self.train()

    def look(self, scale: float = 1.0, *, of: Any = float) -> Any:
        """Write nothing."""
        return of(scale)


def toggle(optimizer: Any) -> None:
    optimizer.eval()
    optimizer.train()


def within_context(optimizer: Any) -> None:
    with optimizer.averaged():
        pass


def restart(optimizer: Any) -> None:
    optimizer.restart()


def swap(optimizer: Any) -> None:
    optimizer.swap()


def evaluate(optimizer: Any) -> None:
    if optimizer.param_groups[0]["k"] == 30:
        optimizer.eval()


CALLS = [toggle, within_context, restart, swap, evaluate]


def run(call: Any, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Tensor:
    """Take 30 steps; after each 5 call methods, or nothing."""
    params = start(dtype)
    optimizer = Averaged(params)
    if options:
        collage_fx.compile_(optimizer, **options)
    made = torch.Generator().manual_seed(7)
    for k in range(30):
        for p in params:
            p.grad = torch.randn(p.shape, generator=made).bfloat16().to(dtype)
        optimizer.step()
        if call is not None and k % 5 == 4:
            call(optimizer)
    found = [t for p in params for t in (p, optimizer.state[p]["z"])]
    return torch.cat([collage_fx.value(t).detach().double().flatten() for t in found])


def error(call: Any, **options: Any) -> float:
    begin = torch.cat([p.detach().double().flatten() for p in start(torch.float64) for _ in "xz"])
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*written from outside")
        found = run(call, storage="remainder16", **options)
    return off(found, run(call, torch.float64), begin)


@pytest.mark.parametrize("record", ["auto", True])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.quick("toggle-auto", "swap-True", "evaluate-auto")
def test_what_methods_write_keeps_its_low_words(call: Any, record: Any) -> None:
    """A restart leaves less than half of the way, of which the error is a share."""
    most = 3 if call is restart else 2
    assert error(call, record=record) < most * error(None, record=record) < 1e-3


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.quick("toggle", "swap", "evaluate")
def test_of_a_method_that_is_not_served_low_words_are_lost(
    call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control."""
    monkeypatch.setattr(other_methods, "_methods_of", lambda cls: {})
    monkeypatch.setattr(Checks, "of", lambda *_: None)
    assert error(call) > 1e-3  # some elements are what they were


def compiled(**options: Any) -> tuple[Averaged, list[Tensor]]:
    params = start(torch.bfloat16)
    optimizer = collage_fx.compile_(Averaged(params), storage="remainder16", **options)
    for _ in range(3):
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
    return optimizer, params


def test_what_the_step_calls_is_a_part_of_it() -> None:
    optimizer, _ = compiled()
    assert "make_states" not in vars(optimizer)
    assert all(s.graph for s in collage_fx.report(optimizer).states)


def test_a_method_that_writes_nothing_does_as_before() -> None:
    optimizer, params = compiled(record=True)
    before = [collage_fx.value(p) for p in params]
    assert optimizer.look(3.5) == 3.5
    assert optimizer.look(2.0, of=lambda x: torch.compiler.is_compiling() or x) == 2.0
    assert optimizer.look.__name__ == "look"
    with pytest.raises(ValueError, match="of no use"):
        optimizer.look(of=_fail)
    assert all(map(torch.equal, before, map(collage_fx.value, params)))
    assert collage_fx.report(optimizer).states[0].steps == 3


def _fail(scale: float) -> None:
    raise ValueError("of no use")


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_methods_of_a_copy_are_its_own(copied: Any) -> None:
    optimizer, params = compiled(record=True)
    before = [collage_fx.value(p) for p in params]
    vars(optimizer)["kept"] = method = optimizer.eval
    twin = copied(optimizer)
    twin.eval()
    assert all(map(torch.equal, before, map(collage_fx.value, params)))
    assert not twin.param_groups[0]["trains"] and optimizer.param_groups[0]["trains"]
    assert not isinstance(copied({"of": optimizer, "kept": method})["kept"], type(method))


def test_without_the_compiled_step_a_method_is_the_class_s_own() -> None:
    params = start(torch.bfloat16)
    optimizer = Averaged(params)
    collage_fx.compile(optimizer)  # and nobody keeps what it returns
    gc.collect()
    for p in params:
        p.grad = torch.ones_like(p)
    with pytest.warns(UserWarning, match="never was"):
        optimizer.step()
    optimizer.eval()
    assert not any(len(collage_fx.residuals(p)) for p in params)


def test_what_somebody_has_put_in_the_place_of_a_method_stays() -> None:
    optimizer = Averaged(start(torch.bfloat16))
    optimizer.eval = mine = lambda: None  # type: ignore[method-assign]
    collage_fx.compile_(optimizer)
    assert optimizer.eval is mine
    collage_fx.compile_(optimizer)
    assert optimizer.train.steps() is optimizer.step._collage.steps()  # type: ignore[attr-defined]


def test_a_method_that_the_user_compiles_is_a_function() -> None:
    optimizer, _ = compiled(record=True)
    evaluated = collage_fx.compile(optimizer.eval, storage="remainder16", record=True)
    evaluated()
    assert not optimizer.param_groups[0]["trains"]
    assert "eval" in str(collage_fx.report(evaluated))


class Called(Averaged):
    """One that is called itself."""

    @torch.no_grad()
    def __call__(self) -> None:
        for p in self.param_groups[0]["params"]:
            p.sub_(LR)


class Named(Averaged):
    """The control: its call does what a method does."""

    def __call__(self) -> None:
        self.eval()


def test_an_optimizer_that_is_called_itself_is_warned_of() -> None:
    with pytest.warns(collage_fx.CollageWarning, match="as in optimizer.., reaches its"):
        collage_fx.compile_(Called(start(torch.bfloat16)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        collage_fx.compile_(Named(start(torch.bfloat16)))
