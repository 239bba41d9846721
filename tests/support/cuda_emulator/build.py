"""Builds the emulator's library, and says in what environment a program runs on it."""

import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

TORCH = "2.11.0"
"""The version whose calls are emulated: others call functions that are not there."""
HERE = Path(__file__).parent
BUILT = HERE.parents[2] / "build" / "cuda_emulator"
LIBRARY = "libcuda.so.1"
"""The name under which Triton loads the driver; the runtime and cuBLAS are found in it too, because
it is loaded before all other libraries."""
FLAGS = ["-O1", "-std=c++17", "-Wall", "-shared", "-fPIC", "-fvisibility=hidden"]
_HEADERS = ["cuda.h", "cuda_runtime_api.h", "driver_types.h"]


def missing() -> str:
    """Return why programs cannot run on the emulator here; empty if they can."""
    if (here := (sys.platform, platform.machine())) != ("linux", "x86_64"):
        return f"the CUDA emulator is for Linux on x86_64, not {' on '.join(here)}"
    try:
        found = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        found = "none"
    if found.partition("+")[0] != TORCH or _include() is None:
        return f"the CUDA emulator needs the CUDA wheel of torch {TORCH}; here is {found}"
    if shutil.which("g++") is None:
        return "the CUDA emulator needs g++"
    return ""


def library() -> Path:
    """Return the library, which is built if its sources, flags or headers are new."""
    include = _include()
    assert include is not None
    sources = sorted(p for p in HERE.rglob("*") if p.suffix in (".cpp", ".h"))
    digest = hashlib.sha256(" ".join(FLAGS).encode())
    for path in (*sources, *(include / name for name in _HEADERS)):
        digest.update(path.read_bytes())
    folder = BUILT / digest.hexdigest()[:16]
    if not folder.exists():
        BUILT.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=BUILT) as scratch:
            made = Path(scratch) / "made"
            made.mkdir()
            _compile(made / LIBRARY, [p for p in sources if p.suffix == ".cpp"], include)
            try:
                made.rename(folder)
            except OSError:  # another process was faster
                assert folder.exists()
    return folder / LIBRARY


def environment(before: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process on the emulator, whose own counters it can import."""
    path = library()
    paths = [str(HERE.parent), *filter(None, [before.get("PYTHONPATH")])]
    caches = {
        "TORCHINDUCTOR_CACHE_DIR": str(BUILT / "inductor"),
        "TRITON_CACHE_DIR": str(BUILT / "triton"),
    }
    return {
        **caches,
        **before,
        "LD_PRELOAD": str(path),
        "TRITON_LIBCUDA_PATH": str(path.parent),
        # A pool of processes, each with an emulated device, would compile nothing sooner.
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(paths),
    }


def _include() -> Path | None:
    """Return the folder of CUDA's headers that the wheel of torch brings along."""
    package = importlib.util.find_spec("nvidia")
    for root in package.submodule_search_locations or () if package else ():
        include = Path(root) / "cu13" / "include"
        if (include / "cuda_runtime_api.h").exists():
            return include
    return None


def _compile(target: Path, sources: list[Path], include: Path) -> None:
    command = ["g++", *FLAGS, f"-Wl,-soname,{LIBRARY}", f"-I{HERE}", "-isystem", str(include)]
    subprocess.run([*command, *map(str, sources), "-o", str(target), "-ldl"], check=True)
