"""A copy of an optimizer that has parameters, states and gradients of its own."""

import copy
import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

try:
    import numpy
except ImportError:  # PyTorch does without it
    numpy = None  # type: ignore[assignment]
import torch
from torch import Tensor
from torch.compiler import set_stance
from torch.optim import Optimizer

from collage_fx.classes import FIRST_USE
from collage_fx.optimizer import plain_steps
from collage_fx.optimizer.checkpoints.copying import copy_residuals
from collage_fx.optimizer.ownership import family, params_of, tensors_in
from collage_fx.runtime.residuals.dtensor import shard_of

_OWN = ("step", "__getstate__", FIRST_USE)
"""Attributes that are of one optimizer, and of no copy."""


def clone_of(
    optimizer: Optimizer, convert: Callable[[Tensor], Tensor], *, residuals: bool
) -> Optimizer:
    """Return a copy of the optimizer; nothing of what is done to it reaches the original.

    Args:
        optimizer: any; a step assigned to it, or put around its step, is left out.
        convert: makes the copy of a tensor, a parameter, a state or a gradient.
        residuals: whether the copy has those of the original too.
    """
    everyone = family(optimizer)
    params = [p for one in everyone for p in params_of(one)]
    # Without the gradients, which may share memory that cannot be copied so, as those of FSDP2.
    memo: dict[int, Any] = {
        id(p): convert(p).detach().requires_grad_(p.requires_grad) for p in params if p.is_leaf
    }
    for one in everyone:
        memo[id(one)] = object.__new__(type(one))
        for state in getattr(one, "state", {}).values():
            memo |= {id(t): convert(t).detach() for _, t in tensors_in(state) if id(t) not in memo}
    for one in everyone:
        # Not by way of its state for pickling, which leaves attributes out.
        kept = {k: v for k, v in vars(one).items() if k not in _OWN}
        memo[id(one)].__dict__.update(copy.deepcopy(kept, memo))
        if residuals:
            copy_residuals(one, memo)
    twin: Optimizer = memo[id(optimizer)]
    plain_steps.called(family(twin))  # its plain steps are meant to be plain
    for p in params:
        if p.grad is not None and p.is_leaf:
            memo[id(p)].grad = convert(p.grad).detach()
    return twin


def with_some_gradient(optimizer: Optimizer) -> None:
    """Give parameters gradients of zeros if none has one: a step would do nothing."""
    params = params_of(optimizer)
    if all(p.grad is None for p in params):
        for p in (p for p in params if p.requires_grad):
            p.grad = torch.zeros_like(p)


@contextmanager
def rehearsal(optimizer: Optimizer) -> Iterator[Callable[[], bool]]:
    """Run within what copies of an optimizer do, in Python and without drawing random numbers.

    It gives a function that tells whether some have been drawn, once that is undone.
    """
    # Not of all devices, on each of which it would begin a context.
    devices = {shard_of(p).device for p in params_of(optimizer)}
    cuda = sorted({d.index for d in devices if d.type == "cuda"})
    chance = random.getstate()
    numpys: Any = numpy.random.get_state() if numpy else None
    saved = pickle.dumps(numpys)
    drawn = [False]
    with torch.random.fork_rng(cuda), set_stance("force_eager"):
        state = torch.get_rng_state()
        try:
            yield lambda: drawn[0]
        finally:
            drawn[0] = random.getstate() != chance
            random.setstate(chance)
            if numpy:
                drawn[0] |= pickle.dumps(numpy.random.get_state()) != saved
                numpy.random.set_state(numpys)
            drawn[0] |= not torch.equal(state, torch.get_rng_state())
