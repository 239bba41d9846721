"""The Triton kernel of a class, compiled for GPUs on a machine without one."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from graphs import BF16
from kernels import (
    CASES,
    GFX942,
    LIBRARY,
    PER_THREAD,
    SM90,
    Case,
    assembled,
    instructions,
    matching,
    misaligned,
    moved,
    rewritten,
    rounded,
    roundings,
    stack_bytes,
    sweep_of,
    without_roundings,
)

from collage_fx.runtime.launch import CHUNK, Launch, _chunks


@pytest.mark.parametrize("case", [*CASES.values(), LIBRARY], ids=[*CASES, "library"])
def test_on_an_nvidia_gpu_each_tensor_is_read_and_written_once_by_16_bytes(case: Case) -> None:
    built = assembled(sweep_of(rewritten(case)).triton(), SM90)
    counts = instructions(built["ptx"])
    assert moved(counts) == PER_THREAD * case.traffic
    assert stack_bytes(built["cubin"]) == 0
    apart = instructions(assembled(sweep_of(rewritten(case)).triton(), SM90, aligned=False)["ptx"])
    assert matching(apart, r"(ld|st)\.global\.v4\.b32") == 0


@pytest.mark.parametrize("case", [*CASES.values(), LIBRARY], ids=[*CASES, "library"])
def test_every_rounding_is_there_and_no_product_is_contracted(case: Case) -> None:
    of_class = rewritten(case)
    source = sweep_of(of_class).triton()
    counts = instructions(assembled(source, SM90)["ptx"])
    assert rounded(counts) >= 2 * PER_THREAD * roundings(of_class)  # whole chunks and tails
    if case is not LIBRARY:
        assert matching(counts, r"fma\..*") == 0


def test_the_checks_on_roundings_and_contraction_can_fail() -> None:
    of_class = rewritten(CASES["adamw-plus"])
    source = sweep_of(of_class).triton()
    fused = instructions(assembled(source, SM90, fusion=True)["ptx"])
    assert matching(fused, r"fma\.rn\.f32") > 0
    plain = instructions(assembled(without_roundings(source), SM90)["ptx"])
    assert rounded(plain) < 2 * PER_THREAD * roundings(of_class)


def test_on_an_amd_gpu_too() -> None:
    source = sweep_of(rewritten(CASES["sgd-light"])).triton()
    contracted = r"\bv_(?:pk_)?(?:fma|fmac|mad)\w*_f32"
    text = assembled(source, GFX942)["amdgcn"]
    assert re.search(r"buffer_load_dwordx[24]", text) and not re.search(contracted, text)
    assert re.search(contracted, assembled(source, GFX942, fusion=True)["amdgcn"])


class Recorder:
    """A kernel that notes its launches."""

    def __init__(self) -> None:
        self.launches: list[tuple[int, bool]] = []

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        return lambda *_, **options: self.launches.append((grid[0], options["ALIGNED"]))


def test_one_launch_for_all_aligned_members_and_one_for_the_others() -> None:
    sweep = sweep_of(rewritten(CASES["sgd-light"]))
    launch = Launch(sweep.triton(), sweep.scalar)
    launch.kernel = recorder = Recorder()
    sizes = [2, CHUNK, CHUNK + 1]
    column = [torch.zeros(n, dtype=BF16) for n in sizes]
    launch.run([column * 100] * len(sweep.dtypes), sizes * 100)
    assert recorder.launches == [(400, True)]
    column[2] = misaligned(column[2])
    launch.run([column] * len(sweep.dtypes), sizes)
    assert recorder.launches[1:] == [(2, True), (2, False)]


def test_a_member_of_more_elements_than_an_int32_counts() -> None:
    geometry = _chunks((5, 2**32 + 1))
    assert geometry.members.tolist() == [0] + [1] * (2**32 // CHUNK + 1)
    assert geometry.starts[:3].tolist() == [0, 0, CHUNK] and geometry.starts[-1] == 2**32
    assert geometry.starts.dtype == geometry.sizes.dtype == torch.int64


def test_the_kernel_in_tritons_interpreter() -> None:
    """The tests of interpreted.py, in a process of their own: Triton reads the variable once."""
    command = [sys.executable, "-m", "pytest", "-q", str(Path(__file__).parent / "interpreted.py")]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
