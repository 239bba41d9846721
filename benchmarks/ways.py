"""The ways to take a step of AdamW in bf16 that step_time.py, memory.py and train_gpt.py compare.

    plain             bf16 parameters and states, compiled; plain fused: torch's own kernel
    master            fp32 master weights and states, torch's fused kernel, which takes gradients in
                      fp32; the bf16 parameters are copies
    master compiled   the same, gradients widened and copies made in the compiled step
    light, plus       collage_fx at that level, in eft or wide arithmetic; "each" compiles a kernel
                      for each tensor (multi_tensor=False), the others one for all; "foreach" and
                      "fused" say how the optimizer was constructed, both are plus in wide
    remainder16, sr   level plus in that storage: exactly fp32; no residuals, rounded by chance
    ulp4              level all in that storage: four bits more, rounded by chance;
                      "remainder16, ulp4": weights in the first, moments in the other
    budget 7.5, 9     the storages that are chosen for so many bytes without the gradient

and, where they are installed (`make bench-peers`):

    torchao 8-bit     states of 8 bits, parameters rounded to bf16
    torchao rounding  bf16 states, parameters rounded stochastically
    optimi            Kahan summation of the parameters, bf16 states
    flashoptim        8 more bits for the parameters, states of 8 bits; on a GPU only

and, for what a loop does to gradients around the step (`--clipped`):

    clipped apart     torch.nn.utils.clip_grad_norm_ before the step; "zeroed apart":
                      zero_grad(set_to_none=False) after it
    clips, zeroes     clip_grad_norm= and zero_grads=True of collage_fx

and, for what has changed of the parameters after each step (`--changed`):

    changed           changed=True of collage_fx; "taken": take_changes after the step
    compared, taken   the places and values of the elements that differ from those of a copy, which
                      is kept up, with PyTorch's operations
"""

import importlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from steps import Shapes, parameters
from torch import Tensor
from torch.optim import AdamW, Optimizer
from torch.optim.adamw import adamw as adamw_function

import collage_fx

Step = Callable[[], Any]
LR = 1e-4


class Way(NamedTuple):
    """One way to take a step."""

    make: Callable[[list[Tensor]], Step]
    """Function that makes a step of bf16 parameters with gradients."""
    moved: float
    """Bytes for each parameter that a step must read and write, by the table of its states."""
    held: float
    """Bytes for each parameter that are there between steps, with its gradient."""


def adamw(params: list[Tensor], **options: Any) -> Optimizer:
    """Return AdamW with its step counts where the parameters are."""
    if params[0].is_cuda:
        options = {"capturable": True, **options}
    return AdamW(params, **{"lr": LR, **options})


def _collage(
    optimizer: dict[str, Any] | None = None, **options: Any
) -> Callable[[list[Tensor]], Step]:
    options = {"multi_tensor": True, **options}
    return lambda params: collage_fx.compile(adamw(params, **(optimizer or {})), **options)


def _masters(params: list[Tensor]) -> list[Tensor]:
    return [p.detach().float().requires_grad_() for p in params]


def _master(params: list[Tensor]) -> Step:
    masters = _masters(params)
    for master in masters:
        master.grad = torch.empty_like(master)
    optimizer = adamw(masters, fused=True)

    @torch.no_grad()
    def step() -> None:
        torch._foreach_copy_([m.grad for m in masters], [p.grad for p in params])
        optimizer.step()
        torch._foreach_copy_(params, masters)

    return step


def _master_compiled(params: list[Tensor]) -> Step:
    masters = _masters(params)
    averages, squares = ([torch.zeros_like(m) for m in masters] for _ in range(2))
    counts = [torch.zeros((), device=m.device) for m in masters]

    @torch.compile
    @torch.no_grad()
    def step(params: list[Tensor], grads: list[Tensor]) -> None:
        wide = [g.float() for g in grads]
        settings = {"lr": LR, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.01, "eps": 1e-8}
        adamw_function(
            masters,
            wide,
            averages,
            squares,
            [],
            counts,
            foreach=False,
            capturable=masters[0].is_cuda,
            amsgrad=False,
            maximize=False,
            **settings,
        )
        for p, m in zip(params, masters, strict=True):
            p.copy_(m)

    def run() -> None:
        step([p.detach() for p in params], [p.grad for p in params if p.grad is not None])

    return run


WAYS: dict[str, Way] = {
    "plain": Way(lambda params: torch.compile(adamw(params).step), 14, 8),
    "plain fused": Way(lambda params: adamw(params, fused=True).step, 14, 8),
    # Gradients widened (6), fused step (28), parameters copied (6); 4 bytes are those gradients.
    "master": Way(_master, 40, 20),
    "master compiled": Way(_master_compiled, 28, 16),
    "light eft": Way(_collage(level="light", storage="mcf2"), 18, 10),
    "light wide": Way(_collage(level="light", storage="mcf2", arithmetic="wide"), 18, 10),
    "plus eft": Way(_collage(level="plus", storage="mcf2"), 22, 12),
    "plus wide": Way(_collage(level="plus", storage="mcf2", arithmetic="wide"), 22, 12),
    "plus foreach": Way(
        _collage(level="plus", storage="mcf2", arithmetic="wide", optimizer={"foreach": True}),
        22,
        12,
    ),
    "plus fused": Way(_collage(level="plus", storage="mcf2", optimizer={"fused": True}), 22, 12),
    "remainder16": Way(_collage(level="plus", storage="remainder16"), 22, 12),
    "sr": Way(_collage(level="plus", storage="sr"), 14, 8),
    "ulp4": Way(_collage(level="all", storage="ulp4"), 17, 9.5),
    "remainder16, ulp4": Way(
        _collage(level="all", storage={"param": "remainder16", "*": "ulp4"}), 20, 11
    ),
    "budget 7.5": Way(_collage(budget=7.5), 17, 9.5),
    "budget 9": Way(_collage(budget=9.0), 20, 11),
    "plus eft each": Way(_collage(level="plus", storage="mcf2", multi_tensor=False), 22, 12),
}


def _apart(
    make: Callable[[list[Tensor]], Step], *, zeroes: bool = False
) -> Callable[[list[Tensor]], Step]:
    """Return what makes a step around which gradients are clipped, and zeroed."""

    def made(params: list[Tensor]) -> Step:
        own = make(params)

        def step() -> None:
            torch.nn.utils.clip_grad_norm_(params, 1.0)
            own()
            if zeroes:
                torch._foreach_zero_([p.grad for p in params])

        return step

    return made


_REMAINDER = {"level": "plus", "storage": "remainder16"}
CLIPPED: dict[str, Way] = {
    "plain fused, clipped apart": Way(_apart(WAYS["plain fused"].make), 20, 8),
    "master, clipped apart": Way(_apart(WAYS["master"].make), 46, 20),
    "remainder16": WAYS["remainder16"],
    "remainder16, clipped apart": Way(_apart(_collage(**_REMAINDER)), 28, 12),
    "remainder16, clips": Way(_collage(**_REMAINDER, clip_grad_norm=1.0), 24, 12),
    "remainder16, zeroed apart too": Way(_apart(_collage(**_REMAINDER), zeroes=True), 30, 12),
    "remainder16, clips and zeroes": Way(
        _collage(**_REMAINDER, clip_grad_norm=1.0, zero_grads=True), 26, 12
    ),
}
"""The ways of a loop that clips gradients by their norm."""


_SLOW: dict[str, Any] = {**_REMAINDER, "optimizer": {"lr": 1e-6}}
"""A rate at which few elements change in a step."""


class _Model(torch.nn.Module):
    """A module that has these tensors, which are no Parameters, as its parameters."""

    def __init__(self, params: list[Tensor]) -> None:
        super().__init__()
        self.tensors = params

    def named_parameters(self, *_: Any, **__: Any) -> Any:
        """Return the tensors by their numbers."""
        return [(str(i), p) for i, p in enumerate(self.tensors)]


def _taken(params: list[Tensor]) -> Step:
    """Return a step after which the changes of the parameters are taken."""
    own = _collage(**_SLOW, changed=True)(params)
    model = _Model(params)

    def step() -> None:
        own()
        collage_fx.take_changes(model)

    return step


def _compared(params: list[Tensor]) -> Step:
    """Return a step after which the parameters are compared with copies."""
    own = _collage(**_SLOW)(params)
    flat = [p.detach().view(-1) for p in params]
    copies = [p.clone() for p in flat]

    def step() -> None:
        own()
        for p, copy in zip(flat, copies, strict=True):
            places = (p.view(torch.int16) != copy.view(torch.int16)).nonzero().squeeze(1)
            copy[places] = p[places]

    return step


CHANGED: dict[str, Way] = {
    "plain fused": WAYS["plain fused"],
    "remainder16": WAYS["remainder16"],
    "remainder16, changed": Way(_collage(**_REMAINDER, changed=True), 22.25, 12.125),
    "remainder16, changed, taken": Way(_taken, 22.5, 12.125),
    # Both read, a bool for each element written and read; the few that differ are not counted.
    "remainder16, compared, taken": Way(_compared, 28, 14),
}
"""The ways of a loop that sends what has changed."""
EVERY = WAYS | CLIPPED | CHANGED


def peer_of(module: str, kind: str, **options: Any) -> Callable[[list[Tensor]], Step]:
    """Return what makes a step of an optimizer of another package."""

    def make(params: list[Tensor]) -> Step:
        optimizer = getattr(importlib.import_module(module), kind)(params, lr=LR, **options)
        return optimizer.step

    return make


# Both 8-bit peers have a scale for each block of a state: fp32 for 256 elements, fp16 for 32.
PEERS: dict[str, Way] = {
    "torchao 8-bit": Way(peer_of("torchao.optim", "AdamW8bit"), 10.0625, 6.03125),
    "torchao rounding": Way(peer_of("torchao.optim", "_AdamW", bf16_stochastic_round=True), 14, 8),
    "optimi": Way(peer_of("optimi", "AdamW", betas=(0.9, 0.999), eps=1e-8), 18, 10),
    "flashoptim": Way(peer_of("flashoptim", "FlashAdamW"), 12.25, 7.125),
}


def seconds(step: Step, steps: int, device: str = "cpu") -> list[float]:
    """Return the time of each of some steps."""
    found = []
    for _ in range(steps):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    return found


_MADE: dict[str, Step] = {}


def make(name: str, shapes: Shapes) -> None:
    """Make a way to take a step over tensors of these shapes, for `run`."""
    _MADE[name] = EVERY[name].make(parameters(shapes))


def run(name: str, steps: int) -> list[float]:
    """Take steps of a way that `make` has made; return the time of each."""
    return seconds(_MADE[name], steps)


def absent(device: str) -> dict[str, str]:
    """Return which peers cannot be run on a device, and why: what they say when they are tried."""
    found = {}
    for name, way in PEERS.items():
        p = torch.ones(64, 64, dtype=torch.bfloat16, device=device, requires_grad=True)
        p.grad = torch.ones_like(p)
        try:
            way.make([p])()
        except Exception as error:  # whatever a peer raises is the reason
            found[name] = f"{type(error).__name__}: {error}"
    return found
