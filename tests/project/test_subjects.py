"""Each test file says at the end of its docstring what it is for. For tests."""

import ast
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAYERS = ("collage_fx", "passes", "runtime")
"""The folders with the code of the product."""
LAST = re.compile(r"(?:^|\s)For ([^\s,]+(?:, [^\s,]+)*(?: and [^\s,]+)?)\.$")
"""The last sentence of a docstring: names with commas, and an `and` before the last one.

A module has the name by which `collage_fx` imports it, without that prefix; anything else, such as
a benchmark or a page of the documentation, has its path in the repository.
"""


def module_of(path: Path) -> str:
    """Return the name of a module, or of the package of an `__init__.py`."""
    parts = path.with_suffix("").parts
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    return ".".join(parts[1:] if len(parts) > 1 and parts[0] == LAYERS[0] else parts)


def has_code(path: Path) -> bool:
    """Return False for a file that has a docstring alone."""
    return len(ast.parse(path.read_text()).body) > 1


def sources(root: Path) -> list[Path]:
    """Return the files of the product, relative to its root; no link is followed."""
    found = [p for layer in LAYERS for p in sorted((root / layer).rglob("*.py"))]
    return [p.relative_to(root) for p in found]


def subjects(docstring: str) -> list[str]:
    """Return the names in the last sentence of a docstring."""
    last = LAST.search(" ".join(docstring.split()))
    return re.split(r", | and ", last[1]) if last else []


def faults(docstrings: Mapping[str, str], modules: Iterable[str], root: Path) -> list[str]:
    """Return what is wrong with the subjects of test files.

    Args:
        docstrings: name of a test file -> its docstring.
        modules: names that are of modules and packages; other names are paths.
        root: where paths begin.
    """
    known, found = set(modules), []
    for file, text in docstrings.items():
        names = subjects(text)
        if not names:
            found.append(f"{file} does not end with what it is for")
        for name in names:
            if name not in known and not (root / name).exists():
                found.append(f"{file} is for {name}, which is not there")
            elif name not in known and name.endswith(".py") and name.partition("/")[0] in LAYERS:
                found.append(f"{file} is for {name}, which is the path of a module")
        if len(names) != len(set(names)):
            found.append(f"{file} names one subject twice")
    return found


def unnamed(docstrings: Iterable[str], modules: Iterable[str]) -> list[str]:
    """Return the modules that no docstring names by themselves."""
    named = {name for text in docstrings for name in subjects(text)}
    return sorted(set(modules) - named)


FILES = sources(ROOT)
DOCSTRINGS = {
    path.relative_to(ROOT).as_posix(): ast.get_docstring(ast.parse(path.read_text())) or ""
    for path in sorted((ROOT / "tests").rglob("test_*.py"))
}


def test_subjects_are_there() -> None:
    assert len(DOCSTRINGS) > 200
    assert not faults(DOCSTRINGS, map(module_of, FILES), ROOT)


def test_every_module_has_a_test_file() -> None:
    modules = [module_of(path) for path in FILES if has_code(ROOT / path)]
    assert {"passes.ir.verify", "step.subject", "runtime", "collage_fx"} <= {*modules}
    assert not unnamed(DOCSTRINGS.values(), modules)


@pytest.mark.parametrize(
    ("docstring", "names"),
    [
        ("Sums. For passes.pipeline.", ["passes.pipeline"]),
        ("Sums.\n\nFor a.b and c.", ["a.b", "c"]),
        ("Sums: all.\n\nFor a.b,\nc/d.py and e.\n", ["a.b", "c/d.py", "e"]),
        ("For a. Sums.", []),
        ("Sums, for a.", []),
        ("Sums. For a reader.", []),
    ],
)
def test_subjects_are_read(docstring: str, names: list[str]) -> None:
    assert subjects(docstring) == names


@pytest.mark.parametrize(
    ("docstring", "fault"),
    [
        ("Sums.", "does not end with what it is for"),
        ("Sums. For passes.gone.", "is for passes.gone, which is not there"),
        ("Sums. For docs/gone.md.", "is for docs/gone.md, which is not there"),
        ("Sums. For passes/pipeline.py.", "is the path of a module"),
        ("Sums. For api and api.", "names one subject twice"),
    ],
)
def test_a_fault_is_found(docstring: str, fault: str) -> None:
    """The control: a docstring for each fault, and one that has none."""
    (found,) = faults({"test_a.py": docstring}, ["api", "passes.pipeline"], ROOT)
    assert fault in found
    right = {"test_a.py": "Sums. For api, passes.pipeline and README.md."}
    assert not faults(right, ["api", "passes.pipeline"], ROOT)


def test_a_module_without_a_test_file_is_found(tmp_path: Path) -> None:
    """The control: its package does not stand for it; a file without code needs none."""
    for name, text in {"__init__": '"""A package."""', "a": "A = 1\nB = 2", "b": "A = 1"}.items():
        (tmp_path / "passes" / "ir").mkdir(parents=True, exist_ok=True)
        (tmp_path / "passes" / "ir" / f"{name}.py").write_text(text + "\n")
    assert [module_of(p) for p in sources(tmp_path)] == ["passes.ir", "passes.ir.a", "passes.ir.b"]
    assert not has_code(tmp_path / "passes" / "ir" / "__init__.py")
    assert unnamed(["Sums. For passes.ir."], ["passes.ir", "passes.ir.a"]) == ["passes.ir.a"]
    assert not unnamed(["Sums. For passes.ir and passes.ir.a."], ["passes.ir", "passes.ir.a"])
