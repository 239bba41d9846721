"""Rules of the source tree as a whole: imports, sizes of folders, names of files.

For collage_fx, passes and runtime.
"""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import optim

ROOT = Path(__file__).parents[2]
LAYERS = ("collage_fx", "passes", "runtime")
"""The folders with the code, from the top to the bottom."""
PACKAGES = [
    *("__main__", "callbacks", "accumulation", "averages", "optim", "first_use", "api"),
    *("inspection", "diagnosis", "convert", "budget", "step", "dynamo", "stand_in"),
    *("record", "segments", "binding"),
    "compilation",
    *("hooks", "gradients", "changes"),
    *("optimizer", "config", "classes", "errors"),
    *("passes.pipeline", "passes.codegen", "passes.dedup", "passes.rewrite", "passes.analysis"),
    *("passes.frontend", "passes.rules", "passes.ir"),
    *("runtime.ops", "runtime.kernels", "runtime.residuals"),
    *("runtime.cpp_compiler", "runtime.storage"),
    *("runtime.expansion", "runtime.progress", "runtime.logs"),
    *("runtime.torch_private", "runtime.torch_versions", "runtime.errors", "runtime.trees"),
]
"""Packages, and modules beside them: each imports itself and what stands behind it."""
FILES = 10
"""Largest number of files in a folder; more is a list that nobody reads."""


def sources(layer: str) -> list[Path]:
    return sorted((ROOT / layer).rglob("*.py"))


def imported(path: Path) -> Iterator[str]:
    """The modules that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import hides which layer it reaches"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def package_of(module: str) -> str | None:
    """The package of the list that a module of collage_fx belongs to; None for what is in none."""
    name = module.removeprefix("collage_fx.")
    fits = [p for p in PACKAGES if name == p or name.startswith(p + ".")]
    return fits[0] if module != name and fits else None


def module_of(path: Path) -> str:
    """The name by which a file of the tree is imported."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    return ".".join(parts if parts[0] == "collage_fx" else ("collage_fx", *parts))


def code(path: Path) -> str:
    """The code of a file without comments and docstrings."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [s for s in body if not _is_text(s)] or [ast.Pass()]  # type: ignore[attr-defined]
    return ast.unparse(tree)


def _is_text(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def test_listed_packages_are_those_of_the_tree() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {p: p.replace(".", "/") for p in settings["packages"]}
    for package, folder in settings["package-dir"].items():
        for p in folders:
            if p == package or p.startswith(package + "."):
                folders[p] = folder + p.removeprefix(package).replace(".", "/")
    inits = (p for layer in LAYERS for p in sources(layer) if p.name == "__init__.py")
    assert sorted(folders.values()) == sorted(p.parent.relative_to(ROOT).as_posix() for p in inits)


def test_every_folder_with_code_is_a_package() -> None:
    for layer in LAYERS:
        for path in sources(layer):
            assert (path.parent / "__init__.py").exists(), path


MODULES = [path for layer in LAYERS for path in sources(layer)]
OPEN = {"collage_fx", "collage_fx.passes", "collage_fx.runtime"}
"""Roots: they import no module of collage_fx, or, to name public functions, when asked."""


def test_every_module_is_in_the_order() -> None:
    assert {m for m in map(module_of, MODULES) if package_of(m) is None} == OPEN
    used = {package_of(m) for m in map(module_of, MODULES)}
    assert used - {None} == set(PACKAGES), "a package in the list is not there"


def test_imports_point_one_way() -> None:
    upwards = []
    for path in MODULES:
        package = package_of(module_of(path))
        allowed = PACKAGES[PACKAGES.index(package) :] if package else PACKAGES
        for module in imported(path):
            reached = package_of(module)
            if reached is not None and reached not in allowed:
                upwards.append(f"{path.relative_to(ROOT)} imports {module}")
    assert not upwards


@pytest.mark.parametrize("layer", LAYERS)
def test_folders_are_small(layer: str) -> None:
    for folder in {path.parent for path in sources(layer)}:
        assert len(list(folder.glob("*.py"))) <= FILES, folder


@pytest.mark.parametrize("layer", LAYERS[1:])
def test_nothing_is_imported_by_its_second_name(layer: str) -> None:
    for path in (p for other in LAYERS for p in sources(other)):
        assert layer not in {m.partition(".")[0] for m in imported(path)}, path


@pytest.mark.parametrize("package", ["passes", "passes.ir", "runtime", "runtime.storage"])
def test_packages_refuse_their_second_name(package: str) -> None:
    """From the repository root, where `import passes` would otherwise work."""
    done = subprocess.run(
        [sys.executable, "-c", f"import {package}"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "ImportError: this package is collage_fx." in done.stderr


@pytest.mark.parametrize("layer", ["passes", "runtime"])
def test_no_optimizer_is_named_below_the_top(layer: str) -> None:
    classes = {n for n in vars(optim) if isinstance(getattr(optim, n), type)} - {"Optimizer"}
    states = ["exp_avg", "exp_avg_sq", "momentum_buffer", "square_avg", "max_exp_avg_sq"]
    known = re.compile(rf"\b({'|'.join([*classes, *states])})\b", re.IGNORECASE)
    assert {"AdamW", "SGD", "Muon"} <= classes
    for path in sources(layer):
        found = {m.group() for m in known.finditer(code(path))}
        assert not found, f"{path.relative_to(ROOT)} names {found}"


def test_tests_stay_below_three_hundred_lines() -> None:
    """A long test file is one that nobody reads."""
    for path in sources("tests"):
        assert len(path.read_text().splitlines()) < 300, path


def test_test_files_have_names_of_their_own() -> None:
    """Of two with one name pytest collects the first, and ends with an error."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(set(names)) == sorted(names)


def test_what_has_no_package_has_names_of_its_own() -> None:
    """Tests put all three folders on the path, where the order of tests decides which is found."""
    names = [p.name for at in ("tests/support", "benchmarks", "examples") for p in sources(at)]
    bare = sorted(name for name in names if not name.startswith("__"))
    assert "checkpoints.py" in bare and sorted(set(bare)) == bare
