"""Members: a parameter with its gradient and states, and the comparison of such."""

import operator
import weakref
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from collage_fx.compilation.layout_guards import PLAIN, STRIDED, layout
from collage_fx.runtime.kernels.argument_table import check_sizes
from collage_fx.runtime.residuals.dtensor import (
    is_partial,
    shard_of,
    sharding_of,
    shards_of,
)
from collage_fx.runtime.residuals.store import STORE

GRAD = 1
"""Position of the gradient among a member's tensors."""
NO_STATE: dict[str, Any] = {}


class Member:
    """A parameter with its gradient and its states; of DTensors, the shards of this process.

    A step that updates each element by itself does to a DTensor what it does to the shards.
    """

    def __init__(self, param: Tensor, optimizer: Optimizer) -> None:
        self.whole = param
        self.state: dict[str, Any] = optimizer.state.get(param, NO_STATE)

    @property
    def param(self) -> Tensor:
        """The parameter; of a DTensor the shard."""
        return shard_of(self.whole)

    def tensors(self) -> list[Any]:
        """Return the tensors, in an order that members of a class have in common."""
        return shards_of([self.whole, self.whole.grad, *self.state.values()])

    def check(self) -> None:
        """Raise CollageError if the gradient or a state has not as many elements."""
        full = (t for t in self.tensors() if isinstance(t, Tensor) and t.dim())
        check_sizes([t.numel()] for t in full)

    def is_sharded_alike(self) -> bool:
        """Return True if a step that updates each element by itself does so to the shards too."""
        own = sharding_of(self.whole)
        full = (t for t in (self.whole.grad, *self.state.values()) if t.dim())
        return all(sharding_of(t) == own for t in full) and not is_partial(self.whole)

    def kind(
        self, values: Sequence[Any], held: Collection[torch.dtype], *, shaped: bool = False
    ) -> Hashable | None:
        """Return in what members of a class agree, but for sizes; None for what is in no class.

        Args:
            values: its `tensors`.
            held: the dtypes of states that may be compensated; others need no class.
            shaped: whether they agree in shapes and strides too, since a step does more than to
                update each element by itself.
        """
        p: Tensor = values[0]
        if not (PLAIN.issuperset(map(type, values)) and STRIDED.issuperset(map(layout, values))):
            return None
        wholes = (self.whole, self.whole.grad, *self.state.values())
        by_shards = not all(map(operator.is_, values, wholes))
        if by_shards and (shaped or not self.is_sharded_alike()):
            return None
        if not p.dim() or p.is_complex():
            return None
        if not (p.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(p)):
            return None
        shape, stride, device, holds = p.shape, p.stride(), p.device, False
        facts: list[Hashable] = [device]
        for at, t in enumerate(values):  # in one loop: it is asked of each tensor after each load
            full = t.dim() > 0
            alike = shaped or not full or (t.shape == shape and t.stride() == stride)
            if not alike or t.device != device:
                return None
            holds |= full and at != GRAD and t.dtype in held
            facts.append((type(t), t.dtype, full, t.requires_grad))
        layouts = [(*t.shape, *t.stride()) for t in values] if shaped else ()
        return (*facts, *layouts, *self.state) if holds else None

    def storages(self) -> tuple[str, ...]:
        """Return the storages of the residuals of its tensors; empty for those without."""
        found = STORE.of([t for t in self.tensors() if isinstance(t, Tensor)])
        return tuple("" if r is None else r.storage for r in found)

    def finder(self, at: int) -> Callable[[Any], Tensor | None]:
        """Return the function that finds one of its tensors, whatever the arguments of a graph."""
        reference = weakref.ref(self.tensors()[at] if at != GRAD else self.whole)
        if at != GRAD:
            return lambda args: reference()
        return lambda args: None if (p := reference()) is None else shard_of(p.grad)


Members: TypeAlias = list[list[tuple[Member, list[Any]]]]
"""The parameters of each group of an optimizer, those without gradient too, with their tensors."""


def members_of(optimizer: Optimizer) -> Members:
    """Return the parameters of an optimizer."""
    groups = [[Member(p, optimizer) for p in group["params"]] for group in optimizer.param_groups]
    return [[(member, member.tensors()) for member in group] for group in groups]
