"""Which states the steps have: looked for anew only where something has changed."""

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from torch import Tensor

from collage_fx.optimizer.discovery import FunctionStates, StateStorage
from collage_fx.optimizer.ownership import Owned
from collage_fx.runtime.residuals.store import STORE
from collage_fx.segments.memory import memory_key


@dataclass(eq=False)
class KnownStates:
    """The states of an optimizer or function that may be compensated.

    What there was when they were looked for must not be kept alive.
    """

    discovery: FunctionStates
    storages: StateStorage
    """Tells which of them may be compensated."""
    warn: Callable[[str], None]
    generation: int = -1
    """That of the store when they were looked for."""
    memory: list[int] = field(default_factory=list)
    """The storage of each tensor that there was then."""
    tensors: list[weakref.ref[Tensor]] = field(default_factory=list)
    states: list[int] = field(default_factory=list)
    """Which of the tensors may be compensated."""

    def find(self) -> list[Owned]:
        """Return the states that there are now: those of before, if all tensors are the same."""
        found = list(self.discovery.all())
        memory = [memory_key(o.tensor) for o in found]
        same = (STORE.generation, memory) == (self.generation, self.memory) and all(
            tensor() is o.tensor for tensor, o in zip(self.tensors, found, strict=True)
        )
        if not same:
            at = {id(o.tensor): i for i, o in reversed(list(enumerate(found)))}
            states = self.discovery.find(self.storages.is_compensable, self.warn)
            self.tensors = [weakref.ref(o.tensor) for o in found]
            self.states = [at[id(o.tensor)] for o in states]
            # Looking for them may have dropped residuals.
            self.generation, self.memory = STORE.generation, memory
        return [found[i] for i in self.states]

    def __len__(self) -> int:
        """Return how many were found last."""
        return len(self.states)

    def alive(self) -> Iterator[Tensor]:
        """Yield those that were found last, and are still there."""
        found = (self.tensors[i]() for i in self.states)
        return (t for t in found if t is not None)


def resumed(states: list[Owned]) -> bool:
    """Tell whether states have residuals from other steps, as of a checkpoint or a copy."""
    residuals = (STORE.get(owned.tensor) for owned in states)
    return any(r is not None and not r.provisional for r in residuals)
