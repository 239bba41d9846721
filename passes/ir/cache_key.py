"""Digest of the source code of collage_fx, for the cache keys of Inductor."""

import hashlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path

_PASSES = Path(__file__).parents[1]
_PACKAGES = (_PASSES, _PASSES.parent / "runtime")


def sources() -> list[Path]:
    """Return the files that decide what is compiled: the passes and the runtime, all of them."""
    return sorted(path for package in _PACKAGES for path in package.rglob("*.py"))


def digest_of(files: Iterable[Path]) -> str:
    """Return a digest of the text of files."""
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.read_bytes())
    return digest.hexdigest()


@cache
def source_digest() -> str:
    """Return a digest of the source of the passes and the arithmetic."""
    return digest_of(sources())
