"""Parameters on the emulated device (`cuda_emulator`), and steps that are captured there."""

from collections.abc import Callable
from typing import Any

import cuda_emulator as emulator
import torch
from torch import Tensor

import collage_fx


def parameters(tensors: int, size: int = 64) -> list[Tensor]:
    """Return bf16 parameters with gradients."""
    params = [
        torch.zeros(size, dtype=torch.bfloat16, device="cuda").requires_grad_()
        for _ in range(tensors)
    ]
    renew_gradients(params)
    return params


def renew_gradients(params: list[Tensor]) -> list[Tensor | None]:
    """Give parameters new gradients; return the old ones, which keep their addresses taken."""
    old = [p.grad for p in params]
    for p in params:
        p.grad = torch.zeros_like(p)
    return old


def warm_up(step: Callable[[], object], steps: int = 3) -> None:
    """Take steps on a side stream, as PyTorch wants it before a step is captured."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(steps):
            step()
    torch.cuda.current_stream().wait_stream(side)


def captured(step: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Return a step as a CUDA graph."""
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    try:
        with torch.cuda.graph(graph, pool=pool):
            step()
    except torch.AcceleratorError:
        # When CUDA refuses a capture, torch goes on to allocate for it, and frees nothing any more.
        torch._C._cuda_endAllocateToPool(0, pool)
        raise
    return graph


def quiet_step(kind: Any, **options: Any) -> tuple[dict[str, int], dict[str, int]]:
    """Return the work of a quiet step of twelve tensors with new gradients, and its kernels."""
    params = parameters(12)
    optimizer = kind(params, capturable=True)
    collage_fx.compile_(optimizer, level="plus", **options)
    for _ in range(5):
        optimizer.step()
    old = [renew_gradients(params)]
    optimizer.step()
    old.append(renew_gradients(params))
    asked = "pointer queries", "pinned allocations"
    work = emulator.counted(optimizer.step)
    return {name: n for name, n in work.items() if name not in asked}, dict(emulator.kernels())
