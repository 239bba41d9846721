"""The Triton kernel of a class, compiled for GPUs on a machine without one.

For passes.codegen.printers.triton_kernel, runtime.kernels.triton_launch and
runtime.kernels.argument_table.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from graphs import BF16
from kernels import (
    CASES,
    LIBRARY,
    PER_THREAD,
    SM90,
    Case,
    assembled,
    instructions,
    kernel_of,
    matching,
    misaligned,
    moved,
    moved_in_tails,
    parametrized,
    rewritten,
    rounded,
    roundings,
    stack_bytes,
    without_roundings,
)
from tensors import bf16, with_grads

import collage_fx
from collage_fx.passes.codegen.multi_tensor_kernel import MultiTensorKernel
from collage_fx.runtime.kernels import triton_launch
from collage_fx.runtime.kernels.argument_table import addresses
from collage_fx.runtime.kernels.triton_launch import CHUNKS, MANY, Launch, _chunks, chunk_of
from collage_fx.runtime.storage import nibbles

MIXED = ((64, 64), (64,), (128, 65), (31, 2), (256,))


@parametrized(CASES | {"library": LIBRARY})
@pytest.mark.quick("adamw-plus", "adamw-remainder16", "adamw-ulp8", "trust-in-fp32")
def test_on_an_nvidia_gpu_each_tensor_is_read_and_written_once_by_16_bytes(case: Case) -> None:
    kernel = kernel_of(rewritten(case))
    built = assembled(kernel.triton(), SM90)
    counts = instructions(built["ptx"])
    # Whole chunks and tails, and nothing else but the table, 0-d inputs, and words of 4 bytes for 8
    # elements of four bits, or bytes of one bit each, in each of the two loops.
    packed = sum(bits == nibbles.BITS for bits in kernel.packed.values())
    bits = 4 * (len(kernel.packed) - packed)
    whole = PER_THREAD * (case.traffic - packed)
    assert moved(counts) == whole
    assert stack_bytes(built["cubin"]) == 0
    apart = instructions(assembled(kernel.triton(), SM90, aligned=False)["ptx"])
    assert matching(apart, r"(ld|st)\.global\.v4\.b32") == 0
    pairs = zip(kernel.dtypes, kernel.scalar, strict=True)
    if any(dtype.itemsize == 4 for dtype, scalar in pairs if not scalar):
        return  # elements one by one look like 0-d inputs
    assert moved_in_tails(counts) == whole + bits
    assert moved_in_tails(apart) == 2 * whole + bits
    others = r"(ld\.global\.b(32|64)|st\.global\.(b32|b64|v2\.b64))"
    assert matching(counts, others) <= 4 + len(kernel.dtypes) + sum(kernel.scalar) + 4 * packed


@parametrized(CASES | {"library": LIBRARY})
@pytest.mark.quick("adamw-plus", "adamw-mcf2-by-chance", "adam-e5m2-mcf3", "library")
def test_every_rounding_is_there_and_no_product_is_contracted(case: Case) -> None:
    of_class = rewritten(case)
    source = kernel_of(of_class).triton()
    counts = instructions(assembled(source, SM90)["ptx"])
    assert rounded(counts) >= 2 * PER_THREAD * roundings(of_class)  # whole chunks and tails
    if case is not LIBRARY:
        assert matching(counts, r"fma\..*") == 0


def test_the_checks_on_roundings_and_contraction_can_fail() -> None:
    of_class = rewritten(CASES["adamw-plus"])
    source = kernel_of(of_class).triton()
    fused = instructions(assembled(source, SM90, fusion=True)["ptx"])
    assert matching(fused, r"fma\.rn\.f32") > 0
    plain = instructions(assembled(without_roundings(source), SM90)["ptx"])
    assert rounded(plain) < 2 * PER_THREAD * roundings(of_class)


class Recorder:
    """A kernel that notes its launches."""

    def __init__(self) -> None:
        self.launches: list[tuple[int, bool]] = []

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        return lambda *_, **options: self.launches.append((grid[0], options["ALIGNED"]))


def test_one_launch_for_all_aligned_members_and_one_for_the_others() -> None:
    kernel = kernel_of(rewritten(CASES["sgd-light"]))
    launch = Launch(kernel.triton(), kernel.scalar)
    launch.kernel = recorder = Recorder()
    sizes = [2, CHUNKS[0], CHUNKS[0] + 1]
    column = [torch.zeros(n, dtype=BF16) for n in sizes]
    launch.run([column * 100] * len(kernel.dtypes), sizes * 100)
    assert recorder.launches == [(400, True)]
    column[2] = misaligned(column[2])
    launch.run([column] * len(kernel.dtypes), sizes)
    assert recorder.launches[1:] == [(2, True), (2, False)]


@pytest.mark.slow
def test_a_step_of_three_hundred_parameters_is_two_launches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On CPU tensors that are taken for those of a GPU, by kernels that only note that they ran."""
    recorder = Recorder()

    def runner(kernel: MultiTensorKernel, device: torch.device) -> Launch:
        launch = Launch(kernel.triton(), kernel.scalar)
        launch.kernel = recorder
        return launch

    monkeypatch.setattr(MultiTensorKernel, "runner", runner)
    params = with_grads([bf16(*MIXED[i % len(MIXED)]) for i in range(300)])
    step = collage_fx.compile(torch.optim.AdamW(params), level="plus")
    for _ in range(3):
        recorder.launches.clear()
        step()
    # Step counts and what follows from them are 0-d tensors: one launch for all, unaligned.
    assert [aligned for _, aligned in recorder.launches] == [False, True]


def test_a_member_of_more_elements_than_an_int32_counts() -> None:
    geometry = _chunks((5, 2**32 + 1))
    assert geometry.members.tolist() == [0] + [1] * (2**32 // CHUNKS[1] + 1)
    assert geometry.starts[:3].tolist() == [0, 0, CHUNKS[1]] and geometry.starts[-1] == 2**32
    assert geometry.starts.dtype == geometry.sizes.dtype == torch.int64


def test_programs_of_few_elements_work_on_smaller_chunks() -> None:
    for sizes, chunk in (([MANY - 1], CHUNKS[0]), ([MANY // 2, MANY // 2], CHUNKS[1])):
        geometry = _chunks(tuple(sizes))
        assert chunk_of(sizes) == chunk and geometry.starts[1] == chunk
        assert len(geometry.starts) == MANY // chunk
        ends = geometry.starts + chunk
        assert all(ends[geometry.members == m].max() >= size for m, size in enumerate(sizes))


def test_a_rate_that_all_members_share_is_copied_to_the_device_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copied: list[torch.Tensor] = []

    def move(values: torch.Tensor, device: torch.device, kept: list[torch.Tensor]) -> torch.Tensor:
        copied.append(values.clone())
        return copied[-1]

    monkeypatch.setattr(triton_launch, "_moved", move)
    far = torch.device("meta")
    rate, another = torch.tensor(1e-3, dtype=torch.float64), torch.tensor(0.5, dtype=torch.float64)
    column = [rate, rate, another, rate]
    here = triton_launch._near(column, far, [])
    assert [t.item() for t in here] == [t.item() for t in column]
    assert len(set(addresses(here))) == copied[-1].numel() == 2
    # Steps that each parameter counts by itself are as many, in one vector.
    counts = [torch.tensor(float(k)) for k in range(4)]
    assert triton_launch._near(counts, far, []) is copied[-1] and copied[-1].numel() == 4


@pytest.mark.parametrize("chosen", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_the_kernel_in_tritons_interpreter(chosen: str) -> None:
    """The tests of interpreted.py, in a process of their own: Triton reads the variable once."""
    tests = str(Path(__file__).parents[1] / "support/interpreted.py")
    command = [sys.executable, "-m", "pytest", "-q", "-m", chosen, tests]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
