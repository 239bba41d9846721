"""The judgement of tensors by their tallies: rows, storages and the status of a finding."""

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from collage_fx.diagnosis.finding import Finding, Kept, Row, Seen, Status, text
from collage_fx.diagnosis.looks import Looker
from collage_fx.diagnosis.tally import Look, Tally, storages_for
from collage_fx.optimizer.ownership import PARAM
from collage_fx.optimizer.parameter_names import renamed_state
from collage_fx.runtime.residuals.lost_share import kept_share, lost_share
from collage_fx.runtime.storage.registry import AUTO, STORAGES, kept

_NUMBER = re.compile(r"(?<![^.\[])\d+(?![^.\]])")
"""A number that is all between two dots or in brackets: the first is that of a layer."""
_Key = tuple[str, str, int]
"""Name, dtype and number of dimensions, which tensors of one row have in common."""


class _Seen(NamedTuple):
    """A tensor, and the sums over all steps of its optimizer."""

    name: str
    tally: Tally
    look: Look


class _Group(NamedTuple):
    row: Row
    tensors: list[_Seen]


def finding_of(lookers: Iterable[Looker], advice: Sequence[str]) -> Finding:
    """Return the finding on the steps of optimizers.

    Args:
        lookers: one for each optimizer.
        advice: lines on how to compensate, for a run that loses.
    """
    lookers = list(lookers)
    params: dict[_Key, list[_Seen]] = {}
    states: dict[_Key, list[_Seen]] = {}
    known: set[tuple[int, str]] = set()
    for one in lookers:
        for tally in (t for t in one.tallies.values() if t.same_as not in known):
            total = tally.total(one.steps)
            known.add(tally.same_as)  # a wrapper may have the parameters of what it wraps
            into, dtype, dims = params, text(tally.like.dtype), tally.like.dim()
            name = renamed_state(tally.state_name, one.names).parameter
            alike = _NUMBER.sub("*", name, count=1)
            if tally.key != PARAM:
                into, name, alike, dims = states, tally.key, tally.key, 0
            into.setdefault((alike, dtype, dims), []).append(_Seen(name, tally, total))
    weights, averages = ([_group(*one) for one in found.items()] for found in (params, states))
    seen = _seen(lookers)
    losing = [g for g in weights if g.row.losing] + [g for g in averages if g.row.biased]
    measured = any(g.row.updated for g in weights + averages)
    narrow = bool(weights or averages)
    fine = any(s.looks or s.compensated for s in seen) and (measured or not narrow)
    status: Status = "losing" if losing else "fine" if fine else "unknown"
    said = list(advice) if losing else []
    if status == "unknown":
        said = _why_unknown(seen, narrow)
    rows = [[g.row for g in groups] for groups in (weights, averages)]
    return Finding(status, seen, rows[0], rows[1], _storages(losing), said)


def _why_unknown(seen: Sequence[Seen], narrow: bool) -> list[str]:
    """Return the reasons why nothing is known, and the remedy."""
    why = sorted(
        {f"{s.optimizer}: {s.problem or s.estimated}" for s in seen if s.problem or s.estimated}
    )
    if narrow and any(s.looks for s in seen):
        return [*why, "No update of 16 bits was made, or could be measured."]
    return why or [
        "No step of an optimizer was seen. Where torch.compile or collage_fx runs it nothing can",
        "look: run once with TORCH_COMPILE_DISABLE=1 in the environment, or see collage_fx.report.",
    ]


def _seen(lookers: Sequence[Looker]) -> list[Seen]:
    """Return the numbers of what was seen, of all optimizers of a class together."""
    found: dict[str, Seen] = {}
    for one in lookers:
        seen = found.setdefault(one.subject, Seen(one.subject))
        seen.optimizers += 1
        seen.compensated |= one.compensated
        for dtype, count in one.params.items():
            seen.parameters[text(dtype)] = seen.parameters.get(text(dtype), 0) + count
        seen.steps, seen.looks = max(seen.steps, one.steps), max(seen.looks, one.looks)
        seen.estimated = seen.estimated or one.fitted
        if not one.looks:
            seen.problem = seen.problem or one.problem
    return list(found.values())


def _group(key: _Key, seen: list[_Seen]) -> _Group:
    """Return tensors whose names differ in numbers only."""
    tallies = [one.tally for one in seen]
    sizes = [t.like.numel() for t in tallies]
    lost, edq, gone, missing = _losses(seen)
    masks = [t.moved for t in tallies if t.moved is not None]
    samples = sum(m.numel() for m in masks)
    still = samples - sum(int(m.sum()) for m in masks)
    row = Row(
        key[0] if len(seen) > 1 else seen[0].name,
        key[1],
        tensors=len(seen),
        elements=sum(sizes),
        lost=lost,
        edq=edq,
        gone=gone,
        never_moved=still / samples if samples else 0.0,
        exact=all(t.exact for t in tallies),
        updated=any(t.updated for t in tallies),
        missing=missing,
        value=_one_value(tallies),
        master=next((t.master for t in tallies if t.master), ""),
    )
    return _Group(row, seen)


def _losses(seen: Sequence[_Seen]) -> tuple[float, float, float, float]:
    """Return the fields `lost`, `edq`, `gone` and `missing` of a row."""
    total, found, missing = Look(), [], 0.0
    of = sum(one.tally.like.numel() for one in seen if one.tally.updated) or 1
    for one in (o for o in seen if o.tally.updated):
        size = one.tally.like.numel() / of
        look, stats = one.look, one.look.stats
        if stats.count:
            total.add(look, 1.0)
            missing += size * look.missing / look.weight if look.weight else 0.0
            found.append((stats.lost, stats.edq, look.gone / stats.exact_square, size))
        else:
            found.append((*_fitted(one.tally)[:2], 0.0, size))
    if total.stats.count and all(one.tally.exact for one in seen):
        square = total.stats.exact_square
        return total.stats.lost, total.stats.edq, total.gone / square, missing
    lost, edq, gone = (sum(f[i] * f[3] for f in found) for i in range(3))
    return lost, edq, gone, missing


def _fitted(tally: Tally) -> tuple[float, float, float]:
    """Return the lost share and EDQ of a tensor whose exact updates are not known, and the size."""
    moves, least = (torch.cat(one)[None].double() for one in (tally.moves, tally.least))
    size, share = lost_share(moves, least)
    counts = least > 0
    whole = float((counts & (moves == 0)).sum() / counts.sum().clamp(min=1))
    return whole, 1 - float(share), float(size)


def _one_value(tallies: Sequence[Tally]) -> float | None:
    """Return the value of all elements that were looked at last; None if they have several."""
    ends = {float(x) for t in tallies if t.last is not None for x in t.last.double().aminmax()}
    return ends.pop() if len(ends) == 1 else None


def _storages(losing: Sequence[_Group]) -> list[Kept]:
    """Return the shares of lost updates that storages keep, of each dtype the default first."""
    found = []
    for dtype in dict.fromkeys(t.tally.like.dtype for g in losing for t in g.tensors):
        groups = [g for g in losing if g.row.dtype == text(dtype)]
        tensors = [t.tally.like for g in groups for t in g.tensors]
        plain = min(1 - g.row.loss if g.row.losing else 1 - abs(g.row.missing) for g in groups)
        found.append(Kept("", text(dtype), plain, 0))
        for name in sorted(storages_for(dtype), key=lambda s: s != AUTO[dtype]):
            more = sum(STORAGES[name].residual_bytes(t) for t in tensors)
            share = min(_kept_by(name, g.tensors) for g in groups)
            found.append(Kept(name, text(dtype), min(share, 1.0), more, name == AUTO[dtype]))
    return found


def _kept_by(storage: str, seen: Sequence[_Seen]) -> float:
    """Return the EDQ that tensors would have in a storage."""
    if square := sum(one.look.stats.exact_square for one in seen):
        return sum(one.look.kept.get(storage, 0.0) for one in seen) / square
    shares = []
    for tally in (one.tally for one in seen if one.tally.updated):
        *_, size = _fitted(tally)
        least = torch.cat(tally.least) * (kept(tally.like.dtype, storage) / kept(tally.like.dtype))
        shares.append(float(kept_share(torch.tensor(size), least[least > 0]).mean()))
    return min(shares, default=0.0)
