"""The quickstart and its notebook: they run, and the losses say what README says of them.

For examples/quickstart.py.
"""

import contextlib
import importlib
import io
import json
import re
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import notebooks
import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
NOTEBOOK = EXAMPLES / "quickstart.ipynb"
STORED = [c for c in json.loads(NOTEBOOK.read_text())["cells"] if c["cell_type"] == "code"]
LINE = re.compile(r"(bf16|one line|fp32) +loss \d+\.\d{4}, ([+-]\d+\.\d{4})")


def quickstart(monkeypatch: pytest.MonkeyPatch, steps: int | None) -> ModuleType:
    """Return the module, with fewer steps if a number is given."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.delitem(sys.modules, "quickstart", raising=False)
    module = importlib.import_module("quickstart")
    if steps is not None:
        monkeypatch.setattr(module, "train", partial(module.train, steps=steps))
    monkeypatch.setitem(sys.modules, "quickstart", module)
    return module


@pytest.fixture(autouse=True)
def same_threads() -> Any:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    "steps", [pytest.param(25, id="25"), pytest.param(None, id="all", marks=pytest.mark.slow)]
)
def test_one_line_learns_what_fp32_does(steps: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    module = quickstart(monkeypatch, steps)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        module.main()
    gains = {way: -float(gain) for way, gain in map(_parsed, out.getvalue().splitlines()[1:])}
    assert list(gains) == ["bf16", "one line", "fp32"]
    assert gains["fp32"] > (0.01 if steps is None else 0.001)
    # Few steps move few weights to another bf16 number, and with these the model computes.
    least = 0.9 if steps is None else 0.4
    assert gains["one line"] > least * gains["fp32"] and gains["bf16"] < 0.2 * gains["fp32"]


def _parsed(line: str) -> tuple[str, str]:
    found = LINE.fullmatch(line)
    assert found, line
    return found[1], found[2]


@pytest.mark.parametrize(
    "steps", [pytest.param(8, id="8"), pytest.param(None, id="all", marks=pytest.mark.slow)]
)
def test_notebook_is_executed(steps: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stored notebook has outputs of the same kinds, and is of a whole run."""
    quickstart(monkeypatch, steps)
    monkeypatch.setenv("COLUMNS", "120")
    cells = notebooks.executed(NOTEBOOK)
    assert [c["source"] for c in cells] == [c["source"] for c in STORED]
    assert [_kinds(c) for c in cells] == [_kinds(c) for c in STORED]
    for outputs in ((c["outputs"] for c in STORED), (c["outputs"] for c in cells)):
        text = "".join(line for cell in outputs for o in cell for line in o.get("text", ()))
        plain, ours = (
            int(share) for share in re.findall(r"(\d+)% of the weights have moved", text)
        )
        assert plain < 20 and ours > 80


def _kinds(cell: dict[str, Any]) -> list[list[str]]:
    return [[o["output_type"], *o.get("data", ())] for o in cell["outputs"]]


def test_a_cell_is_executed_as_jupyter_does(tmp_path: Path) -> None:
    sources = (["n = 1\n", "print(n)\n", "n + given"], ["None"], ["import beside\n", "n"])
    (tmp_path / "beside.py").write_text("")
    cells = [{"cell_type": "code", "source": source, "outputs": []} for source in sources]
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": [{"cell_type": "markdown"}, *cells]}))
    done = notebooks.executed(tmp_path / "a.ipynb", {"given": 2})
    assert [_kinds(c) for c in done] == [
        [["stream"], ["execute_result", "text/plain"]],
        [],
        [["execute_result", "text/plain"]],
    ]
    assert done[0]["outputs"][0]["text"] == ["1\n"]
    assert done[0]["outputs"][1]["data"]["text/plain"] == ["3"]
