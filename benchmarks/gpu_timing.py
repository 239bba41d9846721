"""Sizes and timing for the GPU check: replayed CUDA graphs, ten steps between events, host time."""

import gc
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from gpu_rows import Row, Rows, spread
from step_time import gpt
from steps import Shapes
from torch.autograd import DeviceType

Step = Callable[[], Any]
SECONDS = 1.0
"""Seconds after which a measurement is repeated no more, if it was five times."""


@dataclass
class Setup:
    """Device, sizes and files of a part."""

    device: str
    dry: bool = False
    folder: Path = Path()
    """Folder for what a part writes beside its rows."""
    words: Path = Path()
    """The expected words, see gpu_words.py."""
    _copied: Row = field(default_factory=dict)

    @property
    def small(self) -> Shapes:
        """Three hundred tensors of 64 elements."""
        return [(64,)] * (10 if self.dry else 300)

    @property
    def many(self) -> Shapes:
        """A thousand tensors of 64 elements."""
        return [(64,)] * (12 if self.dry else 1000)

    @property
    def gpt(self) -> Shapes:
        """The 579 tensors of a GPT of 1.56 billion elements."""
        return [(8, 8), (8,)] * 5 if self.dry else gpt(48, 1600)

    @property
    def large(self) -> Shapes:
        """Three hundred tensors of the shapes of a 7B model, 2.8 billion elements."""
        return [(8, 8), (8,)] * 5 if self.dry else [(4096, 4096), (4096,), (11008, 1024)] * 100

    @property
    def repeats(self) -> int:
        """Number of measurements of one thing."""
        return 2 if self.dry else 20

    def wait(self) -> None:
        """Wait for the device."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def copied(self) -> Row:
        """Return the bandwidth of a copy of random data in this process; measured once.

        Bytes read and written, in GB/s. The first call must come before the memory is full.
        """
        if not self._copied:
            size = 1 << (12 if self.dry else 30)
            a, b = (torch.empty(size // 2, dtype=torch.int16, device=self.device) for _ in "ab")
            a.random_(-(1 << 15), (1 << 15) - 1)
            begun = time.perf_counter()
            while time.perf_counter() - begun < (0.0 if self.dry else 0.3):  # clocks go up
                b.copy_(a)
                self.wait()
            times = between_events(self, lambda: b.copy_(a), calls=4)
            self._copied["copy, GB/s"] = round(2 * size / 1e6 / spread(times)["median"], 1)
        return self._copied


def tool_of_cuda(name: str) -> str | None:
    """Return the path of a CUDA tool, None if it is neither on the path nor beside nvcc."""
    places = (None, "/usr/local/cuda/bin", "/opt/nvidia/nsight-compute")
    return next(filter(None, (shutil.which(name, path=place) for place in places)), None)


def count(shapes: Shapes) -> int:
    """Return the elements of tensors of these shapes."""
    return sum(torch.Size(s).numel() for s in shapes)


def _again(setup: Setup) -> Iterator[None]:
    """Yield for each repetition of a measurement."""
    begun = time.perf_counter()
    for taken in range(setup.repeats):
        if taken >= 5 and time.perf_counter() - begun > SECONDS:
            return
        setup.wait()
        yield


def between_events(setup: Setup, step: Step, calls: int = 10) -> list[float]:
    """Return milliseconds a call, of some calls between two events on the device, repeatedly."""
    found = []
    for _ in range(3):
        step()
    for _ in _again(setup):
        start = time.perf_counter()
        if setup.device == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in "ab")
            begin.record()
        for _ in range(calls):
            step()
        if setup.device == "cuda":
            end.record()
            end.synchronize()
            found.append(begin.elapsed_time(end) / calls)
        else:
            found.append(1e3 * (time.perf_counter() - start) / calls)
    return found


def host_times(setup: Setup, step: Step, *, waiting: bool = False) -> list[float]:
    """Return milliseconds of single steps by the host's clock, each begun on an idle device.

    Args:
        setup: of the part.
        step: is called.
        waiting: whether the time ends when the device is done, not when the call returns.
    """
    found = []
    for _ in range(3):
        step()
    for _ in _again(setup):
        start = time.perf_counter()
        step()
        if waiting:
            setup.wait()
        found.append(1e3 * (time.perf_counter() - start))
    return found


def graph_of(setup: Setup, step: Step) -> Step:
    """Take three steps on a side stream, as PyTorch wants it, and capture one; return its replay.

    Without CUDA the step itself is returned.
    """
    if setup.device != "cuda":
        return step
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def timed(setup: Setup, rows: Rows, name: str, step: Step, moved: float, elements: int) -> Row:
    """Add a row for a step: replays of its CUDA graph, ten steps between events, host time.

    Args:
        setup: of the part.
        rows: to which the row is added.
        name: of the row.
        step: is called.
        moved: bytes that a step must read and write for each element.
        elements: of all parameters.
    """
    more: Row = {"ten steps, ms": spread(between_events(setup, step))["median"]}
    more["host, ms"] = spread(host_times(setup, step))["median"]
    times = []
    try:
        replay = graph_of(setup, step)
        times = between_events(setup, replay, calls=3)
    except Exception as error:  # whatever a peer's step does that cannot be captured
        more["not captured"] = f"{type(error).__name__}: {error}"
    best = spread(times)["median"] if times else more["ten steps, ms"]
    more |= bandwidth(setup, best, moved * elements)
    return rows.measure(name, times or [more["ten steps, ms"]], **more)


def bandwidth(setup: Setup, milliseconds: float, moved: float) -> Row:
    """Return the bandwidth of what moves so many bytes, and its share of that of a copy."""
    speed = moved / 1e6 / milliseconds
    return {"GB/s": speed, "share of copy": speed / setup.copied()["copy, GB/s"]}


@contextmanager
def profiled(setup: Setup) -> Iterator[Counter[str]]:
    """Within, note the work of the device: afterwards it is in the counter, see `counted`."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if setup.device == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    found: Counter[str] = Counter()
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        yield found
        setup.wait()
    found += counted(profile.events())


def counted(events: Iterable[Any]) -> Counter[str]:
    """Return the numbers of kernels, copies and synchronisations, and microseconds of each name.

    The one synchronisation of `profiled` at the end is among them.
    """
    found: Counter[str] = Counter()
    for event in events:
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation:
            kind = event.name if event.name.startswith(("Memcpy", "Memset")) else "kernels"
            found[kind] += 1
            found[f"{event.name[:60]}, us"] += round(event.time_range.elapsed_us())
        elif "Synchronize" in event.name:
            found[event.name] += 1
    return found


def free(setup: Setup) -> None:
    """Forget compiled code and return memory to the device."""
    torch.compiler.reset()
    gc.collect()
    if setup.device == "cuda":
        torch.cuda.empty_cache()
