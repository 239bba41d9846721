"""What has written each state in a step: a graph of Dynamo's, a segment, or nobody knows what."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from collage_fx.optimizer.ownership import Owned
from collage_fx.optimizer.served import Served
from collage_fx.passes.ir.program import StatePlan
from collage_fx.record.service import Service
from collage_fx.runtime.residuals.memory import has_memory
from collage_fx.runtime.residuals.store import version
from collage_fx.segments.memory import storage_key
from collage_fx.segments.trie import layout_of


@dataclass(eq=False)
class _Account:
    """One state in a step."""

    served: Served
    """What has served it in all steps."""
    version: int | None
    """Its version at the beginning of the step; None for one that was not there."""

    def changed(self, tensor: Tensor) -> bool:
        """Tell whether something has written it in this step."""
        return self.version is not None and version(tensor) != self.version


@dataclass(eq=False)
class Accounts:
    """Accounts for all states that a step writes."""

    service: Service
    """Keeps the record of all steps."""
    of_tensor: dict[int, _Account] = field(default_factory=dict)
    of_memory: dict[Any, _Account] = field(default_factory=dict)
    """The same by memory: a graph may write p.detach() in the place of p."""
    places: set[Any] = field(default_factory=set)
    """Those that had a state when the step began."""
    by_graph: dict[int, tuple[Tensor, StatePlan]] = field(default_factory=dict)
    """What Dynamo's graphs have written in this step, with its verdict."""

    def begin(self, states: Sequence[Owned]) -> None:
        """Begin a step with these states."""
        self.of_tensor = {
            id(o.tensor): _Account(self.service.of(o), version(o.tensor)) for o in states
        }
        self.places = {o.place for o in states}

    def begin_again(self, states: Iterable[Tensor]) -> None:
        """Begin a step with the states of the last one."""
        for tensor in states:
            self.of_tensor[id(tensor)].version = version(tensor)

    def take_up(self, states: Sequence[Owned]) -> list[Owned]:
        """Know these states at the end of a step; return those that were not there before."""
        before = self.of_tensor
        new = [o for o in states if id(o.tensor) not in before]
        self.of_tensor = {
            id(o.tensor): before.get(id(o.tensor)) or _Account(self.service.of(o), None)
            for o in states
        }
        self.of_memory = {_memory(o.tensor): self.of_tensor[id(o.tensor)] for o in states}
        return new

    def not_by_graphs(self, states: Iterable[Owned]) -> list[Owned]:
        """Return the states that no graph has written in this step."""
        by_graph = {_memory(tensor) for tensor, _ in self.by_graph.values()}
        return [o for o in states if _memory(o.tensor) not in by_graph]

    def unaccounted(self, states: Iterable[Tensor]) -> list[str]:
        """Count and name those of these states that something has written nevertheless."""
        names = []
        for tensor in states:
            account = self.of_tensor[id(tensor)]
            if account.changed(tensor):
                account.served.unaccounted += 1
                names.append(account.served.name)
        return names

    def count_graphs(self) -> None:
        """Count what graphs have written in this step."""
        self.service.written = []
        for key, (tensor, plan) in self.by_graph.items():
            account = self.of_tensor.get(key) or self.of_memory.get(_memory(tensor))
            served = account.served if account else self.service.unknown(tensor, plan)
            self.service.written.append(served)
            self.service.count_graph(served, plan)


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    return memory_key(tensor), layout_of(tensor)


def memory_key(tensor: Tensor) -> int:
    """Return the storage of a tensor as a key; 0 for one without memory."""
    return storage_key(tensor) if has_memory(tensor) else 0
