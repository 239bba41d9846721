"""`python -m collage_fx doctor`: run a script, and say what its optimizers' steps lose."""

import argparse
import contextlib
import os
import runpy
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from collage_fx.diagnosis.doctor import Doctor
from collage_fx.diagnosis.finding import Finding
from collage_fx.errors import PageError, ScriptError

FINE, LOSING, UNKNOWN = 0, 1, 2
"""Exit statuses: nothing is lost; updates are; nothing could be seen, or the script failed."""
_STATUS = {"fine": FINE, "losing": LOSING, "unknown": UNKNOWN}


def add_command(commands: Any) -> None:
    """Add the command to those of `python -m collage_fx`, an object of argparse."""
    command = commands.add_parser(
        "doctor",
        help="say what the optimizer steps of a script lose in 16 bits",
        description="Run a script that uses nothing of collage_fx, and say which parameters and "
        "averages lose how much of their updates in bf16 or fp16, and what would keep them. The "
        "script trains bit for bit as without it. Exit status: 0 nothing is lost, 1 updates are "
        "lost, 2 nothing could be seen, or the script failed.",
    )
    command.add_argument("--json", type=Path, metavar="FILE", help="write the finding there too")
    command.add_argument("--html", type=Path, metavar="FILE", help="write it there as a page")
    command.add_argument("script", type=Path, help="a Python script")
    command.add_argument("args", nargs=argparse.REMAINDER, help="arguments of the script")
    command.set_defaults(run=run, failed=UNKNOWN)


def run(options: argparse.Namespace) -> int:
    """Run a script and print what was found; return the exit status.

    Raises:
        ScriptError: there is no such file.
        PageError: the finding cannot be written where it was asked for.
    """
    if not options.script.is_file():
        raise ScriptError(f"{options.script} is no file")
    # The script may go to another folder, and print elsewhere.
    files = [f and f.absolute() for f in (options.json, options.html)]
    for file in filter(None, files):
        if not file.parent.is_dir():
            raise PageError(f"{file} cannot be written: there is no such folder")
    out = sys.stdout
    with Doctor(everyone=True) as doctor:
        failure = _run(options.script, options.args)
    finding = doctor.finding()
    if _rank() == 0:  # which tells for all
        _tell(finding, failure, sys.__stdout__ if out.closed else out)
        for file in filter(None, files):
            finding.save(file, page=file is files[1])
    return UNKNOWN if failure else _STATUS[finding.status]


def _tell(finding: Finding, failure: str, out: Any) -> None:
    with contextlib.suppress(ValueError):  # it is closed
        sys.stdout.flush()
    if failure:
        print(f"collage_fx doctor: {failure}; this is what was seen until then", file=sys.stderr)
    if out is not None:
        print(f"\n{finding}", file=out, flush=True)


def _rank() -> int:
    """Return the rank of this process among those that train together."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdecimal() else 0


def _run(script: Path, arguments: Sequence[str]) -> str:
    """Run a script; return how it failed, empty if it did not. An error's traceback is printed."""
    try:
        run_as_main(script, arguments)
    except SystemExit as end:
        if end.code is not None and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        return f"{script} ended with status {status}" if status else ""
    except KeyboardInterrupt:
        print(f"collage_fx doctor: {script} was interrupted", file=sys.stderr)
    except BaseException as error:
        traceback.print_exception(error.with_traceback(_within(script, error.__traceback__)))
        return f"{script} ended with status 1 ({type(error).__name__})"
    return ""


def run_as_main(script: Path, arguments: Sequence[str]) -> None:
    """Run a script as Python does, with its own arguments and folder."""
    before = sys.argv, list(sys.path)
    sys.argv, sys.path[0] = [str(script), *arguments], str(script.resolve().parent)
    try:
        runpy.run_path(str(script.absolute()), run_name="__main__")
    finally:
        sys.argv, sys.path[:] = before


def _within(script: Path, trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the calls that lead to the script; of a syntax error all of it."""
    at = trace
    while at is not None and at.tb_frame.f_code.co_filename != str(script.absolute()):
        at = at.tb_next
    return at or trace
