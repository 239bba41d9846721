"""CUDA graphs that a user captures: their kernels and copies, how many, and their replays.

For runtime.kernels.triton_launch.
"""

from typing import Any

import cuda_emulator as emulator
import pytest
import torch
from emulated_steps import captured, parameters, warm_up
from torch.optim import AdamW

import collage_fx
from collage_fx.errors import CaptureError

OPTIONS: dict[str, dict[str, Any]] = {
    "eft": {"level": "plus"},
    "wide": {"level": "plus", "arithmetic": "wide", "stochastic_rounding": True},
    "sr": {"level": "plus", "storage": "sr"},
    "ulp4": {"level": "plus", "storage": "ulp4"},
}


@pytest.mark.parametrize("arithmetic", OPTIONS)
def test_a_step_is_captured_and_replayed(arithmetic: str) -> None:
    step = collage_fx.compile(AdamW(parameters(12), capturable=True), **OPTIONS[arithmetic])
    warm_up(step)
    emulator.reset()
    graph = captured(step)
    found = emulator.read()
    assert "capture violations" not in found and "multi_tensor" not in emulator.kernels()
    assert found["copies captured"] == 2, "a table for each kernel of a class"
    replayed = emulator.counted(graph.replay)
    assert replayed == {
        "graph launches": 1,
        "copies replayed": 2,
        "kernels replayed": found["kernels captured"],
    }
    assert emulator.kernels()["multi_tensor"] == 2


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_two_graphs_are_captured_after_a_step() -> None:
    step = collage_fx.compile(AdamW(parameters(12), capturable=True), level="plus")
    warm_up(step)
    for _ in range(2):
        captured(step)
        captured(step)
        with pytest.raises(CaptureError, match="another after each 2 graphs"):
            captured(step)
        step()


def test_a_whole_training_step_is_captured() -> None:
    """With gradients that the graph makes."""
    norms = (torch.nn.LayerNorm(64, device="cuda", dtype=torch.bfloat16) for _ in range(6))
    model = torch.nn.Sequential(*norms)
    optimizer = AdamW(model.parameters(), capturable=True)
    step = collage_fx.compile(optimizer, level="plus")
    x = torch.zeros(8, 64, dtype=torch.bfloat16, device="cuda")

    def train() -> None:
        optimizer.zero_grad()
        model(x).float().square().mean().backward()
        step()

    warm_up(train)
    optimizer.zero_grad()
    emulator.reset()
    graph = captured(train)
    assert "capture violations" not in emulator.read()
    assert emulator.counted(graph.replay)["graph launches"] == 1
    assert emulator.kernels()["multi_tensor"] == 2


def test_a_step_that_waits_is_not_captured() -> None:
    step = collage_fx.compile(AdamW(parameters(12), capturable=True), level="plus")
    warm_up(step)

    def waiting() -> None:
        step()
        torch.cuda.synchronize()

    emulator.reset()
    with pytest.raises(RuntimeError, match="failed due to a previous error during capture"):
        captured(waiting)
    assert emulator.read()["capture violations"] == 1


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_rate_on_the_host_is_not_captured() -> None:
    """One that has changed is an input of the step; a graph would keep its value for ever."""
    optimizer = AdamW(parameters(12), capturable=True)
    step = collage_fx.compile(optimizer, level="plus")

    def scheduled() -> None:
        optimizer.param_groups[0]["lr"] *= 0.99
        step()

    warm_up(scheduled)
    with pytest.raises(CaptureError, match="on the device"):
        captured(step)
