"""The parts of gpu_check.py that measure: the device, kernels, variants of them, peers, memory."""

import gc
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import memory
import torch
from steps import Shapes, conditions, parameters
from torch.autograd import DeviceType
from ways import WAYS, Step

from collage_fx.passes.codegen.multi_tensor_kernel import MULTI_TENSOR_KERNELS
from collage_fx.runtime.kernels import triton_launch

Found = dict[str, Any]


class Record(dict[str, Any]):
    """What a part has found, which is written to a file whenever something is added."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file
        self.write()

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        self.write()

    def write(self) -> None:
        """Write all of it, whole whenever this process ends."""
        new = self.file.with_suffix(".new")
        new.write_text(json.dumps(self, default=str))
        new.replace(self.file)


KERNELS = {"light": "light eft", "eft": "plus eft", "wide": "plus wide", "remainder16": None}
"""The kernels that are measured by themselves, and their names among the ways."""


@dataclass
class Setup:
    """Where the parts run, and how large they are."""

    device: str
    dry: bool = False

    @property
    def large(self) -> Shapes:
        """Tensors of some layers of a 7B model, 1.6 billion elements."""
        layer = [(4096, 4096)] * 4 + [(11008, 4096)] * 3 + [(4096,)] * 2
        return [(8, 8), (8,)] * 5 if self.dry else layer * 8

    @property
    def middle(self) -> Shapes:
        """Tensors of a GPT of 26 million elements."""
        block = [(1536, 512), (512, 512), (2048, 512), (512, 2048), *[(512,)] * 4]
        return [(8, 8), (8,)] * 5 if self.dry else [(8192, 512), *block * 6]

    @property
    def many(self) -> Shapes:
        """Three hundred small tensors."""
        return [(64,)] * (10 if self.dry else 300)

    @property
    def repeats(self) -> int:
        """How often something is measured."""
        return 2 if self.dry else 20

    def wait(self) -> None:
        """Wait for the device."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def milliseconds(self, call: Step, calls: int = 1) -> float:
        """Return the median time of a call, by events on the device, which the host runs ahead."""
        found = []
        for _ in range(3):
            call()
        for _ in range(self.repeats):
            self.wait()
            start = time.perf_counter()
            if self.device == "cuda":
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
            for _ in range(calls):
                call()
            if self.device == "cuda":
                end.record()
                end.synchronize()
                found.append(begin.elapsed_time(end) / calls)
            else:
                found.append(1e3 * (time.perf_counter() - start) / calls)
        return statistics.median(found)


def count(shapes: Shapes) -> int:
    """Return how many elements tensors of these shapes have."""
    return sum(torch.Size(s).numel() for s in shapes)


def copied(setup: Setup) -> dict[str, float]:
    """Return the bandwidth of a copy in GB/s, read and written, by the bytes of a buffer."""
    found = {}
    for size in (1 << 10,) if setup.dry else (1 << 28, 1 << 30, 1 << 31):
        a, b = (torch.zeros(size // 2, dtype=torch.bfloat16, device=setup.device) for _ in "ab")
        found[f"{size >> 20} MiB"] = (
            2 * size / 1e6 / setup.milliseconds(lambda a=a, b=b: a.copy_(b))
        )
    return found


def device(setup: Setup, found: Record) -> None:
    """Versions, the device, and the bandwidth of a copy."""
    found["python"] = sys.version.split()[0]
    for name, value in conditions(setup.device).items():
        found[name] = value
    if setup.device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found["cuda"] = torch.version.cuda
        found["multiprocessors"] = properties.multi_processor_count
        found["GiB"] = round(properties.total_memory / 2**30, 1)
    found["copy, GB/s"] = copied(setup)


@contextmanager
def profiled(setup: Setup) -> Iterator[Counter[str]]:
    """Within, the work of the device is noted: afterwards it is in the counter, see `counted`."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if setup.device == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    found: Counter[str] = Counter()
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        yield found
        setup.wait()
    found += counted(profile.events())


def counted(events: Iterable[Any]) -> Counter[str]:
    """Return how many kernels, copies and synchronisations there were, and each one's microseconds.

    One synchronisation at the end is ours.
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


def kernels(setup: Setup, found: Record) -> None:
    """The kernels of classes over tensors of a 7B model, and their share of a copy's bandwidth."""
    found["copy, GB/s"] = speed = max(copied(setup).values())
    for name, way in KERNELS.items():
        made = WAYS[way or name]
        step = made.make(parameters(setup.large, setup.device))
        row: Found = {"step, ms": setup.milliseconds(step)}
        with profiled(setup) as seen:
            step()
        ours = [us for event, us in seen.items() if event.startswith("multi_tensor")]
        row["kernels, ms"] = sum(ours) / 1e3
        bandwidth = made.moved * count(setup.large) / 1e6 / (row["kernels, ms"] or row["step, ms"])
        found[name] = row | {"GB/s": bandwidth, "share of copy": bandwidth / speed}
        del step
        free(setup)


def _free(setup: Setup) -> None:
    torch.compiler.reset()
    if setup.device == "cuda":
        torch.cuda.empty_cache()


def free(setup: Setup) -> None:
    """Forget what was compiled, and give memory back."""
    torch.compiler.reset()
    gc.collect()
    if setup.device == "cuda":
        torch.cuda.empty_cache()


def variants(setup: Setup, found: Record) -> None:
    """Other sizes of chunks and blocks, and other numbers of warps, than what is built in."""
    for name, shapes in (("26M", setup.middle), ("7B shapes", setup.large)):
        step = WAYS["plus eft"].make(parameters(shapes, setup.device))
        found[f"{name}, as built"] = setup.milliseconds(step)
        for chunk in (4096, 8192, 16384, 32768):
            for block, warps in ((512, 4), (1024, 4), (1024, 8), (2048, 8)):
                sizes = {"BLOCK": block, "WARPS": warps}
                always = mock.patch.object(triton_launch, "chunk_of", lambda _, chunk=chunk: chunk)
                launches = [k.runners.get("cuda") for k in MULTI_TENSOR_KERNELS.values()]
                for launch in (x for x in launches if isinstance(x, triton_launch.Launch)):
                    launch.ready.clear()
                with always, mock.patch.multiple(triton_launch, **sizes):
                    found[f"{name}, chunks of {chunk}, {sizes}"] = setup.milliseconds(step)
        free(setup)


def peers(setup: Setup, found: Record) -> None:
    """Steps of other ways beside ours, over 26M elements and over tensors of a 7B model."""
    names = ["plus eft", "plus wide", "light eft", "remainder16", "plain fused", "master", "plain"]
    for size, shapes in (("26M", setup.middle), ("7B shapes", setup.large)):
        for name in names:
            step = WAYS[name].make(parameters(shapes, setup.device))
            found[f"{name}, {size}, ms"] = setup.milliseconds(step)
            del step
            free(setup)


def held(setup: Setup, found: Record) -> None:
    """Bytes for each parameter between steps and at the peak of one."""
    sizes = {"cpu": (1, 16, 64)} if setup.dry else memory.SETS
    with mock.patch.object(memory, "SETS", sizes):
        names = ["plus eft"] if setup.dry else memory.NAMES
        for name in names:
            found[name] = memory.measure(name, setup.device)
