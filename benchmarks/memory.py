"""How much memory a compensated AdamW takes for each parameter, beside what else there is.

    plain         bf16 parameters, gradients and states, torch.compile
    light, plus   collage_fx at that level; remainder16: plus, in that storage
    master        fp32 master weights and states, fused, with bf16 gradients and a bf16 copy: 16
                  bytes, and 4 for the gradients in fp32 that the fused step takes

Each way in a process of its own, over the same tensors:

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
from collections.abc import Callable
from pathlib import Path
from typing import Any

WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "light": {"level": "light"},
    "plus": {"level": "plus"},
    "remainder16": {"level": "plus", "storage": "remainder16"},
    "master": {},
}
EXPECTED = {"plain": 8, "light": 10, "plus": 12, "remainder16": 12, "master": 20}
"""By the tables of states, in bytes."""
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
    from step_time import _adamw, _master, gpt

    import collage_fx

    warnings.simplefilter("ignore")

    def made(shapes: Any) -> Callable[[], Any]:
        if way == "master":
            return _master(shapes, device)
        step = _adamw(shapes, device).step
        options = WAYS[way]
        return collage_fx.compile(step.__self__, **options) if options else torch.compile(step)  # type: ignore[attr-defined]

    shapes = gpt(*SETS[device])
    small = made([(2, 2)] * 10)  # what compiling leaves in the process is nobody's state
    for _ in range(3):
        small()
    torch.compiler.reset()
    before = held_now(device)
    step = made(shapes)
    for _ in range(3):
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

    parser = argparse.ArgumentParser(description="memory beside other ways")
    parser.add_argument("--device", choices=SETS, default="cpu")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    out = args.out or Path(__file__).parent / f"results/memory_{args.device}.json"
    rows = []
    for way in WAYS:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            row = {"way": way, "expected_bytes": EXPECTED[way]}
            row |= pool.apply(measure, (way, args.device))
        rows.append(row)
        print(
            f"{way:12} {row['held_bytes']:6.2f} bytes a parameter ({EXPECTED[way]} by its states), "
            f"in a step {row['peak_above']:+.1%}",
            flush=True,
        )
        result = {"conditions": conditions(args.device), "rows": rows}
        out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
