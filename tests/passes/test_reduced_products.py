"""Products that the result of a reduction enters are rounded where they are stored or added."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from recorded_steps import Each
from torch import Tensor

import collage_fx

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
SHAPE = (8, 16)


def stored(each: Callable[..., None], *names: str, **options: Any) -> tuple[list[Tensor], Tensor]:
    """Return states of a parameter after a step of Dynamo's, and its gradient."""
    g = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).to(BF16)
    p = torch.nn.Parameter(torch.ones(SHAPE, dtype=BF16))
    p.grad = g.clone()
    optimizer = Each([p], each)
    optimizer.state[p] |= {name: torch.zeros(SHAPE, dtype=BF16) for name in names}
    collage_fx.compile(optimizer, **options)()
    return [optimizer.state[p][name] for name in names], g


def clipped(x: Tensor, g: Tensor) -> Tensor:
    """Return four products in a row, none of them exact in 16 bits."""
    rows = g.abs().mean(1, keepdim=True)
    columns = g.abs().mean(0, keepdim=True)
    return rows * columns * g / (g.norm() + 1) * 0.3


def scaled(x: Tensor, g: Tensor) -> Tensor:
    """Return products of a tensor and one number."""
    return g * g.norm() * g * 0.3


@pytest.mark.parametrize("of", [clipped, scaled])
@pytest.mark.parametrize("options", [{}, {"arithmetic": "wide"}], ids=["eft", "wide"])
def test_a_chain_of_products_is_rounded_once(of: Any, options: dict[str, Any]) -> None:
    def each(p: Tensor, g: Tensor, state: Any) -> None:
        state["u"].copy_(of(p, g))
        p.sub_(state["u"], alpha=1e-3)

    def wrong(**options: Any) -> int:
        (u,), g = stored(each, "u", **options)
        return int((u != of(g, g.to(F64)).to(BF16)).sum())

    assert wrong(**options) <= 1  # a tie that fp32 breaks otherwise
    assert wrong(without=("reductions",)) > 30


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
        lambda x: (x * x).amax().sqrt(),
        lambda x: x.view(-1).sort()[0][-1],
        lambda x: x.clamp(min=1).float().max(),
    ],
)
def test_no_product_passes_its_largest(largest: Callable[[Tensor], Tensor]) -> None:
    def each(p: Tensor, g: Tensor, state: Any) -> None:
        x = g.norm() * g.abs() * 0.3
        state["u"].copy_((1 - x / largest(x)).sqrt())
        p.sub_(g, alpha=1e-3)

    (u,), _ = stored(each, "u")
    assert not u.isnan().any()
    assert (u == 0).any()


def test_comparisons_of_products_are_of_what_pytorch_compares() -> None:
    def each(p: Tensor, g: Tensor, state: Any) -> None:
        x = g.norm() * g
        state["u"].copy_((x == x.max()).to(g.dtype))
        p.sub_(g, alpha=1e-3)

    (u,), _ = stored(each, "u")
    assert u.sum() >= 1
