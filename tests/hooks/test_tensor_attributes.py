"""States that are attributes of their parameters, under all names that a step has for those.

For hooks.traces and segments.memory.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from interpreter import without_compiler
from torch import Tensor, nn
from torch.optim import Optimizer

import collage_fx
from collage_fx.hooks import traces
from collage_fx.segments.memory import Memories

RATE = 1e-2
STEPS = 8


def kept(p: Any) -> Tensor:
    """Return a state that is made when it is first asked for."""
    if not hasattr(p, "kept"):
        p.kept = torch.zeros_like(p)
    return p.kept


class Averaged(Optimizer):
    """SGD by an average that is an attribute of the parameter."""

    def __init__(self, params: list[Tensor], average: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__(params, {"lr": RATE})
        self.average = average

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(self.average(p, p.grad), alpha=group["lr"])


def by_parameter(p: Tensor, g: Tensor) -> Tensor:
    return kept(p).mul_(0.95).add_(g, alpha=0.05)


def by_operator(p: Tensor, g: Tensor) -> Tensor:
    p -= 0.001 * p
    return kept(p).mul_(0.95).add_(g, alpha=0.05)


def by_method(p: Tensor, g: Tensor) -> Tensor:
    return kept(p.mul_(0.999)).mul_(0.95).add_(g, alpha=0.05)


def by_getattr(p: Any, g: Tensor) -> Tensor:
    p *= 0.999
    before = getattr(p, "kept", None)
    p.kept = g.clone() if before is None else before.mul_(0.95).add_(g, alpha=0.05)
    return p.kept


def only_asked(p: Any, g: Tensor) -> Tensor:
    """Ask for an attribute that is there, and assign none."""
    p *= 0.999
    begun = getattr(p, "begun", None)
    return g if begun is None else begun.mul_(0.95).add_(g, alpha=0.05)


def only_assigned(p: Any, g: Tensor) -> Tensor:
    """Assign an attribute to the result of an operation, and ask the parameter for it."""
    last = p.last if hasattr(p, "last") else torch.zeros_like(p)
    p.mul_(0.999).last = g.clone()
    return g + last


def only_looked_at(p: Any, g: Tensor) -> Tensor:
    p *= 0.999
    return g if hasattr(p, "not_there") else 2 * g


def far(average: Callable[[Any, Tensor], Tensor]) -> float:
    """Return the largest distance of parameters from the trajectory in float64, after steps."""

    def values(dtype: torch.dtype) -> list[Tensor]:
        torch.compiler.reset()
        generator = torch.Generator().manual_seed(0)
        begin = [torch.randn(3, 2, generator=generator).bfloat16().to(dtype) for _ in range(2)]
        params: list[Any] = [nn.Parameter(t) for t in begin]
        for p in params:
            p.begun = torch.zeros_like(p)
        optimizer = Averaged(params, average)
        step: Any = optimizer.step
        if dtype is torch.bfloat16:
            step = collage_fx.compile(
                optimizer, storage="remainder16", arithmetic="wide", level="all"
            )
        for _ in range(STEPS):
            for p in params:
                p.grad = torch.randn(p.shape, generator=generator).bfloat16().to(dtype)
            step()
        return [collage_fx.value(p) for p in params]

    pairs = zip(values(torch.bfloat16), values(torch.float64), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


@pytest.mark.filterwarnings("ignore:.*belong to no torch.optim.Optimizer")
@pytest.mark.parametrize(
    "average",
    [by_operator, by_method, by_getattr, only_asked, only_assigned, only_looked_at],
)
@pytest.mark.quick("by_operator", "by_getattr", "only_*")
def test_attributes_belong_to_the_tensor_under_each_name(
    average: Callable[[Any, Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    with without_compiler():
        assert far(average) < 1e-3 * RATE
        if average is not only_looked_at:  # the control: Dynamo's own
            monkeypatch.setattr(traces, "_is_result_in_place", lambda _: False)
            assert far(average) > 0.1 * RATE


@pytest.mark.filterwarnings("error:.*was cleared:collage_fx.errors.CollageWarning")
def test_a_state_in_an_attribute_keeps_its_residual_when_graphs_take_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with without_compiler(), pytest.warns(collage_fx.CollageWarning) as said:
        assert far(by_parameter) < 1e-4 * RATE
    (text,) = [text for w in said if "no state_dict" in (text := str(w.message))]
    assert text.count("tensor 1 of") == 1
    # The control: the step judges by versions, which another name of the memory does not have.
    monkeypatch.setattr(Memories, "expect_same", lambda _: None)
    with without_compiler():
        assert far(by_parameter) > 1e-3 * RATE
