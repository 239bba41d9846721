"""Differences between the runs of the studies: gaps to masters, margins, shares of a gain."""

import json
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from cells import BASE, REFERENCES, STUDIES, Cell
from equivalence import mean_of

Results = dict[Cell, dict[str, Any]]
"""Cell -> the contents of its file."""
RATES = (1e-3, 3e-3, 1e-2)
"""Rates of the sweep of `train`."""
PREDICTORS: dict[str, Callable[[dict[str, Any]], float]] = {
    "cumulative EDQ": lambda row: _off(row["shadow"]["cumulative"]),
    "EDQ of single steps": lambda row: _off(row["shadow"]["single"]),
    "lost share": lambda row: statistics.fmean(row["shadow"]["lost"]),
    "error of the weights": lambda row: statistics.fmean(row["shadow"]["error"]),
}
"""Name -> number of a run that may go with the share of the gain that it loses; 0 is best."""


def _off(qualities: list[float]) -> float:
    return abs(1 - statistics.fmean(qualities))


def load(folder: Path) -> Results:
    """Return the results of all cells of which the file is whole."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        try:
            row = json.loads(path.read_text())
            found[Cell(**row["cell"])] = row
        except (ValueError, KeyError):
            print(f"not whole: {path.name}")
    return found


def beside(cell: Cell) -> Cell:
    """Return the cell of the masters with which a cell is compared."""
    return replace(cell, strategy="masters", optimizer=cell.optimizer.partition(",")[0])


def gaps(results: Results, cell: Cell, of: str = "whole") -> list[float]:
    """Return the loss of each seed less that of the masters' stored values, in nats a byte."""
    base = results[beside(cell)]["whole"]
    return [x - y for x, y in zip(results[cell][of], base, strict=True)]


def kept(results: Results, cell: Cell, of: str = "whole") -> list[float]:
    """Return the share of the masters' gain that each seed of a cell has."""
    base = results[beside(cell)]
    gains = [x - y for x, y in zip(base["before"], base["whole"], strict=True)]
    return [1 - gap / gain for gap, gain in zip(gaps(results, cell, of), gains, strict=True)]


class Margin(NamedTuple):
    """Numbers that say how large a difference counts, in nats a byte."""

    floor: float
    """Largest, of both twins, of |mean difference| + half of its interval."""
    plain: float
    """Mean gap of plain bf16."""
    spread: float
    """Standard deviation of the masters' loss between seeds."""

    @property
    def margin(self) -> float:
        """Margin of equivalence, by the protocol."""
        return max(self.floor, min(self.plain, self.spread) / 10)


def margin_of(results: Results, base: Cell) -> Margin | None:
    """Return the margin beside a cell of masters; None if a cell that it needs is not there."""
    needed = [replace(base, strategy=s) for s in BASE]
    if any(cell not in results for cell in needed):
        return None
    _, *twins, plain = needed
    means = [mean_of(gaps(results, twin)) for twin in twins]
    floor = max(abs(m.mean) + m.half for m in means)
    spread = statistics.stdev(results[base]["whole"])
    return Margin(floor, statistics.fmean(gaps(results, plain)), spread)


def best_rate(results: Results, base: Cell) -> float | None:
    """Return the rate of the least mean loss of a strategy; None if there is none."""
    cells = [replace(base, lr=lr) for lr in RATES]
    found = {c.lr: statistics.fmean(results[c]["whole"]) for c in cells if c in results}
    return min(found, key=lambda lr: found[lr]) if found else None


class Point(NamedTuple):
    """A run of which EDQ and loss are compared."""

    cell: Cell
    lost: float
    """Share of the masters' gain that it loses."""
    clear: bool
    """True if that is more than the floor."""
    predicted: dict[str, float]


def points(results: Results) -> list[Point]:
    """Return the runs that the hypothesis on EDQ is about, as far as they are there."""
    found = []
    for cell in STUDIES["edq"].cells:
        if cell.strategy in REFERENCES or cell not in results or beside(cell) not in results:
            continue
        margin = margin_of(results, beside(cell))
        gap = abs(statistics.fmean(gaps(results, cell)))
        clear = margin is not None and gap > margin.floor
        lost = 1 - statistics.fmean(kept(results, cell))
        numbers = {name: number(results[cell]) for name, number in PREDICTORS.items()}
        found.append(Point(cell, lost, clear, numbers))
    return found
