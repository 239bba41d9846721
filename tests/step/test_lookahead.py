"""A wrapper that now and then puts a slow copy in the parameter's place: one value, two states.

For passes.analysis.plan.
"""

from typing import Any

import pytest
import torch
from tensors import error
from torch import Tensor
from torch.optim import Optimizer

import collage_fx


class Sign(Optimizer):
    """Steps by signs of an average."""

    def __init__(self, params: list[Tensor]) -> None:
        super().__init__(params, {"lr": 1e-5})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            m = self.state[p].setdefault("m", torch.zeros_like(p))
            p.mul_(1 - 1e-6)
            p.sub_((0.9 * m + 0.1 * p.grad).sign(), alpha=self.param_groups[0]["lr"])
            m.lerp_(p.grad, 0.01)


class Slow(Optimizer):
    """Lets another optimizer step; every second time parameters become slow averages of them."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner, self.param_groups, self.t = inner, inner.param_groups, 0

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        params = self.param_groups[0]["params"]
        if not self.t:
            for p in params:
                self.state[p]["slow"] = p.detach().clone()
        self.inner.step()
        self.t += 1
        for p in params if self.t % 2 == 0 else ():
            slow = self.state[p]["slow"]
            slow.add_(p - slow, alpha=0.5)
            p.copy_(slow)


@pytest.mark.parametrize("level", ["auto", "light"])
def test_what_takes_over_a_settled_state_is_compensated_too(level: Any) -> None:
    begin = [torch.randn(9, 5, generator=torch.Generator().manual_seed(k)) for k in range(2)]

    def run(dtype: torch.dtype, *, compile_: bool) -> Tensor:
        params = [b.bfloat16().to(dtype).requires_grad_() for b in begin]
        optimizer = Slow(Sign(params))
        step = collage_fx.compile(optimizer, level=level) if compile_ else optimizer.step
        with torch.compiler.set_stance("force_eager"):
            for k in range(8):
                for i, p in enumerate(params):
                    g = torch.randn(9, 5, generator=torch.Generator().manual_seed(10 * k + i))
                    p.grad = g.to(dtype)
                step()
        return torch.cat([collage_fx.value(p).detach() for p in params])

    exact = run(torch.float64, compile_=False)
    way = error(torch.cat(begin).bfloat16().double(), exact)
    assert error(run(torch.bfloat16, compile_=True), exact) < 0.1 * way
    assert error(run(torch.bfloat16, compile_=False), exact) > 0.5 * way
