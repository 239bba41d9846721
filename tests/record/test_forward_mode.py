"""Forward-mode derivatives in a step.

The derivative of a constant is a tensor without memory: to read it is a segmentation fault.

For runtime.residuals.memory and segments.operations.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from recorded_steps import LR, off, start, train
from torch import Tensor
from torch.autograd import forward_ad

import collage_fx
from collage_fx.runtime.residuals.memory import has_memory
from collage_fx.segments.operations import OPERATIONS

ZERO = torch.ops.aten._efficientzerotensor.default


def scaled(p: Tensor, g: Tensor) -> Tensor:
    return torch.func.jvp(lambda q: q * 0.5, (p,), (g,))[1]


def squared(p: Tensor, g: Tensor) -> Tensor:
    return torch.func.jvp(lambda q: q * q * 0.5, (p,), (g,))[1]


def hessian(p: Tensor, g: Tensor) -> Tensor:
    return torch.func.jvp(torch.func.grad(lambda q: (q * g * q).sum() / 4), (p,), (p,))[1]


def dual(p: Tensor, g: Tensor) -> Tensor:
    with forward_ad.dual_level():
        made = forward_ad.make_dual(p, g) / 2
        return forward_ad.unpack_dual(made).tangent


def error(derivative: Callable[[Tensor, Tensor], Tensor], **options: Any) -> tuple[float, Any]:
    """Return the error as a share of the way, and the step."""

    def update(p: Tensor, g: Tensor, state: Any) -> None:
        p.sub_(derivative(p.detach(), g), alpha=LR)

    exact, _ = train(update, torch.float64)
    found, step = train(update, **options)
    begin = torch.cat([p.detach().double().flatten() for p in start(torch.bfloat16)])
    return off(found, exact, begin), step


@pytest.mark.parametrize("derivative", [scaled, squared, hessian, dual])
@pytest.mark.parametrize("record", ["auto", True, False])
@pytest.mark.quick("True-scaled", "True-hessian")
def test_a_step_differentiates_forward(derivative: Any, record: object) -> None:
    found, step = error(derivative, record=record)
    assert found < 0.02
    assert not any("fails" in note for note in collage_fx.report(step).notes)
    assert error(derivative, plain=True)[0] > 0.9


def test_a_tensor_of_zeros_without_memory_is_made_at_once() -> None:
    made = ZERO([2, 2])
    assert not has_memory(made)
    assert has_memory(made + 1)
    assert OPERATIONS[ZERO].kind == "metadata"
