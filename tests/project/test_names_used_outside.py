"""Benchmarks, examples and support of tests name only what the package has; few run in tests.

For benchmarks, examples and tests/support.
"""

import ast
import importlib.util
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FILES = [
    path
    for folder in ("benchmarks", "examples", "tests/support")
    for path in sorted((ROOT / folder).rglob("*.py"))
]


def missing(text: str) -> Iterator[str]:
    """Yield the names that a source imports from collage_fx, or reads of these, in vain."""
    tree = ast.parse(text)
    known: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("collage_fx"):
            module = importlib.import_module(str(node.module))
            for one in node.names:
                if hasattr(module, one.name):
                    known[one.asname or one.name] = getattr(module, one.name)
                elif not is_module(f"{node.module}.{one.name}"):
                    yield f"{node.module}.{one.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found = known.get(node.value.id)
            if isinstance(found, types.ModuleType | type) and not hasattr(found, node.attr):
                yield f"{node.value.id}.{node.attr}"


def is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # its parent is no package
        return False


@pytest.mark.parametrize("path", FILES, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_every_name_is_there(path: Path) -> None:
    assert not list(missing(path.read_text()))


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("from collage_fx.stand_in import stand_ins\nstand_ins.narrowed", "stand_ins.narrowed"),
        ("from collage_fx.step import nothing", "collage_fx.step.nothing"),
        ("def f():\n    from collage_fx.errors import CollageError as E\n    E.no", "E.no"),
    ],
)
def test_one_that_is_not_is_found(source: str, name: str) -> None:
    assert list(missing(source)) == [name]
