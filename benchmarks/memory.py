"""Memory that a compensated AdamW takes for each parameter, beside other ways to train.

The ways are those of ways.py. Each way in a process of its own, over the same tensors:

    held          bytes for each parameter that are there after a step: parameters, gradients,
                  states, residuals. On a GPU what its allocator has given out, on a CPU what the
                  process has more than before (VmRSS), with what compiling leaves in it
    peak          by how much of that the most that was there during a later step is above it
                  (max_memory_allocated; VmHWM)

Written to benchmarks/results/memory_<device>.json.
"""

import argparse
import ctypes
import gc
import json
import multiprocessing
import re
import warnings
from pathlib import Path

NAMES = (
    "plain",
    "plain fused",
    "light eft",
    "plus eft",
    "remainder16",
    "sr",
    "ulp4",
    "remainder16, ulp4",
    "budget 7.5",
    "budget 9",
    "master compiled",
    "master",
)
SETS = {"cpu": (8, 1024, 8192), "cuda": (24, 2048, 50304)}
"""Layers, width and vocabulary of a GPT."""


def held_now(device: str) -> int:
    """Return the bytes that are there now, and let the peak begin there."""
    import torch

    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return int(torch.cuda.memory_allocated())
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak(device: str) -> int:
    """Return the most bytes that were there since `held_now`."""
    import torch

    return int(torch.cuda.max_memory_allocated()) if device == "cuda" else _status("VmHWM")


def _status(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def measure(way: str, device: str) -> dict[str, float]:
    """Measure one way."""
    import torch
    from step_time import gpt
    from steps import parameters
    from ways import WAYS

    warnings.simplefilter("ignore")
    make = WAYS[way].make
    shapes = gpt(*SETS[device])
    small = make(
        parameters([(2, 2)] * 10, device)
    )  # what compiling leaves in the process is nobody's state
    for _ in range(3):
        small()
    torch.compiler.reset()
    before = held_now(device)
    step = make(parameters(shapes, device))
    for _ in range(101 if way.startswith("budget") else 3):  # until its storages are chosen
        step()
    held = held_now(device)
    for _ in range(2):
        step()
    count = sum(torch.Size(s).numel() for s in shapes)
    size = held - before
    return {
        "parameters": count,
        "held_bytes": round(size / count, 2),
        "peak_above": round((peak(device) - held) / size, 4),
    }


def main() -> None:
    """Measure, print and write the table."""
    from steps import conditions
    from ways import WAYS

    parser = argparse.ArgumentParser(description="memory beside other ways")
    parser.add_argument("--device", choices=SETS, default="cpu")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    out = args.out or Path(__file__).parent / f"results/memory_{args.device}.json"
    rows = []
    for way in NAMES:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            row = {"way": way, "expected_bytes": WAYS[way].held}
            row |= pool.apply(measure, (way, args.device))
        rows.append(row)
        print(
            f"{way:16} {row['held_bytes']:6.2f} bytes a parameter "
            f"({WAYS[way].held} by its states), "
            f"in a step {row['peak_above']:+.1%}",
            flush=True,
        )
        result = {"conditions": conditions(args.device), "rows": rows}
        out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
