"""Launches of a step that notes what it changes: the same as without.

For changes.noted and passes.codegen.printers.triton_kernel.
"""

import cuda_emulator as emulator
from emulated_steps import captured, parameters, quiet_step, warm_up
from torch.optim import AdamW

import collage_fx


def test_no_launch_more() -> None:
    (work, kernels), plain = quiet_step(AdamW, changed=True), quiet_step(AdamW)
    assert work == plain[0] and kernels["multi_tensor"] == plain[1]["multi_tensor"] == 2


def test_such_a_step_is_captured() -> None:
    optimizer = AdamW(parameters(12), capturable=True)
    collage_fx.compile_(optimizer, level="plus", changed=True)
    warm_up(optimizer.step)
    emulator.reset()
    graph = captured(optimizer.step)
    assert "capture violations" not in emulator.read()
    emulator.counted(graph.replay)
    assert emulator.kernels()["multi_tensor"] == 2
