"""A release: one version everywhere, all files, links that lead somewhere.

For tests/support/release.py.
"""

import io
import re
import runpy
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import release

import collage_fx

ROOT = Path(__file__).parents[2]
FILES = {"passes/a.py": b"a", "collage_fx/b.py": b"b", "tests/c.py": b"c"}
WHEEL = {"collage_fx/passes/a.py": b"a", "collage_fx/b.py": b"b"}


def settings() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_one_version_is_named() -> None:
    assert f"\nversion: {collage_fx.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    named = release.newest_version((ROOT / "CHANGELOG.md").read_text())
    assert named in (collage_fx.__version__, "Unreleased")


def test_pinned_setuptools_may_build_it() -> None:
    (wanted,) = settings()["build-system"]["requires"]
    low, high = re.fullmatch(r"setuptools>=(\d+),<(\d+)", wanted).groups()
    texts = [file.read_text() for file in ROOT.glob("requirements*.txt")]
    pinned = [int(p) for t in texts for p in re.findall(r"^setuptools==(\d+)", t, re.M)]
    assert len(pinned) >= 4 and all(int(low) <= p < int(high) for p in pinned)
    assert max(pinned) == int(high) - 1


def test_licence_is_an_expression() -> None:
    project = settings()["project"]
    assert project["license"] == "BSD-3-Clause" and project["license-files"] == ["LICENSE"]
    assert not any(c.startswith("License ::") for c in project["classifiers"])


def test_what_is_missing_or_more_is_named() -> None:
    assert release.installed(FILES) == WHEEL
    assert not release.differences(WHEEL | {"collage_fx-0.2.0.dist-info/METADATA": b""}, WHEEL)
    found = {"collage_fx/b.py": b"other", "tests/c.py": b"c"}
    assert release.differences(found, WHEEL) == [
        "collage_fx/passes/a.py is missing",
        "collage_fx/b.py differs",
        "tests/c.py is not of the repository, or not to be installed",
    ]


@pytest.mark.parametrize("lost", [None, "tests/c.py", "collage_fx/b.py"])
def test_archives_are_compared_with_the_repository(
    lost: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    version = release.newest_version((ROOT / "CHANGELOG.md").read_text())
    with tarfile.open(tmp_path / f"collage_fx-{version}.tar.gz", "w:gz") as archive:
        for name, data in FILES.items():
            info = tarfile.TarInfo(f"collage_fx-{version}/{name}")
            info.size = len(data)
            if name != lost:
                archive.addfile(info, io.BytesIO(data))
    with zipfile.ZipFile(tmp_path / f"collage_fx-{version}-py3-none-any.whl", "w") as archive:
        for name, data in WHEEL.items():
            if name != lost:
                archive.writestr(name, data)
    monkeypatch.setattr(release, "repository", lambda: FILES)
    monkeypatch.setattr(sys, "argv", ["release", str(tmp_path)])
    if lost:
        with pytest.raises(SystemExit, match=f"{lost} is missing"):
            release.main()
    else:
        release.main()
        assert f"git tag -a v{version}" in capsys.readouterr().out


def test_links_of_the_description_lead_somewhere() -> None:
    """A package index shows README, and has none of the files beside it."""
    description = runpy.run_path(str(ROOT / "setup.py"))["description"]
    readme = (ROOT / "README.md").read_text()
    relative = re.findall(r"\]\((?!https://)([^)]*)\)", readme)
    assert "docs/api.md" in relative
    for source in ("https://host/files", None):
        shown = description(readme, source)
        assert not re.findall(r"\]\((?!https://)", shown)
        assert ("(https://host/files/docs/api.md)" in shown) == (source is not None)
