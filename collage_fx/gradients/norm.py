"""Norm of the gradients of one optimizer, or of several that are stepped in turn."""

import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from collage_fx.optimizer.ownership import params_within
from collage_fx.runtime.errors import UnsupportedError
from collage_fx.runtime.expansion.eft import WIDER
from collage_fx.runtime.kernels.sum_of_squares import PLAIN, sum_of_squares
from collage_fx.runtime.residuals.dtensor import is_partial, is_sharded, placed, shard_of
from collage_fx.runtime.residuals.residual import Residual, version
from collage_fx.runtime.residuals.store import STORE
from collage_fx.runtime.storage.registry import join_in

_Seen: TypeAlias = list[tuple[weakref.ref[Tensor], int]]
"""Gradients with their versions."""
_NORMS = WeakIdKeyDictionary()
"""Optimizer -> the norms over several optimizers that it is one of."""
_LOCK = threading.Lock()


class GradientNorm:
    """Norm over the gradients of some optimizers.

    The step of any of them reads all gradients, and the steps of the others use what it has found,
    as long as each takes one step and its gradients are what they were.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.of = [weakref.ref(one) for one in optimizers]
        self.sum: Tensor | None = None
        self.waiting: dict[int, _Seen] = {}
        """Optimizers, by their ids, that have not used the last sum; with their gradients then."""

    def sum_of_squares(self, optimizer: Optimizer, gradients: list[Tensor]) -> Tensor:
        """Return the square of the norm, for a step of one of the optimizers.

        Args:
            optimizer: that one.
            gradients: those that it has now.

        Returns:
            A 0-d tensor, in float64 or fp32, on the device of the gradients; on the CPU if they are
            on several, each of which takes a factor from there. Of DTensors all shards count, and
            all processes get the same.

        Raises:
            UnsupportedError: a gradient is a DTensor that is yet to be reduced over its mesh.
        """
        seen = self.waiting.pop(id(optimizer), None)
        if self.sum is None or seen is None or not _are(seen, gradients):
            alive = (one for one in (find() for find in self.of) if one is not None)
            others = [one for one in alive if one is not optimizer]
            self.sum = _sum(gradients_of(optimizer, *others) if others else gradients)
            self.waiting = {id(one): _seen(gradients_of(one)) for one in others}
        return self.sum


def norm_over(optimizers: Sequence[Optimizer]) -> GradientNorm:
    """Return the norm over some optimizers: the same one to each of those that share it."""
    members = list({id(one): one for one in optimizers}.values())
    if len(members) == 1:
        return GradientNorm(members)
    with _LOCK:
        for norm in _NORMS.get(members[0], ()):
            if {id(find()) for find in norm.of} == {*map(id, members)}:
                return norm
        norm = GradientNorm(members)
        for one in members:
            _NORMS[one] = [*_NORMS.get(one, ()), norm]
        return norm


def resolve_gradients(params: Iterable[Tensor]) -> None:
    """Give parameters gradients of which memory has the values, and not their negatives.

    Kernels read memory, and stock torch.compile takes that for the values too.
    """
    for p in params:
        if p.grad is not None and p.grad.is_neg():
            p.grad = p.grad.resolve_neg()


def gradients_of(*optimizers: Optimizer) -> list[Tensor]:
    """Return the gradients of the parameters of optimizers, and of what these wrap.

    One for each parameter, as torch.nn.utils.clip_grad_norm_ counts a gradient that two have twice.
    """
    params = [p for one in optimizers for p in params_within(one)]
    if len({*map(id, params)}) < len(params):
        params = list({id(p): p for p in params}.values())
    return [g for p in params if (g := p.grad) is not None]


def _seen(gradients: list[Tensor]) -> _Seen:
    return [(weakref.ref(g), version(g)) for g in gradients]


def _are(seen: _Seen, gradients: list[Tensor]) -> bool:
    """Return True if these are the gradients that were seen, and none was written since."""
    return len(seen) == len(gradients) and all(
        find() is g and before == version(g)
        for (find, before), g in zip(seen, gradients, strict=True)
    )


def _sum(gradients: list[Tensor]) -> Tensor:
    """Return the sum of the squares of gradients, whole ones, of which some may be shards."""
    total = _sum_of_words(gradients)
    for g, residual in zip(gradients, STORE.of(gradients), strict=True):
        if residual is not None and residual.is_present(g):
            total = total + _of_low_words(g, residual).to(total)
    return total


def _of_low_words(gradient: Tensor, residual: Residual) -> Tensor:
    """Return how much larger the sum of squares is with the low words of a gradient."""
    wide = WIDER[gradient.dtype]
    whole = join_in(wide, residual.storage, gradient, *residual.components)
    return ((whole - gradient) * (whole + gradient)).sum()


def _sum_of_words(gradients: list[Tensor]) -> Tensor:
    if PLAIN.issuperset(map(type, gradients)) and len({g.device for g in gradients}) < 2:
        return sum_of_squares(gradients)
    parts: dict[Any, list[Tensor]] = {}
    for g in gradients:
        shard = shard_of(g)
        parts.setdefault((shard.device, *_reduced_over(g)), []).append(shard)
    sums = []
    for (_, *groups), tensors in parts.items():
        one = sum_of_squares(tensors)
        for group in groups:
            torch.distributed.all_reduce(one, group=group)
        sums.append(one)
    if not sums:
        return sum_of_squares([])
    if len({one.device for one in sums}) > 1:
        sums = [one.cpu() for one in sums]
    first, *others = sums
    for one in others:
        first = first + one.to(first.dtype)
    return first


def _reduced_over(gradient: Tensor) -> Iterator[Any]:
    """Yield the process groups over which the shards of a gradient are added up."""
    if not is_sharded(gradient):
        return
    sharded: Any = gradient
    if is_partial(gradient):
        raise UnsupportedError(
            f"clip_grad_norm: a gradient is {placed(gradient)}, yet to be reduced; redistribute it "
            "before the step. Nothing was written"
        )
    for dim, placement in enumerate(sharded.placements):
        if not placement.is_replicate():
            yield sharded.device_mesh.get_group(dim)
