"""README: short, in PyTorch's words, and its numbers are those of the results files.

For README.md.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
OURS = (
    "residual",
    "high word",
    "low word",
    "expansion",
    "carried",
    "recurrence",
    "verdict",
    "joined",
    "eft",
)
"""Words that the pages behind README explain."""
ROWS = {
    "plain bf16": ("plain fused", "plain fused"),
    "`collage_fx.compile_": ("remainder16", "remainder16"),
    "fp32 weights": ("master", "master"),
    "`level=": ("plus eft", "plus eft"),
}
"""Rows of the costs, and the ways of gpu_check.py and of step_time.py that they are of."""


def results(name: str) -> Any:
    return json.loads((ROOT / "benchmarks/results" / name).read_text())


def costs() -> Iterator[tuple[str, list[float]]]:
    for row in re.findall(r"^\| (.*) \|$", README, re.MULTILINE):
        first, *cells = row.split(" | ")
        if re.fullmatch(r"[\d.]+", cells[-1]):
            yield first, [float(cell) for cell in cells]


def test_it_is_short() -> None:
    lines = README.splitlines()
    assert len(lines) <= 100
    assert all(len(line) <= 120 or line.startswith("| ") for line in lines)


def test_our_words_do_not_stand_in_it() -> None:
    words = " ".join(re.sub(r"\]\([^)]*\)", "]", README).lower().split())
    assert not [word for word in OURS if re.search(rf"\b{word}", words)]


def test_picture_is_there_in_both_themes_and_small() -> None:
    files = re.findall(r'(?:srcset|src)="([^"]*)"', README)
    assert len(files) == 2 and all((ROOT / file).stat().st_size <= 200_000 for file in files)


def test_picture_shows_what_is_said_of_it() -> None:
    found = results("loss_curves_cpu.json")
    ends, seeds = found["summary"], {row["seed"] for row in found["runs"]}
    assert f"the mean of {len(seeds)} seeds" in README.replace("\n", " ")
    assert len(seeds) >= 3 and len(found["runs"]) == 4 * len(seeds)
    span = ends["bf16"]["before"] - ends["fp32"]["after"]
    assert all(end["range"][1] - end["range"][0] < 0.01 * span for end in ends.values())
    assert ends["bf16"]["before"] - ends["bf16"]["after"] < 0.05 * span
    ours = (ends["default"]["after"], ends["paper"]["after"])
    assert all(abs(after - ends["fp32"]["after"]) < 0.01 * span for after in ours)


def test_quickstart_prints_what_is_shown_in_the_seconds_that_are_named() -> None:
    found = results("quickstart_cpu.json")
    shown = "\n".join(("$ python examples/quickstart.py", *found["printed"]))
    assert f"```\n{shown}\n```" in README
    named = re.findall(
        r"load ([\d.]+)\) that takes (\d+) seconds, (\d+) of CPU time, and (\d+) once", README
    )
    keys = ("seconds", "cpu_seconds", "again: seconds")
    assert named == [(str(found["load"]), *(f"{found[key]:.0f}" for key in keys))]
    assert found["cores"] == 2


@pytest.mark.parametrize("start", ROWS)
def test_costs_are_those_of_the_results(start: str) -> None:
    gpu, cpu = ROWS[start]
    (shown,) = (cells for first, cells in costs() if first.startswith(start))
    rows = {row["name"]: row for row in results("gpu_check_B.json")["rows"] if "name" in row}
    (threads,) = (
        each["rows"]
        for each in results("step_time_cpu.json")["results"]
        if each["shapes"] == "GPT, 26M" and each["threads"] == 2
    )
    (on_cpu,) = (row["p50_ms"] for row in threads if row["way"] == cpu)
    held = rows[f"{gpu}: bytes for each parameter"]["held"]
    on_gpu = rows[f"{gpu}, 1.5B in 579 tensors"]["median"]
    assert shown == [round(number, 1) for number in (held, on_gpu, on_cpu)]


def test_compilation_takes_what_is_said() -> None:
    rows = {
        row["tensors"]: {
            way: round(row[way]["cold"]["first"] + row[way]["cold"]["second"], 1)
            for way in ("collage", "stock")
        }
        for row in results("compile_time.json")["rows"]
        if row["optimizer"] == "AdamW" and row["tensors"] in (30, 1000)
    }
    small, large = rows[30], rows[1000]
    said = f"{small['collage']} seconds for 30 tensors, {large['collage']} for 1000"
    stock = f"takes {small['stock']} and {large['stock']}"
    text = " ".join(README.split())
    assert said in text and stock in text
