"""Programs that are known to fail: a narrow switch for each defect, until it is mended."""

from collections.abc import Callable

from programs import Program

KNOWN: dict[str, Callable[[Program], bool]] = {}
"""The defect -> whether a program may run into it: these are left out of the random ones."""

CASES: dict[str, Program] = {}
"""The defect -> a small program that fails for it."""


def known(program: Program) -> str:
    """Return the first defect that a program may run into; "" for none."""
    return next((name for name, hits in KNOWN.items() if hits(program)), "")
