"""Histories in a deque that drops elements, of which stock torch.compile has one too many.

For hooks.traces.
"""

from collections import deque
from typing import Any

import pytest
import torch
from interpreter import without_compiler
from recorded_steps import Each
from torch import Tensor, nn

import collage_fx
from collage_fx.hooks import traces

RATE, STEPS, LENGTH = 1e-3, 8, 3
OTHERS: dict[Tensor, deque[Tensor]] = {}


def of_state(p: Tensor, state: Any) -> deque[Tensor]:
    return state.setdefault("history", deque(maxlen=LENGTH))


def of_global(p: Tensor, state: Any) -> deque[Tensor]:
    if p not in OTHERS:
        OTHERS[p] = deque(maxlen=LENGTH)
    return OTHERS[p]


def trained(find: Any, dtype: torch.dtype, *, compiled: bool) -> Tensor:
    """Return how far a parameter has come that follows the mean of its last gradients."""

    def update(p: Tensor, g: Tensor, state: Any) -> None:
        history = find(p, state)
        history.append(g.clone())
        p.sub_(sum(history) / len(history), alpha=RATE)

    p = nn.Parameter(torch.full((4, 3), 1.0, dtype=dtype))
    optimizer = Each([p], update)
    if compiled:
        collage_fx.compile_(optimizer)
    with without_compiler():
        for k in range(STEPS):
            p.grad = torch.full_like(p, float(2 ** (k % 4)))
            optimizer.step()
    return collage_fx.value(p).detach().double() - 1


@pytest.mark.filterwarnings("ignore:.*nothing needed compensation")
@pytest.mark.filterwarnings("ignore:.*belong to no torch.optim.Optimizer")
@pytest.mark.parametrize("find", [of_state, of_global])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.quick("dtype0-*")
def test_a_deque_is_as_long_as_it_may_be(find: Any, dtype: torch.dtype) -> None:
    exact = trained(find, torch.float64, compiled=False)
    found = trained(find, dtype, compiled=True)
    assert (found - exact).norm() < 1e-4 * exact.norm()


@pytest.mark.filterwarnings("ignore:.*nothing needed compensation")
def test_the_backend_string_says_so() -> None:
    """Only where the deque was there before: one that the step makes is right in a graph."""

    def update(p: Tensor, history: deque[Tensor] | None) -> None:
        history = deque([p + 1], maxlen=1) if history is None else history
        history.append(p * 0.5)
        p.sub_(sum(history), alpha=RATE)

    with without_compiler():
        p, step = torch.ones(4), torch.compile(update, backend="collage")
        step(p, None)
        assert (p - 1 + 0.5 * RATE).abs().max() < 1e-6
        with pytest.warns(collage_fx.CollageWarning, match="uses a deque with maxlen"):
            step(p, deque([p], maxlen=1))


@pytest.mark.parametrize("find", [of_state, of_global])
@pytest.mark.filterwarnings("ignore::collage_fx.CollageWarning")
def test_stock_has_one_element_too_many(find: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control, and the notice of a torch that has mended it."""
    monkeypatch.setattr(traces, "_track_mutable", traces._track)
    exact = trained(find, torch.float64, compiled=False)
    found = trained(find, torch.float32, compiled=True)
    assert (found - exact).norm() > 1e-3 * exact.norm()
