"""Scripts in processes of their own, which begin with torch imported, and no collage_fx module.

They are forked from one that has done so: to import torch takes longer than most of them.
"""

import multiprocessing
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

FRESH = multiprocessing.get_context("forkserver")
FRESH.set_forkserver_preload(["torch"])


class Done(NamedTuple):
    """Exit status and output of a script."""

    returncode: int | None
    stdout: str
    stderr: str


def run_script(script: str, timeout: float = 300) -> Done:
    """Run the text of a script; end it, with no exit status, if it takes longer."""
    with TemporaryDirectory() as folder:
        process = FRESH.Process(target=_main, args=(script, folder))
        process.start()
        process.join(timeout)
        code = process.exitcode
        process.kill()
        process.join()
        return Done(code, *(Path(folder, name).read_text() for name in ("stdout", "stderr")))


def _main(script: str, folder: str) -> None:
    """Be the process of a script."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(f"{folder}/{name}", os.O_CREAT | os.O_WRONLY), number)
    exec(compile(script, "<script>", "exec"), {"__name__": "__main__"})
