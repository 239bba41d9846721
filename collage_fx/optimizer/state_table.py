"""Tables of states for a terminal: equal rows are merged, and cells wrap to a width."""

import html
import re
import shutil
import textwrap
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Generic, TypeVar

from collage_fx.runtime.storage.state_name import Named, StateName

PARAMETER = "parameter"
"""The kind of a state that is a parameter itself, in tables."""
ROWS = 24
"""Number of rows that a table has which is not asked for every state."""
NARROWEST, WIDEST = 90, 120
"""Columns of a terminal that a table fits into; of one that is wider, it uses no more."""
T = TypeVar("T")
S = TypeVar("S", bound=Named)


def sort_key(name: StateName) -> list[tuple[bool, int, str]]:
    """Return the key by which states are ordered: the parameter, by number, and their own name."""
    kind, param = columns(name)
    words = [*re.split(r"(\d+)", param), "" if kind == PARAMETER else kind]
    return [(word.isdigit(), int(word) if word.isdigit() else 0, word) for word in words]


def columns(name: StateName) -> tuple[str, str]:
    """Return the kind of a state and its parameter as tables show them.

    What belongs to no parameter, as an argument of a function, stands there as one itself.
    """
    if name.own is None or not name.parameter:
        return PARAMETER, name.short
    return name.own, name.parameter


@dataclass
class Group(Generic[S]):
    """States of one kind of which a table says the same."""

    states: list[S]
    kind: str
    whole: bool
    """True if these are all states of the kind."""

    @property
    def label(self) -> str:
        """Label of the row: `148 x exp_avg_sq`, or the name of a single state."""
        count = len(self.states)
        if count == 1:
            return self.states[0].name
        if self.whole:
            return f"{count} x {self.kind}"
        return f"{count} x {self.kind}, of {columns(self.states[0].state_name)[1]} and others"


def grouped(states: Sequence[S], says: Callable[[S], Hashable]) -> list[Group[S]]:
    """Return states in groups of one kind of which `says` is the same, in order of appearance.

    Args:
        states: any records of states.
        says: what the row of one says beside the name.
    """
    found: dict[tuple[str, Hashable], list[S]] = {}
    for state in states:
        found.setdefault((columns(state.state_name)[0], says(state)), []).append(state)
    kinds = [kind for kind, _ in found]
    return [Group(some, kind, kinds.count(kind) == 1) for (kind, _), some in found.items()]


def terminal_width() -> int:
    """Return the number of columns that a table may take."""
    columns = shutil.get_terminal_size((WIDEST, 24)).columns
    return min(max(columns, NARROWEST), WIDEST)


def table(
    rows: Sequence[tuple[str, ...]],
    width: int | None = None,
    *,
    wraps: Mapping[int, int] = MappingProxyType({}),
) -> list[str]:
    """Return rows as lines, their columns below each other, two blanks apart.

    Args:
        rows: the cells; the first row is the head.
        width: how wide a line may be; as wide as it needs to be if not given.
        wraps: the columns that are wrapped to reach that, the widest first, each with how narrow
            it may become.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    while width is not None and sum(widths) + 2 * len(widths) - 2 > width:
        widest = max(wraps, key=lambda i: widths[i] - wraps[i], default=None)
        if widest is None or widths[widest] <= wraps[widest]:
            break
        widths[widest] -= 1
    lines = []
    for row in rows:
        cells = [textwrap.wrap(c, w) or [""] for c, w in zip(row, widths, strict=True)]
        for k in range(max(map(len, cells))):
            parts = [c[k] if k < len(c) else "" for c in cells]
            padded = (part.ljust(w) for part, w in zip(parts, widths, strict=True))
            lines.append("  ".join(padded).rstrip())
    return lines


def shortened(groups: Sequence[T], *, verbose: bool) -> tuple[Sequence[T], list[str]]:
    """Return the groups that are shown, and a line about those that are not."""
    if verbose or len(groups) <= ROWS:
        return groups, []
    return groups[:ROWS], [f"... and {len(groups) - ROWS} rows more, which verbose=True shows"]


def wrapped(text: str, width: int) -> list[str]:
    """Return a sentence as lines, all but the first indented; blanks inside are kept."""
    lines = (textwrap.wrap(part, width, subsequent_indent="  ") for part in text.splitlines())
    return [line for part in lines for line in part]


def preformatted(shown: object) -> str:
    """Return the text of an object as a notebook shows it, in columns."""
    return f"<pre>{html.escape(str(shown))}</pre>"
