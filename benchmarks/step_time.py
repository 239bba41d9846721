"""Time of a compensated AdamW step, beside other ways to take it, on the same tensors.

The ways are those of ways.py. For each: the 20th, 50th and 80th percentile of a step in
milliseconds; the bytes that its tables of states ask to be read and written for each parameter; and
those divided by the time, as a share of what a plain copy reaches on the device in the same run;
and with `--firsts n` the median of n first steps with all that they compile, each in a process of
its own with empty caches, which has compiled something else before. With `--before DIR`, where
another version of collage_fx is installed (see other_version.py), its steps take turns with these.

The ways take turns, a round of steps each. On a GPU, whose memory does not hold them all at once,
each takes turns with the copy alone. A peer that does not run is named with its reason. Written to
benchmarks/results/step_time_<device>.json.
"""

import argparse
import contextlib
import functools
import gc
import json
import logging
import multiprocessing
import os
import statistics
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from other_version import OtherVersion, other_version
from steps import Shapes, conditions, parameters
from ways import CHANGED, CLIPPED, EVERY, PEERS, WAYS, Step, absent, seconds

import collage_fx
from collage_fx.runtime import progress


def gpt(layers: int, width: int, vocabulary: int = 50304) -> Shapes:
    """Return the shapes of a GPT's parameters."""
    block = [(3 * width, width), (3 * width,), (width, width), (width,), (4 * width, width)]
    block += [(4 * width,), (width, 4 * width), *[(width,)] * 5]
    return [(vocabulary, width), *block * layers, (width,), (width,)]


SETS: dict[str, dict[str, Shapes]] = {
    "cpu": {
        "4 of 1024 x 1024": [(1024, 1024)] * 4,
        "300 of 64 elements": [(64,)] * 300,
        "300 of 7B shapes, 11M": [(256, 256), (256,), (688, 64)] * 100,
        "GPT, 26M": gpt(4, 512, 8192),
    },
    "cuda": {
        "300 of 64 elements": [(64,)] * 300,
        "GPT, 1.3B": gpt(24, 2048),
        "300 of 7B shapes, 2.8B": [(4096, 4096), (4096,), (11008, 1024)] * 100,
    },
}


COMPENSATED = ("light", "plus", "remainder16", "sr")


def first_steps(shapes: Shapes, device: str, names: list[str], count: int) -> dict[str, float]:
    """Return for each way the median time of a first step in seconds, the ways taking turns."""
    found: dict[str, list[float]] = {name: [] for name in names}
    context, threads = multiprocessing.get_context("spawn"), torch.get_num_threads()
    for _ in progress.over(range(count), "round", "first steps, in processes of their own"):
        for name in names:
            with tempfile.TemporaryDirectory() as cache:
                os.environ |= {"TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": cache}
                with context.Pool(1) as pool:
                    found[name].append(pool.apply(first_step, (name, shapes, device, threads)))
    return {name: statistics.median(times) for name, times in found.items()}


def first_step(name: str, shapes: Shapes, device: str, threads: int) -> float:
    """Return the time of the first step in this process, after a compilation of another kind."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(threads)
    sgd = torch.optim.SGD(parameters([(3,)] * 9, device), lr=1e-3)
    collage_fx.compile(sgd)()
    (taken,) = seconds((EVERY | PEERS)[name].make(parameters(shapes, device)), 1, device)
    return taken


def _run(other: OtherVersion, name: str, steps: int) -> list[float]:
    found: list[float] = other.call("ways", "run", name=name, steps=steps)
    return found


def measure(
    shapes: Shapes,
    device: str,
    rounds: int,
    steps: int,
    names: list[str],
    other: OtherVersion | None,
) -> list[dict[str, Any]]:
    """Return the rows of some ways that take turns, and of the copy beside them."""
    count = sum(torch.Size(s).numel() for s in shapes)
    ways = EVERY | PEERS
    steppers: dict[str, Step] = {n: ways[n].make(parameters(shapes, device)) for n in names}
    a, b = (torch.empty(count * 4, dtype=torch.bfloat16, device=device) for _ in range(2))
    steppers["copy"] = lambda: a.copy_(b)
    take: dict[str, Callable[[int], list[float]]] = {
        name: functools.partial(seconds, step, device=device) for name, step in steppers.items()
    }
    if other is not None:
        for name in (n for n in names if n.startswith(COMPENSATED)):
            other.call("ways", "make", name=name, shapes=shapes)
            take[f"{name}, before"] = functools.partial(_run, other, name)
    times: dict[str, list[float]] = {name: [] for name in take}
    for name, run in take.items():
        run(6)
        print(f"  {name} compiled", flush=True)
    for turn in range(rounds):
        print(f"  round {turn + 1} of {rounds}", flush=True)
        for name, run in take.items():
            times[name] += run(steps)
    copied = 4 * count * 4 / statistics.median(times["copy"])
    rows = []
    for name, found in times.items():
        p20, p50, p80 = (sorted(found)[int(q * len(found))] for q in (0.2, 0.5, 0.8))
        row: dict[str, Any] = {"way": name}
        row |= {f"p{p}_ms": round(v * 1e3, 4) for p, v in ((20, p20), (50, p50), (80, p80))}
        if (way := name.removesuffix(", before")) in ways:
            moved = ways[way].moved
            row |= {"bytes": moved, "share_of_copy": round(moved * count / p50 / copied, 3)}
        else:
            row["GB_per_s"] = round(copied / 1e9, 2)
        rows.append(row)
    return rows


def table(shapes: Shapes, args: argparse.Namespace, names: list[str]) -> list[dict[str, Any]]:
    """Return the rows of one set of shapes, printing each."""
    rows = []
    for together in [[n] for n in names] if args.device == "cuda" else [names]:
        torch.compiler.reset()
        gc.collect()
        if args.device == "cuda":
            torch.cuda.empty_cache()
        firsts = first_steps(shapes, args.device, together, args.firsts) if args.firsts else {}
        with contextlib.ExitStack() as stack:
            other = None
            if args.before is not None:
                other = stack.enter_context(other_version(args.before, torch.get_num_threads()))
            found = measure(shapes, args.device, args.rounds, args.steps, together, other)
        for row in found:
            share, first = row.get("share_of_copy"), firsts.get(row["way"])
            times = f"{row['p20_ms']:9.3f} {row['p50_ms']:9.3f} {row['p80_ms']:9.3f} ms"
            times += "" if share is None else f"  {share:.1%} of copy"
            if first is not None:
                row["first_s"] = round(first, 3)
                times += f"  first step {first:.2f} s"
            print(f"  {row['way']:20} {times}")
        rows += found
    return rows


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description="step time beside other ways")
    parser.add_argument("--device", choices=SETS, default="cpu")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--sets", nargs="+", help="names of sets of shapes; all by default")
    parser.add_argument("--only", nargs="+", default=[], help="names of ways; all by default")
    parser.add_argument("--clipped", action="store_true", help="the ways that clip gradients")
    parser.add_argument("--changed", action="store_true", help="the ways that send changes")
    parser.add_argument("--without", nargs="+", default=[], help="names of ways to leave out")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--firsts", type=int, default=0, help="how many first steps to time")
    parser.add_argument("--before", type=Path, help="where another version is installed")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    kind = "clipped_" if args.clipped else "changed_" if args.changed else ""
    out = args.out or Path(__file__).parent / f"results/step_time_{kind}{args.device}.json"
    skipped = absent(args.device)
    for name, reason in skipped.items():
        print(f"without {name}: {reason}")
    known = CLIPPED if args.clipped else CHANGED if args.changed else WAYS | PEERS
    wanted = args.only or [*known]
    names = [n for n in wanted if n not in skipped and n not in args.without]
    results = []
    for name, shapes in SETS[args.device].items():
        if args.sets and name not in args.sets:
            continue
        for threads in args.threads if args.device == "cpu" else [torch.get_num_threads()]:
            torch.set_num_threads(threads)
            print(f"{name}, {threads} threads", flush=True)
            results.append({"shapes": name, "threads": threads, "rows": table(shapes, args, names)})
            out.parent.mkdir(exist_ok=True)
            result = {"conditions": conditions(args.device), "without": skipped, "results": results}
            out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
