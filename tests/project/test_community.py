"""Pages for visitors of the repository: issue forms, badges, the pages of a community.

For .github/ISSUE_TEMPLATE and CONTRIBUTING.md.
"""

import re
import tomllib
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import yaml

import collage_fx
from collage_fx.runtime.torch_versions import TESTED

ROOT = Path(__file__).parents[2]
FORMS = [p for p in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml") if p.stem != "config"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BADGE = re.compile(r"!\[(.*?)\]\(https://img\.shields\.io/badge/([^)]*)\)")


def fields(form: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {part["id"]: part["attributes"] for part in form["body"]}


@pytest.mark.parametrize("path", FORMS, ids=lambda p: p.stem)
def test_names_in_a_form_exist(path: Path) -> None:
    text = path.read_text()
    named = set(re.findall(r"collage_fx\.(\w+)", text))
    assert named <= {*collage_fx.__all__, "__version__"}
    assert all((ROOT / file).exists() for file in re.findall(r"\b(docs/[\w.-]*\w)", text))
    for part in yaml.safe_load(text)["body"]:
        assert part["attributes"].keys() <= {"label", "description", "render", "placeholder"}
        assert isinstance(part["validations"]["required"], bool)


def test_a_bug_comes_with_what_explains_it() -> None:
    form = yaml.safe_load((ROOT / ".github/ISSUE_TEMPLATE/bug.yml").read_text())
    assert {"script", "explain", "versions"} <= fields(form).keys()
    required = {p["id"] for p in form["body"] if p["validations"]["required"]}
    assert {"script", "explain", "versions"} <= required
    assert all(f"`print(collage_fx.{n}" in str(form) for n in ("explain", "report"))


def test_badges_are_true() -> None:
    """Compare static badges with the facts, since nothing else does."""
    badges = dict(BADGE.findall((ROOT / "README.md").read_text()))
    assert len(badges) == 3
    for said, path in badges.items():
        label, shown, _ = re.split(r"(?<!-)-(?!-)", path)
        assert said == unquote(f"{label} {shown}").replace("_", " ").replace("--", "-")
    versions = [c.rpartition(" ")[2] for c in PROJECT["classifiers"] if "Python :: 3." in c]
    minors = [v.rpartition(".")[0] for v in TESTED]
    assert set(badges) == {
        f"Python {versions[0]} to {versions[-1]}",
        f"torch {minors[0]} to {minors[-1]}",
        f"licence {PROJECT['license']}",
    }
