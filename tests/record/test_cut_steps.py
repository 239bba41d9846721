"""Steps that Dynamo traces in parts: what goes from one part to the next keeps its low word.

For dynamo.backend.
"""

from typing import Any

import pytest
import torch
from recorded_steps import LR, Each, from_state, off, start, train
from torch import Tensor
from torch._dynamo import graph_break

import collage_fx
from collage_fx.dynamo.backend import Backend
from collage_fx.segments.executors import Executors


def update_of(p: Tensor, g: Tensor) -> Tensor:
    """Return the new value of a parameter: Dynamo compiles this by itself."""
    return p - LR * g


def cut_after_value(p: Tensor, g: Tensor, state: Any) -> None:
    new = update_of(p, g)
    graph_break()
    p.copy_(new)


def cut_after_wide_value(p: Tensor, g: Tensor, state: Any) -> None:
    new = p.to(torch.promote_types(torch.float32, p.dtype)).mul(1.0)
    graph_break()
    p.copy_(new - LR * g)


def cut_after_count(p: Tensor, g: Tensor, state: Any) -> None:
    state["step"] = state.get("step", 0) + 1
    graph_break()
    p.sub_(g, alpha=LR)


class Twice(Each):
    """Has two loops, between which Dynamo cuts the step: the second reads what the first made."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        params = self.param_groups[0]["params"]
        made = [p - LR * p.grad for p in params]
        self.total = float(sum(p.grad.float().sum() for p in params))  # read: a graph break
        for p, new in zip(params, made, strict=True):
            p.copy_(new)


def errors(update: Any, **options: Any) -> tuple[float, Any]:
    exact, _ = train(update, torch.float64)
    found, step = train(update, **options)
    begin = torch.cat([p.detach().double().flatten() for p in start(torch.bfloat16)])
    return off(found, exact, begin), step


def recorded(step: Any) -> bool:
    """Return True if a report says that a step's rest was recorded, with a line of this file."""
    notes = [n for n in collage_fx.report(step).notes if "Dynamo cuts the step" in n]
    assert all(__file__ in n for n in notes), notes
    return bool(notes)


@pytest.mark.parametrize("update", [cut_after_value, cut_after_wide_value])
def test_value_that_outlives_a_graph_keeps_its_low_word(update: Any) -> None:
    error, step = errors(update)
    assert error < 0.01 and recorded(step)
    plain, _ = errors(update, plain=True)
    assert plain > 0.5


@pytest.mark.filterwarnings("ignore:.*in one compiled graph")
def test_without_the_switch_it_loses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    # In the second step: from the third on all is recorded, as p is written outside of graphs.
    monkeypatch.setattr(Backend, "hands_on", lambda self, gm: False)
    error, step = errors(cut_after_value, steps=2)
    assert error > 0.1 and not recorded(step)


# Dynamo of torch 2.11 cannot assign a number that is read to the optimizer: docs/limits.md.
@pytest.mark.filterwarnings("ignore:collage_fx. torch.compile fails on a part of the step")
def test_results_of_one_loop_that_the_next_reads() -> None:
    assert distance(Twice) < 0.01


class Elsewhere(Each):
    """Keeps a state of each parameter in an attribute, and reads it behind a cut."""

    def __init__(self, params: list[Tensor], update: Any) -> None:
        super().__init__(params, update)
        self.slow = [p.detach().clone() for p in params]

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        params = self.param_groups[0]["params"]
        for p, z in zip(params, self.slow, strict=True):
            z.sub_(p.grad, alpha=LR)
        float(self.slow[0].float().sum())
        for p, z in zip(params, self.slow, strict=True):
            p.copy_(0.5 * z + 0.5 * p)


@pytest.mark.parametrize("record", ["auto", True])
@pytest.mark.filterwarnings("ignore:.*belong to no parameter")
@pytest.mark.quick("auto")
def test_state_in_an_attribute_is_read_with_its_low_word(record: Any) -> None:
    cut = "numbers"  # with them it is one graph
    assert distance(Elsewhere, record=record, without=(cut,)) < 0.01
    if record == "auto":
        assert distance(Elsewhere, record=record, without=(cut, "escape")) > 0.3


def distance(kind: type[Each], **options: Any) -> float:
    """Return the error of the parameters after some steps of an optimizer of this kind."""
    torch.compiler.reset()
    params = {d: start(d) for d in (torch.bfloat16, torch.float64)}
    begin = torch.cat([p.detach().double().flatten() for p in params[torch.bfloat16]])
    optimizers = {d: kind(p, print) for d, p in params.items()}
    step = collage_fx.compile(optimizers[torch.bfloat16], **options)
    for _ in range(4):
        for ps in params.values():
            for p in ps:
                p.grad = torch.ones_like(p)
        step()
        optimizers[torch.float64].step()
    found, exact = (
        torch.cat([collage_fx.value(p).double().flatten() for p in ps]) for ps in params.values()
    )
    return off(found, exact, begin)


def test_harmless_cut_stays_with_dynamo() -> None:
    error, step = errors(cut_after_count)
    assert error < 0.01 and not recorded(step)


def test_parameter_that_is_computed_anew_has_a_low_word(monkeypatch: pytest.MonkeyPatch) -> None:
    error, _ = errors(from_state)
    assert error < 0.01
    recorded, _ = errors(from_state, without=("join",))
    assert recorded < 0.01
    monkeypatch.setattr(Executors, "computes_anew", lambda self, code, args: False)
    rounded, _ = errors(from_state, without=("join",))
    assert rounded > 0.1


def read_between(p: Tensor, g: Tensor, state: Any) -> None:
    wide = p.to(torch.promote_types(torch.float32, p.dtype))
    float(g.sum())  # ends a segment, after which wide is still in use
    wide.sub_(g, alpha=LR)
    p.copy_(wide)


def test_wide_copy_that_outlives_a_segment_has_both_words() -> None:
    error, _ = errors(read_between, record=True)
    assert error < 0.01


def made_before_a_read(p: Tensor, g: Tensor, state: Any) -> None:
    if not state:
        state["z"] = p.clone()
    float(g.sum())  # ends a segment: the next one updates the new state
    state["z"].sub_(g, alpha=LR)
    p.copy_(state["z"])


@pytest.mark.parametrize("record", ["auto", True])
def test_state_that_one_segment_makes_and_the_next_updates(record: Any) -> None:
    error, _ = errors(made_before_a_read, record=record)
    assert error < 0.01


def exponential(p: Tensor, g: Tensor, state: Any) -> None:
    if not state:
        state["l"] = p.log()
    state["l"].sub_(g / p, alpha=LR)
    p.copy_(state["l"].exp())


@pytest.mark.parametrize("record", ["auto", True])
def test_parameter_that_is_no_sum_of_a_state_that_reads_it(record: Any) -> None:
    error, _ = errors(exponential, record=record)
    assert error < 0.02
