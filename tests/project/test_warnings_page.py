"""Each warning has an entry in docs/warnings.md, and each entry is of a warning that is given.

For runtime.errors and docs/warnings.md.
"""

import ast
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

import pytest

import collage_fx
from collage_fx.runtime.errors import WarningName, warn

ROOT = Path(__file__).parents[2]
SOURCES = [p for layer in ("collage_fx", "passes", "runtime") for p in (ROOT / layer).rglob("*.py")]
HELPER = ROOT / "runtime" / "errors.py"
PAGE = (ROOT / "docs" / "warnings.md").read_text()
NAMES = set(get_args(WarningName))
FLAT = re.sub(r"(?<=```text\n).*?(?=\n```)", lambda m: " ".join(m[0].split()), PAGE, flags=re.S)
"""The page with each text on one line."""
LEAST = 8
"""Letters of a part of a text, between what differs, from which on it is looked for."""


def entries(page: str) -> dict[str, str]:
    """Return the entries by their names."""
    parts = re.split(r"^### (.*)$", page, flags=re.M)[1:]
    bodies = (re.split(r"^## ", part, flags=re.M)[0] for part in parts[1::2])
    return dict(zip(parts[::2], bodies, strict=True))


def shown(entry: str) -> list[str]:
    """Return the texts of an entry, each on one line."""
    found = re.findall(r"^```text\n(.*?)\n```$", entry, re.M | re.S)
    return [" ".join(text.split()) for text in found]


def parts(text: str) -> list[str]:
    """Return what of a text never differs."""
    found = (part.strip() for part in re.split(r"<[^<>]*>", text))
    return [part for part in found if len(part) >= LEAST]


def strings(tree: ast.AST) -> Iterator[str]:
    """Yield the texts in code, those of an f-string between its braces."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def warned(tree: ast.AST) -> Iterator[tuple[str, list[str]]]:
    """Yield the warnings that code gives, each with the parts of its text that stand there."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not called(node).endswith(("warn", "warn_once")):
            continue
        names = [a.value for a in node.args if isinstance(a, ast.Constant) and a.value in NAMES]
        if names:
            others = (s for a in node.args for s in strings(a) if s not in NAMES)
            yield names[0], [s for s in others if len(s) >= LEAST]


def called(node: ast.Call) -> str:
    return getattr(node.func, "attr", "") or getattr(node.func, "id", "")


@dataclass
class Code:
    """Warnings and texts of the sources."""

    given: list[tuple[str, list[str]]]
    """The warnings, as of `warned`."""
    texts: str
    direct: list[Path]
    """The files that give warnings by themselves."""


@pytest.fixture(scope="module")
def code() -> Code:
    trees = {path: ast.parse(path.read_text()) for path in SOURCES}
    given = [found for tree in trees.values() for found in warned(tree)]
    direct = [p for p, tree in trees.items() for n in ast.walk(tree) if is_direct(n)]
    return Code(given, "\n".join(s for t in trees.values() for s in strings(t)), direct)


def is_direct(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and ast.unparse(node) == "warnings.warn"


def faults(page: str, code: Code) -> list[str]:
    """Return in what the page and the code differ."""
    there, given, texts = entries(page), code.given, code.texts
    found = [f"{name} has no entry" for name in sorted(NAMES - there.keys())]
    found += [f"{name} is no warning" for name in sorted(there.keys() - NAMES)]
    found += [f"{name} is never given" for name in sorted(NAMES - {name for name, _ in given})]
    for name, entry in there.items():
        means = re.sub(r"```text\n.*?\n```", "", entry, flags=re.S).partition("**Paste**")
        if not shown(entry) or not means[0].strip() or "`" not in means[2]:
            found.append(f"{name} lacks a text, a meaning or a line to paste")
        found += [
            f"{name}: no code says {part!r}"
            for text in shown(entry)
            for part in parts(text)
            if part not in texts
        ]
    for name, said in given:
        whole = " ".join(shown(there.get(name, "")))
        found += [f"{name}: the page leaves out {s!r}" for s in said if s.strip() not in whole]
    return found


def test_the_page_has_the_warnings_of_the_code(code: Code) -> None:
    assert not faults(PAGE, code)


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("### overlap\n", "### overlaps\n", "overlap has no entry"),
        ("### overlap\n", "### overlaps\n", "overlaps is no warning"),
        ("by .clone()\n", "by clone\n", "overlap: no code says"),
        ("themselves; give each memory of its own, by", "<and> by", "overlap: the page leaves out"),
        ("**Paste** `state = state.clone()`", "`state.clone()`", "overlap lacks a text, a meaning"),
        ("A write of one state changes another.", "", "overlap lacks a text, a meaning"),
    ],
)
def test_a_fault_is_found(old: str, new: str, fault: str, code: Code) -> None:
    assert FLAT.count(old) == 1 and not faults(FLAT, code)
    assert any(f.startswith(fault) for f in faults(FLAT.replace(old, new), code))


def test_a_warning_that_nothing_gives_is_found(code: Code) -> None:
    others = [found for found in code.given if found[0] != "overlap"]
    assert "overlap is never given" in faults(PAGE, replace(code, given=others))


def test_all_go_through_one_function(code: Code) -> None:
    """Only this function adds the link."""
    assert code.direct == [HELPER]


def test_a_warning_ends_with_the_link_to_its_entry() -> None:
    with pytest.warns(collage_fx.CollageWarning) as caught:
        warn("overlap", "two states")
    (one,) = caught
    text, _, link = str(one.message).rpartition(" ")
    assert text == "collage_fx: two states" and one.filename == __file__
    page, _, anchor = link.strip("[]").partition("#")
    assert (ROOT / page).read_text() == PAGE and f"\n### {anchor}\n" in PAGE


def test_one_can_be_chosen_by_its_name() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", message="collage_fx: .*#overlap")
        warn("pattern", "not this one")
        with pytest.raises(collage_fx.CollageWarning):
            warn("overlap", "this one")
