"""Compiled kernels of classes by their content, on disk, beside those that Inductor keeps.

Inductor's own cache is asked with a graph. To trace it with symbolic sizes, which loads much of
sympy, takes most of what a second process would spend on a kernel that it already has.
"""

import hashlib
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.compiler import config as compiler_config

from collage_fx.passes.ir.cache_key import source_digest
from collage_fx.runtime.cpp_compiler import (
    cache_dir,
    processor,
    quote_cache_dir,
    write_whole,
)
from collage_fx.runtime.kernels.cpp_loop import Loop
from collage_fx.runtime.torch_private import inductor_config

_LOGGER = logging.getLogger(__name__)


def path_of(content: str, settings: Sequence[Any] | None = None) -> Path | None:
    """Return the file for what makes this kernel; None where the user wants no caches.

    Its name covers the content, this compiler, PyTorch, all settings of Inductor and the vector
    instructions of the machine: all that the key of Inductor's cache covers.

    Args:
        content: the kernel's.
        settings: those that matter; all if None.
    """
    if not inductor_config.fx_graph_cache or inductor_config.force_disable_caches:
        return None
    quote_cache_dir()  # before the paths of libraries are noted
    if settings is None:
        settings = sorted(inductor_config.save_config_portable().items())
    versions = (torch.__version__, torch.version.git_version)
    parts = (content, source_digest(), *versions, processor(), torch.get_num_threads())
    text = repr((*parts, compiler_config.cache_key_tag, settings))
    name = hashlib.sha256(text.encode()).hexdigest()
    return Path(cache_dir(), "collage_fx", f"{name}.json")


def load(place: Path | None) -> tuple[Loop, str, str] | None:
    """Return a loop, its kernel's source and why that is Inductor's; None if it is not whole."""
    found = read(place)
    if not found:
        return None
    try:
        loop = Loop.of(Path(cache_dir(), found["library"]), found["order"], found["widths"])
        return loop, str(found["source"]), str(found["by_inductor"])
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        _LOGGER.debug("%s is of no use: %s", place, error)
        return None


def read(place: Path | None) -> dict[str, Any]:
    """Return the contents of a file of this cache; nothing if there is none, or it is not whole."""
    try:
        if place is None or not place.is_file():
            return {}
        found = json.loads(place.read_text())
        return found if isinstance(found, dict) else {}
    except (OSError, ValueError) as error:
        _LOGGER.debug("%s is of no use: %s", place, error)
        return {}


def write(place: Path | None, found: dict[str, Any]) -> None:
    """Keep what a file of this cache holds, where it can be written."""
    try:
        if place is not None:
            write_whole(place, json.dumps(found))
    except OSError as error:
        _LOGGER.debug("%s is not written: %s", place, error)


def save(place: Path | None, loop: Any, source: str, by_inductor: str) -> None:
    """Keep a loop, if that is what it is and its kernel is where Inductor keeps kernels."""
    library = Path(getattr(loop, "library", ""))
    if place is None or not isinstance(loop, Loop) or not library.is_relative_to(cache_dir()):
        return
    found = {
        "library": str(library.relative_to(cache_dir())),
        "order": loop.order,
        "widths": loop.widths,
        "source": source,
        "by_inductor": by_inductor,
    }
    write(place, found)
