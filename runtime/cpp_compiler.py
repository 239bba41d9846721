"""The C++ compiler: libraries of our own sources, kept on disk, and why none can be made."""

import atexit
import ctypes
import functools
import getpass
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from collage_fx.runtime.torch_private import inductor_config

_CACHE = "TORCHINDUCTOR_CACHE_DIR"
REMEDY = (
    "Install g++ or clang, or name one in the environment variable CXX; the folder of its results "
    f"({_CACHE}) must be one to write to and to run code from"
)
_FLAGS = (
    *("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-fopenmp"),
    "-ffp-contract=off",  # a product that is contracted with a sum is not rounded before it
)


def load(source: str, flags: Sequence[str] = ()) -> ctypes.CDLL:
    """Return the library that the compiler makes of a source, from the cache on disk or anew."""
    include = f"-I{sysconfig.get_path('include')}"
    command = (compiler(), *_FLAGS, include, *flags)
    key = repr((source, command, version_of(compiler()), torch.__version__, processor()))
    name = hashlib.sha256(key.encode()).hexdigest()
    library = cache_dir() / "collage_fx" / f"{name}.so"
    if library.is_file():
        try:
            return ctypes.CDLL(str(library))
        except OSError:  # it is not whole, since a disk was full say
            library.unlink(missing_ok=True)
    with _whole(library) as made:
        _run(*command, "-x", "c++", "-", "-o", str(made), given=source)
    return ctypes.CDLL(str(library))


def compiler() -> str:
    """Return the C++ compiler's name: the first installed one that Inductor's setting lists."""
    setting = inductor_config.cpp.cxx
    named = setting if isinstance(setting, tuple | list) else [setting]
    names = [str(name) for name in named if name] or ["g++"]
    return next(filter(shutil.which, names), names[-1])


@functools.cache
def version_of(name: str) -> str:
    """Return what a compiler says of its version."""
    return _run(name, "--version")


def processor() -> str:
    """Return what code for this processor may consist of: its vectors, as PyTorch names them."""
    return torch.backends.cpu.get_cpu_capability()


def _run(*command: str, given: str = "") -> str:
    """Run a compiler, and return what it prints; CalledProcessError has that too."""
    out, both = subprocess.PIPE, subprocess.STDOUT
    done = subprocess.run(command, input=given.encode(), stdout=out, stderr=both, check=True)
    return done.stdout.decode(errors="replace")


def cache_dir() -> Path:
    """Return the folder that Inductor keeps its kernels in, in which ours are too."""
    try:
        user = getpass.getuser()
    except (KeyError, ModuleNotFoundError, OSError):  # one without a name
        user = f"uid_{os.getuid()}"
    default = Path(tempfile.gettempdir(), "torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", user))
    return Path(os.environ.get(_CACHE, default)).absolute()


def quote_cache_dir() -> None:
    """Have Inductor reach its cache by a link, if spaces in the path would end words of commands.

    It joins a command out of paths that it does not quote, and splits that at spaces.
    """
    folder = str(cache_dir())
    if shlex.split(folder) == [folder]:
        return
    place = tempfile.mkdtemp(prefix="collage_fx_")  # which nobody else can write to
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    link = Path(place, "cache")
    link.symlink_to(folder, target_is_directory=True)
    if shlex.split(str(link)) == [str(link)]:
        os.environ[_CACHE] = str(link)


def write_whole(path: Path, text: str) -> None:
    """Write a file of which no other process sees a part."""
    with _whole(path) as made:
        made.write_text(text)


@contextmanager
def _whole(path: Path) -> Iterator[Path]:
    """Yield another path to write to, where other processes may write the same; then rename it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    made = path.with_suffix(f".{uuid.uuid4()}")
    yield made
    made.replace(path)


def compiler_fault() -> str:
    """Return the reason why no C++ compiler works; empty if one does."""
    try:
        load(f'extern "C" int works() {{ return 0; }}  // {uuid.uuid4()}')
    except Exception as fault:
        return f"{type(fault).__name__}: {words_of(fault)}"
    return ""


def words_of(error: BaseException) -> str:
    """Return an error in a line: of a compiler its own words, without the command."""
    text = str(error)
    ended = error if isinstance(error, subprocess.CalledProcessError) else error.__cause__
    if isinstance(ended, subprocess.CalledProcessError):
        lines = os.fsdecode(ended.output or "").splitlines()
        errors = [line for line in lines if "error" in line.lower()]
        text = errors[0] if errors else f"it ended with status {ended.returncode}"
    return " ".join(text.split()).partition(" Set TORCHDYNAMO_VERBOSE")[0][:240]
