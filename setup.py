"""Describe the package by README, whose relative links lead nowhere from a package index."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

PICTURE = re.compile(r"<picture>.*?</picture>\n*", re.DOTALL)
LINK = re.compile(r"\[([^\]]+)\]\((?!https?://)([^)\s]+)\)")


def description(readme: str, source: str | None) -> str:
    """Return README with absolute links, by the URL of its folder; as text where there is none.

    Its picture is left out, as an index shows neither files of the repository nor two themes.
    """
    readme = PICTURE.sub("", readme)
    return LINK.sub(rf"[\1]({source}/\2)" if source else r"\1", readme)


def source_url(version: str) -> str | None:
    """Return where the files of a version stand, by `Source` in [project.urls]; None without it."""
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    source = project.get("urls", {}).get("Source")
    return f"{source.rstrip('/')}/blob/v{version}" if source else None


if __name__ == "__main__":
    code = Path("collage_fx/__init__.py").read_text()
    (version,) = re.findall(r'^__version__ = "(.*)"$', code, re.M)
    setup(
        long_description=description(Path("README.md").read_text(), source_url(version)),
        long_description_content_type="text/markdown",
    )
