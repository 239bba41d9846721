"""Rehearsal of a first step on copies without data, which tells the states that it will make."""

import types
import warnings

import torch
from torch import Tensor
from torch.optim import Optimizer

from collage_fx.optimizer.ownership import PARAM, owned_tensors
from collage_fx.runtime.residuals.dtensor import shard_of
from collage_fx.step.optimizer_clone import clone_of, rehearsal, with_some_gradient


def states_to_come(optimizer: Optimizer) -> list[Tensor] | None:
    """Return tensors like the states that an optimizer has after a step, numbers left out.

    None if that is not known: its step wants data, or a closure.
    """
    found = _states(optimizer)
    if found:
        return found
    try:
        with warnings.catch_warnings(), rehearsal(optimizer):
            warnings.simplefilter("ignore")
            twin = clone_of(optimizer, _without_data, residuals=False)
            with_some_gradient(twin)
            types.MethodType(type(twin).step, twin)()
    except Exception:  # whatever code of the user's raises where there are no values
        return None
    return _states(twin)


def _states(optimizer: Optimizer) -> list[Tensor]:
    return [o.tensor for o in owned_tensors(optimizer) if o.key != PARAM and o.tensor.dim()]


def _without_data(tensor: Tensor) -> Tensor:
    return torch.empty_like(shard_of(tensor), device="meta")
