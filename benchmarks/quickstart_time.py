"""How long examples/quickstart.py takes, and what it prints: what README shows of it.

Each run is a process of its own whose caches are empty, so that all is compiled; three of them.
Written to benchmarks/results/quickstart_cpu.json.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from steps import conditions

ROOT = Path(__file__).parents[1]


def once() -> tuple[str, float, float]:
    """Run it; return what it prints, its seconds, and its seconds of CPU time."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": folder}
        begin, used = time.perf_counter(), _cpu_seconds()
        done = subprocess.run(
            [sys.executable, str(ROOT / "examples/quickstart.py")],
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
            check=True,
        )
        return done.stdout, time.perf_counter() - begin, _cpu_seconds() - used


def _cpu_seconds() -> float:
    of_children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return of_children.ru_utime + of_children.ru_stime


def main() -> None:
    """Time it, and keep what it prints."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/quickstart_cpu.json")
    args = parser.parse_args()
    runs = [once() for _ in range(args.runs)]
    assert len({printed for printed, _, _ in runs}) == 1, "the losses differ from run to run"
    found = conditions() | {
        "cores": os.cpu_count(),
        "python": ".".join(map(str, sys.version_info[:3])),
        "seconds": statistics.median(seconds for _, seconds, _ in runs),
        "cpu_seconds": statistics.median(used for _, _, used in runs),
        "printed": runs[0][0].splitlines(),
    }
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
