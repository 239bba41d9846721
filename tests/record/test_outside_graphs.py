"""Steps, or parts of steps, that are in no Dynamo graph. For record.steps and record.service."""

from collections import deque
from typing import Any

import pytest
import torch
from recorded_steps import Each
from tensors import error
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

import collage_fx
from collage_fx.errors import UnsupportedError


def stream(shapes: list[tuple[int, ...]], steps: int, dtype: torch.dtype) -> Any:
    """Return initial parameters and the gradients of each step."""
    made = torch.Generator().manual_seed(7)
    params = [torch.randn(s, generator=made).to(dtype) for s in shapes]
    grads = [[torch.randn(s, generator=made).to(dtype) for s in shapes] for _ in range(steps)]
    return params, grads


def final(make: Any, how: str, steps: int = 24, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Run an optimizer; return its full parameters in float64, and the report if there is one."""
    initial, grads = stream([(8, 4), (5,)], steps, dtype)
    to = torch.float64 if how == "exact" else dtype
    params = [p.to(to).clone().requires_grad_() for p in initial]
    optimizer = make(params)
    ours = how == "collage"  # without what makes graphs of steps that read numbers back
    step = collage_fx.compile(optimizer, without=("numbers",)) if ours else optimizer.step
    for each in grads:
        for p, g in zip(params, each, strict=True):
            p.grad = g.to(to)
        step()
    flat = torch.cat([collage_fx.value(p).flatten() for p in params])
    return flat, collage_fx.report(step) if ours else None


class Rebinding(Optimizer):
    """Puts new tensors in the place of its states, and writes through .data."""

    def __init__(self, params: ParamsT, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["m"] = torch.zeros_like(p)
                    state["v"] = torch.zeros_like(p)
                state["m"] = state["m"] * 0.9 + p.grad * 0.1
                state["v"] = 0.999 * state["v"] + p.grad.square() * 0.001
                float(p.grad.sum())  # what keeps Dynamo from compiling a part of the step
                p.data = p.data - group["lr"] * state["m"] / (state["v"].sqrt() + 1e-3)


class Views(Optimizer):
    """Updates rows through views, an fp32 copy, and select."""

    def __init__(self, params: ParamsT, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                float(p.grad.sum())
                p.view(-1)[::2].add_(p.grad.reshape(-1)[::2], alpha=-group["lr"])
                p.t().mul_(1 - 1e-5)
                wide = p.float()
                assert wide.dtype == torch.float32
                wide.sub_(p.grad.float(), alpha=group["lr"])
                p.copy_(torch.where(p.grad > 3, p, wide))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "make",
    [
        torch.optim.Adafactor,
        Rebinding,
        Views,
    ],
)
@pytest.mark.quick("Views-dtype0")
def test_step_outside_graphs_is_compensated(make: Any, dtype: torch.dtype) -> None:
    exact, _ = final(make, "exact", dtype=dtype)
    plain, _ = final(make, "plain", dtype=dtype)
    found, report = final(make, "collage", dtype=dtype)
    rounded = error(exact.to(dtype).double(), exact)
    assert error(found, exact) < rounded < error(plain, exact)
    params = [s for s in report.states if s.name.startswith("param")]
    assert params and all(s.compensated and s.joined and not s.unaccounted for s in params), report


def each(params: list[Tensor], update: Any) -> Optimizer:
    """One update by PyTorch operations, which no compiled graph does."""
    return Each(params, torch.compiler.disable(update))


def improves(update: Any, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Assert that an update is compensated; return the report."""
    exact, _ = final(lambda p: each(p, update), "exact", dtype=dtype)
    plain, _ = final(lambda p: each(p, update), "plain", dtype=dtype)
    found, report = final(lambda p: each(p, update), "collage", dtype=dtype)
    rounded = error(exact.to(dtype).double(), exact)
    assert error(found, exact) < rounded / 4 < error(plain, exact), report
    return report


def foreach_numbers(p: Tensor, g: Tensor, state: Any) -> None:
    if not state:
        state["v"] = torch.zeros_like(p)
        state["m"] = torch.zeros_like(p)
    v = [state["v"]]
    torch._foreach_lerp_([state["m"]], [g], 0.1)
    torch._foreach_mul_(v, 0.999)
    torch._foreach_addcmul_(v, [g], [g], 0.001)
    root = torch._foreach_sqrt(v)
    torch._foreach_add_(root, [1e-3])
    torch._foreach_addcdiv_([p], [g], root, [-1e-4])
    torch._foreach_addcdiv_([p], [state["m"]], root, torch.tensor([-1e-4]))


@pytest.mark.slow
def test_foreach_operations_take_numbers_in_every_place() -> None:
    improves(foreach_numbers)


def through_a_product(p: Tensor, g: Tensor, state: Any) -> None:
    same = torch.eye(p.shape[0], dtype=p.dtype)
    flat = p.reshape(p.shape[0], -1)
    p.copy_((same @ flat).view_as(p) - 1e-4 * g)


def through_parts_of_a_new_tensor(p: Tensor, g: Tensor, state: Any) -> None:
    new = torch.empty_like(p)
    new[:2] = p[:2] - 1e-4 * g[:2]
    new[2:] = p[2:] - 1e-4 * g[2:]
    kept = p.clone()
    kept.view(-1)[1:].sub_(g.view(-1)[1:], alpha=1e-4)
    p.copy_(new + kept - kept)


def through_views_of_a_copy(p: Tensor, g: Tensor, state: Any) -> None:
    new = p.clone()
    new[:2].sub_(g[:2], alpha=1e-4)
    new[2:].sub_(g[2:], alpha=1e-4)
    p.copy_(new)


def through_fp32(p: Tensor, g: Tensor, state: Any) -> None:
    wide = p.to(torch.float32 if p.dtype != torch.float64 else p.dtype).clone()
    wide.mul_(1 - 1e-5)
    wide = wide - 1e-4 * g
    p.copy_(wide.to(p.dtype))


def through_a_plain_state(p: Tensor, g: Tensor, state: Any) -> None:
    if not state:
        state["a"], state["b"] = torch.zeros_like(p), torch.zeros_like(p)
    state["a"].copy_(p - 1e-4 * g)
    state["a"], state["b"] = state["b"], state["a"]
    p.copy_(state["b"])


def shifted_averages(p: Tensor, g: Tensor, state: Any) -> None:
    if not state:
        state["h"] = deque([torch.zeros_like(p) for _ in range(2)])
    history = state["h"]
    history.append(history.popleft() * 0.999 + 0.001 * g * g)
    p.sub_(history[-1], alpha=1e-3)


@pytest.mark.parametrize(
    "update",
    [
        through_a_product,
        through_parts_of_a_new_tensor,
        through_views_of_a_copy,
        through_fp32,
        through_a_plain_state,
        shifted_averages,
    ],
)
@pytest.mark.quick("through_a_product", "through_fp32", "shifted_averages")
def test_nothing_is_lost_on_the_way(update: Any) -> None:
    improves(update)


def test_states_that_average_each_other_are_compensated() -> None:
    def exchanging(p: Tensor, g: Tensor, state: Any) -> None:
        if not state:
            state["a"], state["b"] = torch.zeros_like(p), torch.zeros_like(p)
        both = state["b"] * 0.999 + 0.001 * g * g, state["a"] * 0.999 + 0.002 * g * g
        state["a"], state["b"] = both
        p.sub_(state["a"], alpha=1e-4)

    report = improves(exchanging)
    assert all(s.compensated for s in report.states), report


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of torch 2.11
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.SparseAdam])
def test_sparse_gradients(make: Any) -> None:
    found = {}
    for how, dtype in (("exact", torch.float64), ("collage", torch.bfloat16)):
        made = torch.Generator().manual_seed(3)
        p = torch.randn(6, 4, generator=made).bfloat16().to(dtype).requires_grad_()
        optimizer = make([p], lr=1e-4)
        step = collage_fx.compile(optimizer) if how == "collage" else optimizer.step
        for _ in range(20):
            rows = torch.randn(2, 4, generator=made).bfloat16().to(dtype)
            p.grad = torch.sparse_coo_tensor([[1, 4]], rows, (6, 4), check_invariants=False)
            step()
        found[how] = collage_fx.value(p)
    rounded = error(found["exact"].bfloat16().double(), found["exact"])
    assert error(found["collage"], found["exact"]) < rounded / 4
    indices, values = 2 * 8, 8 * 2
    assert collage_fx.explain(optimizer).memory["gradients"] == indices + values


def test_states_made_in_inference_mode() -> None:
    p = torch.ones(3, dtype=torch.bfloat16)
    optimizer = Rebinding([p])
    step = collage_fx.compile(optimizer)
    for _ in range(3):
        p.grad = torch.ones_like(p)
        with torch.inference_mode():
            step()
    assert not any(s.unaccounted for s in collage_fx.report(step).states)


def test_unsupported_operation_raises_before_it_changes_anything() -> None:
    def update(p: Tensor, g: Tensor, state: Any) -> None:
        p.tanh_()

    p = torch.full((4,), 0.5, dtype=torch.bfloat16, requires_grad=True)
    p.grad = torch.ones_like(p)
    step = collage_fx.compile(each([p], update), storage="mcf2", on_unsupported="error")
    with pytest.raises(UnsupportedError, match=r"tanh.* param_groups\[0\].params\[0\].*join"):
        step()
    assert (p == 0.5).all()
