"""Plot of error against bytes for each storage, from benchmarks/results/storages.json and budgets.

    python benchmarks/storages_plot.py

Of AdamW: a curve for each learning rate goes through the storages for which nothing with as few
bytes, or fewer, has a smaller error, and a dashed one through what `budget=` chooses for so many
bytes (benchmarks/results/budgets.json, triangles). Circles are storages of this project, squares
its own implementations of layouts that others have. Written to docs/images/storages_light.png and
storages_dark.png; nothing is measured here.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from budgets import RESULTS as BUDGETS
from pictures import IMAGES, THEMES, picture
from storages import RATES, RESULTS

OURS = {
    "sr, ulp4": "ulp4 + sr",
    "sr, ulp8, by chance": "ulp8 + sr",
    "ulp4": "ulp4",
    "sr, remainder16": "remainder16 + sr",
    "ulp4, remainder16": "remainder16 + ulp4",
}
"""Variant of benchmarks/storages.py -> what it is called: the storage of weights + of moments."""
PEERS = {"plain bf16": "", "sr": "sr", "ulp8": "", "mcf2, eft": "", "remainder16": "remainder16"}
"""The same of layouts that others have: stochastic rounding, FlashOptim, the Collage paper, and
Transformer Engine and apex; those without a name lie under one that has."""


def frontier(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return those points for which none with as few bytes, or fewer, has a smaller error."""
    best: list[tuple[float, float]] = []
    for size, error in sorted(points):
        if not best or error < best[-1][1]:
            best.append((size, error))
    return best


def draw(rows: list[dict[str, Any]], chosen: list[dict[str, Any]], theme: str, axes: Any) -> None:
    """Draw the errors of AdamW at each rate, of storages and of what budgets chose."""
    background, text, colors = THEMES[theme]
    names = OURS | PEERS
    for lr, color in zip(RATES, colors, strict=True):
        found = {r["variant"]: (r["bytes"], r["E_theta"]) for r in rows if r["lr"] == lr}
        best = frontier([found[name] for name in names])
        axes.plot(*zip(*best, strict=True), color=color, lw=2, label=f"rate {lr:.0e}")
        for group, marker in ((OURS, "o"), (PEERS, "s")):
            hollow = background if group is PEERS else color
            style = {"color": color, "mfc": hollow, "ls": "", "ms": 8}
            axes.plot(*zip(*(found[name] for name in group), strict=True), marker, **style)
        budgets = [(r["bytes"], r["E_theta"]) for r in chosen if r["lr"] == lr]
        axes.plot(*zip(*budgets, strict=True), "^--", color=color, lw=1.5, ms=7)
    axes.set_yscale("log")
    sizes = {r["variant"]: r["bytes"] for r in rows}
    for name, shown in names.items():
        axes.text(sizes[name], 2.6, shown, rotation=40, ha="left", va="bottom", fontsize=11)
    axes.set_xlim(5.7, 12.5)
    axes.set_xlabel("bytes of a parameter with its states and residuals (fp32: 12)", color=text)
    axes.set_ylabel("error of 2,000 steps / their way", color=text)
    axes.plot([], [], "o", color=text, label="this project's")
    axes.plot([], [], "^--", color=text, label="chosen for a budget")
    axes.plot([], [], "s", color=text, mfc=background, label="others', as implemented here")
    legend = axes.legend(loc="upper left", bbox_to_anchor=(0.52, 1.02), frameon=False, fontsize=11)
    legend.set_title("AdamW", prop={"size": 12})


def main() -> None:
    """Draw what the results file has."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--budgets", type=Path, default=BUDGETS)
    parser.add_argument("--images", type=Path, default=IMAGES)
    args = parser.parse_args()
    rows = json.loads(args.results.read_text())["rows"]
    chosen = json.loads(args.budgets.read_text())["rows"]
    rows, chosen = ([r for r in some if r["optimizer"] == "AdamW"] for some in (rows, chosen))
    for theme in THEMES:
        path = args.images / f"storages_{theme}.png"
        with picture(path, theme, 5.6, 13) as axes:
            draw(rows, chosen, theme, axes)
        print(f"written to {path}")


if __name__ == "__main__":
    main()
