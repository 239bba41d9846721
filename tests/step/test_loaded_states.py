"""Steps after states have been loaded: by what was compiled for those of before.

For record.known_states and stand_in.shared_graph.
"""

import copy
import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from repeated_steps import changing, give_gradients, made, params_of, trained, values
from torch.optim import SGD, AdamW, Optimizer

import collage_fx
from collage_fx.compilation.side_inputs import Code
from collage_fx.dynamo.backend import Backend
from collage_fx.record.known_states import KnownStates
from collage_fx.runtime.residuals.store import STORE
from collage_fx.stand_in import shared_graph
from collage_fx.stand_in.shared_graph import SharedGraph

pytestmark = pytest.mark.kernels


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """One item for each graph that is compiled."""
    found: list[Any] = []
    compile_graph = Backend.__call__

    def noted(self: Backend, gm: Any, inputs: Any) -> Any:
        found.append(gm)
        return compile_graph(self, gm, inputs)

    monkeypatch.setattr(Backend, "__call__", noted)
    return found


def adamw(**options: Any) -> Optimizer:
    return made(AdamW, "mcf2", lr=1e-3, **options)


def load(optimizer: Optimizer) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def after(
    make: Callable[[], Optimizer], change: Callable[[Optimizer, int], Any], steps: int = 12
) -> tuple[list[torch.Tensor], list[str]]:
    torch.compiler.reset()
    optimizer = make()
    said = trained(optimizer, steps, change)
    return values(optimizer), [*said, str(collage_fx.report(optimizer.step))]


@pytest.mark.parametrize(
    "make", [adamw, lambda: made(SGD, "remainder16", lr=1e-2, momentum=0.9)], ids=["AdamW", "SGD"]
)
@pytest.mark.quick("SGD")
def test_nothing_is_compiled_after_a_load(make: Callable[[], Optimizer], graphs: list[Any]) -> None:
    """The bits are those of a run that loads nothing."""
    optimizer, unbroken = make(), make()
    for one in (optimizer, unbroken):
        trained(one, 6)
    graphs.clear()
    for i in range(6, 12):
        give_gradients(optimizer, i)
        give_gradients(unbroken, i)
        if i % 2:
            load(optimizer)
        optimizer.step()
        unbroken.step()
    assert not graphs
    assert all(map(torch.equal, values(optimizer), values(unbroken)))


def calls_in(do: Callable[[], Any]) -> int:
    """Return how many functions of Python are called."""
    calls = 0

    def note(_: Any, event: str, __: Any) -> None:
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    gc.collect()  # else it may begin within, and call what other tests have left
    gc.disable()
    sys.setprofile(note)
    try:
        do()
    finally:
        sys.setprofile(before)
        gc.enable()
    return calls


@pytest.mark.parametrize(("fused", "first", "later"), [(False, 530, 500), (True, 610, 560)])
@pytest.mark.quick("True-610-560")
def test_the_step_after_a_load(
    fused: bool, first: int, later: int, graphs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameters, states and residuals are looked at once, and bound to what was compiled.

    After a first load the guards of the states before are let go of, too.
    """
    # Those of functions are found by memory, and other tests may have left some.
    monkeypatch.setattr(STORE, "of_view", {})
    optimizer = adamw(sizes=[(8, 8)] * 10, fused=fused)
    trained(optimizer, 6)
    quiet = calls_in(optimizer.step)
    assert quiet < 80
    graphs.clear()
    for most in (first, later):
        load(optimizer)
        assert calls_in(optimizer.step) <= most
        assert calls_in(optimizer.step) == quiet
    assert not graphs
    # The control: a step is done in full where that cannot be.
    monkeypatch.setattr(SharedGraph, "repeated", lambda *_: None)
    load(optimizer)
    assert calls_in(optimizer.step) > 2000
    assert not graphs


@pytest.mark.slow
@pytest.mark.parametrize("bound", [True, False])
def test_a_report_counts_on(bound: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The states of a load are those of before, however the step after it is done."""

    def counts() -> list[int]:
        optimizer = adamw()
        trained(optimizer, 4)
        load(optimizer)
        trained(optimizer, 3)
        return [state.steps for state in collage_fx.report(optimizer.step).states]

    if not bound:
        monkeypatch.setattr(SharedGraph, "repeated", lambda *_: None)
    assert counts() == [7] * 27
    if not bound:  # the control: nobody asks whether they are others
        monkeypatch.setattr(KnownStates, "are_present", lambda _: True)
        assert len(counts()) == 27 + 18


def test_old_states_are_let_go_of() -> None:
    optimizer = adamw()
    trained(optimizer, 6)
    old = [weakref.ref(optimizer.state[p]["exp_avg"]) for p in params_of(optimizer)]
    load(optimizer)
    assert all(state() is not None for state in old)  # steps after it find out
    trained(optimizer, 3)
    gc.collect()
    # Dynamo keeps those of the parameter that it has traced.
    assert sum(state() is not None for state in old) <= 1


CHANGES: dict[str, Callable[[Optimizer], Any]] = {
    "loaded": load,
    "loaded with another rate": lambda o: (o.param_groups[0].update(lr=3e-3), load(o)),
    "loaded without a gradient": lambda o: (setattr(params_of(o)[4], "grad", None), load(o)),
    "state in another layout": lambda o: o.state[params_of(o)[1]].update(
        exp_avg=o.state[params_of(o)[1]]["exp_avg"].t().contiguous().t()
    ),
    "state of another dtype": lambda o: o.state[params_of(o)[2]].update(
        exp_avg_sq=o.state[params_of(o)[2]]["exp_avg_sq"].float()
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES)
def test_as_where_all_is_compiled_anew(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("repeated_steps.CHANGES", CHANGES)
    found = after(adamw, changing(name, 7))
    monkeypatch.setattr(SharedGraph, "is_for", lambda *_: False)
    expected = after(adamw, changing(name, 7))
    assert found[1] == expected[1]
    assert all(map(torch.equal, found[0], expected[0]))


def test_residuals_that_the_graph_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint of `level="all"` has one of each moment: none of them is dropped."""

    def kept(optimizer: Optimizer) -> bool:
        load_all(optimizer)
        trained(optimizer, 1)
        moments = (optimizer.state[p]["exp_avg"] for p in params_of(optimizer))
        return all(any(lo.any() for lo in collage_fx.residuals(m)) for m in moments)

    other = AdamW(params_of(adamw()), lr=1e-3)
    step = collage_fx.compile(other, level="all")
    for i in range(6):
        give_gradients(other, i)
        step()
    saved = copy.deepcopy(other.state_dict())

    def load_all(optimizer: Optimizer) -> None:
        optimizer.load_state_dict(saved)

    optimizer = adamw()
    trained(optimizer, 6)
    assert kept(optimizer)
    monkeypatch.setattr(SharedGraph, "is_for", lambda *_: True)  # the control: nobody asks
    monkeypatch.setattr(Code, "drops_residual", lambda *_: [])
    monkeypatch.setattr(shared_graph, "_GRAPHS", weakref.WeakSet())  # and no other optimizer's
    optimizer = adamw()
    trained(optimizer, 6)
    assert not kept(optimizer)
