"""Coverage table: the optimizers of other packages that are fully compensated.

Every optimizer class of the packages in coverage_classes.py that works in eager bf16 with its
defaults takes 24 steps under collage_fx.compile, at Dynamo's default limits, each class in a
process of its own; coverage_entry.py has the four runs and the verdicts:

    full      every 16-bit state that loses updates is compensated, nothing was warned about, and
              the parameters are nearer to float64 than those of plain bf16
    partly    some states are compensated, and a warning or the report says which are not
    refused   none is compensated, and a warning or an error says so
    failed    it raises, or takes longer than --timeout
    silent    none is compensated and nothing says so: a defect

Written after each entry to benchmarks/results/coverage.json and coverage.md.
`make coverage` installs the packages (coverage-requirements.txt) into an environment of its own.
"""

import argparse
import importlib.metadata
import json
import multiprocessing
import os
import platform
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from coverage_classes import PACKAGES, class_names
from coverage_entry import Row, measure

CONTEXT = multiprocessing.get_context("forkserver")
"""Processes that start with collage_fx imported, and none of the packages."""
VERDICTS = ("full", "partly", "refused", "failed", "silent")


def ask(function: Callable[..., Any], args: tuple[str, ...], timeout: float) -> Any:
    """Return function(*args) from a process of its own, or a string that says what went wrong."""
    receiver, sender = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=answer, args=(sender, function, args))
    process.start()
    sender.close()
    try:
        if receiver.poll(timeout):
            return receiver.recv()
        return f"it took longer than {timeout:.0f} s"
    except EOFError:
        process.join()
        return f"its process ended with {process.exitcode}"
    finally:
        process.kill()
        process.join()


def answer(sender: Connection, function: Callable[..., Any], args: tuple[str, ...]) -> None:
    """Send the result of function, in silence."""
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 1)
        os.dup2(nothing.fileno(), 2)
    warnings.simplefilter("ignore")
    sender.send(function(*args))


def run(module: str, name: str, timeout: float) -> dict[str, Any]:
    """Return the row of one class."""
    row = ask(measure, (module, name), timeout)
    if isinstance(row, str):
        row = Row(module, importlib.metadata.version(PACKAGES[module]), name, "failed", row)
    return {k: None if v != v else v for k, v in asdict(row).items()}  # JSON has no nan


def entries(modules: list[str], only: str | None, timeout: float) -> list[tuple[str, str]]:
    """Return (module, class) of everything to be run."""
    found = []
    for module in modules:
        names = ask(class_names, (module,), timeout)
        if isinstance(names, str):
            raise SystemExit(f"{module} cannot be imported: {names}; see coverage-requirements.txt")
        found += [(module, name) for name in names if only in (None, name)]
    return found


def merged(path: Path, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return these rows and those of the file that they do not replace, in the table's order."""
    old = json.loads(path.read_text())["rows"] if path.exists() else []
    by_key = {(row["package"], row["name"]): row for row in [*old, *rows]}
    order = list(PACKAGES)
    return [by_key[k] for k in sorted(by_key, key=lambda k: (order.index(k[0]), k[1].lower()))]


def totals(rows: list[dict[str, Any]]) -> list[tuple[str, Counter[str]]]:
    """Return (package, verdict -> count) for each package and for all."""
    found = [
        (module, Counter(r["verdict"] for r in rows if r["package"] == module))
        for module in PACKAGES
    ]
    return [
        *((module, count) for module, count in found if count),
        ("all", Counter(r["verdict"] for r in rows)),
    ]


def markdown(conditions: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """Return the table as Markdown."""
    lines = [
        "# Coverage: optimizers of others",
        "",
        f"`{conditions['command']}`, {conditions['date']}, {conditions['device']}, torch "
        f"{conditions['torch']}. Words and verdicts: [coverage.py](../coverage.py); errors are "
        "|value - exact| / |exact - start| after 24 steps.",
        "",
        "| package | version | " + " | ".join(VERDICTS) + " | run | full of run | not run |",
        "|---|---|" + "---|" * (len(VERDICTS) + 3),
    ]
    for module, count in totals(rows):
        ran = sum(count[v] for v in VERDICTS)
        share = f"{count['full'] / ran:.0%}" if ran else "-"
        versions = {r["version"] for r in rows if r["package"] == module}
        cells = [
            module,
            ", ".join(versions) if len(versions) == 1 else "",
            *(str(count[v]) for v in VERDICTS),
        ]
        lines.append(f"| {' | '.join([*cells, str(ran), share, str(count['not run'])])} |")
    lines += [
        "",
        "| package | class | verdict | engine | plain bf16 | collage | reason |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [row["package"], row["name"], row["verdict"], row["engine"]]
        cells += [_error(row["err_plain"]), _error(row["err_collage"])]
        cells.append(row["reason"].replace("|", "/"))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _error(x: float | None) -> str:
    return "" if x is None else f"{x:.1e}"


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write the JSON and the Markdown table."""
    conditions = {
        "command": " ".join(["python", "benchmarks/coverage.py", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "device": f"cpu, {platform.machine()}, 1 thread",
        "torch": torch.__version__,
    }
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"conditions": conditions, "rows": rows}, indent=1) + "\n")
    path.with_suffix(".md").write_text(markdown(conditions, rows))


def main() -> None:
    """Run the entries, print each, and write the table as they come."""
    parser = argparse.ArgumentParser(description="the coverage table")
    parser.add_argument("--only", nargs="+", choices=PACKAGES, default=list(PACKAGES))
    parser.add_argument("--class", dest="name", help="run this class alone")
    parser.add_argument("--verdict", help="run again the entries that have this verdict")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one entry")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/coverage.json")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as cache, ThreadPoolExecutor(args.jobs) as pool:
        os.environ |= {"TORCHINDUCTOR_CACHE_DIR": cache, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        os.environ["OMP_NUM_THREADS"] = "1"
        CONTEXT.set_forkserver_preload(["collage_fx"])
        found = entries(args.only, args.name, args.timeout)
        if args.verdict:
            old = {(r["package"], r["name"]): r["verdict"] for r in merged(args.out, [])}
            found = [entry for entry in found if old.get(entry) == args.verdict]
        waiting = [pool.submit(run, m, n, args.timeout) for m, n in found]
        for i, done in enumerate(as_completed(waiting), 1):
            row = done.result()
            rows.append(row)
            write(args.out, merged(args.out, rows))
            errors = f"{_error(row.get('err_plain')):>8} -> {_error(row.get('err_collage')):8}"
            label = f"{row['package']}.{row['name']}"
            print(
                f"{i:3} of {len(found)}  {label:44} {row['verdict']:8} {row['engine']:6} "
                f"{errors} {row['reason'][:90]}",
                flush=True,
            )
    for module, count in totals(merged(args.out, rows)):
        print(f"{module:28} " + "  ".join(f"{v} {n}" for v, n in sorted(count.items())))


if __name__ == "__main__":
    main()
