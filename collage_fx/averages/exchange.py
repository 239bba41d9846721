"""The exchange of the values of tensors, with their residuals."""

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from collage_fx.runtime.residuals.dtensor import shard_of
from collage_fx.runtime.residuals.residual import Residual
from collage_fx.runtime.residuals.store import STORE


@torch.no_grad()
def exchange(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Give the tensors of each pair the values of each other, in place, to the last word.

    A residual that is not of the present value of its tensor is cleared first, with a warning.

    Args:
        pairs: tensors alike in shape, dtype and, if they are DTensors, in placement.
    """
    shards = [(shard_of(one), shard_of(other)) for one, other in pairs]
    known = [(t, r) for pair in shards for t in pair if (r := STORE.get(t)) is not None]
    STORE.clear_stale(known)
    for one, other in shards:
        words = _words(one), _words(other)
        kept = one.detach().clone()
        one.detach().copy_(other)
        other.detach().copy_(kept)
        _give(one, words[1])
        _give(other, words[0])


def _words(tensor: Tensor) -> tuple[Residual, list[Tensor]] | None:
    """Return the residual of a tensor, and copies of its components."""
    residual = STORE.get(tensor)
    return None if residual is None else (residual, [c.clone() for c in residual.components])


def _give(tensor: Tensor, words: tuple[Residual, list[Tensor]] | None) -> None:
    """Have a tensor, whose value was another one's, have that one's components."""
    own = STORE.get(tensor)
    if words is None:
        if own is not None:
            STORE.drop(tensor)
        return
    residual, components = words
    if own is None or own.storage != residual.storage:
        name = residual.name if own is None else own.name
        own = STORE.adopt(tensor, None, residual.storage, name)
    own.hold([c.to(tensor.device) for c in components])
    own.settle(tensor)


def reshard(model: Module) -> None:
    """Have the parameters of FSDP2 modules sharded, as they are between steps.

    What is gathered is a copy of what the shards were, and so are the module's parameters then.
    """
    for module in fsdp_modules(model):
        module.reshard()


def fsdp_modules(model: Module) -> list[Any]:
    """Return the modules that `torch.distributed.fsdp.fully_shard` has taken."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return [] if kind is None else [m for m in model.modules() if isinstance(m, kind)]
