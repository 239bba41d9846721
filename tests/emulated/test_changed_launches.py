"""Launches of a step that notes what it changes: the same as without.

For changes.noted and passes.codegen.printers.triton_kernel.
"""

from typing import Any

import cuda_emulator as emulator
from emulated_steps import captured, parameters, renew_gradients, warm_up
from torch.optim import AdamW

import collage_fx

STEPS = 5


def counted(**options: Any) -> dict[str, int]:
    """Return the work of a quiet step of twelve tensors with new gradients."""
    params = parameters(12)
    optimizer = AdamW(params, capturable=True)
    collage_fx.compile_(optimizer, level="plus", **options)
    for _ in range(STEPS):
        optimizer.step()
    old = [renew_gradients(params)]
    optimizer.step()
    old.append(renew_gradients(params))
    asked = "pointer queries", "pinned allocations"
    work = emulator.counted(optimizer.step)
    assert emulator.kernels()["multi_tensor"] == 2
    return {name: n for name, n in work.items() if name not in asked}


def test_no_launch_more() -> None:
    assert counted(changed=True) == counted()


def test_such_a_step_is_captured() -> None:
    optimizer = AdamW(parameters(12), capturable=True)
    collage_fx.compile_(optimizer, level="plus", changed=True)
    warm_up(optimizer.step)
    emulator.reset()
    graph = captured(optimizer.step)
    assert "capture violations" not in emulator.read()
    emulator.counted(graph.replay)
    assert emulator.kernels()["multi_tensor"] == 2
