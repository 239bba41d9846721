"""Host time of an AdamW step over many small tensors, by part: on a CPU, or beside a GPU.

For each number of tensors of 64 elements: the median and the 95th percentile of a step in
milliseconds, one thread, steps of all ways taking turns, so that each finds its tensors in no
cache; the same of a repeated step by itself, and its parts in microseconds: what is not the
kernels' is the host's. "python" looks at each tensor in Python in
each step. "compiled" is torch.compile's plain bf16, for --plain tensors at
most: it compiles a minute or more. Lion and Slow are not in torch.optim: Dynamo graphs, bound to
their tensors, do their steps. Written to benchmarks/results/host_time.json.

With --device cuda it is the host's time before the device is done; it needs no GPU:
    PYTHONPATH=tests/support PYTHON -m cuda_emulator python benchmarks/host_time.py --device cuda
"""

import argparse
import contextlib
import importlib
import json
import logging
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from steps import Lion, Slow, conditions, parameters
from torch.autograd import graph
from torch.optim import AdamW, Optimizer

import collage_fx
from collage_fx.runtime.kernels.cpp_loop import Loop
from collage_fx.runtime.kernels.tensor_snapshot import TensorSnapshot

PARTS = {
    "comparison": (TensorSnapshot, "unchanged"),
    "tables of addresses": (TensorSnapshot, "gather"),
    "kernels": (Loop, "launch"),
    "version counters": (graph, "increment_version"),
    "noting versions": (TensorSnapshot, "settle"),
}
Step = Callable[[], Any]


def ways(count: int, plain: int, device: str) -> dict[str, Step]:
    """Return what takes a step in each way, over parameters of its own."""

    def made(**options: Any) -> Optimizer:
        return AdamW(parameters([(64,)] * count, device), lr=1e-3, **options)

    found: dict[str, Step] = {}
    scheduled = made()
    step = collage_fx.compile(scheduled)
    taken = iter(range(1, 1 << 30))

    def with_schedule() -> None:
        scheduled.param_groups[0]["lr"] = 1e-3 / next(taken)
        step()

    found["repeated"] = collage_fx.compile(made())
    found["repeated, another rate each step"] = with_schedule
    found["python"] = collage_fx.compile(made(), without=("repeat",))
    found["plain bf16, fused"] = made(fused=True).step
    if count <= plain:
        found["plain bf16, compiled"] = torch.compile(made().step)
    for own in (Lion, Slow) if count <= plain else ():
        shapes = [(64,)] * count
        found[own.__name__] = collage_fx.compile(own(parameters(shapes, device)))
        optimizer = own(parameters(shapes, device))
        found[f"{own.__name__}, plain bf16, compiled"] = torch.compile(optimizer.step)
    return found


@contextlib.contextmanager
def timed() -> Iterator[dict[str, float]]:
    """Within, yield the seconds spent in each part."""
    spent = dict.fromkeys(PARTS, 0.0)

    def wrapped(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args)
            finally:
                spent[name] += time.perf_counter() - start

        return call

    with contextlib.ExitStack() as stack:
        for name, (owner, attribute) in PARTS.items():
            function = wrapped(name, getattr(owner, attribute))
            stack.enter_context(patch.object(owner, attribute, function))
        yield spent


def milliseconds(step: Step) -> float:
    """Do a step, and return the time that it took."""
    start = time.perf_counter()
    step()
    return 1e3 * (time.perf_counter() - start)


def measured(count: int, rounds: int, plain: int, device: str) -> dict[str, Any]:
    """Return the figures for a number of tensors."""
    steps = ways(count, plain, device)
    for name, step in steps.items():
        print(f"{count} tensors: {name}", flush=True)
        for _ in range(8):
            step()
    times: dict[str, list[float]] = {name: [] for name in (*steps, "repeated, by itself")}
    for _ in range(rounds):
        for name, step in steps.items():
            times[name].append(milliseconds(step))
    for _ in range(rounds):
        times["repeated, by itself"].append(milliseconds(steps["repeated"]))
    found: dict[str, Any] = {}
    for name, all_times in times.items():
        late = sorted(all_times)
        found[name] = {
            "median, ms": round(statistics.median(late), 3),
            "95th, ms": round(late[int(0.95 * (len(late) - 1))], 3),
        }
    with timed() as spent:
        for _ in range(rounds):
            steps["repeated"]()
    found["parts of a repeated step, us"] = {
        k: round(1e6 * s / rounds, 1) for k, s in spent.items()
    }
    return found


def main() -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tensors", nargs="+", type=int, default=[300, 1000])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--plain", type=int, default=300)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--out")
    given = parser.parse_args()
    name = "host_time.json" if given.device == "cpu" else "host_time_cuda.json"
    out = Path(given.out or Path(__file__).parent / "results" / name)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    results: dict[str, Any] = {**conditions(given.device)}
    if "(emulated)" in results["device"]:
        importlib.import_module("cuda_emulator.probe").leave_out_probe()
    for count in given.tensors:
        found = measured(count, given.rounds, given.plain, given.device)
        results[f"{count} of 64 elements"] = found
        print(json.dumps(found, indent=1), flush=True)
    out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
