"""Sums, norms and states of other shapes that scale a state enter with their low words.

For passes.analysis.factors.
"""

import functools
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from graphs import capture
from interpreter import without_compiler
from recorded_steps import Each
from scaled_states import (
    LR,
    SCALED,
    Update,
    by_numbers,
    centered,
    exchanged,
    followed_mean,
    followed_product,
    held,
    orthogonalized,
    turned,
)
from torch import Tensor
from torch.fx import Node
from torch.optim import Optimizer

import collage_fx
from collage_fx.hooks import data_reads
from collage_fx.passes.analysis import factors
from collage_fx.passes.frontend import slice as slice_module
from collage_fx.passes.ir.program import Carried, Program, Settings
from collage_fx.passes.pipeline import run_passes
from collage_fx.runtime.errors import CollageWarning

BF16 = torch.bfloat16
STEPS = 16
SHAPE = 8, 16
TOP = 1.1
"""The largest element that parameters begin with, about."""


def way(update: Update, dtype: torch.dtype, wrap: Callable[[Optimizer], Any]) -> Any:
    """Return where steps lead, from where, and the step."""
    torch.compiler.reset()
    generator = torch.Generator().manual_seed(0)
    start = (0.6 + 0.5 * torch.rand(SHAPE, generator=generator)).bfloat16()
    p = torch.nn.Parameter(start.to(dtype, copy=True))
    drift = torch.randn(SHAPE, generator=generator)
    step = wrap(Each([p], update))
    for _ in range(STEPS):
        g = 0.1 * (torch.randn(SHAPE, generator=generator) + 1.5 * drift)
        p.grad = g.bfloat16().to(dtype)
        step()
    return collage_fx.value(p), start.double(), step


exact = functools.cache(lambda update: way(update, torch.float64, lambda o: o.step))


def error(
    update: Update, compiled: Callable[..., Any] = collage_fx.compile, **options: Any
) -> float:
    """Return the error as a share of the way."""
    (want, start, _) = exact(update)
    with without_compiler():
        found, _, _ = way(update, BF16, lambda o: compiled(o, **options))
    return float((found - want).norm() / (want - start).norm())


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.quick("row_sums", "products", "put", "added", "matrix_sum")
def test_what_scales_a_state_is_computed_of_whole_values(name: str) -> None:
    assert error(SCALED[name]) < 0.006
    assert error(SCALED[name], without=("escape",)) > 0.012


@pytest.mark.parametrize("name", ["row_sums", "deviation", "magnitude"])
@pytest.mark.parametrize("options", [{"record": True}, {"storage": "remainder16"}], ids=str)
@pytest.mark.quick("*True}-row_sums", "*16'}-deviation")
def test_so_it_is_in_a_recorded_step_and_in_wide(name: str, options: dict[str, Any]) -> None:
    assert error(SCALED[name], **options) < (0.006 if "record" in options else 3e-4)


@pytest.mark.parametrize("update", [followed_product, followed_mean])
@pytest.mark.quick("followed_product")
def test_what_a_state_follows_is_of_whole_values(
    update: Update, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert error(update) < 1e-3
    monkeypatch.setattr(factors, "_followed", lambda new: frozenset())
    assert error(update) > 0.1


def test_sums_that_become_lists_are_those_of_whole_values(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.compiler.set_stance("force_eager"):
        assert error(by_numbers, record=True) < 0.006
        monkeypatch.setattr(data_reads, "LOW_PRECISION", ())
        assert error(by_numbers, record=True) > 0.1


def test_a_number_of_about_one_that_changes_is_no_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    assert error(turned, record=True) < 1e-4
    monkeypatch.setattr(factors, "_size", lambda now, grown: factors.RATE)
    monkeypatch.setattr(factors, "_followed", lambda new: frozenset())
    assert error(turned, record=True) > 0.01


def warnings_of_one_graph(update: Update) -> list[str]:
    """Return what the backend string says of an update that it compiles as one graph."""

    def each(p: Tensor, g: Tensor) -> None:
        update(p, g, {})

    p = torch.ones(SHAPE, dtype=BF16)
    torch.compiler.reset()
    with without_compiler(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.compile(each, backend="collage", fullgraph=True)(p, torch.ones_like(p))
    return [str(w.message) for w in said if "collage_fx" in str(w.message)]


def test_a_graph_that_is_not_recorded_warns() -> None:
    said = warnings_of_one_graph(SCALED["row_sums"])
    assert any("p scales a new value with its high word only" in text for text in said)


def flat(p: Tensor, g: Tensor) -> None:
    p.view(-1).sub_((LR * g).reshape(-1))


def transposed(p: Tensor, g: Tensor) -> None:
    p.t().sub_(g.t(), alpha=LR)


def by_rows(p: Tensor, g: Tensor) -> None:
    for row, part in zip(p.unbind(0), g.unbind(0), strict=True):
        row.sub_(part, alpha=LR)


def in_chunks(p: Tensor, g: Tensor) -> None:
    for piece, part in zip(p.view(-1).chunk(3), g.view(-1).chunk(3), strict=True):
        piece.copy_(piece - LR * part)


def in_order(p: Tensor, g: Tensor) -> None:
    values, order = p.view(-1).sort()
    p.view(-1).scatter_(0, order, values - LR * g.view(-1)[order])


def then_scaled(write: Callable[[Tensor, Tensor], None]) -> Update:
    """Return an update that decays a parameter, writes it by a view, and scales it as a whole."""

    def each(p: Tensor, g: Tensor, state: Any) -> None:
        p.mul_(1 - 1e-5)
        write(p, g)
        p.mul_(TOP / p.abs().max())

    return each


THROUGH_VIEWS = {
    write.__name__: then_scaled(write) for write in (flat, transposed, by_rows, in_chunks, in_order)
}


def as_function(optimizer: Each, **options: Any) -> Callable[[], None]:
    """Return a compiled step that is a function, of which nobody knows the parameters."""
    (p,) = optimizer.param_groups[0]["params"]

    @torch.no_grad()
    def update(p: Tensor, g: Tensor) -> None:
        optimizer.update(p, g, {})

    step = collage_fx.compile(update, **options)
    return lambda: step(p, p.grad)


@pytest.mark.parametrize("name", THROUGH_VIEWS)
@pytest.mark.quick("flat", "by_rows", "in_order")
def test_a_function_that_writes_through_a_view_overwrites_nothing(name: str) -> None:
    assert error(THROUGH_VIEWS[name], as_function) < 0.01


def test_it_would_if_it_were_judged_by_its_last_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slice_module, "_path_refusal", lambda *_: "")
    with pytest.warns(CollageWarning, match="nothing needed compensation"):
        assert error(THROUGH_VIEWS["flat"], as_function) > 0.1


def test_neither_does_an_optimizer() -> None:
    assert error(THROUGH_VIEWS["flat"]) < 0.01
    assert error(THROUGH_VIEWS["flat"], record=True) < 0.01


def test_a_graph_that_cannot_be_joined_says_what_is_in_the_way() -> None:
    (text,) = warnings_of_one_graph(THROUGH_VIEWS["flat"])
    assert "not compensated: p (its update passes through aten.max.default" in text


def trust_ratio(p: Tensor, g: Tensor, state: Any) -> None:
    state["m"].lerp_(g, 0.1)
    state["v"].mul_(0.999).addcmul_(g, g, value=0.001)
    u = state["m"] / (state["v"].sqrt() + 1e-6) + 0.01 * p
    ratio = p.abs().mean() / u.abs().mean()
    p.sub_(torch.where(ratio > 0, ratio, 1.0) * u, alpha=LR)


def projected(p: Tensor, g: Tensor, state: Any) -> None:
    """AdamP's direction, and a weight decay by the largest weight."""
    state["m"].lerp_(g, 0.1)
    state["v"].mul_(0.999).addcmul_(g, g, value=0.001)
    u = state["m"] / (state["v"].sqrt() + 1e-6)
    n = p / p.abs().sum(1, keepdim=True)
    p.mul_(1 - LR * 0.1 * p.abs().max()).sub_(u - n * (n * u).sum(1, keepdim=True), alpha=LR)


def relative_rate(p: Tensor, g: Tensor, state: Any) -> None:
    """Adafactor's, with one factor of the second moment."""
    state["row"].mul_(0.99).add_(g.square().mean(1, keepdim=True), alpha=0.01)
    p.sub_(p.abs().mean().clamp(min=1e-3) * 0.01 * g * state["row"].rsqrt())


def by_newton_schulz(p: Tensor, g: Tensor, state: Any) -> None:
    x = state["m"].mul_(0.95).add_(g) / state["m"].abs().sum()
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
    p.sub_(x, alpha=0.02)


def averaged_step(p: Tensor, g: Tensor, state: Any) -> None:
    """Adadelta's."""
    state["v"].mul_(0.9).addcmul_(g, g, value=0.1)
    delta = (state["m"] + 1e-6).sqrt() / (state["v"] + 1e-6).sqrt() * g
    state["m"].mul_(0.9).addcmul_(delta, delta, value=0.1)
    p.sub_(delta)


def lost(update: Update) -> list[str]:
    """Return what the passes would lose of a step, whose states they know."""
    torch.compiler.reset()
    p = torch.nn.Parameter(torch.ones(SHAPE, dtype=BF16))
    p.grad = torch.ones_like(p)
    optimizer = Each([p], update)
    state = {"m": torch.ones_like(p), "v": torch.ones_like(p), "row": torch.ones_like(p[:, :1])}
    optimizer.state[p] |= {name: t.detach() for name, t in state.items()}
    captured = capture(optimizer.step)

    def describe(index: int, node: Node) -> Carried:
        found = captured._describe(index, node)
        return replace(found, owner="state", owned=True) if "state" in found.name else found

    program = run_passes(Program(captured.functional, Settings("plus"), describe))
    assert sum(s.compensated for s in program.plan) > 0
    return program.lost


@pytest.mark.parametrize(
    "update", [trust_ratio, projected, relative_rate, by_newton_schulz, averaged_step]
)
@pytest.mark.quick("trust_ratio", "projected", "by_newton_schulz")
def test_what_scales_an_update_stays_in_slices(update: Update) -> None:
    assert lost(update) == []


@pytest.mark.parametrize("update", [SCALED["sum"], centered, orthogonalized, exchanged, held])
@pytest.mark.quick("towards_its_sum", "orthogonalized", "held")
def test_what_scales_a_state_does_not(update: Update) -> None:
    scales = "param_groups[0].params[0] scales a new value with its high word only"
    assert lost(update)[0] == scales
