"""_foreach operations that the graphs of PyTorch's own optimizers do not have.

For passes.frontend.decompose and passes.rewrite.op_schema.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import collage_fx

Lists = Callable[[list[Tensor]], list[Tensor]]


@pytest.mark.parametrize(
    "function",
    [
        lambda gs: torch._foreach_maximum(gs, -1.0),
        lambda gs: torch._foreach_minimum(gs, 0.5),
        lambda gs: torch._foreach_clamp_min(gs, -1.0),
        lambda gs: torch._foreach_div(gs, torch._foreach_norm(gs)),
        torch._foreach_sigmoid,  # which is in the graph as it stands
    ],
    ids=["maximum", "minimum", "clamp_min", "norm", "sigmoid"],
)
@pytest.mark.quick("maximum", "norm")
def test_update_by_a_list_operation(function: Lists) -> None:
    def step(params: list[Tensor], gs: list[Tensor]) -> None:
        torch._foreach_sub_(params, function(gs), alpha=1e-3)

    grads = [torch.randn(n).bfloat16() for n in (4, 6)]
    params = [torch.ones(n).bfloat16() for n in (4, 6)]
    exact = [p.double() for p in params]
    compiled = collage_fx.compile(step, storage="mcf2")
    for _ in range(4):
        compiled(params, grads)
        step(exact, [g.double() for g in grads])
    for p, e in zip(params, exact, strict=True):
        assert torch.allclose(collage_fx.value(p), e, rtol=0, atol=4e-5)
