"""Counts of what this process has asked of the emulated device."""

import ctypes
import json
import re
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

_LIBRARY: Any = ctypes.CDLL(None)
if hasattr(_LIBRARY, "cuda_emulator_reset"):
    _LIBRARY.cuda_emulator_counts.restype = ctypes.c_char_p
    _LIBRARY.cuda_emulator_kernels.restype = ctypes.c_char_p


class Memory(NamedTuple):
    """Bytes of the device."""

    used: int
    peak: int
    limit: int


def running() -> bool:
    """Return True if this process has the emulated device."""
    return hasattr(_LIBRARY, "cuda_emulator_reset")


def reset() -> None:
    """Set all counts to zero; memory stays."""
    _LIBRARY.cuda_emulator_reset()


def read() -> dict[str, int]:
    """Return the counts that are not zero.

    What is done at once is counted as "kernels", "memsets", "copy: H2D pinned" and so on; what goes
    into a CUDA graph instead as "kernels captured", "copies captured" and so on, and, whenever that
    is launched, as "kernels replayed". Waiting for the device is "sync: stream", "sync: event",
    "sync: device" or, by cudaMemcpy, "sync: copy".
    """
    return json.loads(_LIBRARY.cuda_emulator_counts())


def counted(act: Callable[[], Any]) -> dict[str, int]:
    """Return the counts of one call, from zero."""
    reset()
    act()
    return read()


def kernels() -> dict[str, int]:
    """Return how often each kernel ran, launched or replayed, by a shortened name."""
    found: dict[str, int] = {}
    for name, runs in json.loads(_LIBRARY.cuda_emulator_kernels()).items():
        found[_short(name)] = found.get(_short(name), 0) + runs
    return found


def memory() -> Memory:
    """Return the bytes of the device that are allocated, were at most, and can be."""
    result = (ctypes.c_size_t * 3)()
    _LIBRARY.cuda_emulator_memory(result)
    return Memory(*result)


def host_ms(step: Callable[[], Any], repeats: int = 15) -> float:
    """Return the median of a step's milliseconds of this thread on the CPU."""
    times = []
    for _ in range(repeats):
        begin = time.thread_time()
        step()
        times.append(1e3 * (time.thread_time() - begin))
    return statistics.median(times)


def _short(name: str) -> str:
    """Return the functor, or else the template, of which a kernel in torch is an instance."""
    for pattern in (r"\w+Functor\w*", r"\w+_kernel\w*", r"\w+Kernel\w*"):
        if found := re.search(pattern, name):
            return found.group()
    return name[:60]
