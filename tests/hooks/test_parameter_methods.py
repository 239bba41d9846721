"""Methods that update one parameter by itself: Dynamo's code for one is not that for others.

For hooks.traces.
"""

from typing import Any
from unittest import mock

import pytest
import torch
from interpreter import without_compiler
from torch import Tensor

import collage_fx
from collage_fx.hooks import traces
from collage_fx.record.steps import Steps

pytestmark = pytest.mark.filterwarnings("ignore:.*nothing needed compensation")
RATE = 2.0**-12
"""Rate of which a bf16 number near 1 keeps nothing."""
STEPS = 6


class Method(torch.optim.Optimizer):
    """Calls a method for each parameter; Dynamo cuts its step there, or in the method."""

    def __init__(self, params: list[Tensor], cut: bool) -> None:
        super().__init__(params, {"cut": cut})
        for i, p in enumerate(params):
            self.state[p]["x"] = torch.full_like(p, i + 1.0)

    def update(self, p: Tensor) -> None:
        raise NotImplementedError

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if group["cut"]:
                    torch._dynamo.graph_break()
                self.update(p)


class Writes(Method):
    def update(self, p: Tensor) -> None:
        torch._dynamo.graph_break()
        state = self.state[p]
        p.sub_(state["x"], alpha=RATE)


class Indexes(Method):
    def update(self, p: Tensor) -> None:
        x = self.state[p]["x"]
        x.mul_(1 - RATE)


class Cut(Method):
    """The first operation on the state is one that Dynamo traces in no graph."""

    all = torch.ones(2, dtype=torch.bool)

    def update(self, p: Tensor) -> None:
        torch._dynamo.graph_break()
        state = self.state[p]
        rows = state["x"][self.all]
        p.sub_(rows, alpha=RATE)


class OfLists(Method):
    def update(self, p: Tensor) -> None:
        self.update_all([p])

    def update_all(self, params: list[Tensor]) -> None:
        torch._dynamo.graph_break()
        for p in params:
            state = self.state[p]
            p.sub_(state["x"], alpha=RATE)


class Looks(Method):
    def update(self, p: Tensor) -> None:
        if "x" in self.state.get(p, {}):
            p.sub_(RATE)
        else:
            p.add_(RATE)


def run(kind: Any, dtype: torch.dtype, way: str, *, cut: bool) -> tuple[list[Tensor], str]:
    """Return the parameters and states after some steps, and what is said of them."""
    torch.compiler.reset()
    params = [torch.ones(2, 3, dtype=dtype).requires_grad_() for _ in range(3)]
    optimizer, report = kind(params, cut), ""
    if kind is Looks:
        del optimizer.state[params[1]]
    for p in params:
        p.grad = torch.ones_like(p)
    with without_compiler():
        if way == "compile":
            collage_fx.compile_(optimizer)
        step = torch.compile(optimizer.step, backend="collage") if way == "string" else None
        for _ in range(STEPS):
            (step or optimizer.step)()
    if way == "compile":
        report = str(collage_fx.report(optimizer))
    states = [optimizer.state[p]["x"] for p in params if p in optimizer.state]
    return [collage_fx.value(t).detach() for t in (*params, *states)], report


@pytest.mark.parametrize(
    ("kind", "cut"),
    [(Writes, False), (Indexes, True), (Cut, False), (OfLists, False), (Looks, True)],
)
@pytest.mark.quick("Writes-*")
def test_each_parameter_is_updated_by_its_own_state(kind: Any, cut: bool) -> None:
    exact, _ = run(kind, torch.float64, "plain", cut=cut)
    for dtype, far in ((torch.float32, 1e-6), (torch.bfloat16, 1e-4)):
        found, report = run(kind, dtype, "compile", cut=cut)
        for x, y in zip(found, exact, strict=True):
            assert (x - y).abs().max() <= far, report
    assert "would be traced for each parameter by itself" in report
    by_name, _ = run(kind, torch.bfloat16, "string", cut=cut)
    assert all(map(torch.equal, by_name, found))


def test_it_would_be_by_that_of_the_first() -> None:
    exact, _ = run(Writes, torch.float64, "plain", cut=False)
    with mock.patch.object(traces, "_along", lambda _: iter(())):
        wrong, _ = run(Writes, torch.float32, "compile", cut=False)
    assert wrong[0][0, 0] < exact[0][0, 0] and torch.equal(wrong[1], torch.ones(2, 3).double())


HELD: dict[str, Any] = {}
"""Objects that functions find in a global."""


@torch.no_grad()
def of_optimizer(p: Tensor) -> None:
    p.sub_(HELD["optimizer"].state[p]["x"], alpha=RATE)


@torch.no_grad()
def of_present_one(p: Tensor) -> None:
    held = HELD["present"]
    held.sub_(HELD["optimizer"].state[held]["x"], alpha=RATE)


@torch.no_grad()
def of_dict(p: Tensor) -> None:
    p.sub_(HELD["states"][p]["x"], alpha=RATE)


@torch.no_grad()
def of_equal_one(p: Tensor) -> None:
    for q, state in HELD["states"].items():
        if q is p:
            q.sub_(state["x"], alpha=RATE)


def run_function(kind: Any, dtype: torch.dtype, way: str) -> list[Tensor]:
    """Return the parameters after a function was called for each of them."""
    torch.compiler.reset()
    params = [torch.ones(2, 3, dtype=dtype).requires_grad_() for _ in range(3)]
    optimizer = Method(params, False)
    HELD.update(optimizer=optimizer, states={p: optimizer.state[p] for p in params})
    wrap = {"compile": collage_fx.compile, "string": torch.compile}.get(way, lambda f: f)
    function = wrap(kind, **({"backend": "collage"} if way == "string" else {}))
    with without_compiler():
        for _ in range(STEPS):
            for p in params:
                HELD["present"] = p
                function(p)
    HELD.clear()
    return [collage_fx.value(p).detach() for p in params]


FUNCTIONS = [of_optimizer, of_present_one, of_dict, of_equal_one]


@pytest.mark.parametrize("kind", FUNCTIONS)
@pytest.mark.parametrize("way", ["compile", "string"])
@pytest.mark.quick("compile-of_dict")
def test_a_function_updates_each_by_what_it_finds_elsewhere(kind: Any, way: str) -> None:
    exact = run_function(kind, torch.float64, "plain")
    assert len({float(x[0, 0]) for x in exact}) == 3
    for dtype, far in ((torch.float32, 1e-6), (torch.bfloat16, 1e-4)):
        for x, y in zip(run_function(kind, dtype, way), exact, strict=True):
            assert (x - y).abs().max() <= far


def test_it_would_update_each_by_the_state_of_the_first() -> None:
    exact = run_function(of_dict, torch.float64, "plain")
    with mock.patch.object(traces, "_traced_for", lambda: None):
        wrong = run_function(of_dict, torch.float32, "compile")
    assert torch.equal(wrong[1], wrong[0]) and not torch.equal(exact[1], exact[0])


class Present(Method):
    """The method finds the parameter in an attribute of the optimizer."""

    present: list[Tensor]

    def update(self, p: Tensor) -> None:
        self.present[:] = [p]
        self.update_present()

    def update_present(self) -> None:
        torch._dynamo.graph_break()
        (p,) = self.present
        p.sub_(self.state[p]["x"], alpha=RATE)


class Module(torch.nn.Module):
    """Updates its weight by an optimizer that it has."""

    def __init__(self, weight: Any, optimizer: Any) -> None:
        super().__init__()
        self.weight, self.optimizer = weight, optimizer

    def forward(self) -> None:
        torch._dynamo.graph_break()
        self.weight.sub_(self.optimizer.state[self.weight]["x"], alpha=RATE)


class ByModules(Method):
    def update(self, p: Tensor) -> None:
        Module(p, self)()


@pytest.mark.parametrize("kind", [Present, ByModules])
@pytest.mark.quick("Present")
def test_a_parameter_is_found_in_an_attribute(kind: Any) -> None:
    kind.present = []
    exact, _ = run(kind, torch.float64, "plain", cut=False)
    for dtype, far in ((torch.float32, 1e-6), (torch.bfloat16, 1e-4)):
        found, report = run(kind, dtype, "compile", cut=False)
        for x, y in zip(found, exact, strict=True):
            assert (x - y).abs().max() <= far, report


class InGradient(Method):
    """Computes the new value in the gradient's memory, and stores it behind a cut."""

    def update(self, p: Tensor) -> None:
        torch.add(p, self.state[p]["x"], alpha=-RATE, out=p.grad)
        torch._dynamo.graph_break()
        p.copy_(p.grad)


@pytest.mark.slow
def test_a_value_in_a_gradient_keeps_its_low_word_over_a_cut() -> None:
    exact, _ = run(InGradient, torch.float64, "plain", cut=False)

    def error() -> float:
        found, _ = run(InGradient, torch.bfloat16, "compile", cut=False)
        return max(float((x - y).abs().max()) for x, y in zip(found, exact, strict=True))

    assert error() <= 1e-6
    taken = mock.patch.object(Steps, "record_rest", lambda *_: None)
    with taken, pytest.warns(collage_fx.CollageWarning, match="in one compiled graph and stores"):
        assert error() > RATE / 2  # the control
