"""Launches, copies and synchronisations of a compiled step, for few tensors as for many.

For comparison, AdamW of torch 2.11 without collage_fx, of 12 and of 300 tensors: fused 2 and 12
kernels, foreach 8 and 37, one tensor at a time 96 and 2400.
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import cuda_emulator as emulator
import pytest
from emulated_steps import parameters, renew_gradients
from torch.optim import SGD, AdamW, Optimizer

import collage_fx

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from steps import Lion

MOMENTUM = partial(SGD, lr=0.1, momentum=0.9)
CASES: dict[str, tuple[Callable[..., Optimizer], int, dict[str, Any], int]] = {
    "adamw, plus, 12": (AdamW, 12, {"level": "plus"}, 2),
    "adamw, plus, 300": (AdamW, 300, {"level": "plus"}, 2),
    "adamw, light": (AdamW, 12, {"level": "light"}, 2),
    "adamw, wide": (AdamW, 12, {"level": "plus", "arithmetic": "wide"}, 2),
    "adamw, remainder16": (AdamW, 12, {"storage": "remainder16"}, 2),
    "momentum, 12": (MOMENTUM, 12, {}, 1),
    "momentum, 300": (MOMENTUM, 300, {}, 1),
    "lion": (Lion, 12, {}, 1),
}
STEPS = 5
"""Until nothing is compiled or made ready any more."""


def work(act: Callable[[], Any]) -> dict[str, int]:
    """Count what the device, or the host waiting for it, has to do."""
    asked = "pointer queries", "pinned allocations"
    return {name: n for name, n in emulator.counted(act).items() if name not in asked}


@pytest.mark.parametrize("case", CASES)
def test_a_quiet_step_is_one_launch_and_one_table_for_each_class(case: str) -> None:
    make, tensors, options, launches = CASES[case]
    params = parameters(tensors)
    step = collage_fx.compile(make(params), **options)
    for _ in range(STEPS):
        step()
    quiet = {"kernels": launches, "copy: H2D pinned": launches}
    assert work(step) == quiet
    assert emulator.kernels() == {"multi_tensor": launches}
    old = [renew_gradients(params)]
    step()
    old.append(renew_gradients(params))
    assert work(step) == quiet, "with gradients at other addresses"


def test_a_rate_that_changes_is_copied_without_waiting() -> None:
    """A copy for the table of each of two launches, and one for the numbers that each takes."""
    optimizer = AdamW(parameters(12))
    step = collage_fx.compile(optimizer)

    def scheduled() -> None:
        optimizer.param_groups[0]["lr"] *= 0.99
        step()

    for _ in range(STEPS):
        scheduled()
    assert work(scheduled) == {"kernels": 2, "copy: H2D pinned": 4}


def test_a_step_that_waits_is_seen() -> None:
    params = parameters(12)
    step = collage_fx.compile(MOMENTUM(params))
    for _ in range(STEPS):
        step()

    def logged() -> None:
        step()
        params[0].sum().item()

    assert work(logged)["sync: stream"] == 1
