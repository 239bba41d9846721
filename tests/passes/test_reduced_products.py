"""Products in a row that the result of a reduction enters are rounded once.

That is unless the step stores, casts, compares or clamps them, and may rely on their roundings.

For passes.frontend.reductions.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphs import capture
from recorded_steps import Each
from torch import Tensor

import collage_fx
from collage_fx.passes.frontend import reductions

BF16, F64 = torch.bfloat16, torch.float64
aten = torch.ops.aten
SHAPE = (8, 16)


def stored(
    each: Callable[..., None], *names: str, steps: int = 1, **options: Any
) -> tuple[list[Tensor], Tensor]:
    """Return a parameter's states after steps in Dynamo graphs, and its gradient in each."""
    g = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).to(BF16)
    p = torch.nn.Parameter(torch.ones(SHAPE, dtype=BF16))
    p.grad = g.clone()
    optimizer = Each([p], each)
    optimizer.state[p] |= {name: torch.zeros(SHAPE, dtype=BF16) for name in names}
    step = collage_fx.compile(optimizer, **options)
    for _ in range(steps):
        step()
    return [optimizer.state[p][name] for name in names], g


def clipped(x: Tensor, g: Tensor) -> Tensor:
    """Return four products in a row, none of them exact in 16 bits."""
    rows = g.abs().mean(1, keepdim=True)
    columns = g.abs().mean(0, keepdim=True)
    return rows * columns * g / (g.norm() + 1) * 0.3


def scaled(x: Tensor, g: Tensor) -> Tensor:
    """Return products of a tensor and one number."""
    return g * g.norm() * g * 0.3


def normed(x: Tensor, g: Tensor) -> Tensor:
    """Return products of which a norm is clamped, as in factored optimizers."""
    u = g * g.abs().mean(0, keepdim=True) * g.abs().mean(1, keepdim=True)
    return u / (u.norm() / 800).clamp(min=1) * 0.3


@pytest.mark.parametrize("of", [clipped, scaled, normed])
@pytest.mark.parametrize("options", [{"storage": "mcf2"}, {}], ids=["eft", "wide"])
@pytest.mark.quick("eft-clipped", "wide-scaled")
def test_a_chain_of_products_is_rounded_once(of: Any, options: dict[str, Any]) -> None:
    def each(p: Tensor, g: Tensor, state: Any) -> None:
        state["u"].copy_(of(p, g))
        p.sub_(state["u"], alpha=1e-3)

    def wrong(**options: Any) -> int:
        (u,), g = stored(each, "u", **options)
        return int((u != of(g, g.to(F64)).to(BF16)).sum())

    assert wrong(**options) <= 1  # a tie that fp32 breaks otherwise
    assert wrong(storage="mcf2", without=("reductions",)) > 30


def test_what_a_sum_of_products_loses_can_be_computed() -> None:
    """A sum compensated by hand: fp32 values of 16-bit tensors would make its residual zero."""

    def each(p: Tensor, g: Tensor, state: Any) -> None:
        a, b = 8 * (g.norm() * g), g.norm() * g * g
        state["a"].copy_(a)
        state["b"].copy_(b)
        high = a + b
        part = high - a
        low = (a - (high - part)) + (b - part)
        state["high"].copy_(high)
        state["low"].copy_(low)
        p.sub_(g, alpha=1e-3)

    (a, b, high, low), _ = stored(each, "a", "b", "high", "low")
    assert torch.equal(high.double() + low.double(), a.double() + b.double())
    assert low.count_nonzero() > 30


@pytest.mark.parametrize(
    "largest",
    [
        lambda x: x.amax(),
        lambda x: x.amax(1, keepdim=True).float(),  # a quotient in fp32, which no rounding mends
        lambda x: torch._foreach_norm([x], float("inf"))[0],
        lambda x: (x * x).amax().sqrt(),
        lambda x: x.view(-1).sort()[0][-1],
        lambda x: x.clamp(min=1).float().max(),
    ],
)
@pytest.mark.quick("<lambda>[024]")
def test_no_product_passes_its_largest(largest: Callable[[Tensor], Tensor]) -> None:
    def each(p: Tensor, g: Tensor, state: Any) -> None:
        x = g.norm() * g.abs() * 0.3
        state["u"].copy_((1 - x / largest(x)).sqrt())
        p.sub_(g, alpha=1e-3)

    (u,), _ = stored(each, "u")
    assert not u.isnan().any()
    assert (u == 0).any()


def split(x: Tensor, n: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    return x, g.float() * n.float() - x.float()


def split_by_promotion(x: Tensor, n: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    return x, g.float() * n.float() - x


def fed_back(x: Tensor, n: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Return a message and what it has lost."""
    whole = g.float() * n.float()
    message = (whole / (0.7 * n)).to(g.dtype)
    return message, whole - message.float() * (0.7 * n)


@pytest.mark.parametrize("storage", ["mcf2", "auto"])
@pytest.mark.parametrize("words", [split, split_by_promotion, fed_back])
@pytest.mark.quick("split-auto", "fed_back-mcf2", "split_by_promotion-auto")
def test_what_a_product_that_is_stored_has_lost_can_be_computed(words: Any, storage: str) -> None:
    def each(p: Tensor, g: Tensor, state: Any) -> None:
        n = g.norm()
        high, low = words(g * n, n, g)
        state["high"].copy_(high)
        state["low"].copy_(low.to(g.dtype))
        p.sub_(g, alpha=1e-3)

    (high, low), g = stored(each, "high", "low", storage=storage)
    n = g.double().norm()
    exact = g.double() * n
    found = high.double() * (0.7 * n if words is fed_back else 1) + low.double()
    assert (found - exact).norm() / exact.norm() < 1e-4
    assert low.count_nonzero() > 100


def test_products_that_are_stored_are_what_the_step_computes_with() -> None:
    def each(p: Tensor, g: Tensor, state: Any) -> None:
        x = g.norm() * g
        state["x"].copy_(x)
        state["y"].copy_(0.3 * x)
        p.sub_(g, alpha=1e-3)

    (x, y), _ = stored(each, "x", "y")
    assert torch.equal(y, 0.3 * x)


def test_products_that_are_stored_are_what_the_next_step_sees() -> None:
    def each(p: Tensor, g: Tensor, state: Any) -> None:
        x = g.norm() * g
        state["difference"].copy_(x.float() - state["before"].float())
        state["before"].copy_(x)
        p.sub_(g, alpha=1e-3)

    (difference, _), _ = stored(each, "difference", "before", steps=2)
    assert not difference.any()


@pytest.mark.parametrize("arithmetic", ["eft", "wide"])
def test_a_sum_is_no_less_than_what_it_is_of(arithmetic: str) -> None:
    def each(p: Tensor, g: Tensor, state: Any) -> None:
        x = g.norm() * g.abs() * 0.3 * state["mask"]
        state["u"].copy_((x.sum(0) - x[0]).sqrt().expand(SHAPE))
        state["mask"].copy_(torch.eye(*SHAPE)[:, :1].expand(SHAPE))
        p.sub_(g, alpha=1e-3)

    (u, _), _ = stored(each, "u", "mask", steps=2, arithmetic=arithmetic)
    assert not u.any()  # and none of it is NaN


def masked(**options: Any) -> Tensor:
    """Return the root of a sum less the one element that it is of; a product computed twice."""

    def each(p: Tensor, g: Tensor, state: Any) -> None:
        x, mask = g.norm() * g.abs() * 0.3, state["mask"]
        state["u"].copy_(((x * mask).sum() - x * mask).sqrt())
        p.sub_(g, alpha=1e-3)

    g = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).to(BF16)
    p = torch.nn.Parameter(torch.ones(SHAPE, dtype=BF16))
    p.grad, optimizer = g, Each([p], each)
    states = optimizer.state[p] = {"u": torch.zeros_like(g), "mask": torch.zeros_like(g)}
    step, found = collage_fx.compile(optimizer, **options), []
    for k in range(4):
        states["mask"].zero_()[0, k] = 1.0
        step()
        found.append(states["u"][0, k].clone())
    return torch.stack(found)


@pytest.mark.parametrize("arithmetic", ["eft", "wide"])
@pytest.mark.quick("eft")
def test_nor_is_it_less_than_the_same_that_is_computed_again(
    arithmetic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not masked(arithmetic=arithmetic).any()
    unrounded = reductions._Widening._unrounded
    monkeypatch.setattr(
        reductions._Widening,
        "_reads_unrounded",
        lambda self, node, operand: unrounded(self, operand) is not operand,
    )
    assert masked(arithmetic=arithmetic).any()


def test_a_state_that_is_scaled_by_a_reduction_is_added_with_its_low_word() -> None:
    def each(p: Tensor, g: Tensor, state: Any) -> None:
        if not state:
            state["r"] = torch.full((p.shape[0], 1), 1.0, dtype=p.dtype)
        r = state["r"].mul_(1 - 1e-3 * g.abs().mean(1, keepdim=True))
        p.copy_(p + (g - r) * 1e-2 * (g - r))

    def value(dtype: torch.dtype, **options: Any) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        p = torch.nn.Parameter(torch.ones(SHAPE, dtype=dtype))
        optimizer = Each([p], each)
        wanted = collage_fx.compile(optimizer, **options) if dtype == BF16 else optimizer.step
        for _ in range(20):
            p.grad = torch.randn(SHAPE, generator=generator).to(BF16).to(dtype)
            wanted()
        return collage_fx.value(p).detach().double()

    exact = value(F64)

    def off(**options: Any) -> float:
        return float(
            (value(BF16, arithmetic="wide", **options) - exact).norm() / (exact - 1).norm()
        )

    assert off() < 1e-4 < 2e-4 < off(without=("reductions",))


def test_roundings_that_nobody_reads_are_left_out() -> None:
    def each(p: Tensor, g: Tensor, state: Any) -> None:
        p.sub_(g * g.norm() / 3, alpha=1e-3)

    p = torch.nn.Parameter(torch.ones(SHAPE, dtype=BF16))
    p.grad = torch.ones_like(p)
    canonical = capture(Each([p], each).step).program().canonical
    assert canonical is not None
    kept = {aten.copy_.default, "output"}
    assert not [n for n in canonical.graph.nodes if not n.users and n.target not in kept]


def test_comparisons_of_products_are_of_what_pytorch_compares() -> None:
    def each(p: Tensor, g: Tensor, state: Any) -> None:
        x = g.norm() * g
        state["u"].copy_((x == x.max()).to(g.dtype))
        p.sub_(g, alpha=1e-3)

    (u,), _ = stored(each, "u")
    assert u.sum() >= 1
