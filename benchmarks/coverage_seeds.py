"""The errors of classes of the coverage table over other gradients, by this version and another.

In coverage.py each class has one error, by one stream of gradients. Where all that is lost are a
few roundings of what is not compensated, a trust ratio or a momentum, chance decides whether that
is more or less than another version loses. Here each class is measured over several streams, from
parameters of their own, by this version and by the one in `--before DIR` (see other_version.py),
each in a process of its own, at level auto, or at the one that is named behind the class: versions
that judge a state otherwise are compared where both give each a residual (`pkg.Class:all`).
Printed and written to benchmarks/results/coverage_seeds.json: both errors for each stream, and the
geometric mean of their quotients with its standard error, as a factor.
"""

import argparse
import functools
import json
import os
import platform
import statistics
import sys
import time
from math import exp, inf, log
from pathlib import Path
from typing import Any

import coverage_classes
import torch
from coverage_classes import gradient_stream, load
from coverage_entry import STEPS, WRAP, Row, choose, compare, trained
from other_version import other_version
from torch._inductor import config as inductor_config

APART = 1000
"""Distance between the seeds of two streams."""


def error(package: str, name: str, level: Any, stream: int) -> float:
    """Return the error of a class over a stream of gradients, as coverage.py measures it."""
    coverage_classes.SEED = APART * stream
    row = Row(package, "", name)
    recipe, plain = choose(getattr(load(package), name), row)
    if recipe is None:
        raise RuntimeError(f"{package}.{name} does not run: {row.reason}")
    gradients = gradient_stream(STEPS)
    with inductor_config.patch(fallback_random=True):
        wrap = functools.partial(WRAP, level=level)
        collage, _ = trained(recipe, torch.bfloat16, gradients, wrap)
    compare(row, recipe, plain, collage)
    return row.err_collage


def error_by(version: Path | None, **given: Any) -> float:
    """Return the same by a version of collage_fx, in a process of its own."""
    with other_version(version, 1) as other:
        return float(other.call("coverage_seeds", "error", **given))


def row(before: Path, wanted: str, streams: int) -> dict[str, Any]:
    """Return what is found of a class, and print it."""
    path, _, level = wanted.partition(":")
    package, _, name = path.rpartition(".")
    of = {"package": package, "name": name, "level": level or "auto"}
    pairs = [
        (error_by(None, **of, stream=k), error_by(before, **of, stream=k)) for k in range(streams)
    ]
    logs = [log(ours / theirs) for ours, theirs in pairs]
    spread = statistics.stdev(logs) / len(logs) ** 0.5 if len(logs) > 1 else inf
    found = {
        **of,
        "ours": [ours for ours, _ in pairs],
        "before": [theirs for _, theirs in pairs],
        "quotient": round(exp(statistics.mean(logs)), 3),
        "standard_error": round(exp(spread), 3),
    }
    print(f"{wanted}: {found['quotient']} times, / or * {found['standard_error']}")
    return found


def main() -> None:
    """Measure the classes that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("classes", nargs="+", help="package.Class[:LEVEL]")
    parser.add_argument("--before", type=Path, required=True)
    parser.add_argument("--streams", type=int, default=6)
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results" / "coverage_seeds.json"
    )
    given = parser.parse_args()
    conditions = {
        "command": " ".join(["python", *sys.argv]).replace(str(given.before), "DIR"),
        "date": time.strftime("%Y-%m-%d"),
        "device": f"cpu, {platform.machine()}, 1 of {os.cpu_count()} cores",
        "torch": torch.__version__,
    }
    rows = []
    for wanted in given.classes:
        rows.append(row(given.before, wanted, given.streams))
        text = json.dumps({"conditions": conditions, "rows": rows}, indent=1)
        given.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
