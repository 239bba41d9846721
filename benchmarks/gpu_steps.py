"""The parts of gpu_check.py that look at whole steps: bits, launches, graphs, training."""

import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from gpu_parts import Found, Record, Setup, free, profiled
from steps import parameters
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.optim import SGD, AdamW, Optimizer
from ways import LR, WAYS, Step, adamw

import collage_fx
from collage_fx.passes.codegen.multi_tensor_kernel import MULTI_TENSOR_KERNELS

ROOT = Path(__file__).parents[1]
STORAGES: dict[str, Found] = {
    "light": {"level": "light"},
    "plus": {"level": "plus"},
    "wide": {"level": "plus", "arithmetic": "wide"},
    "all": {"level": "all"},
    "mcf3": {"level": "plus", "storage": "mcf3"},
    "remainder16": {"level": "plus", "storage": "remainder16"},
    "ulp8": {"level": "plus", "storage": "ulp8"},
    "by chance": {"level": "plus", "arithmetic": "wide", "stochastic_rounding": True},
}


def words(device: str, kind: type[Optimizer], options: Found, **more: Any) -> Any:
    """Return all words of all states after ten steps, on the CPU."""
    params = parameters([(64, 48), (7,), (130, 131), (1,), (3, 5, 7), (1024,), (33, 3), (9, 9)])
    params = [p.detach().to(device).requires_grad_() for p in params]
    optimizer = kind(params, lr=1e-3, **more)  # type: ignore[call-arg]
    step = collage_fx.compile(optimizer, multi_tensor=True, **options)
    generator = torch.Generator().manual_seed(0)
    for _ in range(10):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype).to(device)
        step()
    states = [t for p in params for t in (p.detach(), *optimizer.state[p].values())]
    residuals = (r for t in states for r in collage_fx.residuals(t))
    return [t.cpu() for t in (*states, *residuals)]


def differing(ours: list[Tensor], theirs: list[Tensor]) -> int:
    """Return at how many elements two lists of tensors differ."""
    return sum(int((a != b).sum()) for a, b in zip(ours, theirs, strict=True))


def bits(setup: Setup, found: Record) -> None:
    """At how many elements ten steps on the device differ from those on the CPU: at none."""
    chosen = {"plus": STORAGES["plus"]} if setup.dry else STORAGES
    for name, options in chosen.items():
        for foreach in (False, True) if name in ("plus", "wide") else (False,):
            both = (words(d, AdamW, options, foreach=foreach) for d in ("cpu", setup.device))
            found[f"AdamW, {name}{', foreach' * foreach}"] = differing(*both)
            free(setup)
    ours, theirs = (words(d, SGD, STORAGES["plus"], momentum=0.9) for d in (setup.device, "cpu"))
    found["SGD, plus"] = differing(ours, theirs)
    wrong = [name for name, n in found.items() if n]
    other = words("cpu", SGD, STORAGES["plus"], momentum=0.8)
    found["SGD with another momentum, which must differ"] = control = differing(ours, other)
    if wrong or not control:
        found["failed"] = f"other bits: {wrong}"


def tests(setup: Setup, found: Record) -> None:
    """The tests that need a GPU, which have the eager reference on the CPU and on the device."""
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-m", "gpu", "tests/devices/test_gpu.py"]
    command += ["--collect-only"] if setup.dry else []
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    found["command"], found["output"] = " ".join(command[1:]), done.stdout[-4000:]
    if done.returncode:
        found["failed"] = f"pytest ended with {done.returncode}"


def hosted(setup: Setup, step: Step) -> Found:
    """Return what a step asks of the host: time, launches, copies, synchronisations."""
    times = []
    for _ in range(3):
        step()
    for _ in range(setup.repeats):
        setup.wait()
        start = time.perf_counter()
        step()
        times.append(1e3 * (time.perf_counter() - start))
    with profiled(setup) as seen:
        step()
    row: Found = {"host, ms": statistics.median(times), "seen": dict(seen.most_common(12))}
    if setup.device == "cuda":
        torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step()
        torch.cuda.set_sync_debug_mode("default")
        row["synchronising"] = [str(w.message)[:200] for w in caught]
    return row


def whole_step(setup: Setup, found: Record) -> None:
    """A whole step of 300 tensors, small ones and those of a 7B model."""
    for name in ("plus eft", "plus wide", "plain fused"):
        found[name] = hosted(setup, WAYS[name].make(parameters(setup.many, setup.device)))
        free(setup)
    on_host = AdamW(parameters(setup.many, setup.device), lr=LR)
    found["plus eft, step counts on the host"] = hosted(setup, collage_fx.compile(on_host))
    free(setup)
    large = WAYS["plus eft"].make(parameters(setup.large, setup.device))
    found["plus eft, 7B shapes"] = hosted(setup, large)
    del large
    free(setup)
    found["plain"] = hosted(setup, WAYS["plain"].make(parameters(setup.many, setup.device)))


def rates(setup: Setup, found: Record) -> None:
    """A learning rate that is another float in each step: it must not compile anew each time."""
    for foreach in (True,) if setup.dry else (False, True):
        optimizer = adamw(parameters(setup.many, setup.device), foreach=foreach)
        step = collage_fx.compile(optimizer)
        taken = 0

        def scheduled(optimizer: Any = optimizer, step: Step = step) -> None:
            nonlocal taken
            taken += 1
            optimizer.param_groups[0]["lr"] = LR / taken
            step()

        row = hosted(setup, scheduled)
        row["kernels made"] = len(MULTI_TENSOR_KERNELS)
        for _ in range(3):
            scheduled()
        row["kernels made since"] = len(MULTI_TENSOR_KERNELS) - row["kernels made"]
        found["foreach" if foreach else "one by one"] = row
        free(setup)
    late = [name for name, row in found.items() if row["kernels made since"]]
    if late:
        found["failed"] = f"compiles at each rate: {late}"


def captured(setup: Setup, options: Found, *, replayed: bool) -> tuple[list[Tensor], Found]:
    """Return the words after eight steps, the last five by a CUDA graph or not, and its times."""
    params = parameters([(64, 48), (7,), (130, 131), (1,), (3, 5, 7), (1024,), (33, 3), (9, 9)])
    params = [p.detach().to(setup.device).requires_grad_() for p in params]
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer = adamw(params)
    step = collage_fx.compile(optimizer, multi_tensor=True, **options)
    side, row = torch.cuda.Stream(), Found()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    if replayed:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        step = graph.replay
    states = [t for p in params for t in (p.detach(), *optimizer.state[p].values())]
    states += [r for t in states for r in collage_fx.residuals(t)]
    for k in range(5):
        for p in params:
            p.grad.fill_(0.1 * k - 0.2)
        before = [t.clone() for t in states]
        step()
    found = [t.cpu() for t in states]
    if replayed:
        for t, old in zip(states, before, strict=True):
            t.copy_(old)
        step()
        row["other words of the same step again"] = differing(found, [t.cpu() for t in states])
        row["replay, ms"] = setup.milliseconds(step)
    return found, row


def graphs(setup: Setup, found: Record) -> None:
    """A user's own CUDA graph of a step, and Inductor's: the same bits as launched steps."""
    if setup.device != "cuda":
        found["skipped"] = "CUDA graphs need a CUDA device"
        return
    for name in ("plus", "wide", "remainder16", "by chance"):
        both = [captured(setup, STORAGES[name], replayed=replayed) for replayed in (False, True)]
        row = {"differing": differing(both[0][0], both[1][0]), **both[1][1]}
        # A seed of another draw is another seed, in a graph or not.
        row["as it should be"] = (
            (name == "by chance")
            == bool(row["differing"])
            == bool(row["other words of the same step again"])
        )
        free(setup)
    plain, ours = (
        words("cuda", AdamW, {"level": "plus", "mode": mode}, capturable=True)
        for mode in (None, "reduce-overhead")
    )
    row = {k: n for k, n in counters["inductor"].items() if "cudagraph" in k}
    row |= {"differing": (n := differing(plain, ours)), "as it should be": not n}
    found["reduce-overhead"] = row
    wrong = [name for name, row in found.items() if not row["as it should be"]]
    if wrong:
        found["failed"] = f"other than launched steps: {wrong}"


class Model(nn.Module):
    """Predicts the next byte from those before it."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        layer = nn.TransformerEncoderLayer(
            width, max(1, width // 64), 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores of the next byte."""
        mask = nn.Transformer.generate_square_subsequent_mask(
            x.shape[1], device=x.device, dtype=self.head.weight.dtype
        )
        scores: Tensor = self.head(self.blocks(self.bytes(x), mask=mask, is_causal=True))
        return scores


def training(setup: Setup, found: Record) -> None:
    """A few hundred steps of a small transformer over this project's own source."""
    files = sorted((ROOT / "passes").rglob("*.py"))
    text = torch.tensor(list(b"".join(f.read_bytes() for f in files)), device=setup.device)
    width, layers, length, batch, steps = (16, 1, 8, 2, 3) if setup.dry else (512, 6, 128, 32, 300)
    for name in ("plain", "plus eft", "plus wide", "remainder16", "master"):
        torch.manual_seed(0)
        model = Model(width, layers).to(setup.device, torch.bfloat16)
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        update = WAYS[name].make(list(model.parameters()))
        generator = torch.Generator().manual_seed(0)
        losses = []
        for _ in range(steps):
            at = torch.randint(len(text) - length - 1, (batch, 1), generator=generator)
            seen = text[(at + torch.arange(length + 1)).to(setup.device)].long()
            scores = model(seen[:, :-1]).float()
            loss = nn.functional.cross_entropy(scores.flatten(0, 1), seen[:, 1:].flatten())
            model.zero_grad(set_to_none=False)
            loss.backward()
            update()
            losses.append(loss.detach())
        last = torch.stack(losses[-20:]).mean().item()
        found[name] = {"first loss": losses[0].item(), "mean of the last 20": last}
        free(setup)
