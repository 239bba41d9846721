"""Launches, copies and synchronisations of a compiled step, for few tensors as for many.

For comparison, AdamW of torch 2.11 without collage_fx, of 12 and of 300 tensors: fused 2 and 12
kernels, foreach 8 and 37, one tensor at a time 96 and 2400.

For runtime.kernels.triton_launch and binding.launches.
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import cuda_emulator as emulator
import pytest
import torch
from emulated_steps import parameters, renew_gradients
from torch.optim import SGD, AdamW, Optimizer

import collage_fx
from collage_fx.binding.bound_graph import BoundGraph
from collage_fx.runtime.kernels.triton_launch import Geometry, Launch, Members
from collage_fx.stand_in.repeated_step import RepeatedStep

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
"""Number of steps until nothing is compiled or made ready any more."""


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
    quiet = {"kernels": launches, "copy: H2D pinned": 1}  # of all tables
    assert work(step) == quiet
    assert emulator.kernels() == {"multi_tensor": launches}
    old = [renew_gradients(params)]
    step()
    old.append(renew_gradients(params))
    assert work(step) == quiet, "with gradients at other addresses"


def test_a_rate_that_changes_is_copied_without_waiting() -> None:
    """One copy for the tables of both launches and the numbers that they take."""
    optimizer = AdamW(parameters(12))
    step = collage_fx.compile(optimizer)

    def scheduled() -> None:
        optimizer.param_groups[0]["lr"] *= 0.99
        step()

    for _ in range(STEPS):
        scheduled()
    assert work(scheduled) == {"kernels": 2, "copy: H2D pinned": 1}


def launched(step: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> list[list[Any]]:
    """Return what each launch of a step is given: addresses, the geometry, the members."""
    found: list[list[Any]] = []

    def call(self: Launch, table: Any, geometry: Geometry, members: Members) -> None:
        found.append([table.flatten().tolist(), [t.tolist() for t in geometry], members])

    with monkeypatch.context() as patch:
        patch.setattr(Launch, "call", call)
        step()
    return found


@pytest.mark.parametrize("storage", ["mcf2", "remainder16"])
def test_a_repeated_step_has_the_tables_of_one_that_is_not(
    storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = parameters(12)
    params[3].grad = torch.zeros(65, dtype=torch.bfloat16, device="cuda")[1:]  # is not aligned
    optimizer = AdamW(params)
    step = collage_fx.compile(optimizer, storage=storage)
    for _ in range(STEPS):
        step()
    taken: list[bool] = []

    def run(self: RepeatedStep, of: Optimizer) -> bool:
        taken.append(original(self, of))
        return taken[-1]

    original = RepeatedStep.run
    monkeypatch.setattr(RepeatedStep, "run", run)
    repeated = launched(step, monkeypatch)
    assert taken == [True]
    monkeypatch.setattr(RepeatedStep, "run", lambda self, of: False)
    in_full = launched(step, monkeypatch)
    assert [one[1:] for one in repeated] == [one[1:] for one in in_full]
    # The counts of steps, the aligned members, and the one that is not.
    assert [members.aligned for *_, members in in_full] == [False, True, False]
    tensors = [t for p in params for t in (p, p.grad, *optimizer.state[p].values())]
    tensors += [lo for t in params for lo in collage_fx.residuals(t)]
    known = {t.data_ptr() for t in tensors}
    # What kernels make for one another lies elsewhere each time.
    places = [
        [[at for at in enumerate(table) if at[1] in known] for table, *_ in launches]
        for launches in (repeated, in_full)
    ]
    assert places[0] == places[1] and len(places[0][1]) == 11 * 5


def test_a_gradient_that_is_aligned_no_more_ends_repeating() -> None:
    params = parameters(12)
    step = collage_fx.compile(MOMENTUM(params))
    for _ in range(STEPS):
        step()
    assert work(step)["kernels"] == 1
    params[3].grad = torch.zeros(65, dtype=torch.bfloat16, device="cuda")[1:]
    assert work(step)["kernels"] == 2


def test_a_step_on_another_stream_is_not_repeated() -> None:
    step = collage_fx.compile(MOMENTUM(parameters(12)))
    for _ in range(STEPS):
        step()
    with torch.cuda.stream(torch.cuda.Stream()):
        assert work(step)["kernels"] == 1


def test_a_step_that_waits_is_seen() -> None:
    params = parameters(12)
    step = collage_fx.compile(MOMENTUM(params))
    for _ in range(STEPS):
        step()

    def logged() -> None:
        step()
        params[0].sum().item()

    assert work(logged)["sync: stream"] == 1


def test_a_bound_graph_has_the_tables_of_one_that_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of another optimizer, behind Dynamo's guards: one copy, and one launch."""
    params = parameters(12)
    params[3].grad = torch.zeros(65, dtype=torch.bfloat16, device="cuda")[1:]  # is not aligned
    optimizer = Lion(params)
    step = collage_fx.compile(optimizer)
    for _ in range(STEPS):
        step()
    assert work(step) == {"kernels": 2, "copy: H2D pinned": 1}
    bound = launched(step, monkeypatch)
    monkeypatch.setattr(BoundGraph, "run", lambda self, args: None)
    in_full = launched(step, monkeypatch)
    assert bound == in_full and len(bound) == 2
