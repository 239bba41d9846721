"""The optimizers and tensors that compile_time.py and step_time.py measure."""

import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

try:
    from triton import __version__ as triton_version
except ImportError:  # a CPU does without
    triton_version = "none"

Shapes = Sequence[tuple[int, ...]]
LOAD = os.getloadavg()[0]
"""Load when the benchmark began: other processes that wanted a core, over a minute."""
_LAYER: Shapes = [
    *((64,), (64,), (192, 64), (192,), (64, 64), (64,)),
    *((64,), (64,), (256, 64), (256,), (64, 256), (64,)),
]
TRANSFORMER: Shapes = [(256, 64), (32, 64), *_LAYER, *_LAYER, (64,), (64,)]
"""The 28 tensors of a small GPT of two layers."""
MIXED: Shapes = [(64, 64), (64,), (128, 64), (64, 128), (256, 64), (31,)]


class Lion(Optimizer):
    """Lion (arXiv 2302.06675), as its authors write it."""

    def __init__(self, params: list[Tensor], lr: float = 1e-4) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": 0.1})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Take one step."""
        for group in self.param_groups:
            lr, (beta1, beta2) = group["lr"], group["betas"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                exp_avg = state["exp_avg"]
                p.mul_(1 - lr * group["weight_decay"])
                update = exp_avg * beta1 + p.grad * (1 - beta1)
                p.add_(torch.sign(update), alpha=-lr)
                exp_avg.lerp_(p.grad, 1 - beta2)


class Slow(Optimizer):
    """A user's own: two averages of the gradient, fast and slow, of which the second is damped."""

    def __init__(self, params: list[Tensor], lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Take one step."""
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["fast"], state["slow"] = torch.zeros_like(p), torch.zeros_like(p)
                fast, slow = state["fast"], state["slow"]
                fast.mul_(0.9).add_(p.grad, alpha=0.1)
                slow.mul_(0.9995).add_(p.grad, alpha=0.0005)
                p.sub_(group["lr"] * (fast + 2 * slow) / (1 + slow.abs()))


OPTIMIZERS: dict[str, Callable[[list[Tensor]], Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-3),
    "SGD": lambda params: torch.optim.SGD(params, lr=1e-3, momentum=0.9, weight_decay=0.01),
    "Lion": Lion,
    "Slow": Slow,
}


def parameters(shapes: Shapes, device: str = "cpu", dtype: torch.dtype = torch.bfloat16) -> Any:
    """Return parameters of these shapes with gradients, the same at each call."""
    generator = torch.Generator(device).manual_seed(0)
    params = []
    for shape in shapes:
        p, g = (torch.randn(shape, generator=generator, device=device) for _ in range(2))
        p = p.to(dtype).requires_grad_()
        p.grad = g.to(dtype)
        params.append(p)
    return params


def command() -> str:
    """Return the command line, without `--out` and with no place of this machine."""
    pairs = zip(sys.argv, ["", *sys.argv[:-1]], strict=True)
    given = [word for word, before in pairs if "--out" not in (word, before)]
    # What lies elsewhere on this machine has another name on the next.
    words = ["DIR" if Path(word).is_absolute() else word for word in given]
    return " ".join(["python", *words])


def conditions(device: str = "cpu") -> dict[str, Any]:
    """Return what a result was measured under."""
    name = torch.cuda.get_device_name() if device == "cuda" else platform.machine()
    return {
        "command": command(),
        "date": time.strftime("%Y-%m-%d"),
        "load": round(LOAD, 1),
        "device": f"{device}, {name}, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "triton": triton_version,
    }
