"""Steps that note which elements of parameters they change.

Kernels of classes set bits. What else writes a parameter in a step, a graph on joined values or an
operation that is recorded, is seen by a comparison with a copy of the parameter from before it.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from collage_fx.changes.sharded import ShardedWrites
from collage_fx.optimizer.ownership import owned_tensors, params_within
from collage_fx.runtime.errors import listed
from collage_fx.runtime.residuals.changes import Changes, changes_of, note_changes
from collage_fx.runtime.residuals.dtensor import shards_of
from collage_fx.runtime.residuals.store import STORE
from collage_fx.runtime.torch_private import _disable_current_modes

_NOTING: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Optimizers whose steps note changes -> function that finds the writes to their DTensors."""


def begin_noting(
    optimizer: Optimizer, writes: Callable[[], ShardedWrites | None] = lambda: None
) -> None:
    """Note what changes of an optimizer's parameters from now on.

    Args:
        optimizer: has them.
        writes: finds the writes to its DTensors; None if there are none.
    """
    _NOTING[optimizer] = writes
    for tensor in _shards(optimizer):
        note_changes(tensor)


def noted_parameters() -> set[int]:
    """Return the ids of all parameters of which changes are noted, of DTensors their own.

    What was written to DTensors is counted for their shards.
    """
    noting: list[tuple[Optimizer, Callable[[], ShardedWrites | None]]] = list(_NOTING.items())
    for optimizer, find in noting:
        if (writes := find()) is not None:
            writes.count(optimizer)
    return {id(p) for optimizer, _ in noting for p in params_within(optimizer)}


class NotedChanges:
    """Notes of what the steps of one optimizer change of its parameters."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = weakref.ref(optimizer)
        self.copies = False
        """True if a step that is repeated changes parameters without setting bits."""
        self.count = 0
        """The number of parameters in the last step: others are updated by other graphs."""
        self._begun: list[tuple[Tensor, Changes]] = []

    @contextmanager
    def repeated(self) -> Iterator[None]:
        """Do a step that repeats the last one, or none."""
        copied = [pair for pair in self._every() if not _sets_bits(*pair)]
        self._look(copied)
        self._begin(copied)
        try:
            yield
        finally:
            self._end()

    @contextmanager
    def in_full(self, *, traced: bool) -> Iterator[None]:
        """Do a step, of which some parameters may be copied already.

        Args:
            traced: whether Dynamo traces it; what is recorded is compared as a whole.
        """
        every = self._every()
        self._look(every)
        unnoted = [changes.unnoted for _, changes in every]
        sure = traced and len(every) == self.count
        self._begin([pair for pair in every if not (sure and _sets_bits(*pair))])
        try:
            yield
        finally:
            self._end()
        for (_, changes), before in zip(every, unnoted, strict=True):
            changes.by_copy = traced and changes.unnoted > before
        self.copies, self.count = not all([_sets_bits(*pair) for pair in every]), len(every)

    def notes(self) -> list[str]:
        """Say for a report how the changes of which parameters are noted, and in how many bytes."""
        optimizer = self.optimizer()
        if optimizer is None:
            return []
        named = [o for o in owned_tensors(optimizer) if o.owner == "param"]
        found = [(o.name, o.tensor, changes_of(o.tensor)) for o in named]
        bits = sum(c.bits.nbytes for _, _, c in found if c is not None and c.bits is not None)
        copied = [name for name, t, c in found if c is not None and not _sets_bits(t, c)]
        said = f"changes of parameters are noted in {bits:,} bytes: changed=True"
        if not copied or not bits:
            return [said]
        return [f"{said}; those of {listed(copied)} by a comparison with a copy, in each step"]

    def _every(self) -> list[tuple[Tensor, Changes]]:
        optimizer = self.optimizer()
        tensors = _shards(optimizer) if optimizer is not None else []
        return [(t, note_changes(t, whole=True)) for t in tensors]

    @_disable_current_modes()
    def _look(self, every: Iterable[tuple[Tensor, Changes]]) -> None:
        """Notice what was written before the step."""
        for tensor, changes in every:
            if changes.before is None:
                changes.look(tensor, STORE.get(tensor))

    @torch.no_grad()
    @_disable_current_modes()
    def _begin(self, pairs: Iterable[tuple[Tensor, Changes]]) -> None:
        for tensor, changes in pairs:
            if changes.before is None:
                changes.begin(tensor)
                self._begun.append((tensor, changes))

    @torch.no_grad()
    @_disable_current_modes()
    def _end(self) -> None:
        for tensor, changes in self._begun:
            if changes.before is not None:
                changes.end(tensor)
        self._begun = []


def _shards(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of an optimizer and of those within it, of DTensors the shards."""
    return list({id(t): t for t in shards_of(params_within(optimizer))}.values())


def _sets_bits(tensor: Tensor, changes: Changes) -> bool:
    """Return True if all that writes a parameter in steps sets bits, as far as is known."""
    residual = STORE.get(tensor)
    return residual is not None and residual.changes is changes and not changes.by_copy
