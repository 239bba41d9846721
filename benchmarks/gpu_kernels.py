"""The parts of gpu_check.py on kernels: variants beside a copy, sizes of chunks, a profile."""

import csv
import io
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

from gpu_rows import Row, Rows, spread
from gpu_timing import (
    Setup,
    bandwidth,
    between_events,
    count,
    free,
    graph_of,
    timed,
    tool_of_cuda,
)
from steps import Lion, parameters
from torch import Tensor
from torch.optim import SGD
from ways import CLIPPED, LR, WAYS, Step, Way, adamw

import collage_fx
from collage_fx.passes.codegen.multi_tensor_kernel import MULTI_TENSOR_KERNELS
from collage_fx.runtime.kernels import triton_launch


def _compiled(make: Callable[[list[Tensor]], Any], **options: Any) -> Callable[..., Step]:
    return lambda params: collage_fx.compile(make(params), multi_tensor=True, **options)


def _adamw(moved: float, held: float, **options: Any) -> Way:
    return Way(_compiled(adamw, level="plus", **options), moved, held)


def _sgd(params: list[Tensor]) -> SGD:
    # In lists its first step, which makes the momentum, would have all tensors in float64 at once.
    return SGD(params, lr=LR, momentum=0.9, weight_decay=0.01, foreach=False)


VARIANTS: dict[str, Way] = {
    **{name: WAYS[name] for name in ("plus eft", "remainder16", "plus wide", "light eft")},
    "by chance": _adamw(22, 12, storage="mcf2", arithmetic="wide", stochastic_rounding=True),
    "ulp8": _adamw(18, 10, storage="ulp8"),
    **{name: WAYS[name] for name in ("sr", "ulp4", "remainder16, ulp4")},
    "mcf3": _adamw(30, 16, storage="mcf3"),
    "light wide": WAYS["light wide"],
    "SGD": Way(_compiled(_sgd, level="light", storage="mcf2"), 14, 8),
    "Lion": Way(_compiled(Lion, level="light", storage="mcf2"), 14, 8),
    "remainder16, clips": CLIPPED["remainder16, clips"],
}
"""The kernels that are measured; bytes moved and held by the table of their states."""


def variant(setup: Setup, rows: Rows, name: str) -> None:
    """Measure a variant at GPT-1.5B and at 300 tensors of a 7B model's shapes."""
    way = VARIANTS[name]
    for size, shapes in (("GPT-1.5B", setup.gpt), ("7B shapes", setup.large)):
        step = way.make(parameters(shapes, setup.device))
        timed(setup, rows, f"{name}, {size}", step, way.moved, count(shapes))
        del step
        free(setup)


def blocks(setup: Setup, rows: Rows, name: str) -> None:
    """Time a variant at GPT-1.5B with 4 elements in each thread, in place of those built in."""
    way, elements = VARIANTS[name], count(setup.gpt)
    step = way.make(parameters(setup.gpt, setup.device))
    _replays(setup, rows, f"{name}, as built", step, way.moved * elements)
    for block, warps in ((512, 4), (1024, 8)):
        with _launched_with(None, block, warps):
            said = f"{name}, blocks of {block}, {warps} warps"
            _replays(setup, rows, said, step, way.moved * elements)


def chunks(setup: Setup, rows: Rows) -> None:
    """Time other sizes of chunks and blocks, and other numbers of warps, than those built in."""
    for size, shapes in (("GPT-1.5B", setup.gpt), ("31M", setup.gpt[-14:])):
        step = WAYS["plus eft"].make(parameters(shapes, setup.device))
        moved = WAYS["plus eft"].moved * count(shapes)
        _replays(setup, rows, f"{size}, as built", step, moved)
        for chunk in (4096, 16384, 65536):
            for block, warps in ((512, 4), (1024, 4), (1024, 8), (2048, 8)):
                name = f"{size}, chunks of {chunk}, blocks of {block}, {warps} warps"
                with _launched_with(chunk, block, warps):
                    _replays(setup, rows, name, step, moved)
        free(setup)


def _replays(setup: Setup, rows: Rows, name: str, step: Step, moved: float) -> None:
    times = between_events(setup, graph_of(setup, step), calls=3)
    rows.measure(name, times, **bandwidth(setup, spread(times)["median"], moved))


class _Sizes(NamedTuple):
    BLOCK: int
    WARPS: int


def _launched_with(chunk: int | None, block: int, warps: int) -> Any:
    """Return a context in which launches have these sizes; None for chunks as built."""
    for kernel in MULTI_TENSOR_KERNELS.values():
        launch = kernel.runners.get("cuda")
        if isinstance(launch, triton_launch.Launch):
            launch.ready.clear()  # the geometry of the other chunks
    sizes: dict[str, Any] = _Sizes(block, warps)._asdict()
    if chunk is not None:
        sizes["chunk_of"] = lambda _: chunk
    return mock.patch.multiple(triton_launch, **sizes)


METRICS = {
    "memory, % of peak": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "issue, % of peak": "sm__inst_issued.avg.pct_of_peak_sustained_active",
    "occupancy, %": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "registers": "launch__registers_per_thread",
    "bytes read": "dram__bytes_read.sum",
    "bytes written": "dram__bytes_write.sum",
    "stalled on memory": "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio",
    "stalled on arithmetic": "smsp__average_warps_issue_stalled_wait_per_issue_active.ratio",
}
"""Names in a row, and Nsight Compute's."""


def profile(setup: Setup, rows: Rows, name: str = "plus eft") -> None:
    """Measure by hardware counters what limits the kernel of a variant at GPT-1.5B."""
    if setup.device != "cuda" or (tool := tool_of_cuda("ncu")) is None:
        rows.add(name, skipped="Nsight Compute (ncu) and a CUDA device are needed")
        return
    command = [tool, "--csv", "--kernel-name", "regex:multi_tensor", "--launch-skip", "3"]
    command += ["--launch-count", "1", "--clock-control", "none", "--print-units", "base"]
    command += ["--metrics", ",".join(METRICS.values()), sys.executable, __file__, name]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ)
    rows.add(name, **_metrics(done.stdout), **({} if done.returncode == 0 else _said(done)))


def _said(done: subprocess.CompletedProcess[str]) -> Row:
    return {"error": f"ncu ended with {done.returncode}: {(done.stdout + done.stderr)[-1500:]}"}


def _metrics(text: str) -> Row:
    """Return the values of METRICS in what ncu printed as comma-separated values."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    values = {
        r["Metric Name"]: r["Metric Value"] for r in csv.DictReader(io.StringIO("\n".join(lines)))
    }
    found = {name: values.get(metric) for name, metric in METRICS.items()}
    return {name: value.replace(",", "") for name, value in found.items() if value is not None}


def main() -> None:
    """Take a few steps of a variant, for a profiler."""
    setup = Setup("cuda")
    step = VARIANTS[sys.argv[1]].make(parameters(setup.gpt, "cuda"))
    for _ in range(6):
        step()
    setup.wait()


if __name__ == "__main__":
    main()
