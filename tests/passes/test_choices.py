"""A value that meets its own largest element, or median, meets the element that it has itself.

For passes.analysis.high_words and passes.frontend.single_elements.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import collage_fx
from collage_fx.passes.analysis import escape, high_words
from collage_fx.passes.frontend import canonicalize

LR, STEPS = 1e-3, 6
SOME = torch.arange(12).view(4, 3) % 3 == 1


def alone(u: Tensor, reduce: Any = torch.sum) -> Tensor:
    """Return one element of each row, by a sum of it and zeros or as the largest by far."""
    return reduce(torch.where(SOME, u, 0 if reduce is torch.sum else -torch.inf), 1, keepdim=True)


def in_rows(u: Tensor, x: Tensor) -> Tensor:
    """Return where one element of each row is x; a slice has the element unrounded."""
    return (alone(u) == x) & (u > -1e4)


EACH_STEP: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], int]] = {
    "its largest": (lambda p, u: u == u.max(), 1),
    "at most 1": (lambda p, u: u / u.abs().max() <= 1, 12),
    "a root": (lambda p, u: (1 - (u / u.abs().max()).square()).sqrt() >= 0, 12),
    "sorted": (lambda p, u: u >= u.flatten().sort()[0][6], 6),
    "the three largest": (lambda p, u: u >= u.flatten().topk(3)[0][-1], 3),
    "its first sum": (lambda p, u: u == u.flatten().cumsum(0)[0], 1),
    "of a parameter": (lambda p, u: p == p.max(), 1),
    "of its size": (lambda p, u: p.abs() >= p.abs().max(), 1),
    "of its rows": (lambda p, u: p >= p.amax(1, keepdim=True), 4),
    "its median": (lambda p, u: p >= p.median(), 7),
    "of some": (lambda p, u: SOME & (p >= p.masked_fill(~SOME, -torch.inf).max()), 1),
    "of one sign": (lambda p, u: u == u.relu().amax(), 1),
    "times 1.7, summed": (lambda p, u: in_rows(p * 1.7, alone(p, torch.amax) * 1.7), 12),
    "of two": (lambda p, u: p.abs() == torch.maximum(p, -p).max(), 1),
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
@pytest.mark.quick("its largest-*", "its median-eft", "the three largest-eft", "of some-eft")
def test_the_element_that_is_chosen_is_one_of_the_value(name: str, options: Any) -> None:
    assert counts(name, **options) == [EACH_STEP[name][1]] * STEPS


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("a root", {"arithmetic": "wide"}),
        ("of a parameter", {}),
        ("of some", {}),
        ("of two", {}),
        ("times 1.7, summed", {}),
    ],
)
def test_of_rounded_values_it_is_none(
    name: str, options: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: the largest is that of high words, and compared with whole values."""
    monkeypatch.setattr(escape, "chosen", lambda program: iter(()))
    assert min(counts(name, **options)) < EACH_STEP[name][1]


OF_ONE: dict[str, Callable[[Tensor], Tensor]] = {
    "median": Tensor.median,
    "largest of a row": lambda u: u.amax(-1, keepdim=True) if u.dim() else u.amax(),
    "last": lambda u: u.flatten().sort()[0][-1],
    "first": lambda u: u.flatten()[0],
    "mean": Tensor.mean,
}
MOVED: dict[str, Callable[[Tensor], Tensor]] = {
    "as it is": lambda u: u,
    "moved": lambda u: u.flatten()[torch.arange(u.numel()).flip(0)].view(u.shape),
}


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("name", OF_ONE)
@pytest.mark.quick("median-shape1", "first-shape1")
def test_so_it_is_of_a_single_element(name: str, shape: tuple[int, ...]) -> None:
    assert max(halved(OF_ONE[name], moved, shape) for moved in MOVED.values()) < 1e-4


@pytest.mark.parametrize("moved", MOVED)
def test_else_a_single_element_is_not_its_median(
    moved: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: each use of a 0-d value has a rounding of its own."""
    monkeypatch.setattr(canonicalize, "returns_operand", lambda node: False)
    monkeypatch.setattr(high_words, "_KEPT", frozenset())
    monkeypatch.setattr(high_words, "_alike", lambda graph: {n: [n] for n in graph.nodes})
    assert halved(OF_ONE["median"], MOVED[moved], ()) > 1e-3


def test_so_it_is_behind_views_of_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice takes one of them in fp32, of its own shape, and the other rounded."""

    def flat(u: Tensor) -> Tensor:
        return u.flatten().abs().view(u.shape)

    def error() -> float:
        torch.compiler.reset()
        return halved(lambda u: u.flatten().mode()[0], MOVED["as it is"], (1, 1), flat)

    assert error() < 1e-4
    monkeypatch.setattr(high_words, "_is_wide", lambda node: False)
    assert error() > 1e-3


def halved(
    chosen: Callable[[Tensor], Tensor],
    moved: Callable[[Tensor], Tensor],
    shape: tuple[int, ...],
    size: Callable[[Tensor], Tensor] = Tensor.abs,
) -> float:
    """Return the error of steps that halve what is less than one of its elements: nothing is."""

    def step(p: Tensor, g: Tensor, v: Tensor) -> None:
        v.mul_(0.999).addcmul_(g, g, value=0.001)
        u = g / (v.sqrt() + 1e-8)
        p.sub_(moved(torch.where(size(u) >= chosen(size(u)), u, 0.5 * u)), alpha=LR)

    generator = torch.Generator().manual_seed(0)
    p, v = torch.full(shape, 0.5).bfloat16(), torch.zeros(shape).bfloat16()
    exact, call = [p.double(), v.double()], collage_fx.compile(step)
    for _ in range(STEPS):
        g = torch.randn(shape, generator=generator).bfloat16()
        call(p, g, v)
        step(exact[0], g.double(), exact[1])
    return float((collage_fx.value(p) - exact[0]).abs().max())


@pytest.mark.parametrize("name", ["its largest", "a root"])
@pytest.mark.quick("its largest")
def test_so_it_is_in_a_slice_that_is_in_wide_for_what_it_would_lose(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert counts(name, averaged=True) == [EACH_STEP[name][1]] * STEPS
    monkeypatch.setattr(high_words, "eft_storage", lambda *_: ("mcf2", ""))
    assert min(counts(name, averaged=True)) < EACH_STEP[name][1]


@pytest.mark.parametrize("name", ["of a parameter", "a root"])
@pytest.mark.quick("of a parameter")
def test_so_it_is_where_residuals_are_rounded_by_chance(name: str) -> None:
    assert counts(name, stochastic_rounding=True) == [EACH_STEP[name][1]] * STEPS


def test_a_quotient_by_a_largest_element_stays_in_eft() -> None:
    """Eager PyTorch's roundings are kept there; a ratio of other values has nothing to meet."""

    def step(p: Tensor, g: Tensor) -> None:
        u = g * 1.1
        p.sub_(u / u.abs().max(), alpha=LR)

    p, call = torch.ones(4, 3, dtype=torch.bfloat16), collage_fx.compile(step, storage="mcf2")
    call(p, torch.randn(4, 3).bfloat16())
    (state,) = collage_fx.report(call).states
    assert state.graph == 1 and not state.joined


LESS_ITS_MEAN: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda u: u - u.mean(0, keepdim=True),
    "share of a sum": lambda u: u - u.sum(0, keepdim=True) / 4,
    "added": lambda u: u.add(-u.mean((0, 1), keepdim=True)),
}


@pytest.mark.parametrize("rest", LESS_ITS_MEAN.values(), ids=LESS_ITS_MEAN)
@pytest.mark.quick("mean", "share of a sum")
def test_a_value_less_its_mean_is_what_remains_of_both(
    rest: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All elements of u are alike, and nothing remains of them; means of roundings leave a part."""

    def step(p: Tensor, g: Tensor, v: Tensor) -> None:
        v.copy_(torch.lerp(v, g * g, 0.01))
        p.sub_(rest(g / v.sqrt() / 3))

    def moved(**options: Any) -> float:
        torch.compiler.reset()
        p, v = torch.ones(4, 3).bfloat16(), torch.zeros(4, 3).bfloat16()
        call = collage_fx.compile(step, **options)
        for _ in range(STEPS):
            call(p, torch.full((4, 3), 0.3).bfloat16(), v)
        return float((collage_fx.value(p) - 1).abs().max())

    assert moved() < 2**-17 > moved(arithmetic="wide")
    monkeypatch.setattr(escape, "chosen", lambda program: iter(()))
    assert moved(arithmetic="wide") > 2**-9


def test_a_step_along_a_mean_is_not_joined() -> None:
    def step(p: Tensor, g: Tensor) -> None:
        p.sub_(g * p.mean(), alpha=LR)

    p, call = torch.ones(4, 3, dtype=torch.bfloat16), collage_fx.compile(step, storage="mcf2")
    call(p, torch.randn(4, 3).bfloat16())
    (state,) = collage_fx.report(call).states
    assert state.graph == 1 and not state.joined
