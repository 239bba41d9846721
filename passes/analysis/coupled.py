"""States that are computed from each other: x_i' = sum_j A_ij*x_j + B_i.

A state that is overwritten keeps nothing of its own, but where it is overwritten by another that is
computed from it (slow and fast weights, buffers that change places), the two of them accumulate.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import inf

import sympy
import torch
from sympy.utilities.iterables import strongly_connected_components
from torch.fx import Node

from collage_fx.passes.analysis.affine import FREE, LERP, Form, bound, cancels, is_number, written
from collage_fx.passes.analysis.carried_path import beside, carried_path
from collage_fx.passes.analysis.criticality import critical
from collage_fx.passes.ir.graph_memory import behind
from collage_fx.passes.ir.program import Coefficient, Recurrence, Slice

Walk = dict[Node, Form]


def joint(
    part: Slice, walks: Sequence[Walk], own: list[Recurrence], reads: Sequence[Walk] = ()
) -> list[Recurrence]:
    """Return the recurrences of a slice's states, some of them judged together with others.

    States that are critical by themselves hold what accumulates, as do those that take over their
    values; what is computed from them anew at each step (a momentum with weight decay in it, a
    cache of their norm) does not, so that they take no part in cycles. What remains of a cycle
    keeps its sum nowhere else. An average of carried states, x' = 0.9*x + 0.1*y, changes as slowly
    as they do, whatever its own factor. What is never compensated has no part in that, it is given.

    Args:
        part: the representative of a class.
        walks: for each state, the forms in its old value.
        own: for each state, its recurrence by itself.
        reads: the forms in each state that the graph only reads.
    """
    kept = [i for i, (state, _, _) in enumerate(part.states) if not state.always_plain]
    leads = {i: _lead(part, own, kept, i) for i in kept}
    loose = [i for i in kept if not _lasts(part, own, i) and not _lasts(part, own, leads[i])]
    result = list(own)
    cycles = _cycles(part, walks, loose)
    lasting = {j for j in kept if own[j].kind != "overwritten"}.union(*cycles)
    for i in loose:
        if own[i].kind == "linear":
            result[i] = _average(part, walks, own[i], i, lasting)
    led = [i for i in kept if leads[i] != i]
    for i in kept:
        by_lerp = any(n.target in LERP for n in own[i].carried_path)
        others = [_form(part, walks, i, j) for j in (led if by_lerp else kept) if j != i]
        others += [forms.get(part.states[i][2], FREE) for forms in (() if by_lerp else reads)]
        result[i] = _mean(part, result[i], i, others)
    for i, lead in leads.items():
        if lead != i:
            result[i] = _taken(part, walks, result[lead], i, lead)
    for cycle in cycles:
        factor = _factor(part, walks, cycle)
        if factor is not None:
            for i in cycle:
                result[i] = _on_cycle(part, walks, i, cycle, factor)
    return result


def _average(
    part: Slice, walks: Sequence[Walk], own: Recurrence, i: int, lasting: set[int]
) -> Recurrence:
    """Return the recurrence of a state with the weights in it of all that keep their values."""
    forms = {j: _form(part, walks, i, j) for j in lasting}
    shares = {j: most for j, f in forms.items() if 0 < (most := bound(f.share)) < inf}
    if len(shares) < 2 or own.a == 0:
        return own
    together = replace(
        own,
        a=max(round(sum(shares.values()), 12), bound(own.a)),
        text=_text(part, {j: forms[j] for j in shares}, i),
        side=max(own.side, *(share for j, share in shares.items() if j != i)),
        together=f"together with {' and '.join(part.states[j][0].kind for j in shares if j != i)}",
    )
    return together if critical(together, part.states[i][0].val.dtype, "plus")[0] else own


def _mean(part: Slice, own: Recurrence, i: int, others: list[Form]) -> Recurrence:
    """Return the recurrence of a state, noting that others enter its update if it is a mean.

    In 0.99*x + 0.01*y, y is as large as x, and the product with it has an error of up to all that x
    moves by: averaged, u * sqrt(w/2) of x for a weight w. In lerp(x, y, 0.01) the difference of the
    two is small, and y has all its components; but not where y is overwritten with x, for then no
    path begins at its old value, and what is added to that is rounded. What enters divided by a
    tensor, as a momentum does, is another thing that is added, and no part of the mean.
    """
    shares = [f.share for f in others if f.carries and bound(f.share) < inf]
    if own.kind != "linear" or not shares:
        return own
    unit = torch.finfo(part.states[i][0].val.dtype).eps / 2
    heavy = max(map(bound, shares)) > 4 * unit**2
    weight = sum(shares[1:], shares[0])
    mean = heavy and bound(weight) <= 1 and cancels(weight, own.a)
    return replace(own, side=max(own.side, 1.0)) if mean else own


def _lead(part: Slice, own: list[Recurrence], kept: list[int], i: int) -> int:
    """Return the state that accumulates the new value of a state: itself, or one with the same."""
    new = part.states[i][2]
    same = [j for j in kept if own[j].kind in _KEEPING and _same_value(part.states[j][2], new)]
    lead = max(same, key=lambda j: (_lasts(part, own, j), -j), default=i)
    return lead if own[i].kind not in _KEEPING or _lasts(part, own, lead) else i


_KEEPING = ("linear", "selected", "nonlinear")


def _lasts(part: Slice, own: list[Recurrence], i: int) -> bool:
    return critical(own[i], part.states[i][0].val.dtype, "auto")[0]


def _taken(part: Slice, walks: Sequence[Walk], found: Recurrence, i: int, lead: int) -> Recurrence:
    """Return the recurrence of a state that takes over the new value of another one.

    It holds what that one accumulates, and has the same carried path.
    """
    old, name = part.old(lead), part.states[lead][0].kind
    return replace(
        found,
        carried_path=carried_path(part, old, part.states[i][2], walks[lead]),
        source=old,
        text=f"x' = {name}'",
        together=f"it takes over {name}",
    )


def _same_value(a: Node, b: Node) -> bool:
    """Return True if two new values are one, be it by way of a clone."""
    clones = (torch.ops.aten.clone.default,)
    return behind(a, clones) is behind(b, clones)


def _form(part: Slice, walks: Sequence[Walk], i: int, j: int) -> Form:
    """Return the form of the new value of state i in the old value of state j."""
    return walks[j].get(part.states[i][2], FREE)


def _cycles(part: Slice, walks: Sequence[Walk], states: list[int]) -> list[list[int]]:
    """Return the sets of at least two states each of which is computed from each other."""
    edges = [(i, j) for i in states for j in states if _form(part, walks, i, j).carries]
    components = strongly_connected_components((states, edges))
    return sorted(sorted(c) for c in components if len(c) > 1)


def _factor(part: Slice, walks: Sequence[Walk], cycle: list[int]) -> Coefficient | None:
    """Return by what the cycle multiplies its states in a step, on the whole; None if it only
    moves them.

    That is the spectral radius of |A|, from above where A has rates in it that may change.
    """
    matrix: list[list[float]] = []
    moved = True
    for i in cycle:
        row = []
        for j in cycle:
            branches = _form(part, walks, i, j).alternatives
            if branches is None:
                return sympy.Symbol("a")
            unknown = [b.a for b in branches if bound(b.a) == inf]
            if unknown:
                return unknown[0]
            row.append(max(bound(b.a) for b in branches))
            moved &= all(is_number(b.a) for b in branches)
            moved &= row[-1] in (0, 1) and not (row[-1] and any(b.adds for b in branches))
        moved &= sum(row) == 1
        matrix.append(row)
    return None if moved else _radius(matrix)


def _radius(matrix: list[list[float]]) -> float:
    """Return the largest eigenvalue of a matrix of numbers >= 0, from above (Collatz, Wielandt)."""
    vector = [1.0] * len(matrix)
    largest = 0.0
    for _ in range(200):
        # Of the matrix + 1, so that a cycle, whose eigenvalues lie on a circle, converges too.
        image = [
            v + sum(m * w for m, w in zip(r, vector, strict=True))
            for r, v in zip(matrix, vector, strict=True)
        ]
        before, largest = largest, max(n / o for n, o in zip(image, vector, strict=True)) - 1
        if abs(largest - before) < 1e-14:
            break
        scale = max(image)
        vector = [v / scale for v in image]
    return round(largest, 12)


def _on_cycle(
    part: Slice, walks: Sequence[Walk], i: int, cycle: list[int], a: Coefficient
) -> Recurrence:
    """Return the recurrence of a state on a cycle, its path beginning where most comes from."""
    new = part.states[i][2]
    forms = {j: _form(part, walks, i, j) for j in cycle if _form(part, walks, i, j).carries}
    # The same for all states that take over one value.
    first = min(j for j in cycle if _same_value(part.states[j][2], new))
    source = max(forms, key=lambda j: (_weight(forms[j]), j == first))
    old = part.old(source)
    path = carried_path(part, old, new, walks[source])
    off = [_weight(f) for j, f in forms.items() if j != source]
    names = " and ".join(part.states[j][0].kind for j in cycle if j != i)
    return Recurrence(
        kind="linear",
        a=a,
        text=_text(part, forms, i),
        carried_path=path,
        side=max(beside(part, old, path, walks[source]), *off, 0.0),
        source=None if source == i else old,
        together=f"on a cycle with {names}",
    )


def _weight(form: Form) -> float:
    return inf if form.alternatives is None else bound(form.share)


def _text(part: Slice, forms: dict[int, Form], i: int) -> str:
    terms = []
    for j, form in sorted(forms.items(), key=lambda item: item[0] != i):
        name = "x" if j == i else part.states[j][0].kind
        terms.append(f"B({name})" if form.b == "nonlinear" else f"{written(form.a)}{name}")
    rest = [] if all(f.b == "zero" for f in forms.values()) else ["B"]
    return "x' = " + " + ".join(terms + rest)
