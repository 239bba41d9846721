"""Tables and plots of the studies, from the files that run.py has left.

    python benchmarks/studies/analyse.py           print the tables, put them into docs/evidence.md,
                                                   and draw docs/images/evidence_*.png
    python benchmarks/studies/analyse.py --quick   print those of `run.py --quick`, write nothing
    python benchmarks/studies/analyse.py --gpu     print those of `run.py --device cuda`, likewise

In the page a table stands between `<!-- table NAME -->` and `<!-- end -->`.
"""

import argparse
import re
import statistics
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import figures
from cells import (
    ALL,
    BETA2,
    BETAS,
    BY_NAME,
    EIGHT_BITS,
    REFERENCES,
    STUDIES,
    SWEPT,
    Cell,
    of_betas,
)
from differences import (
    PREDICTORS,
    RATES,
    Margin,
    Results,
    beside,
    best_rate,
    gaps,
    kept,
    load,
    margin_of,
    points,
)
from equivalence import Mean, bootstrapped, holm, mean_of, spearman, tost

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/results/studies"
PAGE = ROOT / "docs/evidence.md"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table in Markdown."""
    first = list(head)
    lines = [first, ["---"] * len(first), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def nats(found: Mean) -> str:
    """Return a mean with half of its interval, in ten-thousandths where it is that small."""
    digits = 5 if abs(found.mean) < 0.01 else 4
    return f"{found.mean:+.{digits}f} ± {found.half:.{digits}f}"


def percent(values: list[float]) -> str:
    """Return a mean share with half of its interval."""
    found = mean_of(values)
    digits = 2 if found.half < 0.0005 else 1
    return f"{found.mean:.{digits}%} ± {100 * found.half:.{digits}f}"


def tested(results: Results, cells: list[Cell]) -> dict[Cell, float]:
    """Return cell -> p-value of "not equivalent to masters", corrected for all that are there."""
    ours = [c for c in cells if c in results and beside(c) in results]
    found = margin_of(results, beside(ours[0])) if ours else None
    if found is None:
        return {}
    ours = [c for c in ours if c.strategy not in REFERENCES]
    tests = [tost(gaps(results, c), found.margin) for c in ours]
    return dict(zip(ours, holm(tests), strict=True))


def compared(results: Results, cells: list[Cell]) -> list[list[str]]:
    """Return a row for each cell that is there: gap, test of equivalence, distances."""
    values, rows = tested(results, cells), []
    for cell in (c for c in cells if c in results and beside(c) in results):
        far = results[cell]["shadow"]
        p = values.get(cell)
        equal = "" if p is None else f"{'yes' if p <= 0.05 else 'no'}, p = {p:.2g}"
        rows.append(
            [
                cell.words,
                nats(mean_of(gaps(results, cell))) if cell.strategy != "masters" else "0",
                equal,
                nats(mean_of(gaps(results, cell, "high"))),
                f"{statistics.fmean(far['cumulative']):.4f}",
                f"{statistics.fmean(far['single']):.3f}",
                f"{statistics.fmean(far['error']):.1e}",
            ]
        )
    return rows


COMPARED = (
    *("strategy", "loss less that of masters", "equivalent?", "high words"),
    *("cumulative EDQ", "EDQ", "error"),
)


def about(found: Margin | None) -> str:
    """Return a margin in words."""
    if found is None:
        return ""
    return (
        f"Margin {found.margin:.5f}: floor {found.floor:.5f}, plain's gap {found.plain:.4f}, "
        f"spread between seeds {found.spread:.4f}."
    )


def parity(results: Results, lr: float | None = None) -> str:
    """Return the table of pre-training at a rate, by default the masters' best."""
    lr = lr or best_rate(results, Cell("train", "masters", 0))
    if lr is None:
        return ""
    cells = [Cell("train", s, lr) for s in ALL]
    text = about(margin_of(results, Cell("train", "masters", lr)))
    return f"{table(COMPARED, compared(results, cells))}\n\nRate {lr:g}. {text}"


def rates(results: Results) -> str:
    """Return the gap of each strategy at each rate, and its best rate."""
    rows = []
    best = best_rate(results, Cell("train", "masters", 0)) or 0.0
    least = results.get(Cell("train", "masters", best))
    equal = {
        cell
        for lr in RATES
        for cell, p in tested(results, [Cell("train", s, lr) for s in ALL]).items()
        if p <= 0.05
    }
    for s in ALL:
        cells = [Cell("train", s, lr) for lr in RATES]
        own = best_rate(results, cells[0])
        if own is None or least is None:
            continue
        at = [
            nats(mean_of(gaps(results, c))) + (" =" if c in equal else "") if c in results else ""
            for c in cells
        ]
        found = results[replace(cells[0], lr=own)]["whole"]
        apart = [x - y for x, y in zip(found, least["whole"], strict=True)]
        if s == "masters":
            losses = [statistics.fmean(results[c]["whole"]) if c in results else 0 for c in cells]
            at = [f"loss {loss:.4f}" if loss else "" for loss in losses]
        swept = all(c in results for c in cells)
        last = [f"{own:g}", nats(mean_of(apart))] if swept and s != "masters" else ["", ""]
        rows.append([cells[0].words, *at, *last])
    head = ("strategy", "1e-3", "3e-3", "1e-2", "its best rate", "there, less masters' best")
    return table(head, rows)


def shares(results: Results, study: str) -> str:
    """Return the shares of the gain that fine-tunes keep, stored, and as bf16 exports."""
    cells = STUDIES[study].cells
    rows, rates = [], sorted({c.lr for c in cells})
    for s in dict.fromkeys(c.strategy for c in cells):
        ours = [Cell(study, s, lr) for lr in rates]
        at = [percent(kept(results, c)) if c in results else "" for c in ours]
        out = [percent(kept(results, ours[0], of)) for of in ("high", "cast") if ours[0] in results]
        if any(at):
            rows.append([ours[0].words, *at, *out])
    names = [f"{lr:.0e}".replace("e-0", "e-") for lr in rates]
    exports = (f"{names[0]}, high words", f"{names[0]}, cast by chance")
    return table(("strategy", *names, *exports), rows)


def each_rate(results: Results, study: str) -> str:
    """Return a table for each optimizer and rate of a study."""
    parts = []
    every = STUDIES[study].cells
    for name, lr in dict.fromkeys((c.optimizer, c.lr) for c in every):
        cells = [c for c in every if (c.optimizer, c.lr) == (name, lr)]
        if rows := compared(results, cells):
            first = name if study == "optimizers" else COMPARED[0]
            text = about(margin_of(results, beside(cells[0])))
            parts.append(f"{table((first, *COMPARED[1:]), rows)}\n\nRate {lr:g}. {text}".strip())
    return "\n\n".join(parts)


def edq(results: Results) -> str:
    """Return the rank correlations of EDQ, and what else may tell, with the share lost."""
    rows = []
    every = points(results)
    groups = {
        "held out": [p for p in every if p.cell.held_out],
        "held out, above the floor": [p for p in every if p.cell.held_out and p.clear],
        "the others": [p for p in every if not p.cell.held_out],
    }
    for name, group in groups.items():
        if len(group) < 4:
            continue
        cells = [f"{name} ({len(group)})"]
        for predictor in PREDICTORS:
            pairs = [(p.predicted[predictor], p.lost) for p in group]
            low, high = bootstrapped(pairs, _spearman)
            cells.append(f"{_spearman(pairs):.2f} ({low:.2f} to {high:.2f})")
        both = [
            (p.predicted["cumulative EDQ"], p.predicted["EDQ of single steps"], p.lost)
            for p in group
        ]
        low, high = bootstrapped(both, _advantage)
        rows.append([*cells, f"{_advantage(both):+.2f} ({low:+.2f} to {high:+.2f})"])
    return table(("runs", *PREDICTORS, "cumulative less single"), rows)


def _spearman(rows: Any) -> float:
    return spearman([r[0] for r in rows], [r[-1] for r in rows])


def _advantage(rows: Any) -> float:
    return _spearman([(r[0], r[2]) for r in rows]) - _spearman([(r[1], r[2]) for r in rows])


def beta2(results: Results, task: str) -> str:
    """Return at each rate of a task the gaps at each beta2, and which beta2 is best by how much."""
    parts = []
    for lr in (lr for name, lr in SWEPT if name == task):
        rows = []
        for s in BETA2:
            cells = of_betas(task, lr, BETAS, (s,))
            there = {c: statistics.fmean(results[c]["whole"]) for c in cells if c in results}
            if not there:
                continue
            if s == "masters":
                at = [f"loss {there[c]:.4f}" if c in there else "" for c in cells]
            else:
                paired = (c in there and beside(c) in results for c in cells)
                at = [
                    nats(mean_of(gaps(results, c))) if both else ""
                    for c, both in zip(cells, paired, strict=True)
                ]
            best, usual = min(there, key=lambda c: there[c]), Cell(task, s, lr)
            gained = ""
            if best != usual and usual in there:
                pairs = zip(results[best]["whole"], results[usual]["whole"], strict=True)
                gained = nats(mean_of([x - y for x, y in pairs]))
            rows.append([usual.words, *at, f"{best.beta2:g}", gained])
        head = ("strategy", *(f"{b:g}" for b in BETAS), "best", "loss there, less that at 0.999")
        if rows:
            text = about(margin_of(results, Cell(task, "masters", lr)))
            at_usual = f" At 0.999: {text[0].lower()}{text[1:]}" if text else ""
            parts.append(f"{table(head, rows)}\n\nRate {lr:g}.{at_usual}")
    return "\n\n".join(parts)


def fp8(results: Results) -> str:
    """Return the table of moments in fp8 beside AdamW's fp32 masters."""
    cells = [
        Cell("train", s, 3e-3, f"AdamW, moments in fp8 {kind}")
        for kind in ("e4m3fn", "e5m2")
        for s in EIGHT_BITS
    ]
    rows = compared(results, cells)
    there = [c for c in cells if c in results]
    for cell, row in zip(there, rows, strict=False):
        row[0] = f"{cell.optimizer.rpartition(' ')[2]}, {cell.strategy}"
    return f"{table(COMPARED, rows)}\n\n{about(margin_of(results, Cell('train', 'masters', 3e-3)))}"


def long(results: Results) -> str:
    """Return the errors after a third, two thirds and all of 5,000 steps."""
    rows = []
    for cell in STUDIES["long"].cells:
        if cell in results:
            marks = results[cell]["marks"]
            errors = [f"{statistics.fmean(m['error']):.1e}" for m in marks]
            far = statistics.fmean(results[cell]["shadow"]["cumulative"])
            gap = statistics.fmean(gaps(results, cell)) if beside(cell) in results else 0.0
            name = cell.words
            rows.append([name, *errors, f"{far:.4f}", f"{gap:+.4f}"])
    steps = ("error after 1,667 steps", "3,333", "5,000")
    return table(("strategy", *steps, "cumulative EDQ", "loss less that of masters"), rows)


def warned(row: dict[str, Any]) -> bool:
    """Return True if a run was told that its updates are too small."""
    return any("of the way of" in text for text in row["warnings"])


def warning(results: Results) -> str:
    """Return how many runs had the warning of small updates, by what they lost of the gain."""
    bounds = ((-1.0, 0.01), (0.01, 0.1), (0.1, 2.0))
    names = ("less than 1%", "1% to 10%", "more than 10%")
    rows = []
    for (low, high), name in zip(bounds, names, strict=True):
        ours = [
            (c, warned(results[c]))
            for c in STUDIES["warning"].cells
            if c in results and beside(c) in results and results[c]["settings"]
            if low <= 1 - statistics.fmean(kept(results, c)) < high
        ]
        said, silent = (
            ", ".join(f"{c.words} at {c.lr:g}" for c, told in ours if told is wanted)
            for wanted in (True, False)
        )
        rows.append([name, str(len(ours)), said or "none", silent if low > 0 else "the others"])
    return table(("lost of the gain", "runs", "warned", "not warned"), rows)


def state(results: Results) -> str:
    """Return how many cells of each study are there."""
    rows = []
    for name, study in STUDIES.items():
        there = sum(cell in results for cell in study.cells)
        if name in BY_NAME and not there:
            continue
        said = "not run yet" if not there else f"{there} of {len(study.cells)}"
        rows.append([f"`{name}`", study.title, said])
    spent = sum(row["seconds"] for row in results.values()) / 60
    said = f"{len(results)} runs, which took {spent:.0f} minutes with one thread on a busy machine."
    return f"{table(('study', 'question', 'runs that are there'), rows)}\n\n{said}"


EACH_RATE = ("optimizers", "digits", "parity 468k", "parity 3M", "gpu")
TABLES: dict[str, Callable[[Results], str]] = {
    **{"state": state, "parity": parity, "parity 1e-3": partial(parity, lr=1e-3)},
    **{"rates": rates, "edq": edq},
    **{name: partial(shares, study=name) for name in ("tune", "lora", "words", "jargon")},
    **{name: partial(each_rate, study=name) for name in EACH_RATE},
    **{f"beta2 {task}": partial(beta2, task=task) for task in dict.fromkeys(t for t, _ in SWEPT)},
    **{"fp8": fp8, "long": long, "warning": warning},
}


def filled(page: str, results: Results) -> str:
    """Return a page with its tables made anew."""
    for name, make in TABLES.items():
        block = re.compile(rf"(<!-- table {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        text = make(results)
        page = block.sub(partial(_block, text), page)
    return page


def _block(text: str, match: re.Match[str]) -> str:
    return f"{match[1]}\n{text}\n\n{match[2]}"


def main() -> None:
    """Print, and write into the page."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="of the quick runs; writes nothing")
    parser.add_argument("--gpu", action="store_true", help="of runs on a GPU; writes nothing")
    args = parser.parse_args()
    folder = ROOT / "build/studies/quick" if args.quick else RESULTS
    results = load(folder / "gpu" if args.gpu else folder)
    for name, make in TABLES.items():
        print(f"## {name}\n\n{make(results)}\n")
    if not (args.quick or args.gpu):
        PAGE.write_text(filled(PAGE.read_text(), results))
        figures.draw(results)


if __name__ == "__main__":
    main()
