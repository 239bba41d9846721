"""Pass 7: decide which carried states get residuals, and say why."""

from collections.abc import Iterable
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import is_concrete_int

from collage_fx.passes.analysis.affine import FREE, Form, cancels, is_number
from collage_fx.passes.analysis.carried_path import walk
from collage_fx.passes.analysis.criticality import critical
from collage_fx.passes.ir.program import (
    Carried,
    Level,
    Program,
    Recurrence,
    Rewritten,
    Settings,
    Slice,
    StateClass,
    StatePlan,
    compensable_in,
    other_outputs,
    value_of,
)
from collage_fx.passes.ir.verdict import UNKNOWN, Verdict, VerdictKind
from collage_fx.runtime.errors import StorageError
from collage_fx.runtime.storage.positions import place_in_order
from collage_fx.runtime.storage.registry import STORAGES, Choice, check_compensable, is_by_chance

_LEFT_BY_LEVEL = "level light compensates parameters only"
Found = tuple[Verdict, Recurrence]
"""The verdict on a state in a slice, and how a step changes it."""


def plan(program: Program) -> None:
    """Give every carried state a verdict and sort the slices to be rewritten by class.

    Members of one class may differ in what they compensate, since a state that has a residual keeps
    it whatever the level says; in whether they are one flat walk over memory; and in their device.
    The graph does not change.
    """
    verdicts: dict[int, Found] = {}
    leave_alone(program.carried, program.settings.states, is_step=program.is_step)
    for group in program.classes:
        feed = feeding(group) if program.settings.level == "light" else taken_over(group)
        for member in group.members:
            for i in feed:
                member.states[i][0].feeds_parameter = True
            verdicts.update(_member(program, group, member))
        program.rewritten += _by_compensated(group, verdicts, program.settings)
    for carried in program.carried:
        entry = _entry(carried, verdicts.get(carried.index), program)
        others = program.others.get(carried.index, [])
        program.plan += [entry, *(_of_other(entry, other) for other in others)]


def leave_alone(carried: list[Carried], named: tuple[str, ...], *, is_step: bool) -> None:
    """Mark the states of one step that are left alone, being nobody's optimizer state.

    Those are the buffers of modules (statistics of a batch norm, caches); and where an optimizer
    owns some of the states, or the step is known to be one's, all others, such as gradients. What
    the user names is not left alone.
    """
    any_owned = is_step or any(c.owned for c in carried)
    for c in carried:
        if not (c.owned or is_named(c.name, named)) and (any_owned or c.owner == "buffer"):
            c.refusal = ""
            c.left_alone = f"not an optimizer's state; name it with states=({c.name!r},)"


def is_named(name: str, named: tuple[str, ...]) -> bool:
    """Return True if the user names a state, by its name or by a pattern."""
    # As it stands too, since the brackets of params[0] mean something else in a pattern.
    return any(name == pattern or fnmatchcase(name, pattern) for pattern in named)


def feeding(group: StateClass) -> set[int]:
    """Return the positions of the states of which a parameter is computed anew at each step.

    The parameter keeps little or nothing of itself then, and what it should accumulate is lost
    where these states lose it.
    """
    part, found = group.representative, group.recurrences
    walks = [walk(part.nodes, part.old(j)) for j in range(len(found))]
    feed = taken_over(group)
    for i, ((carried, _, new), one) in enumerate(zip(part.states, found, strict=True)):
        if carried.owner != "param":
            continue
        anew = bool(one.together) or not critical(one, carried.val.dtype, "auto")[0]
        new_forms = [forms.get(new) for forms in walks]
        feed |= {j for j, f in enumerate(new_forms) if enters(f, new_forms[i], anew=anew)}
    return {j for j in feed if part.states[j][0].owner != "param"}


def taken_over(group: StateClass) -> set[int]:
    """Return the positions of the states of which a parameter takes over the new value."""
    part, found = group.representative, group.recurrences
    place = {part.old(j): j for j in range(len(found))}
    states = zip(part.states, found, strict=True)
    params = (one for (carried, _, _), one in states if carried.owner == "param")
    taken = {place[one.source] for one in params if one.source is not None}
    return {j for j in taken if part.states[j][0].owner != "param"}


def enters(form: Form | None, own: Form | None, *, anew: bool) -> bool:
    """Return True if a parameter is computed anew from x: as it is known to be, or as an average.

    What it keeps of itself may hide that: of 0.9*(1 - lr*wd)*p + 0.1*x the factor is not known.

    Args:
        form: the new value in x.
        own: the same in the parameter's old value.
        anew: whether it is known to keep little of itself.
    """
    if anew or form is None or own is None:
        return anew and form is not None and any(a != 0 for a in form.shares)
    return any(b != 0 and cancels(b, a) for b in form.shares for a in own.shares)


def _member(program: Program, group: StateClass, member: Slice) -> dict[int, Found]:
    """Return verdicts and findings on the states of one slice, by index."""
    has_param = any(c.owner == "param" for c in program.carried)
    model, found = group.representative, group.recurrences
    verdicts = [
        _outside(carried, compensable=False)
        if carried.always_plain
        else verdict(carried, one, program.settings.level, has_param)
        for (carried, _, _), one in zip(member.states, found, strict=True)
    ]
    before: dict[Node, Node] = {}
    # What is linear in a state comes first: what is not may be computed from its new value.
    for i in sorted(range(len(found)), key=lambda i: _ORDER.index(found[i].kind)):
        steps = found[i].steps(model.old(i))
        if verdicts[i].compensated and any(before.get(n, p) is not p for n, p in steps.items()):
            verdicts[i] = _second(member.states[i][0], found, verdicts, i, model)
        if verdicts[i].compensated:
            verdicts[i] = _if_held(member.states[i][0], verdicts[i], program.settings.storage)
        if verdicts[i].compensated:
            before.update(steps)
    sources = {model.old(i): i for i in range(len(found))}
    for _ in found:
        for i, one in enumerate(found):
            alone = one.source is not None and not verdicts[sources[one.source]].compensated
            if alone and verdicts[i].compensated:
                verdicts[i] = _decided(False, f"{one.together}, which has no residual to take over")
    return {
        carried.index: (verdicts[i], found[i]) for i, (carried, _, _) in enumerate(member.states)
    }


def _if_held(carried: Carried, found: Verdict, choice: Choice) -> Verdict:
    """Return a verdict, or a refusal if it needs a storage that cannot hold the state.

    Raises StorageError for a parameter.
    """
    try:
        storage_of(carried, choice)
    except StorageError as error:
        if carried.owner == "param":
            raise
        carried.refusal = str(error)
        return _decided(False, carried.refusal)
    return found


_ORDER = ("overwritten", "unchanged", "linear", "selected", "nonlinear")


def _second(
    carried: Carried,
    found: list[Recurrence],
    verdicts: list[Verdict],
    which: int,
    model: Slice,
) -> Verdict:
    """Return the verdict on a state whose carried path runs into that of another.

    A node has one expansion on it; a second residual would be dropped there.
    """
    for i, (other, _, new) in enumerate(model.states):
        on_path = i != which and verdicts[i].compensated and new in found[which].carried_path
        if on_path and not _keeps_beside(model, which, new):
            cause = f"computed anew from {other.state_name.short}, which accumulates"
            return Verdict(VerdictKind.ANEW, cause)
    carried.refusal = "it is computed on the carried path of another state"
    return _decided(False, carried.refusal)


def _keeps_beside(part: Slice, which: int, other: Node) -> bool:
    """Return True if a state keeps something of itself that the new value of another does not hold.

    So does x of y' = (x + y)/2, x' = (x + y')/2.
    """
    forms = walk([n for n in part.nodes if n is not other], part.old(which))
    return forms.get(part.states[which][2], FREE).carries


def _by_compensated(
    group: StateClass, verdicts: dict[int, Found], settings: Settings
) -> list[Rewritten]:
    found: dict[Any, Rewritten] = {}
    for member in group.members:
        states = enumerate(c for c, _, _ in member.states)
        compensated = {i: c for i, c in states if verdicts[c.index][0].compensated}
        storages = {i: storage_of(c, settings.storage) for i, c in compensated.items()}
        if storages:
            asked = settings.stochastic_rounding
            by_chance = frozenset(s for s in storages.values() if is_by_chance(s, asked=asked))
            marked = _marked(member, storages) if settings.changed else ()
            new = Rewritten(
                [], storages, group.recurrences, group.representative, marked, by_chance
            )
            # What cannot be updated together must not keep the others from it.
            ordered = by_chance and all(in_order(c) is not None for c, _, _ in member.states)
            layout = flat(member), ordered, marked, value_of(member.nodes[0]).device
            found.setdefault((*storages.items(), layout), new).members.append(member)
    return list(found.values())


def _marked(member: Slice, storages: Iterable[int]) -> tuple[int, ...]:
    """Return the positions of the parameters of which bits in the order of rows can be kept."""
    states = [member.states[i][0] for i in storages]
    pairs = zip(storages, states, strict=True)
    return tuple(
        i
        for i, c in pairs
        if c.state_name.is_param
        and c.val.dim()
        and c.val.is_contiguous()
        and all(map(is_concrete_int, c.val.shape))
    )


def flat(member: Slice) -> bool:
    """Return True if all tensors of a member lie in memory in one and the same dense order.

    Sizes of the local tensors of DTensors are SymInts that have a constant value.
    """
    full = [value_of(n) for n in member.inputs if value_of(n).dim()]
    states = {member.inputs[at] for _, at, _ in member.states}
    if not all(is_concrete_int(s) for v in full for s in (*v.shape, *v.stride())):
        return False
    first = full[0] if full else None
    return (
        first is not None
        and all(value_of(n).dim() for n in states)
        and all(
            v.shape == first.shape and v.stride() == first.stride()
            for v in [*full, *map(value_of, other_outputs(member))]
        )
        and torch.ops.aten.is_non_overlapping_and_dense(first)
    )


def in_order(carried: Carried) -> int | None:
    """Return the position of the first element of a state if the others follow it in memory.

    That is its number in the whole tensor, row by row; None if they are in another order there.
    """
    sizes = carried.val.shape
    if not carried.val.is_contiguous() or not all(map(is_concrete_int, sizes)):
        return None
    return place_in_order([int(size) for size in sizes], carried.place)


def storage_of(carried: Carried, choice: Choice) -> str:
    """Return the storage for a carried state; raises StorageError if it cannot hold the state."""
    storage = compensable_in(carried, choice)
    check_compensable(carried.val.dtype, storage, carried.name)
    return storage


def verdict(carried: Carried, found: Recurrence, level: Level, has_param: bool) -> Verdict:
    """Return the verdict on a state by itself; `_entry` tells a refusal.

    Args:
        carried: the state: its refusal, owner, dtype, and whether it has a residual already.
        found: how a step changes it.
        level: what the user asks for.
        has_param: whether any state of the same step is known to be a parameter.
    """
    if carried.refusal:
        return _decided(False, carried.refusal)
    if carried.left_alone:
        return _left_alone(carried)
    if found.kind in ("overwritten", "unchanged") and not found.together:
        return _decided(False, f"{found.kind}: nothing accumulates")
    judged = _judged(carried, found, level, has_param)
    if carried.takes_over and not judged.compensated:
        return _decided(True, "it takes over the value of a state that is compensated")
    if carried.keeps_residual and not judged.compensated:
        return _decided(True, "it has a residual from an earlier graph")
    return judged


def _decided(keep: bool, cause: str) -> Verdict:
    return Verdict(VerdictKind.COMPENSATED if keep else VerdictKind.PLAIN, cause)


def _left_alone(carried: Carried) -> Verdict:
    kind = VerdictKind.GRADIENT if carried.gradient else VerdictKind.NO_STATE
    return Verdict(kind, carried.left_alone)


def _judged(carried: Carried, found: Recurrence, level: Level, has_param: bool) -> Verdict:
    if level == "all":
        return _decided(True, "level all")
    if carried.owner == "param" and level in ("light", "plus"):
        return _decided(True, f"parameter, level {level}")
    if level == "light":
        return _light(carried, found, has_param)
    keep, reason = critical(found, carried.val.dtype, level)
    if carried.owner == "param" and not keep:
        # An average whose input hardly moves, as the iterates of some methods are: its rounding
        # does not grow, and is as large as the progress that a small learning rate makes.
        reason = f"parameter: {reason.partition(',')[0]}, but each update is small beside it"
        return _decided(True, reason)
    if carried.feeds_parameter and not keep:
        return _decided(True, f"a parameter takes it over; {reason}")
    return _decided(keep, reason)


def _light(carried: Carried, found: Recurrence, has_param: bool) -> Verdict:
    """Decide level light for a tensor that is not known to be a parameter."""
    keep, reason = critical(found, carried.val.dtype, "auto")
    if carried.feeds_parameter:
        reason = f"a parameter is computed anew from it; {reason}"
    elif has_param or carried.owner == "state":
        return Verdict(VerdictKind.LEVEL, _LEFT_BY_LEVEL) if keep else _decided(False, reason)
    else:
        unknown = "no tensor of this graph is a known parameter"
        if keep and is_number(found.a) and abs(1 - float(found.a)) >= 1e-3:
            return Verdict(VerdictKind.LEVEL_UNKNOWN, f"{_LEFT_BY_LEVEL}; {unknown}")
        reason = f"{reason}; {unknown}"
    return _decided(keep, reason)


def _entry(carried: Carried, found: Found | None, program: Program) -> StatePlan:
    compensable = bool(compensable_in(carried, program.settings.storage))
    decision = found[0] if found else _outside(carried, compensable=compensable)
    # A dtype in which updates may be lost, and for which there is no storage.
    dtype = carried.val.dtype
    unknown = dtype.is_complex or (dtype.is_floating_point and dtype.itemsize == 1)
    if carried.refusal and (compensable or unknown):
        decision = Verdict(VerdictKind.REFUSED, decision.cause)
    storage = ""
    if decision.compensated:
        storage = storage_of(carried, program.settings.storage)
        decision = decision.in_storage(storage)
    return StatePlan(
        carried.state_name,
        dtype,
        tuple(int(s) if is_concrete_int(s) else -1 for s in carried.val.shape),
        found[1].change if found else UNKNOWN,
        decision,
        storage=storage,
        residual_bytes=STORAGES[storage].residual_bytes(carried.val) if storage else 0,
        index=carried.index,
        compensable=compensable,
    )


def _of_other(entry: StatePlan, other: Carried) -> StatePlan:
    """Return the verdict on a state of a member that is not in the graph."""
    storage = entry.storage
    return replace(
        entry,
        state_name=other.state_name,
        decision=replace(entry.decision, cause=entry.reason.replace(entry.name, other.name)),
        shape=tuple(other.val.shape),
        residual_bytes=STORAGES[storage].residual_bytes(other.val) if storage else 0,
        index=other.index,
    )


def _outside(carried: Carried, *, compensable: bool) -> Verdict:
    """Return the verdict on a state in no slice, or on one that is never compensated."""
    if carried.left_alone and compensable:
        return _left_alone(carried)
    dtype = str(carried.val.dtype).removeprefix("torch.")
    plain = "overwritten: nothing accumulates" if compensable else f"{dtype}: updated as it stands"
    return _decided(False, carried.refusal or plain)
