"""Step times of the coverage table's optimizers beside plain eager ones, by engine.

Each class of benchmarks/results/coverage.json that runs, driven as it is there, takes steps on 4
parameters of 1024 x 1024 and on 100 of 64 elements, one thread, in a process of its own with empty
caches: plain bf16, where torch.compile is made to do nothing (heavyball compiles parts of its steps
by itself), and collage_fx.compile with storage="mcf2" in wide arithmetic, in turns. For each: the
median of a step after four of warm-up as a multiple of the plain median, and the 95th percentile of
the steps likewise, both of the CPU's time, which other processes change less than the elapsed; the
seconds to the end of the first and of the third step, with what they compile; and what served a
step, each way as a number for one step. A step that takes a closure is timed with it.

Written to benchmarks/results/engine_times.json after each class; a class that is run again replaces
its row. `make engine-times` runs it in the environment of `make coverage`.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from coverage import CONTEXT, ask
from coverage_classes import PACKAGES
from engine_times_entry import Row, measure, percentile
from recorded import SETS
from steps import conditions

RESULTS = Path(__file__).parent / "results"
ENGINES = ("joined", "both", "graph")
"""Engines that served a class in the coverage table."""
HERE = ("segments alone", "graphs and segments", "graphs alone")
"""Engines of the timed steps: Dynamo graphs, recorded segments, or both."""
SUMMED = ("median", "95th", "first, s", "first three, s", "first, CPU s", "first three, CPU s")
"""Columns that the summary has of all classes of an engine."""


def groups(row: Row) -> set[str]:
    """Return the engine of a class in the coverage table, and what served it here."""
    served = row.get("served", {})
    graphs = bool({"graphs", "repeated"} & set(served))
    segments = bool({"rewritten", "joined", "interpreted"} & set(served))
    here = {HERE[graphs] if segments else HERE[2]} if served else set()
    return {f"{row['engine']} in the table", *here}


def summary(rows: list[Row]) -> dict[str, Any]:
    """Return for each set and engine what the classes have in the median and at 95%."""
    found: dict[str, Any] = {}
    for kind in SETS:
        for engine in (*(f"{e} in the table" for e in ENGINES), *HERE):
            of = [r for r in rows if r["set"] == kind and engine in groups(r)]
            done = [r for r in of if "median" in r]
            if not done:
                continue
            by_key = {k: [r[k] for r in done] for k in SUMMED}
            found[f"{kind}, {engine}"] = {
                "classes": len(done),
                "without figures": len(of) - len(done),
                **{f"{k}: median": round(statistics.median(v), 2) for k, v in by_key.items()},
                **{f"{k}: 95th": round(percentile(v, 0.95), 2) for k, v in by_key.items()},
                "at most 1.5": sum(r["median"] <= 1.5 for r in done),
                "at most 3": sum(r["median"] <= 3 for r in done),
            }
    return found


def write(path: Path, rows: list[Row], done: list[Row]) -> None:
    """Write the rows that were there and those that were measured."""
    by_key = {(r["package"], r["name"], r["set"]): r for r in [*rows, *done]}
    order, kinds = list(PACKAGES), list(SETS)
    keys = sorted(by_key, key=lambda k: (kinds.index(k[2]), order.index(k[0]), k[1].lower()))
    kept = [by_key[k] for k in keys]
    content = {"conditions": conditions(), "summary": summary(kept), "rows": kept}
    path.write_text(json.dumps(content, indent=1) + "\n")


def entries(given: argparse.Namespace) -> Iterator[tuple[Row, str]]:
    """Yield the classes of the coverage table that are asked for, each with a set."""
    rows = json.loads((RESULTS / "coverage.json").read_text())["rows"]
    wanted = [r for r in rows if r["engine"] in given.engine and r["package"] in given.only]
    wanted.sort(key=lambda r: ENGINES.index(r["engine"]))
    for kind in given.sets:
        yield from ((r, kind) for r in wanted if given.name in (None, r["name"]))


def row_of(entry: Row, kind: str, given: argparse.Namespace) -> Row:
    """Measure one class; return its row."""
    args: Any = (entry["package"], entry["name"], kind, entry["drive"], given.steps)
    found = ask(measure, (*args, 0.8 * given.timeout), given.timeout)
    keys = ("package", "name", "version", "engine", "drive")
    return {
        **{k: entry[k] for k in keys},
        "set": kind,
        **({"problem": found} if isinstance(found, str) else found),
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "load": round(os.getloadavg()[0], 1),
    }


def in_words(row: Row) -> str:
    """Return a row as a line."""
    keys = ("median", "95th", "first three, CPU s", "served")
    said = row.get("problem") or ", ".join(f"{k} {row[k]}" for k in keys)
    return f"{row['package']}.{row['name']}, {row['set']}: {said}"


def main() -> None:
    """Measure all that is asked for, and write the results as they come."""
    parser = argparse.ArgumentParser(description="times by engine")
    parser.add_argument("--engine", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--only", nargs="+", choices=PACKAGES, default=list(PACKAGES))
    parser.add_argument("--class", dest="name", help="run this class alone")
    parser.add_argument("--sets", nargs="+", choices=list(SETS), default=list(SETS))
    parser.add_argument("--missing", action="store_true", help="only what has no row yet")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one class and set")
    parser.add_argument("--out", type=Path, default=RESULTS / "engine_times.json")
    given = parser.parse_args()
    rows = json.loads(given.out.read_text())["rows"] if given.out.exists() else []
    have = {(r["package"], r["name"], r["set"]) for r in rows if given.missing}
    found = [(r, kind) for r, kind in entries(given) if (r["package"], r["name"], kind) not in have]
    done: list[Row] = []
    with tempfile.TemporaryDirectory() as caches, ThreadPoolExecutor(given.jobs) as pool:
        os.environ |= {"ENGINE_TIMES_CACHES": caches, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        os.environ["OMP_NUM_THREADS"] = "1"
        CONTEXT.set_forkserver_preload(["collage_fx"])
        waiting = [pool.submit(row_of, r, kind, given) for r, kind in found]
        for i, one in enumerate(as_completed(waiting), 1):
            row = one.result()
            done.append(row)
            write(given.out, rows, done)
            print(f"{i} of {len(found)}  {in_words(row)}", flush=True)
    print(json.dumps(summary(json.loads(given.out.read_text())["rows"]), indent=1))


if __name__ == "__main__":
    main()
