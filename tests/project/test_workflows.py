"""The workflows of hosted CI call targets of the Makefile, with what collage_fx is tested with.

For .github/workflows.
"""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from collage_fx.runtime.torch_versions import TESTED

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
(PHONY,) = re.findall(r"^\.PHONY:((?:.*\\\n)*.*)$", (ROOT / "Makefile").read_text(), re.M)
TARGETS = set(PHONY.replace("\\", "").split())
CLASSIFIERS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
PYTHONS = [c.rpartition(" ")[2] for c in CLASSIFIERS if re.search(r"Python :: 3\.\d+$", c)]


def read(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text())


def faults(workflow: dict[str, Any]) -> list[str]:
    """Return what is wrong with a workflow."""
    found = []
    if workflow.get("permissions") != {"contents": "read"}:
        found.append("permissions")
    if "concurrency" not in workflow:
        found.append("concurrency")
    for job in workflow["jobs"].values():
        matrix = job.get("strategy", {}).get("matrix", {})
        found += [f"torch {v}" for v in matrix.get("torch", []) if v not in TESTED]
        found += [f"Python {v}" for v in matrix.get("python", []) if v not in PYTHONS]
        if "timeout-minutes" not in job:
            found.append("timeout")
        for step in job["steps"]:
            found += step_faults(step, matrix)
    return found


def step_faults(step: dict[str, Any], matrix: dict[str, list[str]]) -> list[str]:
    if "run" not in step:
        return [] if re.fullmatch(r"[\w/-]+@v\d+", step["uses"]) else [step["uses"]]
    command = re.fullmatch(r"make ([\w-]+)(?: VERSION=\${{ matrix\.(\w+) }})?", step["run"])
    if not command or command[1] not in TARGETS or command[2] not in (None, *matrix):
        return [step["run"]]
    return []


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_workflows_have_no_faults(path: Path) -> None:
    assert not faults(read(path))


def test_the_ends_of_what_is_supported_are_tested() -> None:
    matrix = read(ROOT / ".github/workflows/tests.yml")["jobs"]["test"]["strategy"]["matrix"]
    assert matrix["torch"] == [TESTED[0], TESTED[-1]]
    assert matrix["python"] == [PYTHONS[0], PYTHONS[-1]]


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        (TESTED[0], "2.12.0", "torch 2.12.0"),
        ("3.14", "3.15", "Python 3.15"),
        ("make test-torch", "make tests", "make tests VERSION=${{ matrix.torch }}"),
        ("make test-torch VERSION=${{ matrix.torch }}", "python -m pytest", "python -m pytest"),
        ("matrix.torch }}", "matrix.tor }}", "make test-torch VERSION=${{ matrix.tor }}"),
        ("checkout@v6", "checkout@main", "actions/checkout@main"),
        ("contents: read", "contents: write", "permissions"),
        ("concurrency:", "env:", "concurrency"),
        ("timeout-minutes: 60", "continue-on-error: false", "timeout"),
    ],
)
def test_a_fault_is_found(old: str, new: str, fault: str) -> None:
    text = (ROOT / ".github/workflows/tests.yml").read_text()
    assert old in text
    assert faults(yaml.safe_load(text.replace(old, new))) == [fault]
