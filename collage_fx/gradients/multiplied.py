"""Gradients that a step has multiplied: nothing in it reads them in another way."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from collage_fx.runtime.errors import UnsupportedError
from collage_fx.runtime.residuals.dtensor import shard_of
from collage_fx.runtime.residuals.memory import has_memory

FACTOR = "_collage_factor"
"""Attribute of an optimizer within a step: the 0-d tensor that gradients are multiplied with."""
MULTIPLIED = "_collage_multiplied"
"""Attribute of an optimizer within a step: `Multiplied`, of the same step."""


class Multiplied:
    """Gradients that a recorded step has products of, and reads nowhere else."""

    def __init__(self) -> None:
        self.storages: dict[int, StorageWeakRef] = {}
        self.factors: set[int] = set()
        """The storages of what they are multiplied by."""
        self.flush: Callable[[], object] = lambda: None
        """Function that has done what was recorded so far."""
        self.renew: Callable[[], object] = lambda: None
        """Function that computes the factor anew, where hooks may have written gradients since."""

    def __reduce__(self) -> Any:
        """Return constructor and arguments of a copy, as of an optimizer within its step."""
        return Multiplied, ()

    def note(self, gradient: Tensor, factor: Tensor) -> None:
        """Note a gradient of which a product is made."""
        shard = shard_of(gradient)
        if has_memory(shard):
            storage = shard.untyped_storage()
            self.storages[storage._cdata] = StorageWeakRef(storage)
            self.factors.add(factor.untyped_storage()._cdata)

    def refuse(self, func: Any, read: Iterable[Tensor], where: Callable[[], str]) -> None:
        """Raise UnsupportedError if an operation reads a gradient that is to be multiplied.

        Args:
            func: the operation.
            read: its operands, but for those that it overwrites.
            where: returns the line of code that calls it.
        """
        keys = {t.untyped_storage()._cdata for t in read if has_memory(t)}
        found = map(self.storages.get, keys)
        if not any(storage is not None and not storage.expired() for storage in found):
            return
        if func is torch.ops.aten.mul.Tensor and not keys.isdisjoint(self.factors):
            return
        raise UnsupportedError(
            f"clip_grad_norm: {func} reads the memory of a gradient, though not by way of p.grad, "
            f"at {where()}, so that it would not be clipped: clip the gradients before the step"
        )
