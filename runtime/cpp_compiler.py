"""The C++ compiler: one way to it for our own sources, and a check that one works."""

import atexit
import os
import shlex
import shutil
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from collage_fx.runtime.torch_private import (
    CppCodeCache,
    CppCompileError,
    InvalidCxxCompiler,
    cache_dir,
)

_CACHE = "TORCHINDUCTOR_CACHE_DIR"
REMEDY = (
    "Install g++ or clang, or name one in the environment variable CXX; the folder of its results "
    f"({_CACHE}) must be one to write to and to run code from"
)


def load(source: str, flags: Sequence[str] = ()) -> Any:
    """Return the library that the compiler makes of a source, from the cache on disk or anew."""
    quote_cache_dir()
    return CppCodeCache.load(source, extra_flags=flags)


def quote_cache_dir() -> None:
    """Have Inductor reach its cache by a link, if spaces in the path would end words of commands.

    It joins a command out of paths that it does not quote, and splits that at spaces.
    """
    folder = cache_dir()
    if shlex.split(folder) == [folder]:
        return
    place = tempfile.mkdtemp(prefix="collage_fx_")  # which nobody else can write to
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    link = Path(place, "cache")
    link.symlink_to(Path(folder).absolute(), target_is_directory=True)
    if shlex.split(str(link)) == [str(link)]:
        os.environ[_CACHE] = str(link)


def compiler_fault(error: BaseException) -> str:
    """Return the reason why no C++ compiler works, if it is behind an error; empty if one works."""
    if not isinstance(error, InvalidCxxCompiler | CppCompileError | OSError):
        return ""
    try:
        load(f'extern "C" int works() {{ return 0; }}  // {uuid.uuid4()}')
    except Exception as fault:
        return f"{type(fault).__name__}: {words_of(fault)}"
    return ""


def words_of(error: BaseException) -> str:
    """Return an error in a line: of a compiler its own words, without the command."""
    text = str(error)
    if isinstance(error, CppCompileError):
        errors = [line for line in error.output.splitlines() if "error" in line.lower()]
        status = getattr(error.__cause__, "returncode", "unknown")
        text = errors[0] if errors else f"it ended with status {status}"
    return " ".join(text.split()).partition(" Set TORCHDYNAMO_VERBOSE")[0][:240]
