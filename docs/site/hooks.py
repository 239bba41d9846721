"""Links of the site to files that are no pages of docs/: README, the changes, examples, results.

Pages link to them as on GitHub, by relative paths. Markdown becomes a page of the site, code is
shown on one, and other files are copied. README is the front page.
"""

import posixpath
import re
import shutil
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
FRONT = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
"""Path in the repository -> page of the site."""
LINK = re.compile(r"""(\]\(|\b(?:src|srcset|href)=")(?![a-z]+:|#)([^)\s#"]+)""")
"""The beginning of a link or picture, in Markdown or HTML, and its target, if that is a path."""
BADGE = re.compile(r"^\[?!\[[^]]*\]\(https?:[^)]*\)(?:\]\([^)]*\))?\n", re.MULTILINE)
"""A line that is a picture from another server: the site asks none."""
SHOWN = {".py": "python", ".toml": "toml", ".txt": "text"}
"""Suffix -> the language of what is shown on a page of its own."""


def on_startup(**_: Any) -> None:
    """Lay out the package as it is installed, for docstrings: passes/ and runtime/ are in it."""
    package = ROOT / "build" / "docs-source" / "collage_fx"
    shutil.rmtree(package, ignore_errors=True)
    ignored = shutil.ignore_patterns("__pycache__")
    for folder in ("", "passes", "runtime"):
        source = ROOT / (folder or "collage_fx")
        shutil.copytree(source, package / folder, ignore=ignored, dirs_exist_ok=True)


def page_of(path: str) -> str:
    """Return the name within the site of a file of the repository."""
    if path in FRONT or path.startswith("docs/"):
        return FRONT.get(path, path.removeprefix("docs/"))
    return f"files/{path}.md" if Path(path).suffix in SHOWN else f"files/{path}"


def targets(path: str) -> set[str]:
    """Return the files of the repository that a Markdown file links to."""
    text = (ROOT / path).read_text(encoding="utf-8")
    found = {_resolved(path, target) for _, target in LINK.findall(text)}
    return {target for target in found if (ROOT / target).is_file()}


def linked(text: str, path: str, page: str) -> str:
    """Return the text of a file with links that hold on a page of the site."""

    def one(match: re.Match[str]) -> str:
        target = _resolved(path, match[2])
        if not (ROOT / target).is_file():
            return match[0]
        found = posixpath.relpath(page_of(target), posixpath.dirname(page) or ".")
        return match[1] + (found if match[1] == "](" else _address(found, page))

    return LINK.sub(one, text)


def on_files(files: Files, config: Any) -> Files:
    """Add the files that pages link to, and those that these link to."""
    todo = [*FRONT, *(f"docs/{file.src_uri}" for file in files if file.src_uri.endswith(".md"))]
    seen = set(todo)
    while todo:
        path = todo.pop()
        if not path.startswith("docs/"):
            files.append(_added(path, config))
        if path.endswith(".md"):
            new = targets(path) - seen
            seen |= new
            todo += [target for target in new if files.get_file_from_path(page_of(target)) is None]
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Have the links of a page of docs/ lead to what was added."""
    uri = page.file.src_uri
    return linked(markdown, f"docs/{uri}", uri) if page.file.abs_src_path else markdown


def _address(target: str, page: str) -> str:
    """Return what HTML of a page has for a file beside it: pages are folders there."""
    found = re.sub(r"(^|/)index\.md$", r"\1./", target)
    found = re.sub(r"\.md$", "/", found)
    return found if page.endswith("index.md") else f"../{found}"


def _resolved(path: str, target: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), target))


def _added(path: str, config: Any) -> File:
    page = page_of(path)
    if page == f"files/{path}" and not path.endswith(".md"):
        return File.generated(config, page, content=(ROOT / path).read_bytes())
    text = (ROOT / path).read_text(encoding="utf-8")
    if language := SHOWN.get(Path(path).suffix):
        text = f"# {path}\n\n```{language}\n{text}```\n"
    else:
        text = BADGE.sub("", linked(text, path, page))
    return File.generated(config, page, content=text)
