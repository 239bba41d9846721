"""Copies of the parameters of a model that are kept up by what has changed of them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import collage_fx
from collage_fx.runtime.residuals.dtensor import shard_of

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Lion(Optimizer):
    """Takes the sign of an average."""

    def __init__(self, params: Any, lr: float = 1e-4) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                average = state["exp_avg"]
                p.mul_(1 - group["lr"] * 0.1)
                p.add_(torch.sign(average * 0.9 + p.grad * 0.1), alpha=-group["lr"])
                average.lerp_(p.grad, 0.01)


def model(*, dtype: torch.dtype = torch.bfloat16, width: int = 37) -> nn.Module:
    """Return two layers, the same in each call."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(width, 19), nn.Linear(19, 7)).to(dtype)


def give(module: nn.Module, k: int, share: float = 0.3) -> None:
    """Give a model the gradients of a step, of which only a share is not zero."""
    generator = torch.Generator().manual_seed(100 + k)
    for p in module.parameters():
        g = torch.randn(p.shape, generator=generator)
        p.grad = (g * (torch.rand(p.shape, generator=generator) < share)).to(p.dtype)


def bits(tensor: Tensor) -> Tensor:
    """Return the bits of a tensor, or of the shard of this process, in the order of rows."""
    words = shard_of(tensor).detach().reshape(-1)
    return words.view(
        {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[words.itemsize]
    )


class Replica:
    """The parameters of a model as somebody has them who is sent what has changed."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.copies = {name: bits(p).clone() for name, p in module.named_parameters()}

    def sync(self) -> dict[str, int]:
        """Put changes into the copies; return how many elements of each parameter came."""
        changes = collage_fx.take_changes(self.module)
        for name, (places, values) in changes.items():
            assert places.dtype is torch.int64 and bool((places.diff() > 0).all())
            self.copies[name][places] = bits(values)
        return {name: len(places) for name, (places, _) in changes.items()}

    @property
    def is_equal(self) -> bool:
        """True if the copies have the bits of the parameters."""
        found = dict(self.module.named_parameters())
        return all(torch.equal(copy, bits(found[name])) for name, copy in self.copies.items())

    def changed(self) -> dict[str, int]:
        """Return how many elements of each parameter the copies have other bits of."""
        pairs = ((n, self.copies[n], bits(p)) for n, p in self.module.named_parameters())
        found = {name: int((copy != now).sum()) for name, copy, now in pairs}
        return {name: count for name, count in found.items() if count}


def sizes(module: nn.Module, names: Sequence[str] = ()) -> dict[str, int]:
    """Return the number of elements of parameters, of all if none is named."""
    found = dict(module.named_parameters())
    return {name: shard_of(found[name]).numel() for name in names or found}


def follow(module: nn.Module, optimizer: Optimizer, first: int = 0, steps: int = 6) -> None:
    """Train; after each step exactly what has changed is sent."""
    replica = Replica(module)
    for k in range(first, first + steps):
        give(module, k)
        optimizer.step()
        changed = replica.changed()
        assert replica.sync() == changed and replica.is_equal
