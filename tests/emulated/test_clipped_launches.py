"""Launches of a step that clips gradients by their norm: none of them waits for it.

For gradients.clipping, gradients.norm and runtime.kernels.sum_of_squares.
"""

import contextlib

import cuda_emulator as emulator
import pytest
import torch
from emulated_steps import captured, parameters, quiet_step, warm_up
from torch.optim import SGD, AdamW

import collage_fx
from collage_fx.errors import NonFiniteError
from collage_fx.gradients.norm import gradients_of, norm_over


@pytest.mark.parametrize("zeroes", [False, True])
def test_a_clipped_step_waits_for_nothing(zeroes: bool) -> None:
    plain, launches = quiet_step(AdamW)
    clipped, found = quiet_step(AdamW, clip_grad_norm=1.0, zero_grads=zeroes)
    assert found["multi_tensor"] == launches["multi_tensor"] == 2
    assert not any(name.startswith("sync") for name in clipped)
    assert {k: n for k, n in clipped.items() if k != "kernels"} == {
        k: n for k, n in plain.items() if k != "kernels"
    }
    assert clipped["kernels"] - plain["kernels"] <= 12, "for the norm and the number made of it"


def test_a_norm_that_is_waited_for() -> None:
    optimizer = AdamW(parameters(12), capturable=True)
    collage_fx.compile_(optimizer, clip_grad_norm=1.0, error_if_nonfinite=True)
    emulator.reset()
    with contextlib.suppress(NonFiniteError):  # no kernel computes anything here
        optimizer.step()
    assert any(name.startswith("sync") for name in emulator.read())


def test_a_clipped_step_is_captured() -> None:
    optimizer = AdamW(parameters(12), capturable=True)
    collage_fx.compile_(optimizer, level="plus", clip_grad_norm=torch.ones((), device="cuda"))
    warm_up(optimizer.step)
    emulator.reset()
    graph = captured(optimizer.step)
    assert "capture violations" not in emulator.read()
    emulator.counted(graph.replay)
    assert emulator.kernels()["multi_tensor"] == 2


@pytest.mark.parametrize("devices", [("cuda", "cpu"), ("cpu", "cuda"), ("cuda", "cuda")])
def test_gradients_on_two_devices_take_a_factor_from_the_cpu(devices: tuple[str, ...]) -> None:
    params = [torch.nn.Parameter(torch.ones(8, 8, device=device)) for device in devices]
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer = SGD(params, lr=0.1)
    total = norm_over([optimizer]).sum_of_squares(optimizer, gradients_of(optimizer))
    assert total.device.type == ("cpu" if "cpu" in devices else "cuda")
    for p in params:
        assert torch.mul(p.grad, total).device == p.device  # raises from one device to another
