"""Steps that compute rounding errors themselves: two words, Kahan's summation, error feedback.

For passes.ir.own_errors.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from interpreter import without_compiler
from recorded_steps import LR, Each, off, start, train
from torch import Tensor

import collage_fx
from collage_fx.passes.rewrite import expand
from collage_fx.segments import segment

F64 = torch.float64


def two_words(p: Tensor, g: Tensor, state: Any) -> None:
    """Average in two words of its own, at a decay that gets no residual."""
    whole = 0.9 * (state["high"].float() + state["low"].float()) + g.float().sin()
    if p.dtype == F64:
        whole = 0.9 * (state["high"] + state["low"]) + g.sin()
    state["high"].copy_(whole)
    state["low"].copy_(whole - whole.to(p.dtype).to(whole.dtype))
    p.sub_(state["high"].cos() - 1, alpha=LR)


def by_state(p: Tensor, g: Tensor, state: Any) -> None:
    """The same, less what the state has become."""
    wide = F64 if p.dtype == F64 else torch.float32
    whole = 0.9 * (state["high"].to(wide) + state["low"].to(wide)) + g.to(wide).sin()
    state["high"].copy_(whole)
    state["low"].copy_(whole - state["high"])
    p.sub_(state["high"].cos() - 1, alpha=LR)


def compared(p: Tensor, g: Tensor, state: Any) -> None:
    """The same in a step whose states all have residuals, since it is done on whole values."""
    two_words(p, g, state)
    u = g * 1.1
    p.sub_(torch.where(u.abs() >= u.abs().median(), u, 0.5 * u), alpha=LR)


def in_lists(p: Tensor, g: Tensor, state: Any) -> None:
    """The same, of lists and in place."""
    wide = F64 if p.dtype == F64 else torch.float32
    whole = 0.9 * (state["high"].to(wide) + state["low"].to(wide)) + g.to(wide).sin()
    torch._foreach_copy_([state["high"]], [whole])
    torch._foreach_sub_([whole], [whole.to(p.dtype)])
    state["low"].copy_(whole)
    p.sub_(state["high"].cos() - 1, alpha=LR)


def fed_back(p: Tensor, g: Tensor, state: Any) -> None:
    """Move by what fits a message, and keep the rest for the next one."""
    if not state:
        state["rest"] = torch.zeros_like(p)
    whole = state["rest"] + g.cos()
    message = (whole * 3).round() / 3
    state["rest"].copy_(whole - message)
    p.sub_(message, alpha=LR)


def kahan(p: Tensor, g: Tensor, state: Any) -> None:
    """Keep what the parameter has no room for, as optimizers do that know nothing of collage_fx."""
    if not state:
        state["rest"] = torch.zeros_like(p)
    update = state["rest"] - LR * g.sin()
    new = p + update
    state["rest"].copy_(update - (new - p))
    p.copy_(new)


def words(update: Callable[..., None], dtype: torch.dtype, **options: Any) -> Tensor:
    """Return the average that is kept in two words."""
    params = start(dtype)
    optimizer = Each(params, update)
    for p in params:
        optimizer.state[p] = {"high": torch.zeros_like(p), "low": torch.zeros_like(p)}
    step = collage_fx.compile(optimizer, **options) if dtype != F64 else optimizer.step
    generator = torch.Generator().manual_seed(0)
    with without_compiler():
        for _ in range(6):
            for p in params:
                p.grad = torch.randn(p.shape, generator=generator).bfloat16().to(dtype)
            step()
    both = [(collage_fx.value(t).flatten() for t in optimizer.state[p].values()) for p in params]
    return torch.cat([high + low for high, low in both])


@pytest.mark.parametrize("arithmetic", ["wide", "eft"])
def test_what_high_has_lost_is_in_low(arithmetic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = words(two_words, F64)

    def error() -> float:
        return float((words(two_words, torch.bfloat16, arithmetic=arithmetic) - exact).norm())

    assert error() < 1e-4 * exact.norm()
    if arithmetic == "wide":  # the control
        torch.compiler.reset()
        monkeypatch.setattr(expand, "roundings_for_errors", lambda *_: set())
        assert error() > 5e-4 * exact.norm()


@pytest.mark.parametrize("storage", ["auto", "mcf2"])
@pytest.mark.parametrize("update", [two_words, by_state, in_lists])
@pytest.mark.quick("two_words-mcf2", "in_lists-auto")
def test_so_it_is_in_recorded_steps(update: Callable[..., None], storage: str) -> None:
    exact = words(update, F64)
    found = words(update, torch.bfloat16, storage=storage, record=True)
    assert float((found - exact).norm()) < 1e-4 * exact.norm()


@pytest.mark.slow
def test_all_conversions_of_such_a_value_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """The controls: where none does the error is zero, and where one does another state has it."""
    original = segment.with_errors

    def relative(update: Callable[..., None]) -> float:
        torch.compiler.reset()
        exact = words(update, F64)
        found = words(update, torch.bfloat16, record=True)
        return float((found - exact).norm() / exact.norm())

    assert relative(compared) < 1e-4
    monkeypatch.setattr(segment, "with_errors", lambda *a: {*sorted(original(*a))[1::2]})
    assert relative(compared) > 1e-3
    monkeypatch.setattr(segment, "with_errors", lambda *_: set())
    assert relative(two_words) > 2e-4


def bounded(p: Tensor, g: Tensor, state: Any) -> None:
    """Keep what is beyond a bound, which nothing is."""
    u = ((g * 1.1).sin() * 0.3 + g * 0.77).tanh()
    c = u.clamp(-100, 100)
    state["over"].copy_(u - c)
    p.sub_(c, alpha=LR)


def masked(p: Tensor, g: Tensor, state: Any) -> None:
    """Add up masks."""
    above = g > 0
    state["over"].copy_((above | (g < 1)) + above.to(p.dtype))
    p.sub_(g * (above | (g < 1)), alpha=LR)


@pytest.mark.parametrize("update", [bounded, masked])
def test_what_is_nothing_for_other_reasons_rounds_nothing(
    update: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    original = expand.roundings_for_errors
    monkeypatch.setattr(
        expand, "roundings_for_errors", lambda *a: found.append(original(*a)) or found[-1]
    )
    params = start(torch.bfloat16)
    optimizer = Each(params, update)
    for p in params:
        optimizer.state[p] = {"over": torch.zeros_like(p)}
        p.grad = torch.rand_like(p)
    with without_compiler():
        collage_fx.compile(optimizer)()
    assert found and not any(found)


@pytest.mark.parametrize("update", [fed_back, kahan])
def test_an_error_of_what_has_a_residual_is_counted_once(update: Callable[..., None]) -> None:
    exact, _ = train(update, F64)
    begin = torch.cat([p.detach().double().flatten() for p in start(F64)])
    with without_compiler():
        found, _ = train(update)
    assert off(found, exact, begin) < 2e-3
