"""Gradients that lie in memory of states, or of one another, in some steps and not in others.

For compilation.side_inputs and compilation.graph_inputs.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

import collage_fx
from collage_fx.compilation import aot, side_inputs
from collage_fx.errors import CollageError
from collage_fx.runtime.kernels import tensor_snapshot
from collage_fx.runtime.residuals.memory import Apart

RATE = 1e-2
STEPS = 11
NOTE = "other tensors share memory with states than when the step was compiled"


class Average(Optimizer):
    """An optimizer that Dynamo traces as it is written."""

    def __init__(self, params: list[Tensor], decay: float = 0.0) -> None:
        super().__init__(params, {"lr": RATE, "decay": decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                if group["decay"]:
                    p.grad.add_(p, alpha=group["decay"])  # type: ignore[union-attr]
                state["exp_avg"].mul_(0.9).add_(p.grad, alpha=0.1)
                p.add_(state["exp_avg"], alpha=-group["lr"])


def adamw(params: list[Tensor]) -> Optimizer:
    return AdamW(params, lr=RATE)


def average(params: list[Tensor]) -> Optimizer:
    return Average(params)


def decaying(params: list[Tensor]) -> Optimizer:
    return Average(params, 0.1)


def of_states(params: list[Tensor], optimizer: Optimizer) -> None:
    """Make views of another parameter, and of another's average, gradients."""
    params[0].grad = params[1].detach()
    params[2].grad = optimizer.state[params[3]]["exp_avg"].view(3, 2)


def of_gradients(params: list[Tensor], _: Optimizer) -> None:
    params[0].grad = params[1].grad.detach()  # type: ignore[union-attr]


class Blind(Apart):
    """Sees no memory of states."""

    bounds: Any = ()

    def hold(self, *_: Any) -> bool:
        return True

    def is_like(self, _: Apart) -> bool:
        return True


def trained(
    make: Callable[[list[Tensor]], Optimizer],
    share: Callable[[list[Tensor], Optimizer], None],
    shares: range,
    dtype: torch.dtype,
    *,
    loads: bool = False,
    **options: Any,
) -> tuple[Tensor, str]:
    """Return parameters and averages after steps, and the report.

    Args:
        make: makes the optimizer.
        share: has gradients share memory.
        shares: the steps before which it is called.
        dtype: bf16, or another for plain PyTorch.
        loads: whether the optimizer loads its own states after the third step.
        options: those of collage_fx.compile.
    """
    torch.compiler.reset()
    generator = torch.Generator().manual_seed(0)
    begin = [torch.randn(3, 2, generator=generator).bfloat16().to(dtype) for _ in range(9)]
    params: list[Tensor] = [nn.Parameter(t) for t in begin]
    optimizer = make(params)
    step: Any = optimizer.step
    if dtype is torch.bfloat16:
        step = collage_fx.compile(optimizer, storage="remainder16", level="all", **options)
    for i in range(STEPS):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).bfloat16().to(dtype)
        if loads and i == 3:
            optimizer.load_state_dict(optimizer.state_dict())
        if i in shares:
            share(params, optimizer)
        step()
    tensors = [t for p in params[:4] for t in (p, optimizer.state[p]["exp_avg"])]
    report = str(collage_fx.report(step)) if dtype is torch.bfloat16 else ""
    return torch.stack([collage_fx.value(t).detach().double() for t in tensors]), report


def off(*args: Any, **options: Any) -> tuple[float, str]:
    """Return the largest distance from the trajectory in float64, and the report."""
    exact, _ = trained(*args, torch.float64)
    found, report = trained(*args, torch.bfloat16, **options)
    return (found - exact).abs().max().item(), report


@pytest.mark.parametrize(
    ("make", "options", "where"),
    [
        # Kernels of an interpreter are not repeated.
        pytest.param(adamw, {}, tensor_snapshot, marks=pytest.mark.kernels),
        (adamw, {"without": ("repeat",)}, side_inputs),
        (adamw, {"without": ("repeat",), "loads": True}, side_inputs),
        (average, {}, tensor_snapshot),
        (average, {"without": ("repeat",)}, side_inputs),
    ],
    ids=["repeated", "stand-ins", "shared", "bound", "graph"],
)
@pytest.mark.quick("graph")
def test_views_of_states_are_read_whole(
    make: Any, options: Any, where: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in steps that are recorded. Control: the way that takes the step does not look."""
    distance, report = off(make, of_states, range(6, 9), **options)
    assert distance < 2e-6 and NOTE in report
    monkeypatch.setattr(where, "Apart", Blind)
    distance, report = off(make, of_states, range(6, 9), **options)
    assert distance > 4e-5 and NOTE not in report


@pytest.mark.slow
@pytest.mark.parametrize("shares", [range(5), range(4, 7)], ids=["from the first", "later"])
def test_gradients_that_the_step_writes(shares: range, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is added to once for each name. Control: nobody looks."""
    distance, report = off(decaying, of_gradients, shares)
    assert distance < 2e-6 and "share memory" in report
    monkeypatch.setattr(side_inputs, "Apart", Blind)
    monkeypatch.setattr(aot, "takes_one_for_two", lambda *_: False)
    distance, report = off(decaying, of_gradients, shares)
    assert distance > 1e-4 and "share memory" not in report


@torch.no_grad()
def update(p: Tensor, average: Tensor, gradient: Tensor) -> None:
    average.mul_(0.9).add_(gradient, alpha=0.1)
    p.add_(average, alpha=-RATE)


def calls(function: Any, dtype: torch.dtype, sizes: list[int]) -> Tensor:
    """Return the values after calls for these sizes, the sixth of each given a state twice."""
    found = []
    for size in sizes:
        generator = torch.Generator().manual_seed(size)
        p, *rest = (torch.randn(size, generator=generator).bfloat16().to(dtype) for _ in range(6))
        average = torch.zeros_like(p)
        for gradient in (*rest, p.view(size), rest[0]):
            function(p, average, gradient)
        found += [collage_fx.value(t).double() for t in (p, average)]
    return torch.cat(found)


def test_a_function_is_given_a_state_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the second size on, sizes are symbols."""
    options: Any = {"storage": "remainder16", "level": "all"}
    exact = calls(update, torch.float64, [6, 8, 10])
    found = calls(collage_fx.compile(update, **options), torch.bfloat16, [6, 8, 10])
    assert (found - exact).abs().max() < 2e-6
    monkeypatch.setattr(side_inputs, "Apart", Blind)
    monkeypatch.setattr(side_inputs.Code, "meets_residual", lambda *_: False)
    torch.compiler.reset()
    found = calls(collage_fx.compile(update, **options), torch.bfloat16, [6, 8, 10])
    assert (found - exact).abs().max() > 1e-5


@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_recorded_is_refused() -> None:
    p, average, gradient = (torch.full((4,), x).bfloat16() for x in (1.0, 0.0, 0.3))
    torch.compiler.reset()
    compiled = torch.compile(update, backend="collage")
    for _ in range(2):
        compiled(p, average, gradient)
    before = [collage_fx.value(t) for t in (p, average)]
    with pytest.raises(CollageError, match="share memory"):
        compiled(p, average, p.view(2, 2).view(4))
    assert all(map(torch.equal, map(collage_fx.value, (p, average)), before))
    compiled(p, average, gradient)
    assert not torch.equal(collage_fx.value(p), before[0])
