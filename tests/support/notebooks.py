"""Notebooks, executed without Jupyter: `python tests/support/notebooks.py FILE` stores outputs.

A cell is executed as IPython would: what it prints is a stream, and the value of an expression that
is its last line is displayed, as text and as HTML if it has any.
"""

import ast
import contextlib
import io
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

Cell = dict[str, Any]


def executed(notebook: Path, names: dict[str, Any] | None = None) -> list[Cell]:
    """Execute the code cells in order; return them with their outputs.

    Modules beside the notebook can be imported, as they can in Jupyter; the names are there before
    the first cell.
    """
    module = types.ModuleType("__main__")
    module.__dict__.update(names or {})
    sys.path.insert(0, str(notebook.parent))
    try:
        cells = json.loads(notebook.read_text())["cells"]
        return [_executed(cell, module) for cell in cells if cell["cell_type"] == "code"]
    finally:
        sys.path.remove(str(notebook.parent))


def _executed(cell: Cell, module: types.ModuleType) -> Cell:
    tree = ast.parse("".join(cell["source"]))
    shown = None
    if tree.body and isinstance(last := tree.body[-1], ast.Expr):
        tree.body.pop()
        shown = compile(ast.Expression(last.value), "<cell>", "eval")
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(tree, "<cell>", "exec"), module.__dict__)
        value = None if shown is None else eval(shown, module.__dict__)
    outputs: list[dict[str, Any]] = []
    if text := out.getvalue():
        outputs.append({"name": "stdout", "output_type": "stream", "text": _lines(text)})
    if value is not None:
        data = {"text/plain": _lines(repr(value))}
        if hasattr(value, "_repr_html_"):
            data = {"text/html": _lines(value._repr_html_())} | data
        result = {"data": data, "metadata": {}, "output_type": "execute_result"}
        outputs.append(result | {"execution_count": None})
    return cell | {"outputs": outputs}


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def store(notebook: Path) -> None:
    """Write the outputs, and counts of cells, into a notebook."""
    found = json.loads(notebook.read_text())
    done = iter(executed(notebook))
    for count, cell in enumerate((c for c in found["cells"] if c["cell_type"] == "code"), 1):
        cell |= next(done) | {"execution_count": count}
        for output in cell["outputs"]:
            if output["output_type"] == "execute_result":
                output["execution_count"] = count
    notebook.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    os.environ["COLUMNS"] = "120"
    store(Path(sys.argv[1]))
