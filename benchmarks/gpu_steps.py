"""The parts of gpu_check.py on whole steps: host time, launches, CUDA graphs, the tests."""

import itertools
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu_rows import Row, Rows, spread
from gpu_timing import (
    Setup,
    Step,
    between_events,
    free,
    graph_of,
    host_times,
    profiled,
)
from gpu_words import SHAPES, WHOLE, Words, compare, words_of
from steps import Shapes, parameters
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.optim import AdamW, Optimizer
from ways import LR, WAYS, adamw

import collage_fx
from collage_fx.passes.codegen.multi_tensor_kernel import MULTI_TENSOR_KERNELS

ROOT = Path(__file__).parents[1]


def device(setup: Setup, rows: Rows) -> None:
    """Measure a copy, and note the device."""
    found: Row = {"threads": torch.get_num_threads(), "cores": os.cpu_count()}
    if setup.device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found["multiprocessors"] = properties.multi_processor_count
        found["GiB"] = round(properties.total_memory / 2**30, 1)
        found["cache, MiB"] = round(properties.L2_cache_size / 2**20)
    rows.add("device", **found)
    for size in (1 << 10,) if setup.dry else (1 << 26, 1 << 28, 1 << 30, 1 << 32):
        a, b = (torch.empty(size // 2, dtype=torch.int16, device=setup.device) for _ in "ab")
        a.random_(-(1 << 15), (1 << 15) - 1)
        times = between_events(setup, lambda a=a, b=b: b.copy_(a), calls=4)
        rows.measure(f"copy of {size >> 20} MiB", [2 * size / 1e6 / t for t in times], "GB/s")


def _work(setup: Setup, step: Step) -> Row:
    """Return the kernels, copies and synchronisations of a step."""
    with profiled(setup) as seen:
        step()
    found: Row = {k: n for k, n in seen.items() if not k.endswith(", us")}
    if setup.device == "cuda":
        torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step()
        torch.cuda.set_sync_debug_mode("default")
        found["synchronising calls"] = sum("synchronizing" in str(w.message) for w in caught)
    return found


def hosted(setup: Setup, rows: Rows, name: str, step: Step) -> None:
    """Add a row for a step's host time, with its work, a step waited for, and steps in a row."""
    more = {
        "waiting step, ms": spread(host_times(setup, step, waiting=True))["median"],
        "back to back, ms": spread(between_events(setup, step, calls=5))["median"],
        **_work(setup, step),
    }
    rows.measure(f"{name}: host", host_times(setup, step), **more)


def _made(setup: Setup, shapes: Shapes, name: str) -> tuple[Step, Optimizer]:
    """Return our compiled step or torch's fused kernel, and its optimizer."""
    fused = name == "torch fused"
    optimizer = adamw(parameters(shapes, setup.device), **({"fused": True} if fused else {}))
    if fused:
        return optimizer.step, optimizer
    return collage_fx.compile(optimizer, level="plus", multi_tensor=True), optimizer


def host(setup: Setup, rows: Rows) -> None:
    """Measure steps of many tensors: as usual, with changing rates, with gradients that move."""
    for title, shapes in (
        ("300 of 64", setup.small),
        ("579 of GPT-1.5B", setup.gpt),
        ("1000 of 64", setup.many),
    ):
        for name in ("plus", "torch fused"):
            step, optimizer = _made(setup, shapes, name)
            hosted(setup, rows, f"{name}, {title}", step)
            hosted(setup, rows, f"{name}, {title}, new rates", _scheduled(optimizer, step))
            if "GPT" not in title:  # three sets of gradients
                moved = _with_new_gradients(optimizer, step)
                hosted(setup, rows, f"{name}, {title}, new gradients", moved)
            del step, optimizer
            free(setup)
    _rates_compile_nothing(setup, rows)


def _scheduled(optimizer: Optimizer, step: Step) -> Step:
    """Return a step that gives the optimizer another rate, a float, first."""
    taken = itertools.count(1)

    def scheduled() -> None:
        optimizer.param_groups[0]["lr"] = LR / next(taken)
        step()

    return scheduled


def _with_new_gradients(optimizer: Optimizer, step: Step) -> Step:
    """Return a step that gives each parameter a gradient at another address first."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    sets = itertools.cycle([[p.grad.clone() for p in params] for _ in range(3)])

    def moved() -> None:
        for p, grad in zip(params, next(sets), strict=True):
            p.grad = grad
        step()

    return moved


def _rates_compile_nothing(setup: Setup, rows: Rows) -> None:
    for foreach in (False, True):
        optimizer = adamw(parameters(setup.small, setup.device), foreach=foreach)
        scheduled = _scheduled(optimizer, collage_fx.compile(optimizer))
        for _ in range(4):
            scheduled()
        made = len(MULTI_TENSOR_KERNELS)
        for _ in range(4):
            scheduled()
        since = len(MULTI_TENSOR_KERNELS) - made
        rows.check(f"new rates compile nothing, foreach={foreach}", not since, since=since)
        free(setup)


def _optimizer(setup: Setup, name: str) -> tuple[Optimizer, Step]:
    kind, own, options = WHOLE[name]
    params = [p.detach().to(setup.device).requires_grad_() for p in parameters(SHAPES)]
    for p in params:
        p.grad = torch.ones_like(p)
    own = own | ({"capturable": True} if kind is AdamW and setup.device == "cuda" else {})
    optimizer = kind(params, lr=1e-3, **own)
    return optimizer, collage_fx.compile(optimizer, multi_tensor=True, **options)


def _after(setup: Setup, name: str, *, replayed: bool) -> tuple[Words, Words]:
    """Return all words after eight steps, the last five replays of a CUDA graph or steps.

    Returns:
        The words, and those of the last step done again from the same words.
    """
    optimizer, step = _optimizer(setup, name)
    if replayed:
        step = graph_of(setup, step)
    for _ in range(0 if replayed and setup.device == "cuda" else 3):
        step()
    live, before = words_of(optimizer), {}
    for k in range(5):
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad.fill_(0.1 * k - 0.2)
        before = {key: t.clone() for key, t in live.items()}
        step()
    once = {key: t.clone() for key, t in live.items()}
    for key, t in live.items():
        t.copy_(before[key])
    step()
    return once, {key: t.clone() for key, t in live.items()}


def replays(setup: Setup, rows: Rows, name: str) -> None:
    """Compare the words of replays with those of steps, and of a replay with itself done again."""
    launched, _ = _after(setup, name, replayed=False)
    once, again = _after(setup, name, replayed=True)
    compare(rows, f"{name}: replayed as launched", once, launched)
    compare(rows, f"{name}: replayed again as once", again, once)


def graphs(setup: Setup, rows: Rows) -> None:
    """Compare the words of replays of a user's CUDA graph with those of launched steps."""
    for name in ("AdamW, plus", "AdamW, wide", "AdamW, remainder16", "SGD, plus", "Lion, plus"):
        replays(setup, rows, name)
        free(setup)
    once, again = _after(setup, "AdamW, by chance", replayed=True)
    unequal = sum(int((once[key] != again[key]).sum()) for key in once)
    rows.check("AdamW, by chance: each replay has another seed", unequal > 0, differing=unequal)
    free(setup)
    _training_graph(setup, rows)


def inductors_graphs(setup: Setup, rows: Rows) -> None:
    """Compare steps by Inductor's own CUDA graphs with launched ones."""
    if setup.device != "cuda":
        rows.add("reduce-overhead", skipped="CUDA graphs need a CUDA device")
        return
    found = []
    for mode in (None, "reduce-overhead"):
        optimizer, _ = _optimizer(setup, "AdamW, plus")
        # A kernel for each parameter: those of classes are launched beside Inductor's graphs.
        step = collage_fx.compile(optimizer, level="plus", mode=mode, multi_tensor=False)
        for _ in range(6):
            step()
        found.append({key: t.clone() for key, t in words_of(optimizer).items()})
        free(setup)
    seen = {k: n for k, n in counters["inductor"].items() if "cudagraph" in k}
    compare(rows, "reduce-overhead as launched", found[1], found[0], **seen)


class Model(nn.Module):
    """A few layers whose training step is captured."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6))
        )

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 64) to the same."""
        found: Tensor = self.layers(x)
        return found


def _training_graph(setup: Setup, rows: Rows) -> None:
    """Compare a training step captured whole with one that is launched."""
    found = []
    for replayed in (False, True):
        torch.manual_seed(0)
        model = Model().to(setup.device, torch.bfloat16)
        x = torch.linspace(-1, 1, 512).view(8, 64).to(setup.device, torch.bfloat16)
        optimizer = adamw(list(model.parameters()))
        step = collage_fx.compile(optimizer, level="plus")
        train = _train(model, x, optimizer, step)
        if replayed:
            train = graph_of(setup, train)
        for _ in range(5 if replayed and setup.device == "cuda" else 8):
            train()
        found.append({key: t.clone() for key, t in words_of(optimizer).items()})
    compare(rows, "a training step captured whole", found[1], found[0])


def _train(model: nn.Module, x: Tensor, optimizer: Optimizer, step: Step) -> Callable[[], None]:
    def train() -> None:
        optimizer.zero_grad(set_to_none=True)
        model(x).float().square().mean().backward()
        step()

    return train


def tests(setup: Setup, rows: Rows) -> None:
    """Run tests/devices/test_gpu.py; its output goes to a file as it comes."""
    command = [sys.executable, "-P", "-m", "pytest", "-v", "-m", "gpu", "tests/devices/test_gpu.py"]
    command += ["--collect-only"] if setup.dry else []
    log = setup.folder / "gpu_tests.log"
    with log.open("w") as file:
        done = subprocess.run(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)
    last = log.read_text().strip().splitlines()[-1]
    rows.check("tests/devices/test_gpu.py", done.returncode == 0, said=last, log=log.name)


def stock(setup: Setup, rows: Rows) -> None:
    """Time torch.compile's own step and fp32 masters compiled, which compile for a minute."""
    for name in ("plain", "master compiled"):
        step: Any = WAYS[name].make(parameters(setup.small, setup.device))
        hosted(setup, rows, f"{name}, 300 of 64", step)
        free(setup)
