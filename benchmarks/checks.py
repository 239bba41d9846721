"""Cost of the checks by which residuals know their values: kernels with and without them.

A kernel on a CPU notes a check of each 1,024 words that it writes, see runtime/residuals/checks.py.
For each optimizer and storage the launch of a step over tensors of a million elements is repeated
with the checks and without, by turns, on one thread and on all: the ratio of the least times.
Written to benchmarks/results/checks_cpu.json.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from steps import Lion, conditions, parameters

import collage_fx
from collage_fx.runtime.kernels.cpp_loop import Loop

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results/checks_cpu.json"
OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-3),
    "SGD": lambda params: torch.optim.SGD(params, lr=1e-2),
    "SGD, momentum": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
    "Lion": Lion,
}


def launches(optimizer: Any) -> list[tuple[Loop, tuple[Any, ...]]]:
    """Return the launches of the fourth step, with their arguments."""
    found: list[tuple[Loop, tuple[Any, ...]]] = []
    own = Loop.launch

    def launch(loop: Loop, *args: Any) -> None:
        found.append((loop, args))
        own(loop, *args)

    for _ in range(3):
        optimizer.step()
    with patch.object(Loop, "launch", launch):
        optimizer.step()
    return found


def milliseconds(calls: list[tuple[Loop, tuple[Any, ...]]], *, checked: bool) -> float:
    """Return the time of the launches, with their checks or without."""
    start = time.perf_counter()
    for loop, args in calls:
        loop.launch(*(args if checked else args[:2]))
    return 1e3 * (time.perf_counter() - start)


def row(name: str, storage: str, threads: int, count: int, size: int, turns: int) -> dict[str, Any]:
    """Return the least times of a step's launches."""
    torch.set_num_threads(threads)
    params = parameters([(size,)] * count)
    optimizer = OPTIMIZERS[name](params)
    collage_fx.compile_(optimizer, storage=storage)
    calls = launches(optimizer)
    pairs = [
        (milliseconds(calls, checked=False), milliseconds(calls, checked=True))
        for _ in range(turns)
    ]
    without, checked = (min(column) for column in zip(*pairs, strict=True))
    return {
        "optimizer": name,
        "storage": storage,
        "threads": threads,
        "without_ms": round(without, 3),
        "with_ms": round(checked, 3),
        "ratio": round(checked / without, 3),
    }


def main() -> None:
    """Measure; write the result."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=8, help="tensors")
    parser.add_argument("--size", type=int, default=1 << 20, help="elements of each")
    parser.add_argument("--turns", type=int, default=40)
    options = parser.parse_args()
    rows = []
    most = torch.get_num_threads()
    for threads in sorted({1, most}):
        for name in OPTIMIZERS:
            for storage in ("auto", "mcf2", "ulp8"):
                sizes = options.count, options.size, options.turns
                rows.append(row(name, storage, threads, *sizes))
                print("{optimizer:14} {storage:5} {threads} threads: {ratio}".format(**rows[-1]))
    torch.set_num_threads(most)
    result = {"conditions": conditions(), "tensors": [options.count, options.size], "rows": rows}
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
