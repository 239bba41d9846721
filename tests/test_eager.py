"""The eager engine: steps, or parts of steps, that no compiled graph does."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

import collage_fx


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
    step = collage_fx.compile(optimizer) if how == "collage" else optimizer.step
    for each in grads:
        for p, g in zip(params, each, strict=True):
            p.grad = g.to(to)
        step()
    flat = torch.cat([collage_fx.value(p).flatten() for p in params])
    return flat, collage_fx.report(step) if how == "collage" else None


def error(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


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
        lambda p: torch.optim.AdamW(p, fused=True),
        lambda p: torch.optim.SGD(p, lr=1e-4, momentum=0.9, fused=True, weight_decay=0.1),
        lambda p: torch.optim.Adagrad(p, fused=True),
        torch.optim.Adafactor,
        Rebinding,
        Views,
    ],
)
def test_step_outside_graphs_is_compensated(make: Any, dtype: torch.dtype) -> None:
    exact, _ = final(make, "exact", dtype=dtype)
    plain, _ = final(make, "plain", dtype=dtype)
    found, report = final(make, "collage", dtype=dtype)
    rounded = error(exact.to(dtype).double(), exact)
    assert error(found, exact) < rounded < error(plain, exact)
    params = [s for s in report.states if s.name.startswith("param")]
    assert params and all(s.compensated and s.eager and not s.unaccounted for s in params), report


class Each(Optimizer):
    """One update by PyTorch operations, which no compiled graph does."""

    def __init__(self, params: ParamsT, update: Any) -> None:
        super().__init__(params, {})
        self.update = torch.compiler.disable(update)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, p.grad, self.state[p])


def improves(update: Any, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Assert that an update is compensated; return the report."""
    exact, _ = final(lambda p: Each(p, update), "exact", dtype=dtype)
    plain, _ = final(lambda p: Each(p, update), "plain", dtype=dtype)
    found, report = final(lambda p: Each(p, update), "collage", dtype=dtype)
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


def test_foreach_operations_take_numbers_in_every_place() -> None:
    improves(foreach_numbers)
