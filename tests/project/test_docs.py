"""The code in README and docs runs, what it prints is what is shown, and links lead somewhere.

For README.md and docs.
"""

import contextlib
import io
import re
import types
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CODE = {
    f"{page.relative_to(ROOT)}-{i}": text
    for page in PAGES
    if page.name != "stock-defects.md"  # whose code shows what goes wrong
    for i, text in enumerate(BLOCK.findall(page.read_text()))
}
FOLDERS = {"collage_fx", "passes", "runtime", "tests", "benchmarks", "examples", "docs"}
LINK = re.compile(r"\]\(([^)#\s]+)(?:#([^)]*))?\)")


def printed(text: str) -> str:
    module = types.ModuleType("page")
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(text, "page", "exec"), module.__dict__)
    return out.getvalue()


@pytest.mark.parametrize("name", CODE)
@pytest.mark.quick(
    "docs/api.md-0",
    "docs/checkpoints.md-[01]",
    "docs/choosing.md-0",
    "docs/classes.md-0",
    "docs/convert.md-0",
    "docs/debugging.md-[01]",
    "docs/reading.md-0",
    "docs/recipes.md-[01]",
    "docs/start.md-[012]",
    "docs/warnings.md-0",
)
def test_code_runs(name: str) -> None:
    torch.manual_seed(0)
    printed(CODE[name])


def test_what_is_shown_of_explain_is_what_it_prints() -> None:
    page = (ROOT / "docs/reading.md").read_text()
    (shown,) = re.findall(r"^```\n(state .*?)^```$", page, re.MULTILINE | re.DOTALL)
    found = printed(CODE["docs/reading.md-0"])
    assert all(line.rstrip() in found for line in shown.splitlines())


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_resolve(page: Path) -> None:
    for target, anchor in LINK.findall(page.read_text()):
        if target.startswith("https://"):
            continue
        file = (page.parent / target).resolve()
        assert file.exists(), f"{page.name} links to {target}"
        titles = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE) if anchor else []
        anchors = {re.sub(r"[^\w -]", "", t.lower()).replace(" ", "-") for t in titles}
        assert not anchor or anchor in anchors, f"{page.name} links to {target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_files_that_are_named_exist(page: Path) -> None:
    """Files with a folder in front are named from the root."""
    for name in re.findall(r"`([\w/]+/[\w.]*)`", page.read_text()):
        if name.partition("/")[0] in FOLDERS:
            assert (ROOT / name).exists(), f"{page.name} names {name}"
