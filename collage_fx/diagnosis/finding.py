"""The finding of a doctor: the losses of tensors, and the storages that keep them."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path
from typing import Any, Literal

import torch

from collage_fx.errors import PageError
from collage_fx.optimizer.state_table import table

Status = Literal["fine", "losing", "unknown"]
LOSING = 0.05
"""The share of their way from which on tensors count as losing."""
GONE = 0.1
"""The share of the squares of their updates that are lost whole, from which on they do too."""
ROWS, FEWER = 5, 3
"""Rows of the tables of parameters and of averages in the text, the worst ones."""


@dataclass
class Row:
    """Tensors that are alike but for the numbers in their names."""

    name: str
    """Name with a * for numbers that differ: `layers.*.norm.weight`, or `exp_avg_sq`."""
    dtype: str
    tensors: int
    elements: int
    """Number of elements of all these tensors."""
    lost: float
    """Share of the updates in the sample that were lost whole."""
    edq: float
    """EDQ relative to the length of the exact updates: 1 if nothing is lost (Collage, arXiv
    2405.03637)."""
    gone: float
    """Share of the squares of the updates that were lost whole. What is lost there others may make
    up for in the EDQ, whose updates were rounded up."""
    never_moved: float
    """Share of the elements in the sample that are as they were at first."""
    exact: bool
    """True if exact updates were known; else both shares are fitted to the moves."""
    updated: bool
    """True if any element of the sample had an update."""
    missing: float = 0.0
    """Bias of an average: the exact changes less the stored ones, relative to the sizes of the
    exact ones; positive where the average stays too small, negative where it stays too large."""
    value: float | None = None
    """The value of all elements in the samples, if it is one."""
    master: str = ""
    """The wide state that such parameters are roundings of: they lose nothing."""

    @property
    def loss(self) -> float:
        """The share of the way that is lost."""
        return max(1 - self.edq, self.gone)

    @property
    def losing(self) -> bool:
        """True if a part of the way is lost."""
        some = 1 - self.edq > LOSING or self.gone > GONE
        return self.updated and not self.master and some

    @property
    def stands_still(self) -> bool:
        """True if every update was lost."""
        return self.losing and self.never_moved == 1 and self.lost == 1

    @property
    def biased(self) -> bool:
        """True if an average stays too large or too small."""
        return self.updated and abs(self.missing) > LOSING


@dataclass
class Kept:
    """The share of updates that a storage would keep, and its bytes."""

    storage: str
    """"" for 16 bits alone."""
    dtype: str
    share: float
    """The least of the EDQs of the parameters that lose."""
    bytes: int
    """Bytes of the residuals of the parameters and states that lose."""
    default: bool = False


@dataclass
class Seen:
    """Counts of optimizers of one class, and of their parameters and steps, that were looked at."""

    optimizer: str
    optimizers: int = 0
    parameters: dict[str, int] = field(default_factory=dict)
    """dtype -> the number of parameters."""
    steps: int = 0
    looks: int = 0
    compensated: bool = False
    """True if collage_fx does the steps."""
    problem: str = ""
    """Reason why no step could be looked at."""
    estimated: str = ""
    """Reason why exact updates are not known."""


@dataclass
class Finding:
    """The finding of a doctor; `print` shows it, in 30 lines at most.

    Examples:
        >>> with collage_fx.doctor(optimizer) as doctor:
        ...     train(optimizer)
        >>> finding = doctor.finding()
        >>> finding.status, finding.parameters[0].name
        ('losing', 'weight')
        >>> finding.save("finding.json")
    """

    status: Status
    """`fine`, `losing`, or `unknown` where nothing could be looked at."""
    seen: list[Seen]
    parameters: list[Row]
    averages: list[Row]
    """States of 16 bits or fewer, by their keys."""
    storages: list[Kept]
    advice: list[str]

    @property
    def losing(self) -> bool:
        """True if updates are lost."""
        return self.status == "losing"

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as JSON can hold it."""
        return asdict(self)

    def save(self, file: str | Path, *, page: bool = False) -> None:
        """Write all of it to a file as JSON, or the text as an HTML page.

        Args:
            file: its path.
            page: whether as a page.

        Raises:
            PageError: it cannot be written.
        """
        text = json.dumps(self.to_dict(), indent=1) + "\n"
        if page:
            head = "<!doctype html><meta charset=utf-8><title>collage_fx doctor</title>"
            text = f"{head}\n{self._repr_html_()}\n"
        try:
            Path(file).write_text(text, encoding="utf-8")
        except OSError as error:
            raise PageError(f"{file} cannot be written: {error.strerror}") from error

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def __repr__(self) -> str:
        return f"<Finding: {self.status}, {len(self.parameters)} kinds of parameters>"

    def _repr_html_(self) -> str:
        parts = ["".join(f"<p>{escape(line)}</p>" for line in self._head())]
        for rows in self._tables(len(self.parameters), len(self.averages)):
            cells = (
                "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row)
                for tag, row in zip(("th", *["td"] * len(rows)), rows, strict=False)
            )
            parts.append("<table>" + "".join(f"<tr>{row}</tr>" for row in cells) + "</table>")
        parts.append(f"<pre>{escape(chr(10).join(self.advice))}</pre>")
        return "\n".join(parts)

    def _head(self) -> Iterator[str]:
        yield "collage_fx doctor: " + "; ".join(map(_seen_in, self.seen[:3]))
        if self.status != "unknown":
            yield ""
            yield from _summary(self)

    def _tables(self, most: int, fewer: int) -> Iterator[list[tuple[str, ...]]]:
        """Yield the rows of the tables, each with a head.

        Args:
            most: the rows of parameters, the worst ones.
            fewer: the same of averages.
        """
        params = [r for r in self.parameters if r.updated and not r.master]
        averages = [r for r in self.averages if r.updated]
        for title, rows, number in (("parameters", params, most), ("states", averages, fewer)):
            if rows:
                yield _table(title, rows, number)
        if self.losing:
            yield [_STORAGES, *map(_storage_row, self.storages[:ROWS])]

    def _lines(self) -> Iterator[str]:
        yield from self._head()
        for rows in self._tables(ROWS, FEWER):
            yield from ("", *table(rows))
        if self.advice:
            yield ""
        yield from self.advice


def text(dtype: torch.dtype) -> str:
    """Return the name of a dtype."""
    return str(dtype).removeprefix("torch.")


def _seen_in(seen: Seen) -> str:
    """Return the optimizers that were looked at, and in how many steps."""
    dtypes = ", ".join(f"{count} in {dtype}" for dtype, count in seen.parameters.items())
    many = f"{seen.optimizers} of " if seen.optimizers > 1 else ""
    steps = f"{seen.looks} of {seen.steps} steps looked at"
    if seen.compensated and not seen.looks:
        return f"{many}{seen.optimizer}, compensated"
    return f"{many}{seen.optimizer} ({dtypes or 'no parameters seen'}), {steps}"


def _summary(found: Finding) -> Iterator[str]:
    if found.status == "fine":
        yield f"Nothing is lost here: {_why_fine(found)}."
    if losing := [r for r in found.parameters if r.losing]:
        count, of = (sum(r.tensors for r in rows) for rows in (losing, found.parameters))
        worst = max(losing, key=lambda r: r.loss)
        yield (
            f"{count} of {of} parameters lose more than {LOSING:.0%} of what their updates add up "
            f"to; {worst.name} loses {worst.loss:.0%}."
        )
    if count := sum(r.tensors for r in losing if r.stands_still):
        verb = "stands" if count == 1 else "stand"
        yield f"{count} of them {verb} still: every update is lost."
    biased = [r for r in found.averages if r.biased]
    averages = [
        f"{r.name} too {'small' if r.missing > 0 else 'large'} ({abs(r.missing):.0%})"
        for r in biased[:FEWER]
    ]
    if averages:
        yield f"Averages are off by a share of their changes: {', '.join(averages)}."
    unknown = [r.name for r in found.averages if not r.updated]
    if unknown and (why := [s.estimated for s in found.seen if s.estimated]):
        yield f"Not measured: {', '.join(unknown[:FEWER])}; {why[0].partition(' (')[0]}."


def _why_fine(found: Finding) -> str:
    if ours := [one.optimizer for one in found.seen if one.compensated]:
        return f"collage_fx compensates the steps of {', '.join(ours)}"
    narrow = [r for r in found.parameters if r.updated]
    if not narrow:
        dtypes = sorted({dtype for one in found.seen for dtype in one.parameters})
        return f"the weights are {' and '.join(dtypes)}"
    if masters := sorted({r.master for r in narrow if r.master}):
        return f"the weights are roundings of wide ones, the states {', '.join(masters)}"
    least = min(r.edq for r in narrow)
    return (
        f"updates are large enough beside the {narrow[0].dtype} weights (EDQ {least:.2f} or more)"
    )


_HEAD = ("tensors", "elements", "lost whole", "EDQ", "never moved", "note")
_STORAGES = ("storage", "keeps", "bytes more")


def _table(title: str, rows: Sequence[Row], most: int) -> list[tuple[str, ...]]:
    """Return the rows of a table of the worst of these."""
    shown = sorted(rows, key=lambda r: (-r.loss, -abs(r.missing), r.name))[:most]
    lines = [(title, *_HEAD), *map(_row, shown)]
    if len(rows) > len(shown):
        rest = sum(r.tensors for r in rows) - sum(r.tensors for r in shown)
        lines.append((f"{rest} that lose less", *[""] * len(_HEAD)))
    return lines


def _row(row: Row) -> tuple[str, ...]:
    notes = []
    if row.stands_still and row.value is not None:
        notes.append(f"stay {row.value:g}" if row.tensors > 1 else f"stays {row.value:g}")
    elif row.stands_still:
        notes.append("stand still" if row.tensors > 1 else "stands still")
    if not row.exact:
        notes.append("estimated")
    return (
        row.name,
        f"{row.tensors:,}",
        f"{row.elements:,}",
        f"{row.lost:.0%}",
        f"{row.edq:.2f}",
        f"{row.never_moved:.0%}",
        ", ".join(notes),
    )


def _storage_row(kept: Kept) -> tuple[str, ...]:
    name = kept.storage or f"{kept.dtype} alone"
    return name + (" (default)" if kept.default else ""), f"{kept.share:.0%}", f"{kept.bytes:,}"
