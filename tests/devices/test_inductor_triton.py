"""Triton code that Inductor emits where each member of a class has a kernel of its own.

For passes.codegen.inductor_lowering and compilation.inductor.
"""

from typing import Any
from unittest import mock

import pytest
import torch
from graphs import capture_optimizer
from kernels import (
    CASES,
    PER_THREAD,
    SHAPES,
    Case,
    captured,
    instructions,
    matching,
    moved,
    moved_in_tails,
    parametrized,
    rounded,
    roundings,
    stack_bytes,
    without_roundings,
)
from virtual_gpu import Kernel, inductor, on_gpu, virtual_gpu

import collage_fx.compilation.inductor
from collage_fx.passes.ir.program import Rewritten

pytestmark = pytest.mark.kernels

LARGE = ((1024, 1024),)


def emitted(case: Case) -> tuple[Rewritten, Kernel]:
    """Return the class of a case's only parameter, and the kernel that updates it."""
    capture = captured(case, LARGE)
    with virtual_gpu():
        program = on_gpu(capture, case.settings)
        kernels = inductor(program).kernels
    (of_class,) = program.rewritten
    assert len(kernels) <= 2  # the other one counts steps
    return of_class, max(kernels, key=lambda kernel: len(kernel.source))


@parametrized({name: case for name, case in CASES.items() if not case.changed})
@pytest.mark.quick("adamw-plus", "trust-in-fp32")
def test_one_kernel_reads_and_writes_each_tensor_once_and_rounds_every_result(case: Case) -> None:
    of_class, kernel = emitted(case)
    built = kernel.assembled()
    counts = instructions(built["ptx"])
    assert moved(counts) == PER_THREAD * case.traffic
    assert moved_in_tails(counts) == matching(counts, r"st\.global\.b(32|64)") == 0
    assert stack_bytes(built["cubin"]) == 0
    assert rounded(counts) >= PER_THREAD * roundings(of_class)
    # Bias corrections are computed once in a thread, and 2.11 divides approximately there.
    assert matching(counts, r"fma\.rn\.f32") == 0
    assert matching(counts, r"div\.full\.f32") < PER_THREAD


def test_a_gpu_without_fp8_leaves_such_states_to_joined_values() -> None:
    case = CASES["adam-e4m3fn"]
    old = mock.patch.object(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    capture = captured(case, ((4, 3),))
    with virtual_gpu(), old:
        plan = on_gpu(capture, case.settings).plan
    refused = [s.name.partition(" of ")[0] for s in plan if s.refused]
    assert refused == ["exp_avg", "exp_avg_sq"]


def test_left_alone_inductor_contracts_and_divides_approximately() -> None:
    with mock.patch.object(collage_fx.compilation.inductor, "_EXACT", {}):
        _, kernel = emitted(CASES["adamw-plus"])
    counts = instructions(kernel.assembled()["ptx"])
    assert matching(counts, r"fma\.rn\.f32") > 0 and matching(counts, r"div\.full\.f32") > 0


def test_without_a_residual_a_step_moves_fourteen_bytes() -> None:
    """Count the baseline of the tables of traffic in the same way."""
    capture = captured(CASES["adamw-light"], LARGE)
    with virtual_gpu():
        program = on_gpu(capture, CASES["adamw-light"].settings)
        program.result = program.source
        kernels = inductor(program).kernels
    kernel = max(kernels, key=lambda kernel: len(kernel.source))
    assert moved(instructions(kernel.assembled()["ptx"])) == PER_THREAD * 14


def test_the_check_on_roundings_can_fail() -> None:
    of_class, kernel = emitted(CASES["adamw-plus"])
    kernel.source = without_roundings(kernel.source)
    counts = instructions(kernel.assembled()["ptx"])
    assert rounded(counts) < PER_THREAD * roundings(of_class)


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("rate", ["constant", "tensor", "scheduled"])
@pytest.mark.quick("tensor-False")
def test_a_step_of_many_parameters_is_two_kernels_and_no_kernel_of_inductor(
    rate: str, foreach: bool
) -> None:
    """With a rate on the host, Inductor has what comes of it alone: 0-d, on the host, once."""
    if rate == "tensor" and foreach:
        pytest.skip("torch.optim wants capturable=True then, for which there must be a GPU")
    options: dict[str, Any] = {"lr": torch.tensor(1e-3)} if rate == "tensor" else {}
    capture = capture_optimizer(
        torch.optim.AdamW,
        shapes=SHAPES,
        scheduled=rate == "scheduled",
        foreach=foreach,
        **options,
    )
    with virtual_gpu():
        program = on_gpu(capture, CASES["adamw-plus"].settings, rate_on_host=rate != "constant")
    assert program.result is not None and [r.apart for r in program.rewritten] == [""]
    direct = collage_fx.compilation.partition.split(program.result)
    assert direct is not None and len(direct.calls) == 2
    rest = direct.rest.graph.nodes if direct.rest is not None else ()
    made = [n.meta["val"] for n in rest if n.op == "call_function"]
    assert bool(made) == (rate != "constant")
    assert all(not v.dim() and v.device.type == "cpu" for v in made)
