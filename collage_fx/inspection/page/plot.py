"""The measured errors of a class as lines on a logarithmic scale."""

import math
from dataclasses import dataclass

from collage_fx.inspection.page.states import Row, States
from collage_fx.inspection.replay import Replay

WIDTH, HEIGHT = 320, 170
LEFT, RIGHT, TOP, BOTTOM = 44, 92, 10, 24
"""Margins around the lines: labels stand there."""


@dataclass
class Curve:
    """One of the two lines of a panel."""

    name: str
    points: list[tuple[float, float]]
    value: str
    """Last value of the line, in words."""
    label_y: float


@dataclass
class Panel:
    """The errors of one kind of state of a class."""

    kind: str
    count: int
    curves: list[Curve]
    ticks: list[tuple[float, str]]
    steps: list[tuple[float, int]]
    summary: str
    """Summary of the lines, in words."""


def panels_of(replayed: Replay, states: States, number: int) -> list[Panel]:
    """Return the panels of a class: one for each kind of its states."""
    by_kind: dict[str, list[Row]] = {}
    for row in states.of(number):
        by_kind.setdefault(row.kind, []).append(row)
    errors = {}
    for kind, rows in by_kind.items():
        names = [name for row in rows for name in row.names if name in replayed.states]
        if found := replayed.errors(names):
            errors[kind] = len(names), found
    positive = [e for _, found in errors.values() for step in found for e in step if e > 0]
    if not positive:
        return []
    lowest = math.floor(math.log10(min(positive)))
    highest = math.ceil(math.log10(max(positive)))
    scale = _Scale(lowest, max(highest, lowest + 1))
    return [_panel(kind, count, found, scale) for kind, (count, found) in errors.items()]


@dataclass
class _Scale:
    """Powers of ten from the bottom to the top."""

    lowest: int
    highest: int

    def y(self, error: float) -> float:
        """Return the height of an error; 0 lies on the bottom."""
        power = math.log10(error) if error > 0 else self.lowest
        share = (power - self.lowest) / (self.highest - self.lowest)
        return round(HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM), 1)

    @property
    def ticks(self) -> list[tuple[float, str]]:
        """Return the powers that are labelled, six at most."""
        every = 1 + (self.highest - self.lowest) // 6
        powers = range(self.lowest, self.highest + 1, every)
        return [(self.y(10.0**p), str(p)) for p in powers]


def _panel(kind: str, count: int, errors: list[tuple[float, float]], scale: _Scale) -> Panel:
    inner = WIDTH - LEFT - RIGHT
    xs = [round(LEFT + inner * i / max(len(errors) - 1, 1), 1) for i in range(len(errors))]
    last = errors[-1]
    ys = [scale.y(e) for e in last]
    if abs(ys[0] - ys[1]) < 30:  # two lines of text each
        middle, up = (ys[0] + ys[1]) / 2, 1 if ys[0] <= ys[1] else -1
        ys = [middle - 15 * up, middle + 15 * up]
    low, high = TOP + 8, HEIGHT - BOTTOM - 14
    ys = [min(max(y, low), high) for y in ys]
    curves = [
        Curve(
            name, [(x, scale.y(e[i])) for x, e in zip(xs, errors, strict=True)], _word(last[i]), y
        )
        for i, (name, y) in enumerate(zip(("plain", "compensated"), ys, strict=True))
    ]
    ratio = last[0] / last[1] if last[1] else math.inf
    better = f"{ratio:.3g} times smaller" if 1.05 < ratio < math.inf else "as large"
    summary = f"after {len(errors)} steps the error is {better} than without compensation"
    if ratio <= 1.05:
        summary = "as large with and without compensation"
    every = 1 + (len(errors) - 1) // 8
    steps = [(x, i + 1) for i, x in enumerate(xs) if i % every == 0]
    return Panel(kind, count, curves, scale.ticks, steps, summary)


def _word(error: float) -> str:
    return f"{error:.1e}" if error else "0"
