"""Launches of an average of weights: one kernel for all that have residuals, and nothing waits.

For averages.average_step.
"""

import cuda_emulator as emulator
import pytest
import torch
from emulated_steps import parameters
from torch import nn
from torch.optim import AdamW

import collage_fx


@pytest.mark.parametrize("compensated", [True, False])
def test_an_update_waits_for_nothing(compensated: bool) -> None:
    model = nn.Module()
    model.all = nn.ParameterList(map(nn.Parameter, parameters(12)))
    optimizer = AdamW(model.parameters(), capturable=True)
    if compensated:
        collage_fx.compile_(optimizer)
    average = collage_fx.EMA(model, 0.9)
    for _ in range(5):
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
        emulator.reset()
        average.update_parameters(model)
    assert not any(name.startswith("sync") for name in emulator.read())
    if compensated:  # of weights without residuals Inductor makes a kernel each
        assert emulator.kernels()["multi_tensor"] == 1
    assert bool(collage_fx.residuals(next(model.parameters()))) == compensated
