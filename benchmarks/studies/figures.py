"""Plots of the studies: docs/images/evidence_*.png, in a light and a dark theme."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cells import ALL, BETAS, REFERENCES, TUNED, Cell, of_betas
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
        "beta2": (7.0, _beta2(results)),
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
    panels = {
        "pre-training, 133,440 weights": _by_beta2(results, "train", 3e-3),
        "pre-training, 463,488 weights": _by_beta2(results, "train 468k", 1e-3),
        "fine-tuning, 133,440 weights": _by_beta2(results, "tune", 1e-4),
        "fine-tuning, 463,488 weights": _by_beta2(results, "tune 468k", 1e-4),
    }
    if not all(panels.values()):
        return None

    def drawing(axes: Any, theme: str) -> None:
        background, text, colors = THEMES[theme]
        looks = (("-", 2.5), ("-", 2.5), ("-", 7.0), ("--", 2.5), (":", 2.5))
        figure = axes.figure
        axes.remove()
        for panel, (title, curves) in zip(figure.subplots(2, 2).flat, panels.items(), strict=True):
            for i, (name, found) in enumerate(curves.items()):
                style, width = looks[i]
                x, color = [1 - b for b in BETAS], (*colors, text)[i]
                means, halves = [m.mean for m in found], [m.half for m in found]
                panel.plot(x, means, style, lw=width, color=color, label=name)
                panel.errorbar(x, means, yerr=halves, fmt="none", color=color, capsize=3)
            panel.set_facecolor(background)
            panel.spines[["top", "right"]].set_visible(False)
            panel.spines[["left", "bottom"]].set_color(text)
            panel.set_xscale("log")
            panel.invert_xaxis()
            panel.minorticks_off()
            panel.set_xticks([1 - b for b in BETAS], [f"{b:g}"[1:] for b in BETAS])
            panel.set_title(title, loc="left")
        lines = figure.axes[0].get_legend_handles_labels()
        figure.legend(*lines, loc="outside upper center", ncols=5, labelcolor=text, frameon=False)
        figure.supxlabel("beta2", color=text)
        figure.supylabel("held-out loss less that at .999, nats a byte", color=text)

    return drawing


def _by_beta2(results: Results, task: str, lr: float) -> dict[str, list[Mean]]:
    """Return strategy -> loss at each beta2 less its own at 0.999; empty if a run is not there."""
    curves = {}
    for s in ("bf16", "light", "plus", "auto", "masters"):
        cells = of_betas(task, lr, BETAS, (s,))
        usual = Cell(task, s, lr)
        if any(c not in results for c in (*cells, usual)):
            return {}
        pairs = [zip(results[c]["whole"], results[usual]["whole"], strict=True) for c in cells]
        curves[usual.words] = [mean_of([x - y for x, y in pair]) for pair in pairs]
    return curves
