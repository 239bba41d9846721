"""States in whose place a step puts new tensors: copies, which its graph overwrites."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.optim import Optimizer

from collage_fx.compilation.layout_guards import is_plain
from collage_fx.optimizer.ownership import owned_tensors
from collage_fx.passes.dedup.replaced_states import Replaced, stored_in_place
from collage_fx.runtime.residuals.residual import Residual
from collage_fx.runtime.residuals.store import STORE
from collage_fx.runtime.torch_private import _disable_current_modes


def with_renewed_states(
    gm: GraphModule, inputs: Sequence[Any], optimizer: Optimizer
) -> tuple[GraphModule, Replaced]:
    """Return a graph that overwrites the states which the step replaces by its results.

    Args:
        gm: a Dynamo graph of a whole step.
        inputs: the arguments of its first call.
        optimizer: whose step it is.
    """
    owned = list(owned_tensors(optimizer))
    states = {id(o.tensor) for o in owned if o.owner == "state"}
    params = [o.tensor for o in owned if o.owner == "param"]
    known = {id(t) for p in params for t in (p, p.grad)}
    found = {i for i, t in enumerate(inputs) if id(t) in states and is_plain(t)}
    return stored_in_place(gm, found, {i for i, t in enumerate(inputs) if id(t) in known})


def renewed(
    args: tuple[Any, ...], replaced: Replaced, named: Callable[[str], str]
) -> tuple[Any, ...]:
    """Return the arguments with copies of the states that are replaced, residuals included.

    The states stay as they are: others may have them.

    Args:
        args: the arguments of a call.
        replaced: see `stored_in_place`.
        named: gives the states, in a text, the names of their parameters.
    """
    old = [args[j] for j in replaced.values()]
    with torch.no_grad(), _disable_current_modes():
        new = [t.clone() for t in old]
        pairs = [
            (t, made, r)
            for t, made, r in zip(old, new, STORE.of(old), strict=True)
            if r is not None
        ]
        STORE.clear_stale([(t, r) for t, _, r in pairs], named)
        for _, made, residual in pairs:
            _copy(residual, made)
    given = list(args)
    for j, made in zip(replaced.values(), new, strict=True):
        given[j] = made
    return tuple(given)


def give_new_memory(found: Iterable[Tensor | None], named: Callable[[str], str]) -> list[Tensor]:
    """Give tensors new memory with their values: who has the old memory keeps these.

    Returns:
        tensors on the old memory: as long as they are there no other state is taken to have it.
    """
    tensors = [t for t in found if t is not None]
    with torch.no_grad(), _disable_current_modes():
        pairs = [(t, r) for t, r in zip(tensors, STORE.of(tensors), strict=True) if r is not None]
        STORE.clear_stale(pairs, named)
        old = [t.detach() for t in tensors]
        for t in tensors:
            t.data = t.detach().clone()
        for t, residual in pairs:
            residual.settle(t)
        return old


def _copy(residual: Residual, tensor: Tensor) -> None:
    """Give a tensor a copy of a residual, with what is known of it."""
    copied = STORE.copy(residual, tensor)
    copied.provisional, copied.lost = residual.provisional, residual.lost
    if residual.kept is not None:
        copied.keep(tensor)


def with_states(
    results: Sequence[Any], replaced: Replaced, given: Sequence[Any]
) -> tuple[Any, ...]:
    """Return all results of the whole graph, given the others and the arguments."""
    rest = iter(results)
    count = len(results) + len(replaced)
    return tuple(given[replaced[k]] if k in replaced else next(rest) for k in range(count))
