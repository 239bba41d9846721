"""The proven error bound of each operation on expansions, and the largest error that is seen.

    python benchmarks/bounds.py [--samples 1e8] [--formats bf16 fp16] [--out FILE.json]

Operands have random bits over all exponents; a third of the second ones nearly cancel the first.
Errors are computed as tests/support/operations.py says; what seems to break a bound is decided by
rationals. Writes results/bounds.json and results/bounds.md, or FILE. With 1e8 samples of each
operation it takes some ten minutes for each format on one core.
"""

import argparse
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/support"))
from floats import BF16, FP16
from operations import CHUNK, OPERATIONS, seen

from collage_fx.runtime import progress

RESULTS = Path(__file__).parent / "results"
FORMATS = {"bf16": BF16, "fp16": FP16}


def measured(name: str, samples: int) -> list[dict[str, Any]]:
    """Return a row for each operation."""
    f = FORMATS[name]
    start = time.process_time()
    chunks = progress.over(range(max(1, samples // CHUNK)), "chunk", name)
    found = seen(f, chunks, OPERATIONS)
    print(f"{name}: {time.process_time() - start:.0f} s of one core")
    return [
        {
            "format": name,
            "operation": op.name,
            "components": op.n,
            "bound": op.limit(f),
            "largest": worst.error,
            "beyond": worst.beyond,
            "samples": worst.samples,
            "in_range": worst.valid,
            "where": worst.where,
        }
        for op, worst in found
    ]


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a table in Markdown, the formats beside each other."""
    names = list(dict.fromkeys(row["format"] for row in rows))
    head = ["operation", "n", *(f"{n}: proven, seen" for n in names)]
    lines = [head, ["---"] * len(head)]
    for op in OPERATIONS:
        mine = [r for r in rows if (r["operation"], r["components"]) == (op.name, op.n)]
        seen_beside = [f"{r['bound']:.3f}, {r['largest']:.3f}" for r in mine]
        lines.append([f"`{op.name}`", str(op.n), *seen_beside])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def report(rows: list[dict[str, Any]]) -> str:
    """Return the table with what it says, and how much was measured."""
    return (
        "# Relative errors in units of u^n\n\n"
        f"{table(rows)}\n\n"
        f"n components; a is one float. {min(r['samples'] for r in rows):.3g} samples for each "
        f"operation, {sum(r['beyond'] for r in rows)} beyond a bound in the declared range, "
        f"torch {torch.__version__}; `python benchmarks/bounds.py`.\n"
    )


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=float, default=1e8)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--out", type=Path, default=RESULTS / "bounds.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row for n in arguments.formats for row in measured(n, int(arguments.samples))]
    text = report(rows)
    print(text)
    about = {"torch": torch.__version__, "python": platform.python_version()}
    arguments.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    arguments.out.with_suffix(".md").write_text(text)


if __name__ == "__main__":
    main()
