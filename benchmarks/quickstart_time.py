"""Time and output of examples/quickstart.py, which README shows.

It runs in a process of its own whose caches are empty, so that all is compiled, and in another one
with the caches of the first; twice each. Written to benchmarks/results/quickstart_cpu.json.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from steps import conditions

ROOT = Path(__file__).parents[1]


def once(caches: str) -> dict[str, Any]:
    """Run it; return what it prints, its seconds, and its seconds of CPU time."""
    begin, used = time.perf_counter(), _cpu_seconds()
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples/quickstart.py")],
        stdout=subprocess.PIPE,
        env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": caches},
        text=True,
        check=True,
    )
    return {
        "printed": done.stdout.splitlines(),
        "seconds": time.perf_counter() - begin,
        "cpu_seconds": _cpu_seconds() - used,
    }


def _cpu_seconds() -> float:
    of_children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return of_children.ru_utime + of_children.ru_stime


def main() -> None:
    """Time it, and keep what it prints."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/quickstart_cpu.json")
    args = parser.parse_args()
    firsts, others = [], []
    for _ in range(args.runs):
        with tempfile.TemporaryDirectory() as caches:
            firsts.append(once(caches))
            others.append(once(caches))
    assert all(run["printed"] == firsts[0]["printed"] for run in firsts + others)
    found = conditions() | {"cores": os.cpu_count(), "python": platform.python_version()}
    for name, runs in (("", firsts), ("again: ", others)):
        for key in ("seconds", "cpu_seconds"):
            found[name + key] = round(statistics.median(run[key] for run in runs), 1)
    found["printed"] = firsts[0]["printed"]
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
