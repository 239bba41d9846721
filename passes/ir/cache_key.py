"""Which version of this compiler made a piece of code: a part of the keys of Inductor's caches."""

import hashlib
from functools import cache
from pathlib import Path

_PASSES = Path(__file__).parents[1]
_PACKAGES = (_PASSES, _PASSES.parent / "runtime")


@cache
def source_digest() -> str:
    """Return a digest of the source of the passes and the arithmetic."""
    digest = hashlib.sha256()
    for package in _PACKAGES:
        for path in sorted(package.rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()
