"""Time of a step over a few large tensors, beside as many elements in more tensors.

For each optimizer and way of compensating it: the milliseconds of CPU time of a step on one thread,
the least of all steps, which take turns over the sets of parameters. All sets have 4M elements, so
that a row says what a kernel costs, whatever the number of tensors that it is for. With
`--before DIR` another version of collage_fx (see other_version.py) takes its turns in a process of
its own. Written to benchmarks/results/few_tensors.json.
"""

import argparse
import contextlib
import functools
import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from other_version import other_version
from recorded import DataAdam
from steps import OPTIMIZERS, Shapes, conditions, parameters

import collage_fx
from collage_fx.runtime import progress

SETS: dict[str, Shapes] = {
    "1 of 2048 x 2048": [(2048, 2048)],
    "4 of 1024 x 1024": [(1024, 1024)] * 4,
    "16 of 512 x 512": [(512, 512)] * 16,
}
WAYS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "eft": {"storage": "mcf2"},
    "wide": {"storage": "mcf2", "arithmetic": "wide"},
    "remainder16": {"storage": "remainder16"},
}
KINDS: dict[str, Callable[[Any], Any]] = {
    "AdamW": OPTIMIZERS["AdamW"],
    "SGD": OPTIMIZERS["SGD"],
    "Adam through .data": lambda params: DataAdam(params, {"checks": False}),
}
FIRST = 4
"""Steps that compile, and are not counted."""
STEPS: dict[str, Callable[[], Any]] = {}  # of this process


def begin(kind: str, way: str, of: str) -> None:
    """Make an optimizer here, and take its first steps."""
    optimizer, options = KINDS[kind](parameters(SETS[of])), WAYS[way]
    if options is None:
        STEPS[of] = optimizer.step
    else:
        STEPS[of] = collage_fx.compile(optimizer, **options)
    for _ in range(FIRST):
        STEPS[of]()


def step(of: str) -> float:
    """Take a step; return its milliseconds of CPU time."""
    start = time.process_time()
    STEPS[of]()
    return (time.process_time() - start) * 1e3


def measured(kind: str, way: str, steps: int, other: Any) -> dict[str, dict[str, float]]:
    """Return the least time of a step for each set, of this version and the other one."""
    take: dict[str, dict[str, Callable[[], float]]] = {}
    for of in SETS:
        begin(kind, way, of)
        take[of] = {"now": functools.partial(step, of)}
        if other is not None and WAYS[way] is not None:
            other.call("few_tensors", "begin", kind=kind, way=way, of=of)
            take[of]["before"] = functools.partial(other.call, "few_tensors", "step", of=of)
    found: dict[str, dict[str, list[float]]] = {
        of: {v: [] for v in one} for of, one in take.items()
    }
    for _ in range(steps):
        for of, one in take.items():
            for version, run in one.items():
                found[of][version].append(run())
    STEPS.clear()
    return {of: {v: round(min(times), 2) for v, times in one.items()} for of, one in found.items()}


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description="steps over few tensors")
    parser.add_argument("--optimizers", nargs="+", choices=KINDS, default=[*KINDS])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[*WAYS])
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--before", type=Path, help="where another version is installed")
    default = Path(__file__).parent / "results/few_tensors.json"
    parser.add_argument("--out", type=Path, default=default)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    result: dict[str, Any] = {"conditions": conditions(), "ms": {}}
    pairs = [(kind, way) for kind in args.optimizers for way in args.ways]
    for kind, way in progress.over(pairs, "row", "steps over few tensors"):
        torch.compiler.reset()
        with contextlib.ExitStack() as stack:
            other = None
            if args.before is not None:
                other = stack.enter_context(other_version(args.before, 1))
            result["ms"][f"{kind}, {way}"] = found = measured(kind, way, args.steps, other)
        print(f"{kind}, {way}: {found}", flush=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
