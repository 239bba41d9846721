"""Values that a graph cannot hand over whole: those parts of a step are recorded.

For passes.analysis.escape.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from recorded_steps import LR, Each
from torch import Tensor
from torch.optim import Optimizer

import collage_fx


def over_a_graph_break(p: Tensor, g: Tensor, state: Any) -> None:
    new = p - LR * g
    torch._dynamo.graph_break()
    p.copy_(new)


def state_made_as_a_copy(p: Tensor, g: Tensor, state: Any) -> None:
    if not state:
        state["z"] = p.detach().clone()
    state["z"].sub_(g, alpha=LR)
    p.lerp_(state["z"], 0.5)


def replaced_state(p: Tensor, g: Tensor, state: Any) -> None:
    if not state:
        state["v"] = torch.zeros_like(p)
    state["v"] = 0.999 * state["v"] + 0.001 * g
    p.sub_(state["v"], alpha=LR)


def distance_of_an_untouched_parameter(p: Tensor, g: Tensor, state: Any) -> None:
    if not state:
        state["start"] = p.clone()
    distance = (state["start"] - p).norm()
    torch._dynamo.graph_break()
    p.sub_(g * (LR + 0.5 * distance))


def summation_of_its_own(p: Tensor, g: Tensor, state: Any) -> None:
    """Kahan's, with the gradient as scratch memory."""
    if not state:
        state["k"] = torch.zeros_like(p)
    state["k"].add_(g, alpha=-LR)
    g.copy_(p.detach())
    p.add_(state["k"])
    state["k"].add_(g.sub_(p))


def states_that_begin_equal(p: Tensor, g: Tensor, state: Any) -> None:
    """Stock torch.compile makes one tensor of them, which is the gradient."""
    if not state:
        state["m"] = [torch.zeros_like(p) for _ in range(2)]
    for beta, m in zip((0.9, 0.99), state["m"], strict=True):
        m.mul_(beta).add_(g)
        p.sub_(m, alpha=LR)


def in_fp32_over_a_graph_break(p: Tensor, g: Tensor, state: Any) -> None:
    new = p.to(torch.float64 if p.dtype == torch.float64 else torch.float32) - LR * g
    torch._dynamo.graph_break()
    p.copy_(new.to(p.dtype))


def pulled_to_an_anchor(p: Tensor, g: Tensor, state: Any) -> None:
    """Pull to an anchor that is made, or made anew, long after the verdict on the parameter."""
    state["t"] = state.get("t", -1) + 1
    if state["t"] % 3 == 0:
        state["anchor"] = p.clone()
    p.sub_(p - state["anchor"], alpha=0.3)
    p.sub_(g, alpha=LR)


def computed_anew(p: Tensor, g: Tensor, state: Any) -> None:
    if not state:
        state["start"], state["sum"] = p.clone(), torch.zeros_like(p)
    state["sum"].add_(g, alpha=LR)
    p.copy_(state["start"] - state["sum"])


def turned_in_place(p: Tensor, g: Tensor, state: Any) -> None:
    if not state:
        state["m"] = torch.zeros_like(p)
    state["m"].unsqueeze_(0)
    state["m"].mul_(0.5).add_(g)
    state["m"].squeeze_(0)
    p.sub_(state["m"], alpha=LR)


@torch.compile(backend="aot_eager")
def compiled_by_itself(p: Tensor, g: Tensor) -> None:
    p.sub_(g, alpha=LR)


def parts_that_the_step_compiles(p: Tensor, g: Tensor, state: Any) -> None:
    torch._dynamo.graph_break()
    compiled_by_itself(p, g)


def moved(update: Any, dtype: torch.dtype, *, compensated: bool, steps: int = 8) -> float:
    """Return how far one parameter has moved, its residual included."""
    torch.compiler.reset()
    p = torch.ones(4, dtype=dtype, requires_grad=True)
    optimizer = Each([p], update)
    step = collage_fx.compile(optimizer, storage="mcf2") if compensated else optimizer.step
    for _ in range(steps):
        p.grad = torch.ones_like(p)
        step()
    if compensated:
        (state,) = (s for s in collage_fx.report(step).states if s.name.startswith("param"))
        assert state.compensated and not state.unaccounted
    return 1 - float(collage_fx.value(p)[0])


@pytest.mark.parametrize(
    "update",
    [
        over_a_graph_break,
        state_made_as_a_copy,
        replaced_state,
        distance_of_an_untouched_parameter,
        summation_of_its_own,
        parts_that_the_step_compiles,
        states_that_begin_equal,
        in_fp32_over_a_graph_break,
        pulled_to_an_anchor,
        computed_anew,
        turned_in_place,
    ],
)
@pytest.mark.quick(
    "over_a_graph_break",
    "state_made_as_a_copy",
    "replaced_state",
    "parts_that_the_step_compiles",
    "turned_in_place",
)
def test_no_update_is_lost_and_none_counts_twice(update: Any) -> None:
    exact = moved(update, torch.float64, compensated=False)
    assert math.isclose(moved(update, torch.bfloat16, compensated=True), exact, rel_tol=0.01)
    assert not math.isclose(moved(update, torch.bfloat16, compensated=False), exact, rel_tol=0.5)


AVERAGES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "alpha": lambda p, s: p.mul_(0.75).add_(s, alpha=0.25),
    "product": lambda p, s: p.mul_(0.75).add_(s * 0.25),
    "addcmul": lambda p, s: p.mul_(0.75).addcmul_(s, torch.full_like(s, 0.25)),
    "addcdiv": lambda p, s: p.mul_(0.75).addcdiv_(s, torch.full_like(s, 4)),
    "quotient": lambda p, s: p.mul_(0.75).add_(s / 4),
    "difference": lambda p, s: p.mul_(0.75).sub_(-0.25 * s),
    "new_sum": lambda p, s: p.copy_(s * 0.25 + p * 0.75),
    "view": lambda p, s: p.mul_(0.75).add_((s * 0.25).view(4, 1).t().view(4)),
    "conversion": lambda p, s: p.copy_((p.float() * 0.75 + s.float() * 0.25).to(p.dtype)),
    "foreach": lambda p, s: _foreach_average(p, s),
    "selection": lambda p, s: p.mul_(0.75).add_(torch.where(s > 0, s, 0) * 0.25),
}
"""Ways to move weights towards slow ones, whose low word has weight in all of them."""


def _foreach_average(p: Tensor, s: Tensor) -> None:
    torch._foreach_mul_([p], 0.75)
    torch._foreach_add_([p], [s], alpha=0.25)


class Averaged(Optimizer):
    """Each parameter goes towards a state that another graph writes, in its own way."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        params = self.param_groups[0]["params"]
        for p in params:
            if not self.state[p]:
                self.state[p]["slow"] = p.clone()
            self.state[p]["slow"].sub_(p.grad, alpha=LR)
        torch._dynamo.graph_break()
        for p, average in zip(params, AVERAGES.values(), strict=True):
            average(p, self.state[p]["slow"])


def averaged(
    dtype: torch.dtype, compile: Callable[[Optimizer], Callable[[], Any]]
) -> tuple[Tensor, Callable[[], Any]]:
    """Return how far each parameter has moved, and the step."""
    torch.compiler.reset()
    params = [torch.ones(4, dtype=dtype, requires_grad=True) for _ in AVERAGES]
    for p in params:
        p.grad = torch.ones_like(p)
    step = compile(Averaged(params, {}))
    for _ in range(12):
        step()
    return torch.stack([1 - collage_fx.value(p)[0] for p in params]), step


def test_the_low_word_of_a_state_that_is_only_read_enters_however_it_is_scaled() -> None:
    exact, _ = averaged(torch.float64, lambda optimizer: optimizer.step)
    plain, _ = averaged(torch.bfloat16, lambda optimizer: optimizer.step)
    ours, step = averaged(torch.bfloat16, collage_fx.compile)
    assert torch.allclose(ours, exact, rtol=0.01)
    assert not torch.isclose(plain, exact, rtol=0.5).any()
    assert all(s.graph for s in collage_fx.report(step).states if s.name.startswith("slow"))


def test_functions_that_read_what_another_one_writes() -> None:
    def slowly(slow: Tensor, g: Tensor) -> None:
        slow.sub_(g, alpha=LR)

    def towards(p: Tensor, slow: Tensor) -> None:
        p.mul_(0.75).add_(slow, alpha=0.25)

    def moved(dtype: torch.dtype, compile: Callable[[Any], Any]) -> Tensor:
        p, slow, g = (torch.ones(4, dtype=dtype) for _ in range(3))
        first, second = compile(towards), compile(slowly)
        for _ in range(12):
            first(p, slow)
            second(slow, g)
        return 1 - collage_fx.value(p)

    exact = moved(torch.float64, lambda function: function)
    ours = moved(
        torch.bfloat16, lambda function: collage_fx.compile(function, level="all", storage="mcf2")
    )
    assert torch.allclose(ours, exact, rtol=0.01)
    assert not torch.allclose(moved(torch.bfloat16, lambda f: f), exact, rtol=0.5)


class Split(Optimizer):
    """AdamW whose moments and parameters are updated in two graphs."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        (p,) = self.param_groups[0]["params"]
        state = self.state[p]
        if not state:
            state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
        state["m"].lerp_(p.grad, 0.01)
        state["v"].mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
        torch._dynamo.graph_break()
        p.mul_(1 - 1e-5).addcdiv_(state["m"], state["v"].sqrt().add_(1e-8), value=-LR)


def test_moments_whose_low_word_has_no_weight_leave_the_parameter_in_its_graph() -> None:
    p = torch.ones(4).bfloat16().requires_grad_()
    p.grad = torch.ones_like(p)
    step = collage_fx.compile(Split([p], {}), level="all", storage="mcf2")
    for _ in range(5):
        step()
    states = collage_fx.report(step).states
    assert len(states) == 3
    assert all(s.graph == 4 and s.compensated for s in states)


def test_report_says_where_dynamo_cuts_a_step_that_is_recorded() -> None:
    torch.compiler.reset()
    p = torch.ones(4).bfloat16().requires_grad_()
    step = collage_fx.compile(Each([p], over_a_graph_break), storage="mcf2")
    p.grad = torch.ones_like(p)
    step()
    step()
    assert f"`torch._dynamo.graph_break()`, {__file__}" in str(collage_fx.report(step))
