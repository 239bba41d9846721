"""From what was seen of tensors to a finding."""

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from collage_fx.diagnosis.finding import Finding, Kept, Row, Seen, Status
from collage_fx.diagnosis.looks import Looker
from collage_fx.diagnosis.stats import UpdateStats
from collage_fx.diagnosis.tally import Tally, storages_for
from collage_fx.optimizer.ownership import PARAM
from collage_fx.optimizer.parameter_names import renamed_state
from collage_fx.runtime.residuals.lost_share import kept_share, lost_share
from collage_fx.runtime.storage.registry import AUTO, STORAGES, kept

_NUMBER = re.compile(r"(?<![^.\[])\d+(?![^.\]])")
"""A number that is all between two dots or in brackets: the first is that of a layer."""
_Key = tuple[str, str, int]
"""What tensors have in common that are told together: name, dtype, dimensions."""


class _Group(NamedTuple):
    row: Row
    tallies: list[Tally]


def finding_of(lookers: Iterable[Looker], advice: Sequence[str]) -> Finding:
    """Return what was found in the steps of optimizers.

    Args:
        lookers: one for each optimizer.
        advice: lines on how to compensate, for a run that loses.
    """
    lookers = list(lookers)
    params: dict[_Key, list[tuple[str, Tally]]] = {}
    states: dict[_Key, list[tuple[str, Tally]]] = {}
    for one in lookers:
        for tally in one.tallies.values():
            owned, into = tally.owned, params
            name = renamed_state(owned.state_name, one.names).parameter
            alike, dims = _NUMBER.sub("*", name, count=1), owned.tensor.dim()
            if owned.key != PARAM:
                into, name, alike, dims = states, owned.key, owned.key, 0
            into.setdefault((alike, _text(owned.tensor.dtype), dims), []).append((name, tally))
    weights, averages = ([_group(*one) for one in found.items()] for found in (params, states))
    seen = _seen(lookers)
    losing = [g for g in weights if g.row.losing] + [g for g in averages if g.row.biased]
    fine = any(s.looks or s.compensated for s in seen)
    status: Status = "losing" if losing else "fine" if fine else "unknown"
    said = list(advice) if losing else []
    if status == "unknown":
        said = sorted({s.problem for s in seen if s.problem}) or ["No optimizer took a step."]
    of_params, of_states = ([g.row for g in groups] for groups in (weights, averages))
    return Finding(status, seen, of_params, of_states, _storages(losing), said)


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _seen(lookers: Sequence[Looker]) -> list[Seen]:
    """Return how much was seen, of all optimizers of a class together."""
    found: dict[str, Seen] = {}
    for one in lookers:
        seen = found.setdefault(one.subject, Seen(one.subject))
        seen.optimizers += 1
        seen.compensated |= one.compensated
        for dtype, count in one.params.items():
            seen.parameters[_text(dtype)] = seen.parameters.get(_text(dtype), 0) + count
        seen.steps, seen.looks = max(seen.steps, one.steps), max(seen.looks, one.looks)
        seen.problem = seen.problem or one.why_nothing()
    return list(found.values())


def _group(key: _Key, named: list[tuple[str, Tally]]) -> _Group:
    """Return tensors whose names differ in numbers only."""
    tallies = [tally for _, tally in named]
    sizes = [t.owned.tensor.numel() for t in tallies]
    lost, edq = _losses(tallies, sizes)
    masks = [t.moved for t in tallies if t.moved is not None]
    samples = sum(m.numel() for m in masks)
    still = samples - sum(int(m.sum()) for m in masks)
    steps = sum(t.steps * size for t, size in zip(tallies, sizes, strict=True))
    missing = sum(t.missing * size for t, size in zip(tallies, sizes, strict=True))
    row = Row(
        key[0] if len(named) > 1 else named[0][0],
        key[1],
        tensors=len(tallies),
        elements=sum(sizes),
        lost=lost,
        edq=edq,
        never_moved=still / samples if samples else 0.0,
        exact=all(t.exact for t in tallies),
        updated=any(map(_is_updated, tallies)),
        missing=missing / steps if steps else 0.0,
        value=_one_value(tallies),
        master=next((t.master for t in tallies if t.master), ""),
    )
    return _Group(row, tallies)


def _is_updated(tally: Tally) -> bool:
    return tally.stats.count > 0 or any(bool((least > 0).any()) for least in tally.least)


def _losses(tallies: Sequence[Tally], sizes: Sequence[int]) -> tuple[float, float]:
    """Return the share of updates that were lost whole, and the EDQ."""
    if all(t.exact for t in tallies):
        stats = sum((t.stats for t in tallies), start=UpdateStats())
        return stats.lost, stats.edq
    found = [
        ((t.stats.lost, t.stats.edq) if t.stats.count else _fitted(t)[:2], size)
        for t, size in zip(tallies, sizes, strict=True)
        if _is_updated(t)
    ]
    of = sum(size for _, size in found) or 1
    lost, edq = (sum(pair[i] * size for pair, size in found) / of for i in (0, 1))
    return lost, edq


def _fitted(tally: Tally) -> tuple[float, float, float]:
    """Return the same of a tensor whose exact updates are not known, and their mean size."""
    moves, least = torch.cat(tally.moves)[None].double(), torch.cat(tally.least)[None].double()
    size, share = lost_share(moves, least)
    counts = least > 0
    whole = float((counts & (moves == 0)).sum() / counts.sum().clamp(min=1))
    return whole, 1 - float(share), float(size)


def _one_value(tallies: Sequence[Tally]) -> float | None:
    """Return the value of all elements that were looked at last; None if they have several."""
    ends = {float(x) for t in tallies if t.last is not None for x in t.last.double().aminmax()}
    return ends.pop() if len(ends) == 1 else None


def _storages(losing: Sequence[_Group]) -> list[Kept]:
    """Return what storages keep of the updates that are lost, of each dtype the default first."""
    found = []
    for dtype in dict.fromkeys(t.owned.tensor.dtype for g in losing for t in g.tallies):
        groups = [g for g in losing if g.row.dtype == _text(dtype)]
        tensors = [t.owned.tensor for g in groups for t in g.tallies]
        plain = min(g.row.edq if g.row.losing else 1 - abs(g.row.missing) for g in groups)
        found.append(Kept("", _text(dtype), plain, 0))
        for name in sorted(storages_for(dtype), key=lambda s: s != AUTO[dtype]):
            more = sum(STORAGES[name].residual_bytes(t) for t in tensors)
            share = min(_kept_by(name, g.tallies) for g in groups)
            found.append(Kept(name, _text(dtype), share, more, name == AUTO[dtype]))
    return found


def _kept_by(storage: str, tallies: Sequence[Tally]) -> float:
    """Return the EDQ that tensors would have in a storage."""
    if square := sum(t.stats.exact_square for t in tallies):
        return sum(t.kept.get(storage, 0.0) for t in tallies) / square
    shares = []
    for tally in (t for t in tallies if _is_updated(t)):
        *_, size = _fitted(tally)
        dtype = tally.owned.tensor.dtype
        least = torch.cat(tally.least) * (kept(dtype, storage) / kept(dtype))
        shares.append(float(kept_share(torch.tensor(size), least[least > 0]).mean()))
    return min(shares, default=0.0)
