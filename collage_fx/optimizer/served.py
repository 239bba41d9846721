"""Report: how each carried state was written, by which engine and how often."""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from collage_fx.optimizer.parameter_names import renamed, renamed_state
from collage_fx.optimizer.state_table import (
    grouped,
    preformatted,
    shortened,
    table,
    terminal_width,
    wrapped,
)
from collage_fx.passes.ir.program import StatePlan
from collage_fx.passes.ir.verdict import Judged, VerdictKind
from collage_fx.runtime.errors import listed
from collage_fx.runtime.storage.registry import STORAGES, kept


@dataclass
class Served(Judged):
    """The steps that wrote one carried state, counted by how it was written."""

    graph: int = 0
    """Steps in which a compiled graph wrote it."""
    joined: int = 0
    """Steps in which it was written on whole values: high and low words joined in a wider dtype."""
    unaccounted: int = 0
    """Steps in which something else wrote it."""
    judged: int = 0
    """Steps on which a verdict of the passes rests."""

    def planned(self, storage: str) -> StatePlan:
        """Return the same as the passes say it of a state in a graph."""
        sample = torch.empty(self.shape, dtype=self.dtype, device="meta")
        return StatePlan(
            self.state_name,
            self.dtype,
            self.shape,
            self.change,
            self.decision,
            storage=storage if self.compensated else "",
            residual_bytes=STORAGES[storage].residual_bytes(sample) if self.compensated else 0,
        )

    @property
    def steps(self) -> int:
        """Steps in which it was written."""
        return self.graph + self.joined + self.unaccounted

    @property
    def is_gradient(self) -> bool:
        """True for a gradient, which a step may scale or clip."""
        return self.decision.kind is VerdictKind.GRADIENT

    @property
    def engine(self) -> str:
        """`graph`, `joined`, `graph + joined` or `none`."""
        return " + ".join(e for e in ("graph", "joined") if getattr(self, e)) or "none"


_COLUMNS = (
    *("name", "dtype", "shape", "recurrence", "compensated", "reason", "refused"),
    *("graph", "joined", "unaccounted", "judged"),
)
"""Attributes that a row of a report has in common with the state."""
RETURNED = (
    "not compensated: a function that returns new tensors and updates none in place. "
    "Name the arguments whose place its first results take, in order, as in "
    "collage_fx.compile(step, carries=('p', 'm')), or write them in place"
)
"""Warning of a function that is not seen to carry its states."""


def put_in_place(names: Collection[str]) -> str:
    """Return a warning of a function that puts new tensors where its arguments have states."""
    return (
        f"not compensated: {listed(names)}: the function puts a new tensor in the place of that of "
        "the call before, and it begins without a residual. Write it in place, as in "
        "state.copy_(new)"
    )


def too_small(losing: Iterable[tuple[torch.dtype, str, str]]) -> Iterator[str]:
    """Yield warnings of parameters of which a storage loses half the updates.

    Args:
        losing: of each the dtype, the storage, which keeps too little, and the name.
    """
    for (dtype, storage), names in _by_storage(losing).items():
        more = f" and of {len(names) - 1} more" if names[1:] else ""
        yield (
            f"storage {storage!r} keeps changes of {kept(dtype, storage):.1e} of a value and more: "
            f"at the learning rate of now half the updates of {names[0]}{more} are smaller; "
            f"{_finer(dtype, storage)}"
        )


def way_lost(
    losing: Iterable[tuple[torch.dtype, str, tuple[float, str]]], steps: int
) -> Iterator[str]:
    """Yield warnings of parameters of whose way of some steps a storage lost a part.

    Args:
        losing: of each the dtype, the storage, and the share that was lost with the name.
        steps: how many.
    """
    for (dtype, storage), lost in _by_storage(losing).items():
        (most, name), *others = sorted(lost, reverse=True)
        more = f", and {others[-1][0]:.0%} or more of {len(others)} others'" if others else ""
        yield (
            f"of the last {steps} steps {most:.0%} of the way of {name} was lost{more}: storage "
            f"{storage!r} keeps changes of {kept(dtype, storage):.1e} of a value and more; "
            f"{_finer(dtype, storage)}"
        )


def _by_storage(
    losing: Iterable[tuple[torch.dtype, str, Any]],
) -> dict[tuple[torch.dtype, str], list[Any]]:
    """Return the last of three by the dtype and the storage."""
    alike: dict[tuple[torch.dtype, str], list[Any]] = {}
    for dtype, storage, one in losing:
        alike.setdefault((dtype, storage), []).append(one)
    return alike


def _finer(dtype: torch.dtype, storage: str) -> str:
    """Return the remedy for updates that are too small for a storage."""
    fitting = (s.name for s in STORAGES.values() if dtype in s.residuals)
    finer = [repr(s) for s in fitting if kept(dtype, s) < kept(dtype, storage)]
    would = f"{' or '.join(finer)} keeps more" if finer else "no storage keeps more"
    if STORAGES[storage].split_by_chance is not None:
        would += ", and stochastic_rounding=True keeps them on average"
    return would


def not_given(subject: str, tensor: Tensor, how: str) -> str:
    """Return a warning of a parameter that a function writes without being given it.

    Args:
        subject: the function, in words.
        tensor: the parameter.
        how: what does the writing.
    """
    return (
        f"{subject} writes a parameter of shape {tuple(tensor.shape)} {how}, and without "
        "compensation, since it was not seen to be given it: hand over the optimizer, the model, "
        "or a list or dict of parameters as an argument"
    )


def nothing_compensated(dtypes: Iterable[torch.dtype], states: Iterable[Judged]) -> str:
    """Return a warning of a step of which none of these states is compensated.

    Args:
        dtypes: those of all of its states.
        states: the states with their verdicts.
    """
    if left := left_by_level(states):
        return f"nothing was compensated: {left}"
    words = ", ".join(sorted({str(d).removeprefix("torch.") for d in dtypes}))
    return (
        f"nothing needed compensation: the states of this step are {words}, and none of them loses "
        "updates in its dtype; collage_fx.explain gives the reason for each"
    )


def left_by_level(states: Iterable[Judged], *, unknown: bool = False) -> str:
    """Return a warning of the states that level light leaves alone; empty if there are none.

    Args:
        states: the states with their verdicts.
        unknown: whether only where no tensor is known to be a parameter, so that one may be left.
    """
    kinds = (
        {VerdictKind.LEVEL_UNKNOWN} if unknown else {VerdictKind.LEVEL, VerdictKind.LEVEL_UNKNOWN}
    )
    left = dict.fromkeys(s.name for s in states if s.decision.kind in kinds)
    if not left:
        return ""
    return (
        "level light compensates parameters, and what they are computed anew from, only; "
        f"{', '.join(left)} lose updates in their dtype, which level='auto' compensates"
    )


@dataclass(repr=False)
class Report:
    """The report on the steps of `collage_fx.compile` so far; str() of it is a table."""

    subject: str
    states: list[Served] = field(default_factory=list)
    """The 16-bit states that were written, in the order of their parameters."""
    notes: list[str] = field(default_factory=list)
    """The warnings given."""
    taken: int = 0
    """Number of steps taken."""

    verbose: bool = False
    """True if its text has a row for each state, though others say the same."""

    def named(self, names: dict[str, str]) -> "Report":
        """Return the same with other names of parameters."""
        states = [
            replace(state, state_name=renamed_state(state.state_name, names))
            for state in self.states
        ]
        return replace(self, states=states, notes=[renamed(note, names) for note in self.notes])

    def to_dict(self) -> dict[str, Any]:
        """Return the report as values that JSON can hold, a row for each state."""
        rows = [
            {
                **{key: getattr(s, key) for key in _COLUMNS},
                "dtype": str(s.dtype).removeprefix("torch."),
                "shape": list(s.shape),
                "served_by": s.engine,
                "verdict": s.verdict,
            }
            for s in self.states
        ]
        return {"subject": self.subject, "states": rows, "notes": list(self.notes)}

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return preformatted(self)

    def __str__(self) -> str:
        width = terminal_width()
        told = ("dtype", "engine", "graph", "joined", "unaccounted", "verdict", "reason")
        says = attrgetter(*told, *(("name",) if self.verbose else ()))
        groups = grouped(self.states, says)
        shown, more = shortened(groups, verbose=self.verbose)
        rows = [("state", "dtype", "served by", "steps", "verdict")]
        for group in shown:
            s = group.states[0]
            steps = f"{s.graph} graph, {s.joined} joined"
            steps += f", {s.unaccounted} unaccounted" if s.unaccounted else ""
            dtype = str(s.dtype).removeprefix("torch.")
            rows.append((group.label, dtype, s.engine, steps, f"{s.verdict}: {s.reason}"))
        none = f"in {self.taken} steps nothing was written that is to be compensated"
        none = none if self.taken else "no step has been taken yet"
        more = more if self.states else [none]
        notes = (line for note in self.notes for line in wrapped(note, width))
        return "\n".join(
            [
                f"collage_fx: {self.subject}",
                "",
                *table(rows, width, wraps={0: 200 if self.verbose else 18, 3: 8, 4: 20}),
                *more,
                *notes,
            ]
        )
