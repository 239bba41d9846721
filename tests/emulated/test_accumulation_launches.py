"""Launches where gradients are summed with residuals: nothing waits, the step has as many kernels.

For accumulation.sums.
"""

import cuda_emulator as emulator
import torch
from emulated_steps import parameters
from torch import nn
from torch.optim import AdamW

import collage_fx


def kernels(*, sums: bool) -> int:
    """Return how many kernels the fourth step has, after three backward passes."""
    params = list(map(nn.Parameter, parameters(12)))
    optimizer = AdamW(params, capturable=True)
    collage_fx.compile_(optimizer)
    if sums:
        collage_fx.accumulate(optimizer)
    given = [torch.ones_like(p) for p in params]
    for _ in range(4):
        optimizer.zero_grad()
        emulator.reset()
        for _ in range(3):
            torch.autograd.backward(params, given)
        assert not any(name.startswith("sync") for name in emulator.read())
        assert all(bool(collage_fx.residuals(p.grad)) == sums for p in params)  # type: ignore
        emulator.reset()
        optimizer.step()
    assert not any(name.startswith("sync") for name in emulator.read())
    return int(emulator.kernels()["multi_tensor"])


def test_sums_and_steps_wait_for_nothing() -> None:
    assert kernels(sums=True) == kernels(sums=False)
