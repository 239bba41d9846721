"""The states that a step may carry, as its supervisor looks for them."""

from collections.abc import Callable, Iterable

from torch.optim import Optimizer

from collage_fx.config import CollageConfig
from collage_fx.optimizer.ownership import Owned, all_tensors_of, compensable, state_count
from collage_fx.passes.ir.program import LOW_PRECISION, Carried, compensable_in
from collage_fx.runtime.residuals.store import STORE
from collage_fx.runtime.storage.registry import FINEST, check_compensable


class FunctionStates:
    """What a function is given: the tensors among its arguments."""

    def __init__(self, arguments: Callable[[], Iterable[Owned]]) -> None:
        self.all = arguments
        self.counted = 0

    def find(self, pick: Callable[[Owned], bool], warn: Callable[[str], None]) -> list[Owned]:
        """Return the states that may be compensated; see `compensable`."""
        self.counted = self.count()
        return compensable(self.all(), pick, warn)

    def count(self) -> int:
        """Return a number that changes when a state is made."""
        return 0

    def changed(self) -> bool:
        """Tell whether a state was made since they were looked for."""
        return self.count() != self.counted


class OptimizerStates(FunctionStates):
    """The tensors of an optimizer: parameters, their states, and those it keeps elsewhere."""

    def __init__(self, optimizer: Callable[[], Optimizer]) -> None:
        super().__init__(lambda: all_tensors_of(optimizer()))
        self.optimizer = optimizer

    def count(self) -> int:
        """Return a number that changes when a state is made."""
        return state_count(self.optimizer())


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
