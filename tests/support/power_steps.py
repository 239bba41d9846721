"""Steps whose bias corrections are powers of 0-d step counts, in each way that a step can be done.

As a program, in a process that has TRITON_INTERPRET=1, it takes steps by the Triton kernels of
classes, and saves what they leave: of each case that is named after the file, or the powers alone.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from interpreter import without_compiler
from torch import Tensor
from torch.optim import Optimizer

import collage_fx

SIZES = (1, 5, 130)
BETAS = (0.9, 0.99, 0.999, 0.9999)
COUNTS, FEW, EVERY = 2000, 20, 400
"""The largest step count of powers; one in so many is taken, and by Triton's interpreter."""


class AdamW(Optimizer):
    """AdamW with step counts in 0-d tensors, by a formula of torch.optim's, or in Python.

    `changing` is the formula for counts on the host, with another beta in each step.
    """

    def __init__(self, params: list[Tensor], formula: str) -> None:
        super().__init__(params, {"lr": 1e-3, "beta": 0.999})
        self.formula = formula
        for p in params:
            count = 0 if formula == "python" else torch.zeros(())
            self.state[p].update(step=count, m=torch.zeros_like(p), v=torch.zeros_like(p))

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        for p in group["params"]:
            state = self.state[p]
            state["step"] += 1
            p.mul_(1 - group["lr"] * 0.01)
            state["m"].lerp_(p.grad, 0.1)
            state["v"].mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
            first, second = 1 - 0.9 ** state["step"], 1 - group["beta"] ** state["step"]
            if self.formula == "capturable":
                size = -group["lr"] / first
                p.addcdiv_(state["m"], state["v"].sqrt() / (second**0.5 * size) + 1e-8 / size)
            else:
                root = state["v"].sqrt() / second**0.5 + 1e-8
                p.sub_(state["m"] / root * (group["lr"] / first))


class Powers(Optimizer):
    """Keeps the powers of each of BETAS beside a parameter that it updates."""

    def __init__(self, params: list[Tensor]) -> None:
        super().__init__(params, {"lr": 1e-3})
        for p in params:
            names = ("step", *map(str, BETAS))
            self.state[p].update({name: torch.zeros(()) for name in names})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state["step"] += 1
            for beta in BETAS:
                state[str(beta)].copy_(beta ** state["step"])
            a, b, c, d = (state[str(beta)] for beta in BETAS)
            p.sub_(p.grad * (a + b + c + d))


class ComputedAnew(Optimizer):
    """Divides a state by its norm, which is done on joined values; keeps its last power."""

    def __init__(self, params: list[Tensor], *, foreach: bool) -> None:
        super().__init__(params, {"foreach": foreach})
        for p in params:
            z, count, power = p.detach().clone(), torch.zeros(()), torch.zeros(())
            self.state[p].update(z=z, step=count, power=power)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        for p in group["params"]:
            state = self.state[p]
            state["step"] += 1
            if group["foreach"]:
                (power,) = torch._foreach_pow(BETAS[1], [state["step"]])
            else:
                power = BETAS[1] ** state["step"]
            state["power"].copy_(power)
            state["z"].sub_(p.grad * power, alpha=1e-4)
            p.copy_(state["z"] / state["z"].norm())


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "capturable": ("capturable", {"storage": "remainder16"}),
    "host": ("host", {"storage": "remainder16"}),
    "python": ("python", {"storage": "remainder16"}),
    "changing": ("changing", {"storage": "remainder16"}),
    "capturable-mcf2": ("capturable", {"storage": "mcf2"}),
}
"""Name -> the formula, and what is compensated how."""


@contextlib.contextmanager
def by_triton() -> Iterator[None]:
    """Let kernels of classes be those of a GPU, on CPU tensors, by Triton's interpreter."""
    from kernels import repaired_interpreter

    from collage_fx.passes.codegen.multi_tensor_kernel import MultiTensorKernel
    from collage_fx.runtime.kernels.triton_launch import Launch

    def runner(kernel: MultiTensorKernel, device: torch.device) -> Launch:
        return Launch(kernel.triton(), kernel.scalar)

    with repaired_interpreter(), mock.patch.object(MultiTensorKernel, "runner", runner):
        yield


WAYS: dict[str, tuple[dict[str, Any], Callable[[], Any]]] = {
    "interpreted": ({"multi_tensor": True}, without_compiler),
    "recorded": ({"record": True}, contextlib.nullcontext),
    "Inductor's": ({"multi_tensor": False}, contextlib.nullcontext),
    "C++": ({"multi_tensor": True}, contextlib.nullcontext),
    "Triton's": ({"multi_tensor": True}, by_triton),
}
"""Way -> the options for it, and what it is done within."""


def random(size: int, generator: torch.Generator) -> Tensor:
    return torch.randn(size, generator=generator).bfloat16()


def trained(case: str, way: str, steps: int = 6) -> list[Tensor]:
    """Return all words of the parameters and moments after some steps."""
    formula, settings = CASES[case]
    options, within = WAYS[way]
    torch.compiler.reset()
    generator = torch.Generator().manual_seed(0)
    params = [random(size, generator).requires_grad_() for size in SIZES]
    optimizer = AdamW(params, formula)
    with within():
        step = collage_fx.compile(optimizer, level="plus", **settings, **options)
        step._collage.keep = True  # compile a recorded segment when it is seen first
        for _ in range(steps):
            for p in params:
                p.grad = random(p.numel(), generator)
            if formula == "changing":
                optimizer.param_groups[0]["beta"] *= 0.9999
            step()
    states = [t for p in params for t in (p, optimizer.state[p]["m"], optimizer.state[p]["v"])]
    assert all(collage_fx.residuals(p) for p in params)
    return [word for t in states for word in (t.detach(), *collage_fx.residuals(t))]


def powers(way: str, counts: range) -> Tensor:
    """Return the powers of BETAS that a step has at each of these counts, one after the other."""
    options, within = WAYS[way]
    torch.compiler.reset()
    p = torch.ones(3, dtype=torch.bfloat16, requires_grad=True)
    p.grad = torch.zeros_like(p)
    optimizer = Powers([p])
    state, found = optimizer.state[p], []
    with within():
        step = collage_fx.compile(optimizer, level="plus", storage="remainder16", **options)
        step._collage.keep = True
        for count in counts:
            state["step"].fill_(count - 1)
            step()
            found.append(torch.stack([state[str(beta)] for beta in BETAS]))
    return torch.stack(found)


if __name__ == "__main__":
    file, *names = sys.argv[1:]
    few = range(1, COUNTS + 1, EVERY)
    found = {n: trained(n, "Triton's") if n in CASES else powers("Triton's", few) for n in names}
    torch.save(found, file)
