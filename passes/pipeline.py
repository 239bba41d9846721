"""The compiler: one ordered list of passes over the graph of one optimizer step."""

import time
from collections.abc import Callable

from collage_fx.passes.analysis.escape import escape
from collage_fx.passes.analysis.plan import plan
from collage_fx.passes.analysis.recurrence import recurrence
from collage_fx.passes.codegen.emit import emit
from collage_fx.passes.frontend.canonicalize import canonicalize
from collage_fx.passes.frontend.capture import capture
from collage_fx.passes.frontend.moves import moves
from collage_fx.passes.frontend.reductions import reductions
from collage_fx.passes.frontend.slice import slice_
from collage_fx.passes.ir.listing import UNCHANGED, snapshot
from collage_fx.passes.ir.program import Program
from collage_fx.passes.ir.verify import verify
from collage_fx.passes.rewrite.expand import expand
from collage_fx.passes.rewrite.join import join
from collage_fx.passes.rewrite.lower import lower
from collage_fx.runtime import progress

PASSES: tuple[Callable[[Program], None], ...] = (
    capture,
    canonicalize,
    reductions,
    moves,
    slice_,
    recurrence,
    plan,
    escape,
    join,
    expand,
    lower,
    emit,
)
"""Passes in the order in which they run. Each fills in its own fields of the program."""


def run_passes(program: Program, *, snapshots: bool = False) -> Program:
    """Run every pass in order, verifying what each leaves; return the same program.

    Stops after `join` when that has made the graph, or no state is to be compensated, or slices are
    to read more of states; and where a member cannot stand for others. `result` is None then, but
    in the first case.

    Args:
        program: with a source, and nothing else.
        snapshots: whether to note what each pass leaves, in `Program.snapshots`.

    Raises:
        LegalityError: a pass breaks the specification of `ir/verify.py`.
    """
    before = snapshot(program) if snapshots else ""
    for run in PASSES:
        name = run.__name__
        if name not in program.settings.without:
            start = time.perf_counter()
            with progress.doing(f"pass {name}"):
                run(program)
            if program.unlike is not None:
                break
            verify(program, name)
            program.seconds[name] = time.perf_counter() - start
            if snapshots:
                after = snapshot(program)
                program.snapshots[name] = UNCHANGED if after == before else after
                before = after
        done = program.result is not None or not any(s.compensated for s in program.plan)
        done |= bool(program.wholes)
        if run is join and done:
            break
    return program
