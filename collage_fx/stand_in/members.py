"""A parameter with its gradient and states, and when such are alike."""

import weakref
from collections.abc import Callable, Collection, Hashable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from collage_fx.compilation.layout_guards import is_plain
from collage_fx.runtime.kernels.argument_table import check_sizes
from collage_fx.runtime.residuals.dtensor import is_partial, is_sharded, shard_of, sharding_of

GRAD = 1
"""Where a member has its gradient."""
NO_STATE: dict[str, Any] = {}


class Member:
    """A parameter with its gradient and its states; of DTensors, the shards of this process.

    A step that updates each element by itself does to a DTensor what it does to the shards.
    """

    def __init__(self, param: Tensor, optimizer: Optimizer) -> None:
        self.whole, self.param = param, shard_of(param)
        self.state: dict[str, Any] = optimizer.state.get(param, NO_STATE)

    def tensors(self) -> list[Any]:
        """Return them, in an order that members of a class have in common."""
        return [self.param, shard_of(self.whole.grad), *map(shard_of, self.state.values())]

    def check(self) -> None:
        """Raise CollageError if the gradient or a state has not as many elements."""
        full = (t for t in self.tensors() if isinstance(t, Tensor) and t.dim())
        check_sizes([t.numel()] for t in full)

    def is_sharded_alike(self) -> bool:
        """Tell whether a step that updates each element by itself does so to the shards too."""
        own = sharding_of(self.whole)
        full = (t for t in (self.whole.grad, *self.state.values()) if t.dim())
        return all(sharding_of(t) == own for t in full) and not is_partial(self.whole)

    def kind(self, held: Collection[torch.dtype], *, shaped: bool = False) -> Hashable | None:
        """Return in what members of a class agree, but for sizes; None for what is in no class.

        Args:
            held: the dtypes of states that may be compensated; others need no class.
            shaped: whether they agree in shapes and strides too, since a step does more than to
                update each element by itself.
        """
        p = self.param
        if shaped and is_sharded(self.whole):
            return None
        values = self.tensors()
        if not all(map(is_plain, values)) or not self.is_sharded_alike():
            return None
        if not p.dim() or p.is_complex():
            return None
        if not any(t.dtype in held and t.dim() for t in (p, *self.state.values())):
            return None
        if not (p.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(p)):
            return None
        alike = all(t.shape == p.shape and t.stride() == p.stride() for t in values if t.dim())
        if not (alike or shaped) or any(t.device != p.device for t in values):
            return None
        facts = ((type(t), t.dtype, t.dim() > 0, t.requires_grad) for t in values)
        layouts = ((*t.shape, *t.stride()) for t in values) if shaped else ()
        return p.device, *facts, *layouts, *self.state

    def finder(self, at: int) -> Callable[[Any], Tensor | None]:
        """Return how to find one of its tensors, whatever the arguments of a graph."""
        reference = weakref.ref(self.tensors()[at] if at != GRAD else self.whole)
        if at != GRAD:
            return lambda args: reference()
        return lambda args: None if (p := reference()) is None else shard_of(p.grad)
