"""Optimizers whose classes compile their step, and those that `collage_fx.compile` has compiled."""

from typing import Any

import torch
from interpreter import without_compiler
from repeated_steps import trained, values
from torch.optim import Optimizer

import collage_fx
from collage_fx import optim

RATE = 1e-4


class Descent(Optimizer):
    """Takes arguments of any name, which go into the groups, and a seed of its own."""

    def __init__(self, params: Any, lr: float = RATE, seed: int = 0, **more: Any) -> None:
        super().__init__(params, {"lr": lr, "seed": seed, **more})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"])
        return loss


class Counting(optim.AdamW):
    """A class that a user has derived from a collage_fx class, with its own step."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr, storage="mcf3")
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.count += 1
        return super().step(closure)


def by_hand(cls: Any, *args: Any, options: Any = None, **kwargs: Any) -> Any:
    return collage_fx.compile_(cls(*args, **kwargs), **(options or {}))


def stepped(optimizer: Any, count: int = 4) -> Any:
    trained(optimizer, count)
    return optimizer


def same(found: Optimizer, expected: Optimizer) -> bool:
    return all(map(torch.equal, values(found), values(expected)))


def told(optimizer: Optimizer) -> tuple[str, str]:
    return str(collage_fx.report(optimizer)), str(collage_fx.explain(optimizer))


def spawned(cls: Any, own: Any, optimizer: Any, answers: Any) -> None:
    """In another process: put what two steps of an optimizer that came there make of its weight."""
    assert own is optim.SGD
    assert cls is collage_fx.compensated(torch.optim.SGD, storage="mcf3") is type(optimizer)
    with without_compiler():
        stepped(optimizer, 2)
    answers.put(collage_fx.value(optimizer.param_groups[0]["params"][0]).tolist())
