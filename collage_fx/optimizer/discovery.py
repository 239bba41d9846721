"""The states that a step may carry, as its supervisor looks for them."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias

from torch import Tensor
from torch.optim import Optimizer

from collage_fx.config import CollageConfig
from collage_fx.optimizer.ownership import (
    PARAM,
    Owned,
    compensable,
    family,
    owned_tensors,
    state_count,
    tensors_held,
    tensors_in,
)
from collage_fx.passes.ir.program import LOW_PRECISION, Carried, compensable_in
from collage_fx.runtime.residuals.dtensor import shard_of
from collage_fx.runtime.residuals.memory import has_memory
from collage_fx.runtime.residuals.store import STORE
from collage_fx.runtime.storage.registry import FINEST, check_compensable

Pick: TypeAlias = Callable[[Owned], bool]
"""Tells which states are wanted."""


class FunctionStates:
    """What a function is given: the tensors among its arguments."""

    def __init__(self, arguments: Callable[[], Iterable[Owned]]) -> None:
        self.all = arguments
        self.counted = 0

    def find(self, pick: Pick, warn: Callable[[str], None]) -> list[Owned]:
        """Return the states that may be compensated; see `compensable`."""
        self.counted = self.count()
        return compensable(self.all(), pick, warn)

    def count(self) -> int:
        """Return a number that changes when a state is made."""
        return 0

    def changed(self) -> bool:
        """Tell whether a state was made since they were looked for."""
        return self.count() != self.counted

    def find_new(self, pick: Pick, warn: Callable[[str], None]) -> list[Owned]:
        """Return the states like that which were made since, and maybe others."""
        return self.find(pick, warn)


class OptimizerStates(FunctionStates):
    """What an optimizer holds."""

    def __init__(self, optimizer: Callable[[], Optimizer]) -> None:
        super().__init__(lambda: tensors_held(optimizer()))
        self.optimizer = optimizer
        self.recent: _Recent | None = None

    def find(self, pick: Pick, warn: Callable[[str], None]) -> list[Owned]:
        """Return the states that may be compensated; see `compensable`."""
        self.recent = None
        return super().find(pick, warn)

    def count(self) -> int:
        """Return a number that changes when a state is made."""
        return state_count(self.optimizer())

    def find_new(self, pick: Pick, warn: Callable[[str], None]) -> list[Owned]:
        """Return the states like that which were made since, and maybe others.

        A step that makes its states asks for each: all are looked at the first time only.
        """
        before, self.counted = self.counted, self.count()
        if self.recent is not None:
            found = self.recent.find(self.counted - before, pick)
            if found is not None:
                return found
        low = self.find(pick, warn)
        self.recent = _Recent(self.optimizer(), low)
        return low


class _Recent:
    """Finds states among the newest entries of an optimizer's `state`."""

    def __init__(self, optimizer: Optimizer, low: list[Owned]) -> None:
        self.states = optimizer.state if len(family(optimizer)) == 1 else {}
        self.params = {id(o.tensor): o for o in owned_tensors(optimizer) if o.key == PARAM}
        self.sizes = {id(p): len(state) for p, state in self.states.items()}
        self.known = {id(o.tensor): o.tensor for o in low}
        self.memory = {_memory(o.tensor) for o in low}

    def find(self, count: int, pick: Pick) -> list[Owned] | None:
        """Return the tensors in the last entries; None if it takes a look at all there are.

        Args:
            count: how much `state_count` has grown by them.
            pick: which of them are wanted.
        """
        found = []
        for p, state in reversed(self.states.items()):
            if count <= 0:
                break
            param = self.params.get(id(shard_of(p)))
            if param is None or not isinstance(state, dict):
                return None
            count -= len(state) - self.sizes.get(id(p), 0)
            self.sizes[id(p)] = len(state)
            found += [o for o in _states_of(param, state, pick) if id(o.tensor) not in self.known]
        memory = {_memory(o.tensor) for o in found}
        if count or len(memory) < len(found) or memory & self.memory:
            return None
        self.known |= {id(o.tensor): o.tensor for o in found}
        self.memory |= memory
        return found


def _states_of(param: Owned, state: dict[str, object], pick: Pick) -> Iterator[Owned]:
    for key, tensor in tensors_in(state):
        name = f"{key} of {param.name}"
        owned = Owned(shard_of(tensor), param.group, param.param, key, name)
        if has_memory(owned.tensor) and pick(owned):
            yield owned


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class StateStorage:
    """Chooses the storage of states that are written outside the graphs of Dynamo."""

    def __init__(self, config: CollageConfig, warn: Callable[[str], None]) -> None:
        self.config = config
        self.warn = warn
        self.dropped = ""
        """The name of the first state whose residual was dropped."""

    def storage(self, owned: Owned) -> str:
        """Return the storage for a state.

        Raises StorageError for a parameter that it cannot hold. Another state may not need it.
        """
        storage = self.compensable_in(owned)
        if owned.owner == "param":
            check_compensable(owned.tensor.dtype, storage, owned.name)
        return storage

    def is_compensable(self, owned: Owned) -> bool:
        """Tell whether a state may be compensated; warn of one that was and is not any more."""
        tensor = owned.tensor
        if tensor.dtype in LOW_PRECISION or tensor.dtype not in FINEST:
            return tensor.dtype in LOW_PRECISION
        found = bool(self.compensable_in(owned))
        if not found and STORE.get(tensor) is not None:
            STORE.drop(tensor)
            self.dropped = self.dropped or owned.name
            self.warn(
                f"residuals are dropped, the first of them that of {self.dropped}: this step "
                f"leaves states of {tensor.dtype} as they are; compile it with "
                f"storage={FINEST[tensor.dtype]!r}"
            )
        return found

    def compensable_in(self, owned: Owned) -> str:
        """Return the storage for a state, if it can hold it or not; empty to leave it alone."""
        residual = STORE.get(owned.tensor)
        carried = Carried(-1, owned.name, owned.owner, False, owned.tensor)
        carried.present = "" if residual is None else residual.storage
        return compensable_in(carried, self.config.storage)
