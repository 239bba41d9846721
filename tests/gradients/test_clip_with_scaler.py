"""Clipping of gradients that a GradScaler has scaled.

For gradients.clipping and optimizer.fused.
"""

from typing import Any

import pytest
import torch
from clipped_runs import LR, NORM, Descent, error, exactly, give, norm_of, params
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import SGD, AdamW

import collage_fx

SCALE = 64.0


def scaled(kind: Any, *, unscales: bool = False, infinite: int = -1, **kwargs: Any) -> Any:
    """Return an optimizer after eight steps by a GradScaler, and how its norms were off."""
    optimizer = kind(params(), lr=LR, **kwargs)
    collage_fx.compile_(optimizer, clip_grad_norm=NORM)
    scaler = GradScaler("cpu", init_scale=SCALE, growth_interval=100, backoff_factor=0.5)
    k = step = 0
    while k < 8:
        scale = float(scaler.scale(torch.ones(())))
        given = give(optimizer, k)
        torch._foreach_mul_(given, scale)
        norm = norm_of(given) / scale
        if step == infinite:
            given[3][2] = torch.inf
        if unscales:
            scaler.unscale_(optimizer)
        before = [g.clone() for g in given]
        state = [p.clone() for p in optimizer.param_groups[0]["params"]]
        scaler.step(optimizer)
        scaler.update()
        assert all(map(torch.equal, before, given)), "gradients are left as they are"
        if step == infinite:
            assert all(map(torch.equal, state, optimizer.param_groups[0]["params"]))
        else:
            assert float(optimizer.step.grad_norm) == pytest.approx(float(norm), rel=1e-6)
            k += 1
        step += 1
    assert not {"found_inf", "grad_scale"} & vars(optimizer).keys()
    return optimizer


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (SGD, {}),
        (SGD, {"fused": True}),
        (SGD, {"unscales": True}),
        (Descent, {}),
    ],
)
@pytest.mark.parametrize("infinite", [-1, 0, 3])
def test_steps_are_those_of_gradients_without_scale(
    kind: Any, options: dict[str, Any], infinite: int
) -> None:
    optimizer = scaled(kind, infinite=infinite, **options)
    assert error(optimizer, exactly(lr=LR)) < 2.0**-19


def test_gradients_that_fp16_holds_scaled_only() -> None:
    found: list[Tensor] = []
    for scale in (2.0**14, 1.0):
        p = torch.ones(4).half().requires_grad_()
        optimizer: Any = SGD([p], lr=2.0**18)
        collage_fx.compile_(optimizer, clip_grad_norm=1.0)
        scaler = GradScaler("cpu", init_scale=scale)
        scaler.scale(torch.ones(()))
        p.grad = torch.full((4,), 2.0**-26 * scale).half()
        scaler.step(optimizer)
        found.append(collage_fx.value(p))
    assert torch.equal(found[0], torch.full((4,), 1 - 2.0**-8).double())
    assert torch.equal(found[1], torch.ones(4).double()), "the control: fp16 has no 2^-26"


def test_plain_optimizers_are_left_to_the_scaler() -> None:
    optimizer = AdamW(params(), lr=1e-3)
    collage_fx.compile_(optimizer)
    assert not hasattr(optimizer, "_step_supports_amp_scaling")
