"""How long the steps of the coverage table's optimizers take beside plain eager ones, by engine.

Each class of benchmarks/results/coverage.json that runs, driven as it is there, takes steps on 4
parameters of 1024 x 1024 and on 100 of 64 elements, one thread, in a process of its own with empty
caches: plain bf16, where torch.compile is made to do nothing (heavyball compiles parts of its steps
by itself), and collage_fx.compile(arithmetic="wide"), in turns. For each: the median of a step
after four of warm-up as a multiple of the plain median, the 95th percentile of the steps likewise,
the seconds to the end of the first and of the third step, with what they compile, and what served a
step: graphs of Dynamo's and recorded segments in three ways, each as a number for one step. A step
that takes a closure is timed with it. Classes are timed out after --timeout seconds.

Written to benchmarks/results/engine_times.json after each class; a class that is run again replaces
its row. `make engine-times` runs it in the environment of `make coverage`.
"""

import argparse
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
from coverage import CONTEXT, ask
from coverage_classes import PACKAGES, Model, Recipe, load, recipes
from recorded import SETS
from steps import conditions
from torch import Tensor, nn

import collage_fx
from collage_fx.step.compiled_step import session_of

RESULTS = Path(__file__).parent / "results"
ENGINES = ("joined", "both", "graph")
"""What served a class in the coverage table: whole values, graphs of the passes, or both."""
HERE = ("segments alone", "graphs and segments", "graphs alone")
"""What served the timed steps: Dynamo's graphs, recorded segments, or both."""
WARM = 4
"""The steps before those that are timed: in the first three at most, most is compiled."""
LEAST = 3
"""So many timed steps are enough where there is no time for more."""
STREAMS = 3
"""So many sets of gradients come in turns."""

Row = dict[str, Any]


class Many(Model):
    """Parameters that are all of one shape."""

    def __init__(self, kind: str) -> None:
        nn.Module.__init__(self)
        shape, count = SETS[kind]
        generator = torch.Generator().manual_seed(1)
        for i in range(count):
            start = 1 + 0.25 * torch.randn(shape, generator=generator)
            self.register_parameter(f"p{i}", nn.Parameter(start.bfloat16()))

    def gradients(self) -> list[dict[str, Tensor]]:
        """Return sets of gradients, each a drift of its own plus noise."""
        generator = torch.Generator().manual_seed(2)

        def like(p: Tensor) -> Tensor:
            return torch.randn(p.shape, generator=generator)

        drift = {name: like(p) for name, p in self.named_parameters()}
        return [
            {
                name: (0.05 * (drift[name] + like(p))).bfloat16()
                for name, p in self.named_parameters()
            }
            for _ in range(STREAMS)
        ]


class Run:
    """One optimizer in one way."""

    def __init__(self, recipe: Recipe, kind: str, *, plain: bool) -> None:
        torch.manual_seed(0)
        self.recipe, self.model, self.plain = recipe, Many(kind), plain
        self.optimizer = recipe.make(self.model)
        self.compiled: Callable[..., Any] = (
            self.optimizer.step if plain else collage_fx.compile(self.optimizer, arithmetic="wide")
        )
        self.times: list[float] = []

    def step(self, gradients: dict[str, Tensor]) -> None:
        """Take one step, and note how long it took."""
        with torch.compiler.set_stance("force_eager" if self.plain else "default"):
            self.recipe.step(self._timed, self.model, gradients)

    def _timed(self, *args: Any) -> None:
        start = time.perf_counter()
        self.compiled(*args)
        self.times.append(time.perf_counter() - start)


class Served:
    """Counts what serves the steps of a run."""

    def __init__(self, run: Run) -> None:
        session = session_of(run.compiled)
        assert session is not None
        self.session, self.run, self.begin = session, run, len(run.times)
        self.before = self._counts()

    def _counts(self) -> dict[str, int]:
        steps: Any = self.session.supervisor()
        runs = steps.executors.runs
        return {
            "graphs": self.session.calls - runs["rewritten"],
            **{way: runs[way] for way in ("rewritten", "joined", "interpreted")},
            "compiled": steps.executors.count,
        }

    def each_step(self) -> dict[str, float]:
        """Return how often each way served a step since, and segments compiled in all."""
        steps: Any = self.session.supervisor()
        count, after = len(self.run.times) - self.begin, self._counts()
        found = {k: round((n - self.before[k]) / count, 1) for k, n in after.items()}
        found["repeated"] = round(min(steps.service.repeats, count) / count, 1)
        return {k: n for k, n in found.items() if n} | {"compiled in all": after["compiled"]}


def chosen(module: str, name: str, kind: str, drive: str) -> tuple[Recipe | None, str]:
    """Return the first recipe of this drive that takes a plain step, or why none does."""
    problem = "no recipe"
    for recipe in recipes(getattr(load(module), name)):
        if recipe.drive == drive and len(recipe.names) == 1:  # of which it uses no shape here
            try:
                run = Run(recipe, kind, plain=True)
                run.step(run.model.gradients()[0])
            except Exception as error:
                problem = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            else:
                return recipe, ""
    return None, problem


def measure(module: str, name: str, kind: str, drive: str, steps: int, seconds: float) -> Row:
    """Return the figures of one class over one set of parameters.

    Args:
        module: where the class is.
        name: its name.
        kind: one of SETS.
        drive: how its step is driven.
        steps: how many are timed.
        seconds: after which no more are begun, if `LEAST` were timed.
    """
    until = time.perf_counter() + seconds
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(dir=os.environ["ENGINE_TIMES_CACHES"])
    torch.set_num_threads(1)
    recipe, problem = chosen(module, name, kind, drive)
    if recipe is None:
        return {"problem": f"plain: {problem}"}
    runs = [Run(recipe, kind, plain=plain) for plain in (True, False)]
    stream = runs[0].model.gradients()
    served = None
    for i in range(WARM + steps):
        if i == WARM:
            served = Served(runs[1])
        if i >= WARM + LEAST and time.perf_counter() > until:
            break
        for run in runs:
            try:
                run.step(stream[i % STREAMS])
            except Exception as error:
                return {"problem": f"step {i + 1}: {type(error).__name__}: {str(error)[-300:]}"}
    assert served is not None
    return {**figures(*runs), "served": served.each_step()}


def figures(plain: Run, collage: Run) -> Row:
    """Return what the times of two runs say."""
    base, late = statistics.median(plain.times[WARM:]), collage.times[WARM:]
    return {
        "plain, ms": round(1e3 * base, 2),
        "collage, ms": round(1e3 * statistics.median(late), 2),
        "median": round(statistics.median(late) / base, 2),
        "95th": round(percentile(late, 0.95) / base, 2),
        "first, s": round(collage.times[0], 2),
        "first three, s": round(sum(collage.times[:3]), 2),
        "timed steps": len(late),
    }


def percentile(values: list[float], share: float) -> float:
    """Return the least value that this share of the values does not exceed."""
    return sorted(values)[math.ceil(share * len(values)) - 1]


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
            keys = ("median", "first, s", "first three, s")
            by_key = {k: [r[k] for r in done] for k in keys}
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


def main() -> None:
    """Measure all that is asked for, and write the results as they come."""
    parser = argparse.ArgumentParser(description="times by engine")
    parser.add_argument("--engine", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--only", nargs="+", choices=PACKAGES, default=list(PACKAGES))
    parser.add_argument("--class", dest="name", help="run this class alone")
    parser.add_argument("--sets", nargs="+", choices=list(SETS), default=list(SETS))
    parser.add_argument("--missing", action="store_true", help="only what has no row yet")
    parser.add_argument("--steps", type=int, default=10)
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
            said = {k: row[k] for k in ("median", "95th", "first three, s", "served") if k in row}
            label = f"{row['package']}.{row['name']}, {row['set']}"
            print(f"{i} of {len(found)}  {label}: {row.get('problem') or said}", flush=True)
    print(json.dumps(summary(json.loads(given.out.read_text())["rows"]), indent=1))


if __name__ == "__main__":
    main()
