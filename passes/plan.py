"""Pass 5: decide which carried states get residuals, and say why."""

import sympy
import torch
from torch.fx import Node

from collage_fx.passes.program import (
    LOW_PRECISION,
    Carried,
    Level,
    Program,
    Recurrence,
    Rewritten,
    StateClass,
    StatePlan,
)
from collage_fx.runtime.storage import STORAGES

AUTO_THRESHOLD = 8.0
"""A decaying state is critical where 1 - a is at most this many unit roundoffs: its update then
stalls; benchmarks/criticality.py measures the bias of a plain state."""
PLUS_THRESHOLD = 16.0
"""Level `plus` also takes states whose decay is biased measurably, by 0.4% and more."""


def plan(program: Program) -> None:
    """Give every carried state a verdict and sort the slices to be rewritten by class.

    Members of one class may differ in what they compensate, since a state that has a residual keeps
    it whatever the level says. The graph does not change.
    """
    verdicts: dict[int, tuple[bool, str, str]] = {}
    has_param = any(c.owner == "param" for c in program.carried)
    for group in program.classes:
        for member in group.members:
            taken: set[Node] = set()
            for (carried, _, _), found in zip(member.states, group.recurrences, strict=True):
                keep, reason = verdict(carried, found, program.settings.level, has_param)
                if keep and not taken.isdisjoint(found.spine):
                    # A node has one expansion on it; the second residual would be dropped there.
                    carried.refusal = "it is computed on the carried path of another state"
                    keep, reason = False, carried.refusal
                if keep:
                    taken.update(found.spine)
                verdicts[carried.index] = (keep, reason, found.text)
        program.rewritten += _by_compensated(group, verdicts)
    for carried in program.carried:
        program.plan.append(_entry(carried, verdicts.get(carried.index), program))


def _by_compensated(
    group: StateClass, verdicts: dict[int, tuple[bool, str, str]]
) -> list[Rewritten]:
    chosen: dict[tuple[int, ...], Rewritten] = {}
    for member in group.members:
        which = tuple(i for i, (c, _, _) in enumerate(member.states) if verdicts[c.index][0])
        if which:
            chosen.setdefault(which, Rewritten([], which, group.recurrences)).members.append(member)
    return list(chosen.values())


def verdict(carried: Carried, found: Recurrence, level: Level, has_param: bool) -> tuple[bool, str]:
    """Return whether a state is compensated, and the reason.

    Args:
        carried: the state: its refusal, owner, dtype, and whether it has a residual already.
        found: how a step changes it.
        level: what the user asks for.
        has_param: whether any state of the same step is known to be a parameter.
    """
    if carried.refusal:
        return False, carried.refusal
    if found.kind in ("overwritten", "unchanged"):
        return False, f"{found.kind}: nothing accumulates"
    if carried.pinned:
        return True, "it has a residual from an earlier graph"
    if level == "all":
        return True, "level all"
    if carried.owner == "param" and level in ("light", "plus"):
        return True, f"parameter, level {level}"
    if level == "light":
        return _light(carried, found, has_param)
    return _critical(found, carried.val.dtype, level)


def _light(carried: Carried, found: Recurrence, has_param: bool) -> tuple[bool, str]:
    """Decide level light for a tensor that is not known to be a parameter."""
    if has_param or carried.owner == "state":
        return False, "level light compensates parameters only"
    keep, reason = _critical(found, carried.val.dtype, "auto")
    return keep and _near_one(found), f"{reason}; no tensor of this graph is a known parameter"


def _near_one(found: Recurrence) -> bool:
    return not _is_number(found.a) or abs(1 - float(found.a)) < 1e-3


def _is_number(a: sympy.Expr | float) -> bool:
    return isinstance(a, int | float) or bool(a.is_number)


def _critical(found: Recurrence, dtype: torch.dtype, level: str) -> tuple[bool, str]:
    """Tell whether the storage dtype loses part of the update."""
    if found.kind == "nonlinear":
        if found.adds:
            return True, "nonlinear, adds a term"
        return False, "selected or rescaled, nothing accumulates"
    if not _is_number(found.a):
        return True, "its factor is not a constant and may be arbitrarily near 1"
    gap = 1 - abs(float(found.a))
    if gap <= 0:
        return True, "pure accumulation"
    units = gap / (torch.finfo(dtype).eps / 2)
    limit = PLUS_THRESHOLD if level == "plus" else AUTO_THRESHOLD
    if units <= limit:
        return True, f"1-a = {gap:.3g} is {units:.2g} u, at most {limit:g} u: the decay rounds away"
    return False, f"1-a = {gap:.3g} is {units:.2g} u, above {limit:g} u: rounding averages out"


def _entry(carried: Carried, verdict: tuple[bool, str, str] | None, program: Program) -> StatePlan:
    storage = STORAGES[program.settings.storage]
    compensated, reason, text = verdict or (False, carried.refusal or _outside(carried), "")
    low = carried.val.dtype in LOW_PRECISION or carried.val.dtype.is_complex
    return StatePlan(
        name=carried.name,
        dtype=carried.val.dtype,
        shape=tuple(int(s) if isinstance(s, int) else -1 for s in carried.val.shape),
        recurrence=text,
        compensated=compensated,
        reason=reason,
        storage=storage.name if compensated else "",
        residual_bytes=storage.residual_bytes(carried.val) if compensated else 0,
        refused=bool(carried.refusal) and low,
        index=carried.index,
    )


def _outside(carried: Carried) -> str:
    if carried.val.dtype in LOW_PRECISION:
        return "overwritten: nothing accumulates"
    return f"{str(carried.val.dtype).removeprefix('torch.')}: updated as it stands"
