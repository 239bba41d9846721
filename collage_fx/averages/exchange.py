"""The exchange of the values of tensors, with their residuals."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Module

from collage_fx.runtime.residuals.dtensor import fsdp_modules, shard_of
from collage_fx.runtime.residuals.residual import Residual
from collage_fx.runtime.residuals.store import STORE
from collage_fx.runtime.torch_private import _disable_current_modes

_Value = tuple[Tensor, Residual | None, list[Tensor]]
"""A copy of a tensor, and its residual with copies of the components."""


@torch.no_grad()
def exchange(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Give the tensors of each pair the values of each other, in place, to the last word.

    A residual that is not of the present value of its tensor is cleared first, with a warning. If
    an error is raised, all have their own values.

    Args:
        pairs: tensors alike in shape, dtype and, if they are DTensors, in placement.
    """
    shards = [(shard_of(one), shard_of(other)) for one, other in pairs]
    known = [(t, r) for pair in shards for t in pair if (r := STORE.get(t)) is not None]
    done: list[tuple[Tensor, Tensor]] = []
    with _disable_current_modes():  # a recorder's, say
        STORE.clear_stale(known)
        try:
            for one, other in shards:
                _exchange(one, other)
                done.append((one, other))
        except BaseException:
            for one, other in reversed(done):
                _exchange(one, other)
            raise


def _exchange(one: Tensor, other: Tensor) -> None:
    values = _value_of(one), _value_of(other)
    try:
        _give(one, values[1])
        _give(other, values[0])
    except BaseException:
        _give(one, values[0])
        _give(other, values[1])
        raise


def _value_of(tensor: Tensor) -> _Value:
    residual = STORE.get(tensor)
    components = () if residual is None else residual.components
    return tensor.detach().clone(), residual, [c.clone() for c in components]


def _give(tensor: Tensor, value: _Value) -> None:
    """Have a tensor another one's value, and that one's components."""
    high, residual, components = value
    tensor.detach().copy_(high)
    own = STORE.get(tensor)
    if residual is None:
        if own is not None:
            STORE.drop(tensor)
        return
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
