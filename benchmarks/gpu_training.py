"""The parts of gpu_check.py with peers and training: time, memory, losses, the largest batch.

Each way runs in a process of its own, whose memory nothing else shares.
"""

import itertools
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu_kernels import VARIANTS
from gpu_rows import Rows
from gpu_timing import Setup, count, timed
from steps import Shapes, parameters
from torch.nn.attention import SDPBackend, sdpa_kernel
from ways import PEERS, WAYS, Step, Way, peer_of

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from byte_model import ByteModel, Size, batches, loss_of, read_text

HEAVYBALL = {"betas": (0.9, 0.999), "param_ecc": "bf16+16", "storage_dtype": "bfloat16"}
ALL: dict[str, Way] = {
    **{**VARIANTS, **WAYS, **PEERS},
    "heavyball": Way(peer_of("heavyball", "AdamW", **HEAVYBALL, consume_grad=False), 18, 10),
}
PARITY = Size(layers=13, width=1088, heads=17, context=512, batch=16)
"""A byte transformer of 186 million parameters."""
BILLION = Size(layers=24, width=2048, heads=16, context=1024, batch=8, vocabulary=1 << 16)
"""1.5 billion with its embeddings over pairs of bytes, close to GPT-3's 1.3B."""
THREE = Size(layers=32, width=2560, heads=32, context=1024, batch=1, vocabulary=1 << 16)
"""2.85 billion with its embeddings, called 2.7B."""
TINY = Size(layers=1, width=16, heads=2, context=8, batch=2)
STEPS, MEASURED = 500, 12
ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
"""The same for all ways and versions; cuDNN's would be compiled for each shape first."""


def _held(setup: Setup) -> int:
    return torch.cuda.memory_allocated() if setup.device == "cuda" else 0


def _peak(setup: Setup) -> int:
    return torch.cuda.max_memory_allocated() if setup.device == "cuda" else 0


def _begin_peak(setup: Setup) -> None:
    setup.wait()
    if setup.device == "cuda":
        torch.cuda.reset_peak_memory_stats()


def peer(setup: Setup, rows: Rows, name: str) -> None:
    """Measure a way over GPT-1.5B: time, bandwidth, bytes for each parameter held and at the peak.

    heavyball, which compiles a kernel for each tensor, has as many elements in six tensors.
    """
    few: Shapes = [(260_000_000,)] * 6
    shapes = few if name == "heavyball" and not setup.dry else setup.gpt
    way, elements, before = ALL[name], count(shapes), _held(setup)
    step = way.make(parameters(shapes, setup.device))
    for _ in range(3):
        step()
    held = _held(setup) - before
    _begin_peak(setup)
    step()
    setup.wait()
    peak = _peak(setup) - before
    row = timed(setup, rows, f"{name}, 1.5B in {len(shapes)} tensors", step, way.moved, elements)
    rows.add(
        f"{name}: bytes for each parameter",
        held=round(held / elements, 3),
        peak=round(peak / elements, 3),
        by_states=way.held,
        **{"ms": row["median"]},
    )


def _text(size: Size) -> torch.Tensor:
    """Return the text: bytes, or pairs of them where the vocabulary has room."""
    text = read_text()[0]
    return text if size.vocabulary == 256 else text[:-1:2].int() * 256 + text[1::2]


def _training(setup: Setup, name: str, size: Size) -> Callable[[int], list[torch.Tensor]]:
    """Return what takes some training steps of a new model and returns their losses."""
    torch.manual_seed(0)
    with torch.device(setup.device):
        model = ByteModel(size).bfloat16()
    params = list(model.parameters())
    for p in params:  # ways make their states of parameters with gradients
        p.grad = torch.zeros_like(p)
    step: Step = ALL[name].make(params)
    order = batches(_text(size), 0, setup.device, size)

    def train(steps: int) -> list[torch.Tensor]:
        found = []
        for inputs, targets in itertools.islice(order, steps):
            model.zero_grad(set_to_none=False)
            with sdpa_kernel(ATTENTION):
                loss = loss_of(model, inputs, targets)
                loss.backward()
            step()
            found.append(loss.detach())
        return found

    return train


def losses(setup: Setup, rows: Rows, name: str) -> None:
    """Train a byte transformer of 186M for 500 steps: its loss curve, tokens a second, the peak."""
    size = TINY if setup.dry else PARITY
    steps = 4 if setup.dry else STEPS
    train = _training(setup, name, size)
    _begin_peak(setup)
    found = train(4)
    setup.wait()
    begun = time.perf_counter()
    while len(found) < steps:
        found += train(min(100, steps - len(found)))
        last = torch.stack(found[-50:]).mean().item()
        rows.add(f"{name}: after {len(found)} steps", last=last)
    setup.wait()
    took = time.perf_counter() - begun
    curve = torch.stack(found).float().cpu()
    tokens = size.batch * size.context
    rows.add(
        f"{name}: {steps} steps of 186M",
        last=curve[-50:].mean().item(),
        first=curve[0].item(),
        **{"tokens/s": round(tokens * max(steps - 4, 1) / took), "peak, GiB": _peak(setup) / 2**30},
        curve=[round(x, 4) for x in curve.tolist()],
    )


def trained(setup: Setup, rows: Rows, name: str) -> None:
    """Time training steps of a 1.3B model: all of a step, tokens a second, held and peak bytes."""
    size = TINY if setup.dry else BILLION
    train = _training(setup, name, size)
    train(3)
    setup.wait()
    held = _held(setup)
    _begin_peak(setup)
    times = []
    for _ in range(2 if setup.dry else MEASURED):
        begun = time.perf_counter()
        last = train(1)
        setup.wait()
        times.append(1e3 * (time.perf_counter() - begun))
    tokens = size.batch * size.context
    rows.measure(
        f"{name}: a training step of 1.3B",
        times,
        loss=last[0].item(),
        **{
            "tokens/s": round(1e3 * tokens / statistics.median(times)),
            "held, GiB": held / 2**30,
            "peak, GiB": _peak(setup) / 2**30,
        },
    )


def batch(setup: Setup, rows: Rows, name: str) -> None:
    """Find the largest batch of sequences of 1,024 with which a 2.7B model trains."""
    size = TINY if setup.dry else THREE
    fits_at, fits, tried = _with_batches(setup, name, size), 0, []
    step, over = 4, 5 if setup.dry else 257
    while step:  # by fours as long as it fits, then by two and by one
        at = fits + step
        begun = time.perf_counter()
        ok = at < over and fits_at(at)
        if at < over:
            said = "fits" if ok else "out of memory"
            tried.append(f"{at}: {said}, {time.perf_counter() - begun:.1f} s")
            rows.add(f"{name}: batch {at} at 2.7B", said=said)
        fits, step, over = (at, step, over) if ok else (fits, step // 2, min(over, at))
    more: dict[str, Any] = {"tried": tried, "peak, GiB": _peak(setup) / 2**30}
    rows.add(f"{name}: largest batch at 2.7B", batch=fits, **more)


def _with_batches(setup: Setup, name: str, size: Size) -> Callable[[int], bool]:
    """Return what takes a training step with a batch, and tells whether memory was enough."""
    with torch.device(setup.device):
        model = ByteModel(size).bfloat16()
    params = list(model.parameters())
    for p in params:
        p.grad = torch.zeros_like(p)
    step = ALL[name].make(params)

    def train(sequences: int) -> bool:
        shape = (sequences, size.context)
        tokens = torch.randint(size.vocabulary, shape, device=setup.device)
        try:
            with sdpa_kernel(ATTENTION):
                loss_of(model, tokens, tokens).backward()
            step()
            setup.wait()
        except torch.OutOfMemoryError:
            return False
        finally:
            for p in params:
                if p.grad is not None:
                    p.grad.zero_()
            if setup.device == "cuda":
                torch.cuda.empty_cache()
        return True

    return train
