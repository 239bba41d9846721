"""Tables of states for a terminal: what says the same is one row, and cells wrap to a width."""

import re
import shutil
import textwrap
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Generic, TypeVar

PARAMETER = "parameter"
"""The kind of a state that is a parameter itself."""
ROWS = 24
"""How many rows a table has that is not asked for every state."""
NARROWEST, WIDEST = 90, 120
"""Columns of a terminal that a table fits into; of one that is wider, it uses no more."""
T = TypeVar("T")


def sort_key(name: str) -> list[tuple[bool, int, str]]:
    """Return what states are ordered by: the parameter, by number, and their own name."""
    own, _, param = name.rpartition(" of ")
    words = [*re.split(r"(\d+)", param), own]
    return [(word.isdigit(), int(word) if word.isdigit() else 0, word) for word in words]


def split_name(name: str) -> tuple[str, str]:
    """Return the kind of a state and its parameter: of `exp_avg of w`, `exp_avg` and `w`."""
    own, _, param = name.rpartition(" of ")
    return own or PARAMETER, param


@dataclass
class Group(Generic[T]):
    """States of one kind of which a table says the same."""

    states: list[T]
    kind: str
    names: list[str]
    whole: bool
    """Whether these are all states of the kind."""

    @property
    def label(self) -> str:
        """What the row is called: `148 x exp_avg_sq`, or the name of a single state."""
        if len(self.names) == 1:
            return self.names[0]
        if self.whole:
            return f"{len(self.names)} x {self.kind}"
        first = split_name(self.names[0])[1]
        return f"{len(self.names)} x {self.kind}, of {first} and others"


def grouped(
    states: Sequence[T], name_of: Callable[[T], str], says: Callable[[T], Hashable]
) -> list[Group[T]]:
    """Return states in groups of one kind of which `says` is the same, in order of appearance.

    Args:
        states: any records of states.
        name_of: the name of one, such as `exp_avg of layers.0.weight`.
        says: what its row says beside the name.
    """
    found: dict[tuple[str, Hashable], list[T]] = {}
    kinds: dict[str, int] = {}
    for state in states:
        kind = split_name(name_of(state))[0]
        kinds[kind] = kinds.get(kind, 0) + 1
        found.setdefault((kind, says(state)), []).append(state)
    return [
        Group(members, kind, [name_of(m) for m in members], len(members) == kinds[kind])
        for (kind, _), members in found.items()
    ]


def terminal_width() -> int:
    """Return how many columns a table may take."""
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
