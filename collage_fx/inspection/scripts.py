"""`python -m collage_fx explain`: explain the optimizers of a script, or of a file."""

import argparse
import contextlib
import pickle
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from collage_fx.diagnosis.script import run_as_main
from collage_fx.errors import ScriptError
from collage_fx.inspection.explain import explain
from collage_fx.inspection.gradients import GradientRecorder
from collage_fx.optimizer import plain_steps
from collage_fx.optimizer.ownership import STAND_IN, family, params_of

Recorders = dict[Optimizer, GradientRecorder]
"""The optimizers of a script, with the gradients that they got."""


def add_command(commands: Any) -> None:
    """Add the command to those of `python -m collage_fx`, an object of argparse."""
    command = commands.add_parser(
        "explain",
        help="write what becomes of the optimizer steps of a script to an HTML page",
        description="Run a script, and write what collage_fx makes of the step of each of its "
        "optimizers to an HTML page: those whose compiled step it called, or, if there is none, "
        "all that got gradients or have states.",
    )
    command.add_argument("--out", type=Path, default=Path("step.html"), help="the page (step.html)")
    command.add_argument(
        "--last",
        type=int,
        default=8,
        help="of how many steps at most to keep gradients and replay them, to measure errors (8)",
    )
    command.add_argument("--text", action="store_true", help="print the report too")
    command.add_argument(
        "--unpickle",
        action="store_true",
        help="the file is no script but an optimizer saved by torch.save, or something with "
        "optimizers in it; unpickling runs whatever code the file names, so it must be trusted",
    )
    command.add_argument("script", type=Path, help="a Python script, or a file to unpickle")
    command.add_argument("args", nargs=argparse.REMAINDER, help="arguments of the script")
    command.set_defaults(run=run, failed=1)


def run(options: argparse.Namespace) -> int:
    """Explain the optimizers of a script, or of a file; return the exit status."""
    for line in _explain(options):
        print(line)
    return 0


def _explain(options: argparse.Namespace) -> Iterator[str]:
    if options.last < 0:
        raise ScriptError(f"--last {options.last}: a number of steps, or 0")
    if not options.script.is_file():
        raise ScriptError(f"{options.script} is no file")
    if zipfile.is_zipfile(options.script) and not options.unpickle:
        raise ScriptError(
            f"{options.script} is no script but seems to be a file of torch.save: pass --unpickle "
            "if it can be trusted, since unpickling runs whatever code it names"
        )
    if options.unpickle:
        found: Recorders = {o: GradientRecorder(o, 1) for o in unpickled(options.script)}
    else:
        found = optimizers_of(options.script, options.args, options.last)
    for number, (optimizer, recorder) in enumerate(found.items(), 1):
        replay = recorder if options.last and len(recorder) else 0
        explanation = explain(optimizer, replay=replay)
        place = options.out
        if number > 1:
            place = place.with_name(f"{place.stem}-{number}{place.suffix}")
        explanation.save(place)
        if options.text:
            yield str(explanation)
        count = sum(state.compensated for state in explanation.plan)
        yield (
            f"{place}: {explanation.subject}, {count} of {len(explanation.plan)} states compensated"
        )


def optimizers_of(script: Path, arguments: Sequence[str], last: int) -> Recorders:
    """Run a script; return its optimizers, those with a compiled step if there are any.

    Args:
        script: its file.
        arguments: its command line.
        last: of how many steps to keep gradients.

    Raises:
        ScriptError: it fails, or has no optimizer that took a step.
    """
    try:
        with _noted(max(last, 1)) as found:
            run_as_main(script, arguments)
    except SystemExit as end:
        if end.code:
            raise ScriptError(f"{script} ended with status {end.code}") from end
    except Exception as error:
        raise ScriptError(f"{script} failed with {type(error).__name__}: {error}") from error
    inner = {id(one) for o in found for one in family(o)[1:]}
    found = {o: r for o, r in found.items() if id(o) not in inner and not hasattr(o, STAND_IN)}
    compiled = {o: r for o, r in found.items() if any(map(plain_steps.was_called, family(o)))}
    chosen = compiled or {o: r for o, r in found.items() if _has_stepped(o, r)}
    if not chosen:
        raise ScriptError(f"no optimizer took a step in {script}")
    return chosen


def _has_stepped(optimizer: Optimizer, recorder: GradientRecorder) -> bool:
    has_gradients = any(p.grad is not None for p in params_of(optimizer))
    return bool(len(recorder) or getattr(optimizer, "state", None) or has_gradients)


@contextlib.contextmanager
def _noted(last: int) -> Iterator[Recorders]:
    """Note each optimizer that is made, and its gradients before they are cleared.

    A hook of its step would be traced where that is compiled.
    """
    found: Recorders = {}
    make, clear = Optimizer.__init__, Optimizer.zero_grad

    def noted(self: Optimizer, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        found[self] = GradientRecorder(self, last)

    def noted_before(self: Optimizer, set_to_none: bool = True) -> None:
        if self in found:
            found[self].note()
        clear(self, set_to_none)

    Optimizer.__init__ = noted  # type: ignore[method-assign]
    Optimizer.zero_grad = noted_before  # type: ignore[method-assign]
    try:
        yield found
        for recorder in found.values():
            if not len(recorder):
                recorder.note()
    finally:
        Optimizer.__init__, Optimizer.zero_grad = make, clear  # type: ignore[method-assign]


def unpickled(file: Path) -> list[Optimizer]:
    """Return the optimizers in a file that torch.save has written.

    Raises:
        ScriptError: it cannot be read, or has none.
    """
    try:
        content = torch.load(file, weights_only=False)
    except (
        OSError,
        RuntimeError,
        EOFError,
        AttributeError,
        ImportError,
        pickle.UnpicklingError,
    ) as e:
        raise ScriptError(f"{file} cannot be unpickled: {e}") from e
    found: list[Optimizer] = []
    waiting = [content]
    while waiting:
        one = waiting.pop(0)
        if isinstance(one, Optimizer):
            found.append(one)
        elif isinstance(one, dict):
            waiting += one.values()
        elif isinstance(one, list | tuple):
            waiting += one
    if not found:
        raise ScriptError(
            f"{file} has no optimizer in it: save the optimizer itself, not its state_dict(), "
            "which says nothing of its step"
        )
    return found
