"""fp32 states that take products and quotients of 16-bit tensors: rounded once, as in PyTorch.

For passes.rewrite.roundings.
"""

from collections.abc import Callable

import pytest
import torch
from interpreter import without_compiler
from recorded_steps import Each
from torch import Tensor, nn

import collage_fx
from collage_fx.compilation import aot

Update = Callable[[Tensor, Tensor, Tensor], object]
UPDATES: dict[str, Update] = {
    "product": lambda v, u, w: v.mul_(0.9).addcmul_(u, w, value=0.1),
    "quotient": lambda v, u, w: v.mul_(0.9).addcdiv_(u, w, value=0.1),
    "of other dtypes": lambda v, u, w: v.mul_(0.9).addcmul_(u, w.float(), value=0.1),
}


def average(update: Update, param: torch.dtype, state: torch.dtype, *, compiled: bool) -> Tensor:
    """Return an average of 16-bit temporaries after some steps."""

    def step(p: Tensor, g: Tensor, held: dict[str, Tensor]) -> None:
        if not held:
            held["v"] = torch.ones(p.shape, dtype=state)
        u, w = g.to(torch.bfloat16), g.roll(1, 0).to(torch.bfloat16)
        if state is torch.float64:
            u, w = u.to(state), w.to(state)
        update(held["v"], u, w)
        p.sub_(held["v"].to(p.dtype), alpha=1e-4)

    torch.compiler.reset()
    p = nn.Parameter(torch.ones(17, 5, dtype=param))
    optimizer = Each([p], step)
    if compiled:
        collage_fx.compile_(optimizer)
    draw = torch.Generator().manual_seed(0)
    with without_compiler():
        for _ in range(4):
            p.grad = torch.randn(17, 5, generator=draw).abs().bfloat16().to(param)
            optimizer.step()
    return optimizer.state[p]["v"]


@pytest.mark.filterwarnings("ignore:.*nothing needed compensation")
@pytest.mark.parametrize("param", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", UPDATES)
@pytest.mark.quick("product-param1")
def test_a_product_is_rounded_with_the_sum(
    name: str, param: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control has the graph as Dynamo makes it, which rounds to 16 bits first.

    Not where residuals are: what is computed there is whole.
    """

    def off(*, compiled: bool) -> float:
        found = average(UPDATES[name], param, torch.float32, compiled=compiled)
        return float(((found - exact) / exact).abs().max())

    exact = average(UPDATES[name], torch.float64, torch.float64, compiled=False)
    assert off(compiled=False) < 1e-6 > off(compiled=True)
    monkeypatch.setattr(aot, "widen_products", lambda gm: None)
    rounds = param is torch.float32 and name != "of other dtypes"
    assert (off(compiled=True) > 1e-4) == rounds
