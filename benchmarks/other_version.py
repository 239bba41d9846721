"""Another version of collage_fx, in a process of its own, beside this one.

Two versions of a package cannot be imported into one process. `pip install --no-deps
--no-build-isolation --target DIR TREE` installs another one beside; the process imports it from
there and calls functions of the benchmarks when it is told to, so that both versions do the same
on the same machine in one run.
"""

import contextlib
import importlib
import json
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class OtherVersion:
    """The process: it calls functions of the modules in this folder."""

    def __init__(self, installed: Path | None, threads: int) -> None:
        """Start it.

        Args:
            installed: the folder with the other version's package; None for this version.
            threads: how many it uses.

        Raises RuntimeError if there is none, or it ends.
        """
        env = dict(os.environ)
        if installed is not None:
            if not (installed / "collage_fx/__init__.py").exists():
                raise RuntimeError(f"{installed} has no collage_fx: see {__file__}")
            env["PYTHONPATH"] = str(installed.resolve())
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(threads)],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def call(self, module: str, function: str, **arguments: Any) -> Any:
        """Have it call a function of a module in this folder, and return what that returns.

        Arguments and result are what JSON can write.
        """
        assert self.process.stdin is not None and self.process.stdout is not None
        asked = {"module": module, "function": function, "arguments": arguments}
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the process of the other version ended: {self.process.wait()}")
        return json.loads(answer)


@contextlib.contextmanager
def other_version(installed: Path | None, threads: int) -> Iterator[OtherVersion]:
    """Within, there is such a process."""
    other = OtherVersion(installed, threads)
    with other.process:
        try:
            yield other
        finally:
            other.process.kill()


def serve(threads: int) -> None:
    """Do what the lines of stdin say, until they end."""
    import torch

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(threads)
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        asked = json.loads(line)
        function = getattr(importlib.import_module(asked["module"]), asked["function"])
        print(json.dumps(function(**asked["arguments"])), file=answers, flush=True)


if __name__ == "__main__":
    serve(int(sys.argv[1]))
