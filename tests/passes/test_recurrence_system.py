"""Selections, and states that are computed from each other: graphs first, then against float64.

For passes.analysis.coupled and passes.analysis.carried_path.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphs import BF16, capture, capture_optimizer, named
from torch import Tensor, optim

import collage_fx
from collage_fx.passes.ir.program import StatePlan


def planned(step: Callable[..., None], count: int) -> dict[str, StatePlan]:
    """Return the verdicts on the arguments of step, all of them bf16 tensors."""
    ones = (torch.ones(4, dtype=BF16) for _ in range(count))
    return {s.name: s for s in capture(step, *ones).program().plan}


def larger(x: Tensor, q: Tensor) -> None:
    x.copy_(torch.maximum(x, q))


def decaying_larger(x: Tensor, q: Tensor) -> None:
    x.copy_(torch.maximum(0.999 * x, q))


def fast_decaying_larger(x: Tensor, q: Tensor) -> None:
    x.copy_(torch.maximum(0.5 * x, q))


def replaced(x: Tensor, q: Tensor) -> None:
    x.copy_(torch.where(q > 0, x, q))


def decaying_where(x: Tensor, q: Tensor) -> None:
    x.copy_(torch.where(q > 0, x * 0.999, x))


def average_or_skip(x: Tensor, q: Tensor) -> None:
    x.copy_(torch.where(q.isnan(), x, 0.9 * x + 0.1 * q))


def clamped(x: Tensor, q: Tensor) -> None:
    x.clamp_(-1, 1)


def clamped_decay(x: Tensor, q: Tensor) -> None:
    x.mul_(0.999).clamp_(min=1e-3)


def magnitude(x: Tensor, q: Tensor) -> None:
    x.abs_()


def chosen_by_itself(x: Tensor, q: Tensor) -> None:
    x.copy_(torch.where(x > 0, q, -q))


def in_logarithms(x: Tensor, q: Tensor) -> None:
    x.copy_(torch.exp(torch.log(x) + 0.001 * q))


def root(x: Tensor, q: Tensor) -> None:
    x.pow_(0.999)


def relative(x: Tensor, q: Tensor) -> None:
    x.mul_(1 - 0.001 * q.abs() / x)


def multiplied(x: Tensor, q: Tensor) -> None:
    x.mul_(torch.exp(-0.001 * q))


def root_or_decay(x: Tensor, q: Tensor) -> None:
    x.copy_(torch.where(q > 4, 0.5 * x, (x * x + 1e-3 * q * q).sqrt()))


def minus_root_or_decay(x: Tensor, q: Tensor) -> None:
    x.sub_(torch.where(q > 4, 0.5 * x, 0.001 * x.tanh() + 0.001 * q))


def mostly_root(x: Tensor, q: Tensor) -> None:
    x.copy_(0.1 * x + 0.9 * (x * x + 0.001 * q * q).sqrt())


def sign_beside_decay(x: Tensor, q: Tensor) -> None:
    x.copy_(0.9 * x + q * x.sign())


@pytest.mark.parametrize(
    "step, text, compensated",
    [
        (larger, "x' = x or B", False),
        (decaying_larger, "x' = 0.999*x or B", True),
        (fast_decaying_larger, "x' = 0.5*x or B", False),
        (replaced, "x' = x or B", False),
        (decaying_where, "x' = 0.999*x or x", True),
        (average_or_skip, "x' = x or 0.9*x + B", False),
        (clamped, "x' = x or B", False),
        (clamped_decay, "x' = 0.999*x or B", True),
        (magnitude, "x' = x or -1*x", False),
        (chosen_by_itself, "x' = B, chosen by x", False),
        (in_logarithms, "x' = B(x)", True),
        (root, "x' = B(x)", True),
        (relative, "x' = B(x)", True),
        (multiplied, "x' = f*x", True),
        (root_or_decay, "x' = B(x)", True),
        (minus_root_or_decay, "x' = x + B(x)", True),
        (mostly_root, "x' = 0.1*x + B(x)", True),
        (sign_beside_decay, "x' = 0.9*x + B(x)", False),
    ],
    ids=named,
)
def test_selections_and_what_is_not_linear(
    step: Callable[..., None], text: str, compensated: bool
) -> None:
    found = planned(step, 2)["x"]
    assert (found.recurrence, found.compensated) == (text, compensated), found.reason


def shifted(a: Tensor, b: Tensor, g: Tensor) -> None:
    old = a.clone()
    a.copy_(b)
    b.copy_(old + g)


def shifted_slow(a: Tensor, b: Tensor, g: Tensor) -> None:
    old = a.clone()
    a.copy_(b)
    b.copy_(0.99 * old + g)


def shifted_fast(a: Tensor, b: Tensor, g: Tensor) -> None:
    old = a.clone()
    a.copy_(b)
    b.copy_(0.5 * old + g)


def rotated(a: Tensor, b: Tensor, c: Tensor, g: Tensor) -> None:
    old = a.clone()
    a.copy_(b)
    b.copy_(c)
    c.copy_(old + g)


def swapped(a: Tensor, b: Tensor, g: Tensor) -> None:
    old = a.clone()
    a.copy_(b)
    b.copy_(old)


def slow_and_fast(a: Tensor, b: Tensor, g: Tensor) -> None:
    a.add_(g)
    b.add_(a - b, alpha=0.5)
    a.copy_(b)


def averaged(a: Tensor, b: Tensor, g: Tensor) -> None:
    a.sub_(g, alpha=0.1)
    b.lerp_(a, 0.1)


def averaged_with_signs(a: Tensor, b: Tensor, g: Tensor) -> None:
    a.sub_(g + 0.01 * a.sign(), alpha=0.1)
    b.copy_(0.9 * b + 0.1 * a)


def averaged_or_skipped(a: Tensor, b: Tensor, g: Tensor) -> None:
    a.copy_(torch.where(g.isfinite(), a - 0.1 * (g + 0.01 * a.sign()), a))
    b.lerp_(a, 0.1)


def followed(a: Tensor, b: Tensor, g: Tensor) -> None:
    a.sub_(g)
    b.copy_(a)


def decayed_into_momentum(a: Tensor, b: Tensor, g: Tensor) -> None:
    b.mul_(0.9).add_(g + 0.01 * a)
    a.sub_(b, alpha=0.1)


def cached_square(a: Tensor, b: Tensor, g: Tensor) -> None:
    a.sub_(g / b.sqrt())
    b.copy_(a * a)


@pytest.mark.parametrize(
    "step, expected",
    [
        (shifted, "a b"),
        (shifted_slow, "a b"),
        (shifted_fast, ""),
        (rotated, "a b c"),
        (swapped, ""),
        (slow_and_fast, "a b"),
        (averaged, "a b"),
        (averaged_with_signs, "a b"),
        (averaged_or_skipped, "a b"),
        (followed, "a b"),
        (decayed_into_momentum, "a"),
        (cached_square, "a"),
    ],
    ids=named,
)
@pytest.mark.quick("shifted_*", "rotated-*", "averaged-*", "averaged_or*", "followed-*", "cached*")
def test_systems(step: Callable[..., None], expected: str) -> None:
    found = planned(step, 4 if step is rotated else 3)
    assert [name for name, s in found.items() if s.compensated] == expected.split()
    assert not any(s.refused for s in found.values())


def test_a_cycle_says_with_what_and_how_much() -> None:
    found = planned(shifted_slow, 3)
    assert found["a"].recurrence == "x' = b" and found["b"].recurrence == "x' = 0.99*a + B"
    assert found["b"].reason.startswith("on a cycle with a: 1-a = 0.00501 is 1.3 u")
    assert "computed anew from a" in planned(cached_square, 3)["b"].reason


def test_side_coefficients_that_are_not_known() -> None:
    """A weight decay that SGD adds to the gradient stays in eft; what may be near one does not."""

    def towards(p: Tensor, z: Tensor, weight: Tensor) -> None:
        p.copy_(p + weight * z - weight * p)

    small = capture_optimizer(
        optim.SGD, lr=torch.tensor(0.1), weight_decay=5e-4, momentum=0.9, foreach=False
    ).rewritten()
    assert small.joined == []
    args = torch.ones(4, dtype=BF16), torch.ones(4, dtype=BF16), torch.tensor(0.5)
    joined = str(capture(towards, *args).rewritten().joined)
    assert "enters an update beside the carried path" in joined


def distance(found: Tensor, exact: Tensor, start: Tensor | float) -> float:
    return float((found.double() - exact).norm() / (exact - start).norm())


@pytest.mark.parametrize("step", [shifted, slow_and_fast, averaged], ids=named)
@pytest.mark.quick("slow_and_fast")
def test_systems_against_float64(step: Callable[..., None]) -> None:
    """Plain bf16 does not move at all from 1 by steps of 5e-4."""
    states = [torch.ones(64, dtype=BF16) for _ in range(2)]
    plain, exact = [x.clone() for x in states], [x.double() for x in states]
    compiled = collage_fx.compile(step)
    for _ in range(200):
        g = (torch.rand(64) * 1e-3).to(BF16)
        compiled(*states, g)
        step(*plain, g)
        step(*exact, g.double())
    for x, p, e in zip(states, plain, exact, strict=True):
        assert distance(collage_fx.value(x), e, 1.0) < 5e-3
        assert distance(p, e, 1.0) > 0.9


def test_a_value_taken_over_brings_no_warning() -> None:
    """The low word of what is taken over takes the place of what was there before."""
    p, z, g = torch.ones(8, dtype=BF16), torch.ones(8, dtype=BF16), torch.full((8,), 1e-3).to(BF16)
    step = collage_fx.compile(lambda p, g: p.sub_(g))
    take_over = collage_fx.compile(followed)
    step(p, g)
    take_over(z, p, g)
    assert torch.allclose(1 - collage_fx.value(p), torch.full((8,), 1e-3).double(), rtol=0.01)
    step(p, g)
    assert torch.allclose(1 - collage_fx.value(p), torch.full((8,), 2e-3).double(), rtol=0.01)


def adamax(dtype: torch.dtype, **options: Any) -> tuple[Tensor, Tensor]:
    """Return the parameter and its exp_inf after 300 steps of shrinking gradients."""
    generator = torch.Generator().manual_seed(0)
    p = torch.nn.Parameter(torch.randn(256, generator=generator).to(BF16).to(dtype))
    optimizer = optim.Adamax([p], lr=1e-3)
    step = collage_fx.compile(optimizer, **options) if options else optimizer.step
    for t in range(300):
        scale = 1.0 if t < 20 else 0.1
        p.grad = (scale * torch.randn(256, generator=generator)).to(BF16).to(dtype)
        step()
    return collage_fx.value(p), collage_fx.value(optimizer.state[p]["exp_inf"])


@pytest.mark.slow
def test_adamax_against_float64() -> None:
    start = torch.randn(256, generator=torch.Generator().manual_seed(0)).to(BF16).double()
    exact, exact_inf = adamax(torch.float64)
    plain, plain_inf = adamax(BF16)
    found, found_inf = adamax(BF16, level="auto")
    assert distance(plain_inf, exact_inf, 0.0) > 0.2 > 1e-3 > distance(found_inf, exact_inf, 0.0)
    assert distance(plain, exact, start) > 0.5 > 0.03 > distance(found, exact, start)
