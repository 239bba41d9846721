"""All that a GPU has to show, in three runs of five to ten minutes, the most valued parts first.

    python benchmarks/gpu_check.py --run A        words, kernels, whole steps, graphs, limits
    python benchmarks/gpu_check.py --run B        peers, training, tests
    python benchmarks/gpu_check.py --run C        what limits kernels, sizes, what compiles for long

Needs torch with CUDA, triton, numpy and pytest, and nothing installed of this project: `make
gpu-here RUN=A` lays the packages out under build/site. A part is a process of its own, which
imports while the part before it runs; one that raises, hangs or dies leaves a row with its error,
and the rows that it has written. Rows of all parts are written to `--out` after each, and printed
as a table at the end; the exit status is 1 if a row has an error or a verdict that is not as it
should be. `--dry` runs on the CPU all that needs no CUDA, on tensors of a few elements.
"""

import argparse
import contextlib
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple, Protocol

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(Path(__file__).parent))


class Part(NamedTuple):
    """A part of the check."""

    function: str
    """Module and name; it takes a Setup, Rows, and the argument if there is one."""
    seconds: int
    """Seconds after which it is given up."""
    argument: str = ""


VARIANTS = (
    *("plus eft", "remainder16", "plus wide", "light eft", "by chance"),
    *("ulp8", "mcf3", "light wide", "SGD", "Lion"),
)
CLIPS = "remainder16, clips"
PEERS = (
    *("plus eft", "remainder16", "plain fused", "master", "plus wide", "light eft"),
    *("optimi", "flashoptim"),
)
SLOW_PEERS = ("torchao rounding", "torchao 8-bit", "heavyball")
"""Parts that compile for more than half a minute."""
WHOLE = ("plus eft", "master", "remainder16", "plain fused")
"""Parts that train models."""
LARGEST = ("plus eft", "master")
PROFILED = ("plus eft", "mcf3")
RUNS: dict[str, dict[str, Part]] = {
    "A": {
        "A1 device": Part("gpu_steps.device", 40),
        "A2 whole steps": Part("gpu_words.whole_steps", 70),
        "A2 launches": Part("gpu_words.launches", 70),
        **{f"A3 {way}": Part("gpu_kernels.variant", 40, way) for way in (*VARIANTS, CLIPS)},
        "A4 steps": Part("gpu_steps.host", 80),
        "A5 graphs": Part("gpu_steps.graphs", 60),
        "A6 limits": Part("gpu_limits.large", 90),
    },
    "B": {
        **{f"B1 {way}": Part("gpu_training.peer", 45, way) for way in PEERS},
        **{f"B2 {way}": Part("gpu_training.losses", 45, way) for way in WHOLE},
        **{f"B3 {way}": Part("gpu_training.trained", 40, way) for way in WHOLE},
        **{f"B3 batch, {way}": Part("gpu_training.batch", 40, way) for way in LARGEST},
        "B4 tests": Part("gpu_steps.tests", 120),
    },
    "C": {
        **{f"C1 {way}": Part("gpu_kernels.blocks", 40, way) for way in VARIANTS},
        "C2 chunks": Part("gpu_kernels.chunks", 60),
        **{f"C3 profile, {way}": Part("gpu_kernels.profile", 120, way) for way in PROFILED},
        **{f"C4 {way}": Part("gpu_training.peer", 60, way) for way in SLOW_PEERS},
        "C5 graphs of Inductor": Part("gpu_steps.inductors_graphs", 60),
        "C6 stock": Part("gpu_steps.stock", 100),
    },
}
"""The parts of all runs; what would be missed most comes first."""
PARTS = {name: part for run in RUNS.values() for name, part in run.items()}
SECONDS = {"A": 390, "B": 320, "C": 600}
"""Seconds for the parts of each run together."""
Row = dict[str, object]


class Begun(Protocol):
    """A process of a part, which waits."""

    def run(self, seconds: float) -> list[Row]:
        """Run the part; return its rows, and one more with the error if there is one."""

    def end(self) -> None:
        """End it, whether it has run or not."""


class Process:
    """A process that imports what its part needs, and runs it when it is told to."""

    def __init__(
        self, name: str, command: Sequence[str], env: Mapping[str, str] | None = None
    ) -> None:
        """Start it.

        Args:
            name: of the part.
            command: what is run, with the path of a file for its rows at the end. It reads a line
                from its standard input before it begins.
            env: its environment; None for that of this process.
        """
        self.name = name
        self.folder = tempfile.TemporaryDirectory()
        self.file, self.log = (Path(self.folder.name) / n for n in ("rows.json", "log"))
        self.output: IO[str] = self.log.open("w")
        # What it starts holds its output open; together they are a session that can be ended.
        self.process = subprocess.Popen(
            [*command, str(self.file)],
            stdin=subprocess.PIPE,
            stdout=self.output,
            stderr=self.output,
            start_new_session=True,
            text=True,
            env=env,
        )

    def run(self, seconds: float) -> list[Row]:
        """See `Begun.run`."""
        try:
            with contextlib.suppress(BrokenPipeError):
                self.process.communicate("go\n", timeout=seconds)
            code = self.process.returncode
            why = f"ended with {code}" if code else ""
        except subprocess.TimeoutExpired:
            why = f"not done after {seconds:.0f} seconds"
        rows: list[Row] = json.loads(self.file.read_text()) if self.file.exists() else []
        if why and not any("error" in row for row in rows[-1:]):
            said = self.log.read_text()[-1500:]
            rows.append({"part": self.name, "name": "the part", "error": why, "output": said})
        return rows

    def end(self) -> None:
        """See `Begun.end`."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # one that a driver holds stays
            self.process.wait(10)
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
        self.output.close()
        self.folder.cleanup()


def run_here(name: str, args: argparse.Namespace, file: Path) -> int:
    """Run a part in this process; what it raises is a row with the traceback. Return 1 then."""
    from gpu_rows import Rows
    from gpu_timing import Setup

    part = PARTS[name]
    module, _, function = part.function.rpartition(".")
    device = "cpu" if args.dry else "cuda"
    run = getattr(importlib.import_module(module), function)
    if not args.dry:
        # Inductor tries out the host's vector instructions for 20 seconds in each process; what is
        # compiled for the host here are kernels of single numbers.
        from torch._inductor import cpu_vec_isa

        cpu_vec_isa.valid_vec_isa_list = list
        if "(emulated)" in importlib.import_module("torch").cuda.get_device_name():
            importlib.import_module("cuda_emulator.probe").leave_out_probe()
    from collage_fx.step import small_updates

    small_updates.FIRST = sys.maxsize  # what it looks at is waited for
    if not args.at_once:
        sys.stdin.readline()
    rows = Rows(file, name, device, args.command, commit=args.commit, folder=args.out.parent)
    setup = Setup(device, args.dry, args.out.parent, args.words)
    try:
        setup.copied()  # before the memory is full
        rows.copied = setup.copied
        run(setup, rows, *([part.argument] if part.argument else []))
    except Exception as error:
        rows.copied = dict
        rows.add("the part", error=repr(error), traceback=traceback.format_exc()[-3000:])
        return 1
    return 0


def run_all(
    names: Sequence[str], out: Path, seconds: float, begin: Callable[[str], Begun]
) -> list[Row]:
    """Run parts, writing the rows of all after each; return them.

    Args:
        names: of the parts, in order.
        out: where the rows are written.
        seconds: for all of them; what would begin later is left out.
        begin: takes the name of a part, and returns its waiting process (`Begun`).
    """
    start = time.monotonic()
    rows: list[Row] = []
    parts: dict[str, float] = {}
    out.parent.mkdir(parents=True, exist_ok=True)
    waiting: list[Begun] = [begin(name) for name in names[:1]]
    try:
        for i, name in enumerate(names):
            waiting += [begin(later) for later in names[i + 1 : i + 2]]
            begun = time.monotonic()
            left = seconds - (begun - start)
            if left > 2:
                found = waiting[0].run(min(left, PARTS[name].seconds))
            else:
                found = [{"part": name, "name": "the part", "skipped": "no time was left"}]
            rows += found
            parts[name] = round(time.monotonic() - begun, 1)
            _write(out, rows, parts)
            _say(name, parts[name], found)
            waiting.pop(0).end()
    finally:
        for process in waiting:
            process.end()
    return rows


def _write(out: Path, rows: list[Row], parts: dict[str, float]) -> None:
    new = out.with_suffix(".new")
    new.write_text(json.dumps({"seconds": parts, "rows": rows}, indent=1, default=str) + "\n")
    new.replace(out)


def _say(name: str, took: float, rows: list[Row]) -> None:
    from gpu_rows import wrong

    bad = [f"{row['name']}: {row.get('error', 'not as it should be')}" for row in wrong(rows)]
    said = f"{len(rows)} rows" + (f", {len(bad)} wrong: {'; '.join(bad)[:300]}" if bad else "")
    print(f"{name:22} {took:6.1f} s  {said}", flush=True)


def arguments() -> argparse.Namespace:
    """Return the command line's."""
    parser = argparse.ArgumentParser(description="all that a GPU has to show, in three runs")
    parser.add_argument("--run", choices=RUNS, help="A, B or C; all without it")
    parser.add_argument("--parts", nargs="+", metavar="PART", help="names of parts, or beginnings")
    parser.add_argument("--seconds", type=float, help="for all parts together")
    parser.add_argument("--out", type=Path, help="rows, JSON; in $OUT where that is set")
    parser.add_argument("--words", type=Path, default=ROOT / "build/gpu_words.pt")
    parser.add_argument("--commit", nargs="?", help="of the sources, where git is not there to say")
    parser.add_argument("--dry", action="store_true", help="on the CPU, as far as that goes")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument(
        "--command", default=" ".join(["python", *sys.argv]), help=argparse.SUPPRESS
    )
    parser.add_argument("--at-once", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("file", nargs="?", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.out is None:
        file = f"gpu_check{f'_{args.run}' if args.run else ''}{'_dry' if args.dry else ''}.json"
        near = ROOT / ("build" if args.dry else "benchmarks/results")
        args.out = Path(os.environ.get("OUT") or near) / file
    return args


def chosen(args: argparse.Namespace) -> list[str]:
    """Return the names of the parts to run; exit with those that there are where one is unknown."""
    names = list(RUNS[args.run] if args.run else PARTS)
    wanted = args.parts or [""]
    for word in wanted:
        if not any(name.startswith(word) for name in names):
            sys.exit(f"gpu_check: no part begins with {word!r}; there are {', '.join(names)}")
    return [name for name in names if name.startswith(tuple(wanted))]


def lay_out() -> list[str]:
    """Lay packages out as they are installed, and peers; return the folders to import from."""
    site, peers = ROOT / "build/site", ROOT / "build/peers"
    shutil.rmtree(site, ignore_errors=True)
    linked = shutil.ignore_patterns("__pycache__", "passes", "runtime")
    shutil.copytree(ROOT / "collage_fx", site / "collage_fx", ignore=linked)
    for name in ("passes", "runtime"):
        shutil.copytree(ROOT / name, site / "collage_fx" / name)
    wheels = sorted(map(str, (ROOT / "build/wheels").glob("*.whl")))
    if wheels:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
        subprocess.run([*command, "--upgrade", "--target", str(peers), *wheels], check=False)
    return [str(site), str(peers)]


def surroundings() -> dict[str, str]:
    """Return the environment of the parts; compiled kernels are kept, and carried, in build/."""
    cache = ROOT / "build/gpu_cache"
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(cache), "TRITON_CACHE_DIR": str(cache / "triton")}
    paths = [*lay_out(), *filter(None, sys.path)]
    fixed = {"TORCHINDUCTOR_VEC_ISA_OK": "1", "PYTHONPATH": os.pathsep.join(paths)}
    return {**os.environ, **caches, **fixed}


def main() -> int:
    """Run the check; return the exit status."""
    args = arguments()
    if args.part:
        warnings.simplefilter("ignore")
        return run_here(args.part, args, args.file)
    import torch
    from gpu_rows import commit, table, wrong
    from steps import command as given

    names = chosen(args)
    if not (args.dry or torch.cuda.is_available()):
        print(
            f"gpu_check: torch {torch.__version__} finds no CUDA device here; with --dry, what "
            "needs none is run on the CPU",
            file=sys.stderr,
        )
        return 1
    seconds = args.seconds or SECONDS.get(args.run, sum(SECONDS.values()))
    env = surroundings()
    command = [sys.executable, __file__, *(["--dry"] if args.dry else [])]
    command += ["--out", str(args.out), "--words", str(args.words), "--command", given()]
    command += ["--commit", args.commit or commit(ROOT)]
    rows = run_all(names, args.out, seconds, lambda n: Process(n, [*command, "--part", n], env))
    bad = wrong(rows)
    print(f"\n{table(rows)}\n\nwritten: {args.out}, {len(rows)} rows, {len(bad)} wrong")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
