"""Steps that would lose updates without a word: each is compensated, or named in one warning.

For compilation.uncompensated.
"""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tensors import bf16, with_grads
from torch import Tensor, nn

import collage_fx
from collage_fx.errors import CollageWarning


@pytest.mark.slow
def test_many_optimizers_of_a_class_in_one_process() -> None:
    """Dynamo counts their graphs together and gives up after 8 by default."""
    for _ in range(10):
        (p,) = with_grads([bf16(4)])
        collage_fx.compile(torch.optim.SGD([p]))()
        assert collage_fx.residuals(p)


def test_tensors_made_anew_at_each_call_keep_one_residual() -> None:
    p = nn.Parameter(torch.ones(6).bfloat16())
    step = collage_fx.compile(lambda p, g: p.sub_(g, alpha=1e-3))
    for _ in range(20):
        step(p.data, torch.full((6,), 0.1).bfloat16())
    moved = 1 - collage_fx.value(p)
    assert torch.allclose(moved, torch.full((6,), 20 * 1e-4).double(), rtol=0.01)


def test_differentiated_graph_is_named() -> None:
    def step(w: Tensor, m: Tensor) -> Tensor:
        m.mul_(0.999).add_(w.detach(), alpha=0.001)
        return (w * w).sum()

    with pytest.warns(CollageWarning, match="differentiated"):
        torch.compile(step, backend="collage")(bf16(4), torch.zeros(4).bfloat16())
    w, m = torch.ones(4).bfloat16().requires_grad_(), torch.zeros(4).bfloat16()
    plain = m.clone()
    compiled = collage_fx.compile(step)
    for _ in range(120):
        compiled(w, m).backward()
        step(w, plain)
    assert torch.equal(w.grad, 240 * torch.ones(4).bfloat16())
    exact = torch.full((4,), 1 - 0.999**120).double()
    assert torch.allclose(collage_fx.value(m), exact, rtol=1e-3)
    assert not torch.allclose(plain.double(), exact, rtol=1e-3)


class Momentum(torch.optim.Optimizer):
    """An optimizer that a user wrote; Dynamo passes its states as arguments."""

    def __init__(self, params: list[Tensor]) -> None:
        super().__init__(params, {"lr": 1e-3})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["m"] = torch.zeros_like(p)
                state["m"].mul_(0.99).add_(p.grad)
                p.sub_(state["m"], alpha=group["lr"])


def test_states_of_an_own_optimizer_go_by_their_names() -> None:
    found = collage_fx.explain(Momentum(with_grads([bf16(4)])))
    names = {state.name for state in found.plan if state.compensated}
    assert names == {"param_groups[0].params[0]", "m of param_groups[0].params[0]"}


def test_value_ignores_a_residual_that_no_longer_belongs() -> None:
    (p,) = with_grads([bf16(4)])
    step = collage_fx.compile(torch.optim.SGD([p]))
    step()
    assert collage_fx.residuals(p)
    with torch.no_grad():
        p.zero_()
    assert not collage_fx.residuals(p) and not bool(collage_fx.value(p).any())


def test_reduction_between_two_updates_of_a_state() -> None:
    def step(x: Tensor, g: Tensor) -> None:
        x.sub_(1e-3 * g)
        x.div_(x.norm(dim=-1, keepdim=True))

    x, g = torch.randn(16, 32).bfloat16(), torch.randn(16, 32).bfloat16()
    exact = x.double()
    compiled = collage_fx.compile(step, level="all")
    for _ in range(30):
        compiled(x, g)
        step(exact, g.double())
    assert float((collage_fx.value(x) - exact).norm() / exact.norm()) < 2e-4


def test_factor_computed_in_the_step_is_not_rounded_to_one() -> None:
    def step(x: Tensor, g: Tensor) -> None:
        x.mul_(torch.exp(-1e-3 * g))

    x, g = torch.ones(8).bfloat16(), torch.full((8,), 0.5).bfloat16()
    exact = x.double()
    compiled = collage_fx.compile(step)
    for _ in range(30):
        compiled(x, g)
        step(exact, g.double())
    assert torch.allclose(1 - collage_fx.value(x), 1 - exact, rtol=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["Adagrad", "AdamW", "SGD"])
@pytest.mark.quick("Adagrad-dtype0", "SGD-dtype0")
def test_steps_before_the_first_gradient(name: str, dtype: torch.dtype) -> None:
    """Nothing is said of them; of those that follow it is, where it is to be said: the control."""
    p = nn.Parameter(torch.ones(4, dtype=dtype))
    step = collage_fx.compile(getattr(torch.optim, name)([p], lr=1e-3))
    for _ in range(3):
        step()
    p.grad = torch.ones_like(p)
    plain = dtype is torch.float32
    said: Any = pytest.warns(CollageWarning, match="nothing needed") if plain else nullcontext()
    with said:
        for _ in range(3):
            step()
    assert bool(collage_fx.residuals(p)) is not plain
