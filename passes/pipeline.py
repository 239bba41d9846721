"""The compiler: one ordered list of passes over the graph of one optimizer step."""

import contextlib
import gc
import time
from collections.abc import Callable, Iterator

from collage_fx.passes.analysis.escape import handover
from collage_fx.passes.analysis.plan import plan
from collage_fx.passes.analysis.recurrence import recurrence
from collage_fx.passes.codegen.emit import emit
from collage_fx.passes.frontend.canonicalize import canonicalize
from collage_fx.passes.frontend.capture import capture
from collage_fx.passes.frontend.slice import slice_
from collage_fx.passes.ir.program import Program
from collage_fx.passes.ir.verify import verify
from collage_fx.passes.rewrite.expand import expand
from collage_fx.passes.rewrite.lower import lower

PASSES: tuple[Callable[[Program], None], ...] = (
    capture,
    canonicalize,
    slice_,
    recurrence,
    plan,
    handover,
    expand,
    lower,
    emit,
)
"""In the order in which they run. Each fills in its own fields of the program."""


def run_passes(program: Program) -> Program:
    """Run every pass in order, verifying what each leaves; return the same program.

    Stops after `handover` when no state is to be compensated, leaving `result` None. Raises
    LegalityError when a pass breaks the specification of `verify.py`.
    """
    with without_collector():
        for run in PASSES:
            start = time.perf_counter()
            run(program)
            verify(program, run.__name__)
            program.seconds[run.__name__] = time.perf_counter() - start
            if run is handover and not any(state.compensated for state in program.plan):
                break
    return program


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """Keep Python from looking for garbage, which in a large graph takes 40% of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
