"""The residuals of a compiled graph's states, found anew at each call."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from torch import Tensor
from torch.optim import Optimizer

from collage_fx.compilation.session import Session
from collage_fx.optimizer.checkpoints import state_dicts
from collage_fx.optimizer.ownership import Owned, owners_of
from collage_fx.optimizer.parameter_names import naming
from collage_fx.passes.ir.program import Carried, StatePlan, goes_on
from collage_fx.runtime.residuals.residual import Residual, Sums, clear_stale, settle_at_end
from collage_fx.runtime.residuals.store import STORE
from collage_fx.runtime.storage.registry import STORAGES

Locate: TypeAlias = Callable[[tuple[Any, ...]], Tensor | None]
"""Function that finds a tensor from the arguments of a call."""


@dataclass
class Gathered:
    """The residuals of one call."""

    current: list[tuple[Tensor, Residual]]
    """States with residuals that the graph reads and writes, each with its residual."""
    replaced: list[tuple[Tensor, Residual]]
    """States with residuals that the graph overwrites without compensation."""
    read: Sequence[tuple[Tensor, Residual]] = ()
    """States with residuals that the graph only reads."""
    bits: Sequence[Tensor | None] = ()
    """Bits of the changes of each current state, None if the graph sets none; empty if it sets
    none at all."""

    @property
    def inputs(self) -> list[Tensor]:
        """The inputs of the graph that they are: residuals, each with its bits behind it."""
        read = [c for _, r in self.read for c in r.components]
        if not self.bits:
            return [c for _, r in self.current for c in r.components] + read
        pairs = zip(self.current, self.bits, strict=True)
        return [x for (_, r), b in pairs for x in (*r.components, b) if x is not None] + read

    @property
    def leaves_unnoted(self) -> bool:
        """True if the graph sets no bits for changes of a state that another graph sets."""
        set_ = self.bits or [None] * len(self.current)
        pairs = zip(self.current, set_, strict=True)
        return any([r.changes is not None and bits is None for (_, r), bits in pairs])

    def settle(self) -> None:
        """Record, after the step, that the residuals belong to what was written."""
        for tensor, residual in self.replaced:
            # A value taken over from another tensor: what the old one had beside it is gone too.
            residual.clear()
            residual.settle(tensor)
        self.keep()

    def keep(self) -> None:
        """Record that nothing was written, whatever versions AOTAutograd has counted up."""
        for (tensor, residual), bits in zip(self.current, self.bits, strict=bool(self.bits)):
            if bits is not None and residual.changes is not None:
                residual.changes.noted(tensor)
        settle_at_end(self.current)
        # What is only read belongs to it as it did, unless versions tell nothing.
        settle_at_end([(t, r) for t, r in self.read if r.renewed is not False or r.version < 0])


def of_size(plan: StatePlan, tensor: Tensor) -> StatePlan:
    """Return the verdict on a state for one of the size of a tensor."""
    size = STORAGES[plan.storage].residual_bytes(tensor) if plan.compensated else 0
    return replace(plan, shape=tuple(tensor.shape), residual_bytes=size)


def is_lasting(residual: Residual, state: StatePlan) -> bool:
    """Return True if a graph with this verdict on a state leaves alone what its residual holds.

    The verdict on a state that the graph does not change says nothing of those that do.
    """
    unchanged = state.change.kind == "unchanged"
    return not residual.provisional or (unchanged and residual.has_content())


def conclude(state: StatePlan, tensor: Tensor) -> None:
    """Keep or drop the residual that a state was made with, now that there is a verdict."""
    residual = STORE.get(tensor)
    if residual is not None and not is_lasting(residual, state):
        residual.provisional = not (state.compensated or state.refused)
        if residual.provisional and not state.replaced:
            STORE.drop(tensor)


@dataclass
class Residuals:
    """Binding of a graph's states to their residuals, found at each call; see `SideInputs`."""

    session: Session
    carried: list[Carried]
    locate: list[Locate]
    others: list[Locate]
    """Functions that find the 16-bit states which this graph writes without compensation."""
    plan: dict[int, StatePlan]
    """The verdicts by the positions of the states."""
    introduced: bool = False
    """True once the optimizers of the graph's states have been searched for."""
    ensured: tuple[int, list[int]] = (-1, [])
    """The generation of the store in the last call, and the ids of the residuals of then, for as
    long as it is the same: a graph that is not called any more must not keep them alive."""

    def gather(self, args: tuple[Any, ...]) -> "Gathered":
        """Find the residuals for a call and make sure that each belongs to its tensor."""
        tensors = [tensor for f in self.locate if (tensor := f(args)) is not None]
        found, generation = STORE.of(tensors), STORE.generation
        pairs = zip(tensors, found, strict=True)
        clear_stale([(t, r) for t, r in pairs if r is not None], self.named)
        known = [r is not None or c.gradient for r, c in zip(found, self.carried, strict=False)]
        ownerless = [] if self.introduced and all(known) else self._introduce(tensors)
        self.introduced = True
        if self.ensured != (generation, list(map(id, found))):
            found = [
                self._ensure(tensor, c, residual)
                for tensor, c, residual in zip(tensors, self.carried, found, strict=True)
            ]
            self.ensured = STORE.generation, list(map(id, found))
        current = [(t, r) for t, r in zip(tensors, found, strict=True) if r is not None]
        for tensor in ownerless:
            STORE.share_by_memory(tensor)
        if generation != STORE.generation:  # some were laid out anew
            clear_stale(current, self.named)
        written = [tensor for f in self.others if (tensor := f(args)) is not None]
        replaced: Any = zip(written, STORE.of(written), strict=True)
        replaced = [(t, r) for t, r in replaced if r is not None]
        count = self.count_written
        current, read = current[:count], current[count:]
        for c, (_, residual) in zip(self.carried[count:], read, strict=True):
            if c.gradient and residual.sums is None:  # a user's, by load_residuals
                residual.sums = Sums()
            if residual.sums is not None:
                residual.sums.read = True
        changed = self.session.config.changed
        bits = STORE.bits_for(current, self.carried[:count]) if changed else ()
        return Gathered(current, replaced, read, bits)

    def _ensure(self, tensor: Tensor, carried: Carried, found: Residual | None) -> Residual:
        """Return the residual of a state as the graph takes it, given the one that it has."""
        storage, name = self.storage_for(carried), carried.state_name
        if carried.gradient and found is None:
            return Residual.of_none(tensor, storage, name)
        return STORE.ensure(tensor, storage, name, found, carried.place)

    @property
    def reads_others(self) -> bool:
        """True if there are states that the graph only reads."""
        return self.count_written < len(self.carried)

    @functools.cached_property
    def count_written(self) -> int:
        """The number of states that the graph writes; those that it only reads come last."""
        return sum(not self._is_read(c) for c in self.carried)

    def _is_read(self, carried: Carried) -> bool:
        """Return True for a state that the graph only reads, or a gradient that it zeroes."""
        plan = self.plan.get(carried.index)
        return plan is None or (carried.gradient and not plan.compensated)

    @functools.cached_property
    def named(self) -> Callable[[str], str]:
        """Gives the states of an optimizer, in a text, the names of its parameters."""
        return naming(self.session.optimizer)

    def storage_for(self, carried: Carried) -> str:
        """Return the storage of a state: by its verdict, or as it is where it is only read."""
        return carried.present if self._is_read(carried) else self.plan[carried.index].storage

    def keeps_otherwise(self, args: tuple[Any, ...]) -> bool:
        """Return True if a state has a residual in which it is to go on, of another storage."""
        states = [
            (t, c)
            for find, c in zip(self.locate, self.carried, strict=True)
            if (t := find(args)) is not None
        ]
        found = zip(states, STORE.of([t for t, _ in states]), strict=True)
        choice = self.session.config.storage
        return any(
            r is not None
            and r.storage != self.storage_for(c)
            and (self._is_read(c) or goes_on(choice, t.dtype, r.storage))
            for (t, c), r in found
        )

    def _introduce(self, tensors: list[Tensor]) -> list[Tensor]:
        """Attach the optimizers of tensors that are seen for the first time; return the others."""
        owners = owners_of(self.session.optimizers())
        found: list[tuple[Optimizer, Owned]] = []
        ownerless: dict[str, Tensor] = {}
        for tensor, c in zip(tensors, self.carried, strict=True):
            if id(tensor) in owners:
                found.append(owners[id(tensor)])
                # Known only now, for a state that Dynamo passes as an argument.
                c.state_name = found[-1][1].state_name
                if c.index in self.plan:
                    self.plan[c.index].state_name = c.state_name
            elif not c.gradient and STORE.get(tensor) is None and not STORE.share(tensor):
                ownerless[c.name] = tensor
        for owner in {id(owner): owner for owner, _ in found}.values():
            state_dicts.attach(owner)
        self.session.warn_ownerless(list(ownerless))
        return list(ownerless.values())
