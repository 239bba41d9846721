"""Ways to take a step with another version of collage_fx, in a process of its own.

Two versions of a package cannot be imported into one process. `pip install --no-deps
--no-build-isolation --target DIR TREE` installs another one beside; the process imports it from
there and takes steps when it is told to, so that both versions take turns on the same machine.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class OtherVersion:
    """The process: it makes steps by their names in ways.py, and takes them."""

    def __init__(self, installed: Path, threads: int) -> None:
        """Start it.

        Args:
            installed: the folder with the other version's package.
            threads: how many it uses.

        Raises RuntimeError if there is none, or it ends.
        """
        if not (installed / "collage_fx/__init__.py").exists():
            raise RuntimeError(f"{installed} has no collage_fx: see benchmarks/other_version.py")
        paths = [str(installed.resolve()), str(Path(__file__).parent)]
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(threads)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, **what: Any) -> Any:
        """Return what the process answers."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the process of the other version ended: {self.process.wait()}")
        return json.loads(answer)

    def make(self, name: str, shapes: Any) -> None:
        """Have it make a way to take a step over tensors of these shapes."""
        self.ask(make=name, shapes=shapes)

    def seconds(self, name: str, steps: int) -> list[float]:
        """Have it take steps; return the time of each."""
        found: list[float] = self.ask(run=name, steps=steps)
        return found


@contextlib.contextmanager
def other_version(installed: Path, threads: int) -> Iterator[OtherVersion]:
    """Within, there is such a process."""
    other = OtherVersion(installed, threads)
    try:
        yield other
    finally:
        other.process.kill()
        other.process.wait()


def serve(threads: int) -> None:
    """Do what the lines of stdin say, until they end."""
    import logging
    import time
    import warnings

    import torch
    from steps import parameters
    from ways import WAYS

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(threads)
    made, answers = {}, sys.stdout
    sys.stdout = sys.stderr
    for line in sys.stdin:
        asked, times = json.loads(line), []
        if "make" in asked:
            made[asked["make"]] = WAYS[asked["make"]].make(parameters(asked["shapes"]))
        for _ in range(asked.get("steps", 0)):
            start = time.perf_counter()
            made[asked["run"]]()
            times.append(time.perf_counter() - start)
        print(json.dumps(times), file=answers, flush=True)


if __name__ == "__main__":
    serve(int(sys.argv[1]))
