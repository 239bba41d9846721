"""The errors of the coverage table beside those of another version, class by class.

That version makes its table with its own benchmark: where TREE has it and DIR has it installed
(`pip install --no-deps --no-build-isolation --target DIR TREE`),

    PYTHONPATH=DIR python TREE/benchmarks/coverage.py --out FILE
    python benchmarks/coverage_quotients.py FILE

Both tables have the same parameters and gradients. Printed and written to
benchmarks/results/coverage_quotients.json: the median quotient of the two errors, and for each
class that both measured its errors and their quotient, the largest first.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
MUCH = 1.1
"""A quotient from which on a class is printed."""


def errors(path: Path) -> tuple[dict[str, Any], dict[str, float]]:
    """Return the conditions of a table, but for where it was written, and class -> its error."""
    table = json.loads(path.read_text())
    command = table["conditions"]["command"].partition(" --out")[0]
    rows = [r for r in table["rows"] if r["err_collage"]]
    found = {f"{r['package']}.{r['name']}": r["err_collage"] for r in rows}
    return table["conditions"] | {"command": command}, found


def main() -> None:
    """Compare two tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before", type=Path, help="the table of the other version")
    parser.add_argument("--of", type=Path, default=RESULTS / "coverage.json")
    parser.add_argument("--out", type=Path, default=RESULTS / "coverage_quotients.json")
    given = parser.parse_args()
    (conditions, ours), (before, theirs) = errors(given.of), errors(given.before)
    rows = [
        {"class": c, "ours": ours[c], "before": theirs[c], "quotient": ours[c] / theirs[c]}
        for c in ours.keys() & theirs.keys()
    ]
    rows.sort(key=lambda row: -row["quotient"])
    summary = {
        "classes": len(rows),
        "median quotient": statistics.median(row["quotient"] for row in rows),
        f"above {MUCH}": sum(row["quotient"] > MUCH for row in rows),
        f"below 1 / {MUCH}": sum(row["quotient"] < 1 / MUCH for row in rows),
    }
    for row in rows[: summary[f"above {MUCH}"]]:
        print("{quotient:.2f} {class}: {ours:.2e}, before {before:.2e}".format(**row))
    print(summary)
    table = {"ours": conditions, "before": before, "summary": summary, "rows": rows}
    given.out.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
