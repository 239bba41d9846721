"""Criticality: when a 16-bit state loses part of its update, and the thresholds for it."""

import torch

from collage_fx.passes.analysis.affine import bound, is_number
from collage_fx.passes.ir.program import Coefficient, Level, Recurrence

AUTO_THRESHOLD = 8.0
"""A decaying state is critical where 1 - |a| is at most this many unit roundoffs: its update then
stalls. Measured (benchmarks/criticality.py) for bf16: an error of 0.7% at 10 u, which is that of
storing an average with noise in it, 0.9% at 7.7 u, 2.7% at 5 u, 15% at 2.6 u, 134% at 0.26 u."""
PLUS_THRESHOLD = 16.0
"""Level `plus` goes on to where the error no longer depends on 1 - a much: 0.5% in bf16 from 18 u
on; in fp16 it is 1.4% at 10 u and 0.2% at 20 u."""


def critical(found: Recurrence, dtype: torch.dtype, level: Level) -> tuple[bool, str]:
    """Return True if the storage dtype loses part of the update, and why."""
    if found.kind == "nonlinear":
        keep, reason = True, "not linear in x: what it adds to x may be below the last bit of x"
    elif found.kind == "selected":
        keep, reason = _selected(found, dtype, level)
    else:
        keep, reason = _decaying(found.a, dtype, level)
        if found.curved and not keep:
            keep, reason = True, "what it adds to a*x has some of x in it, not linear"
    return keep, f"{found.together}: {reason}" if found.together else reason


def _selected(found: Recurrence, dtype: torch.dtype, level: Level) -> tuple[bool, str]:
    """Judge each branch of a selection; x itself, -x or something new only takes a value over."""
    for branch in found.branches:
        takes_over = branch.a == 0 or (not branch.adds and branch.a in (1, -1))
        if not takes_over:
            keep, reason = _decaying(branch.a, dtype, level)
            if keep:
                return True, f"one branch of a selection: {reason}"
    return False, "a maximum or selection, which takes a value over: nothing accumulates"


def _decaying(a: Coefficient, dtype: torch.dtype, level: Level) -> tuple[bool, str]:
    gap = 1 - bound(a)
    units = gap / (torch.finfo(dtype).eps / 2)
    limit = PLUS_THRESHOLD if level == "plus" else AUTO_THRESHOLD
    if not is_number(a):
        if units <= limit:
            return True, "its factor is not a constant and may be arbitrarily near 1"
        return False, f"its factor is at most {1 - gap:.3g}: rounding averages out"
    if gap <= 0:
        return True, "pure accumulation"
    if units <= limit:
        return True, f"1-a = {gap:.3g} is {units:.2g} u, at most {limit:g} u: the decay rounds away"
    return False, f"1-a = {gap:.3g} is {units:.2g} u, above {limit:g} u: rounding averages out"
