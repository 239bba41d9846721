"""What there is to know of a GPU, in under ten minutes: bits, kernels, steps, graphs, memory.

Needs PyTorch with CUDA, Triton and pytest, and nothing installed of this project: `make gpu-here`
lays the packages out under build/site and runs this. Each part is a process of its own, with a time
of its own: one that fails, crashes or hangs says so in its place and the others run. The results
are written after each part to benchmarks/results/gpu_check.json (with `--dry`, to
build/gpu_check_dry.json). Ends with 1 if a part has failed, or if there is no CUDA device.

`--dry` runs all parts that need no CUDA on the CPU, on tensors of a few elements.
"""

import argparse
import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
Found = dict[str, Any]


class Part(NamedTuple):
    """A part of the check."""

    module: str
    function: str
    seconds: int
    """After which it is given up."""


PARTS = {
    "device": Part("gpu_parts", "device", 60),
    "kernels": Part("gpu_parts", "kernels", 120),
    "bits": Part("gpu_steps", "bits", 240),
    "step": Part("gpu_steps", "whole_step", 150),
    "graphs": Part("gpu_steps", "graphs", 90),
    "rates": Part("gpu_steps", "rates", 60),
    "peers": Part("gpu_parts", "peers", 120),
    "tests": Part("gpu_steps", "tests", 240),
    "variants": Part("gpu_parts", "variants", 120),
    "memory": Part("gpu_parts", "held", 90),
    "training": Part("gpu_steps", "training", 90),
}
"""What would be missed most comes first."""


def run_here(name: str, dry: bool, file: Path) -> None:
    """Run a part in this process; what it finds, or the traceback, is written to a file."""
    from gpu_parts import Record, Setup

    part, found = PARTS[name], Record(file)
    try:
        function = getattr(importlib.import_module(part.module), part.function)
        function(Setup("cpu" if dry else "cuda", dry), found)
    except Exception:
        found["failed"] = traceback.format_exc()[-4000:]


def run_apart(command: list[str], seconds: float) -> Found:
    """Run a command with the path of a file at its end; return what that has, and how it ended."""
    with tempfile.TemporaryDirectory() as folder:
        file, log = Path(folder) / "found.json", Path(folder) / "log"
        with log.open("w") as output:
            # What it starts holds its output open; together they are a session that can be ended.
            process = subprocess.Popen(
                [*command, str(file)], stdout=output, stderr=output, start_new_session=True
            )
            try:
                code, why = process.wait(seconds), ""
            except subprocess.TimeoutExpired:
                code, why = -1, f"not done after {seconds:.0f} seconds"
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        found: Found = json.loads(file.read_text()) if file.exists() else {}
        if code:
            found |= {"failed": why or f"ended with {code}", "output": log.read_text()[-2000:]}
        return found


def run_all(
    names: list[str], out: Path, seconds: float, run: Callable[[str, float], Found]
) -> list[str]:
    """Run parts, writing what all have found after each; return those that failed.

    Args:
        names: of the parts.
        out: where the results are written.
        seconds: for all of them; what would begin later is left out.
        run: takes a name, and the seconds after which the part is to be given up.
    """
    start = time.monotonic()
    results: Found = {"command": " ".join(["python", *sys.argv]), "date": time.strftime("%Y-%m-%d")}
    for name in names:
        left = seconds - (time.monotonic() - start)
        begun = time.monotonic()
        if left > 5:
            results[name] = run(name, min(left, PARTS[name].seconds))
        else:
            results[name] = {"failed": f"left out: {seconds:.0f} seconds were over"}
        results[name]["took, s"] = round(time.monotonic() - begun, 1)
        why = str(results[name].get("failed", "")).strip().splitlines()
        print(
            f"{name:10} {results[name]['took, s']:6.1f} s  {why[-1] if why else 'done'}", flush=True
        )
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(results, indent=1, default=str) + "\n")
    return [name for name in names if "failed" in results[name]]


def main() -> int:
    """Run the check; return the exit status."""
    parser = argparse.ArgumentParser(description="all that needs a GPU, in ten minutes")
    parser.add_argument("--dry", action="store_true", help="on the CPU, as far as that goes")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--seconds", type=float, default=540, help="for all parts together")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--part", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        warnings.simplefilter("ignore")
        run_here(args.part[0], args.dry, Path(args.part[1]))
        return 0
    import torch

    if not args.dry and not torch.cuda.is_available():
        print(
            f"gpu_check: torch {torch.__version__} finds no CUDA device here; with --dry, what "
            "needs none is run on the CPU",
            file=sys.stderr,
        )
        return 1
    name = "build/gpu_check_dry.json" if args.dry else "benchmarks/results/gpu_check.json"
    out = args.out or ROOT / name
    os.environ["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    command = [sys.executable, __file__, *(["--dry"] if args.dry else []), "--part"]
    failed = run_all(
        args.parts, out, args.seconds, lambda part, seconds: run_apart([*command, part], seconds)
    )
    print(f"written: {out}" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
