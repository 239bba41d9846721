"""Plots of the studies: docs/images/evidence_*.png, in a light and a dark theme."""

import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cells import ALL, REFERENCES, TUNED, Cell
from differences import Results, gaps, kept, margin_of, points
from equivalence import Mean, mean_of

sys.path.insert(0, str(Path(__file__).parents[1]))
from pictures import IMAGES, THEMES, picture

Draw = Callable[[Any, str], None]


def draw(results: Results) -> None:
    """Draw what there are results for."""
    drawings: dict[str, tuple[float, Draw | None]] = {
        "parity": (6.5, _parity(results)),
        "tune": (5.5, _tune(results)),
        "edq": (5.0, _edq(results)),
        "beta2": (4.5, _beta2(results)),
    }
    for name, (height, drawing) in drawings.items():
        for theme in THEMES if drawing else ():
            with picture(IMAGES / f"evidence_{name}_{theme}.png", theme, height, 12) as axes:
                assert drawing is not None
                drawing(axes, theme)


def _dots(axes: Any, rows: Sequence[tuple[str, Mean]], color: str, shift: float = 0.0) -> None:
    """Draw means with their intervals, one below the other."""
    heights = [-i + shift for i in range(len(rows))]
    means, halves = [m.mean for _, m in rows], [m.half for _, m in rows]
    axes.errorbar(means, heights, xerr=halves, fmt="o", color=color, ms=5, capsize=3)
    axes.set_yticks([-i for i in range(len(rows))], [name for name, _ in rows])


def _parity(results: Results) -> Draw | None:
    lr = 1e-3  # of those of the sweep the one with the lowest floor
    margin = margin_of(results, Cell("train", "masters", lr))
    if margin is None:
        return None
    cells = [Cell("train", s, lr) for s in ALL if s != "masters"]
    found = [(c.words, mean_of(gaps(results, c))) for c in cells if c in results]
    rows = sorted(found, key=lambda row: row[1].mean)

    def drawing(axes: Any, theme: str) -> None:
        _, text, colors = THEMES[theme]
        axes.axvspan(-margin.margin, margin.margin, color=colors[1], alpha=0.25, lw=0)
        _dots(axes, rows, colors[2])
        axes.set_xscale("symlog", linthresh=max(2 * margin.margin, 1e-4))
        axes.set_xlabel("held-out loss less that of fp32 masters, nats a byte", color=text)
        axes.set_title(
            f"Pre-training, rate {lr:g}: 95% intervals; the band is the margin", loc="left"
        )

    return drawing


def _tune(results: Results) -> Draw | None:
    strategies = [s for s in TUNED if Cell("tune", s, 1e-6) in results and s not in REFERENCES]
    if not strategies or Cell("tune", "masters", 1e-6) not in results:
        return None
    kinds = {"whole": "stored", "high": "its bf16 words", "cast": "cast to bf16 by chance"}

    def drawing(axes: Any, theme: str) -> None:
        _, text, colors = THEMES[theme]
        for i, (of, label) in enumerate(kinds.items()):
            cells = [Cell("tune", s, 1e-6) for s in strategies]
            rows = [(c.words, mean_of([100 * k for k in kept(results, c, of)])) for c in cells]
            _dots(axes, rows, colors[(2, 0, 1)[i]], 0.2 * (1 - i))
            axes.plot([], [], "o", color=colors[(2, 0, 1)[i]], label=label)
        axes.set_xlabel("share of the gain of fp32 masters, %", color=text)
        axes.set_title("Fine-tuning at a rate of 1e-6: 95% intervals", loc="left")
        axes.legend(labelcolor=text, frameon=False, loc="lower left")

    return drawing


def _edq(results: Results) -> Draw | None:
    held_out = [p for p in points(results) if p.cell.held_out and p.lost > 0]
    if len(held_out) < 4:
        return None

    def drawing(axes: Any, theme: str) -> None:
        _, text, colors = THEMES[theme]
        kinds = {"EDQ of single steps": ("s", colors[0]), "cumulative EDQ": ("o", colors[2])}
        for name, (mark, color) in kinds.items():
            x = [max(p.predicted[name], 1e-6) for p in held_out]
            axes.plot(x, [100 * p.lost for p in held_out], mark, color=color, label=name, ms=5)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("|1 - EDQ|", color=text)
        axes.set_ylabel("lost of the gain, %", color=text)
        axes.set_title("Runs that were held out, where something is lost", loc="left")
        axes.legend(labelcolor=text, frameon=False, loc="upper left")

    return drawing


def _beta2(results: Results) -> Draw | None:
    names = ("bf16", "light", "plus", "auto", "masters")
    curves = {}
    for s in names:
        cells = [Cell("train", s, 3e-3, beta2=b) for b in (0.9, 0.95, 0.99, 0.999, 0.9999)]
        there = {c.beta2: statistics.fmean(results[c]["whole"]) for c in cells if c in results}
        if len(there) > 1:
            curves[s] = there
    if len(curves) < len(names):
        return None

    def drawing(axes: Any, theme: str) -> None:
        _, text, colors = THEMES[theme]
        looks = (("-", 2.5), ("-", 2.5), ("-", 7.0), ("--", 2.5), (":", 2.5))
        for i, (name, found) in enumerate(curves.items()):
            style, width = looks[i]
            x = [1 - b for b in found]
            color = colors[i] if i < len(colors) else text
            axes.plot(x, list(found.values()), style, lw=width, color=color, label=name)
        axes.set_xscale("log")
        axes.invert_xaxis()
        axes.set_xticks([0.1, 0.05, 0.01, 0.001, 0.0001], [".9", ".95", ".99", ".999", ".9999"])
        axes.set_xlabel("beta2", color=text)
        axes.set_ylabel("held-out loss, nats a byte", color=text)
        axes.set_title("Pre-training, rate 3e-3, by the decay of the second moment", loc="left")
        axes.legend(labelcolor=text, frameon=False)

    return drawing
