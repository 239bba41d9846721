"""An average of states that are near each other: what it moves is in their low words.

For passes.analysis.escape.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

import collage_fx


class Pulled(Optimizer):
    """Schedule-free: the parameter goes towards a state and back, in graphs that only read it."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        (p,) = self.param_groups[0]["params"]
        state = self.state[p]
        if not state:
            state["z"] = p.clone()
        p.lerp_(state["z"], 0.1)
        torch._dynamo.graph_break()
        p.lerp_(state["z"], 1 - 1 / 0.9)
        state["z"].sub_(p.grad, alpha=1e-3)
        p.lerp_(state["z"], 0.05)


def test_an_average_of_weights_that_are_near_each_other() -> None:
    def moved(dtype: torch.dtype, compile: Callable[[Optimizer], Callable[[], Any]]) -> Tensor:
        torch.manual_seed(0)
        p = torch.randn(64).bfloat16().to(dtype).requires_grad_()
        p.grad = torch.randn(64).bfloat16().to(dtype)
        first = p.detach().double().clone()
        step = compile(Pulled([p], {}))
        for _ in range(20):
            step()
        return collage_fx.value(p) - first

    exact = moved(torch.float64, lambda optimizer: optimizer.step)
    plain = moved(torch.bfloat16, lambda optimizer: optimizer.step)
    ours = moved(torch.bfloat16, collage_fx.compile)
    assert (ours - exact).norm() < 0.05 * exact.norm() < 0.1 * (plain - exact).norm()


def add_move(a: Tensor, b: Tensor, g: Tensor) -> None:
    old = a.clone()
    a.sub_(g)
    b.mul_(0.9).add_(a - old)


def test_a_state_that_averages_the_moves_of_another() -> None:
    """The rest of a clone of an old value depends on torch; it has the low word either way."""
    states = [torch.ones(64).bfloat16(), torch.zeros(64).bfloat16()]
    plain, exact = [x.clone() for x in states], [x.double() for x in states]
    compiled = collage_fx.compile(add_move, level="all", storage="mcf2")
    for _ in range(50):
        g = (torch.rand(64) * 1e-3).to(torch.bfloat16)
        compiled(*states, g)
        add_move(*plain, g)
        add_move(*exact, g.double())
    assert (collage_fx.value(states[1]) - exact[1]).norm() < 5e-3 * exact[1].norm()
    assert (plain[1].double() - exact[1]).norm() > 0.9 * exact[1].norm()
