"""A value that meets its own largest element, or median, meets the element that it has itself."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import collage_fx
from collage_fx.passes.analysis import escape, high_words

LR, STEPS = 1e-3, 6
EACH_STEP: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], int]] = {
    "its largest": (lambda p, u: u == u.max(), 1),
    "at most 1": (lambda p, u: u / u.abs().max() <= 1, 12),
    "a root": (lambda p, u: (1 - (u / u.abs().max()).square()).sqrt() >= 0, 12),
    "sorted": (lambda p, u: u >= u.flatten().sort()[0][6], 6),
    "the three largest": (lambda p, u: u >= u.flatten().topk(3)[0][-1], 3),
    "of a parameter": (lambda p, u: p == p.max(), 1),
    "of its size": (lambda p, u: p.abs() >= p.abs().max(), 1),
    "of its rows": (lambda p, u: p >= p.amax(1, keepdim=True), 4),
    "its median": (lambda p, u: p >= p.median(), 7),
}
"""A condition -> of how many of 12 elements it holds in each step."""


def counts(name: str, *, averaged: bool = False, **options: Any) -> list[int]:
    """Return of how many elements a condition holds in each step; of one that averages a state with
    its own update, perhaps, whose slice is in arithmetic wide."""
    condition, _ = EACH_STEP[name]

    def step(p: Tensor, g: Tensor, s: Tensor, count: Tensor) -> None:
        u = g * 1.1 + 0.3
        p.sub_(g, alpha=LR)
        if averaged:
            s.mul_(0.95).add_((s - u * LR) * 0.05)
        count.copy_(torch.where(condition(p, u), 1.0, 0.0))
        s.sub_(u, alpha=LR)

    generator = torch.Generator().manual_seed(0)
    p = (torch.randn(4, 3, generator=generator) + 1).bfloat16()
    s, count = torch.zeros_like(p), torch.zeros_like(p)
    call, found = collage_fx.compile(step, **options), []
    for _ in range(STEPS):
        call(p, torch.randn(4, 3, generator=generator).bfloat16(), s, count)
        found.append(int(count.sum()))
    assert collage_fx.residuals(p) and collage_fx.residuals(s)
    return found


@pytest.mark.parametrize("options", [{}, {"arithmetic": "wide"}], ids=["eft", "wide"])
@pytest.mark.parametrize("name", EACH_STEP)
def test_the_element_that_is_chosen_is_one_of_the_value(name: str, options: Any) -> None:
    assert counts(name, **options) == [EACH_STEP[name][1]] * STEPS


@pytest.mark.parametrize(
    ("name", "options"), [("a root", {"arithmetic": "wide"}), ("of a parameter", {})]
)
def test_of_rounded_values_it_is_none(
    name: str, options: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: the largest is that of high words, and compared with whole values."""
    monkeypatch.setattr(escape, "chosen", lambda program: iter(()))
    assert min(counts(name, **options)) < EACH_STEP[name][1]


@pytest.mark.parametrize("name", ["its largest", "a root"])
def test_so_it_is_in_a_slice_that_is_in_wide_for_what_it_would_lose(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert counts(name, averaged=True) == [EACH_STEP[name][1]] * STEPS
    monkeypatch.setattr(high_words, "eft_storage", lambda *_: ("mcf2", ""))
    assert min(counts(name, averaged=True)) < EACH_STEP[name][1]


@pytest.mark.parametrize("name", ["of a parameter", "a root"])
def test_so_it_is_where_residuals_are_rounded_by_chance(name: str) -> None:
    assert counts(name, stochastic_rounding=True) == [EACH_STEP[name][1]] * STEPS


def test_a_quotient_by_a_largest_element_stays_in_eft() -> None:
    """It has the roundings of eager PyTorch there; a ratio of other values has nothing to meet."""

    def step(p: Tensor, g: Tensor) -> None:
        u = g * 1.1
        p.sub_(u / u.abs().max(), alpha=LR)

    p, call = torch.ones(4, 3, dtype=torch.bfloat16), collage_fx.compile(step)
    call(p, torch.randn(4, 3).bfloat16())
    (state,) = collage_fx.report(call).states
    assert state.graph == 1 and not state.joined
