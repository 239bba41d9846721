"""Discovery of the states that a step may carry."""

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from collage_fx.config import CollageConfig
from collage_fx.optimizer.checkpoints.history import history_of
from collage_fx.optimizer.ownership import (
    STAND_IN,
    Owned,
    all_tensors_of,
    compensable,
    family,
    groups_of,
    identities,
    owned_tensors,
    params_of,
    state_count,
    stateless,
)
from collage_fx.optimizer.parameter_names import names_of
from collage_fx.passes.ir.program import LOW_PRECISION, Carried, compensable_in
from collage_fx.runtime.errors import ResidualError, Warn, listed
from collage_fx.runtime.residuals.store import STORE
from collage_fx.runtime.storage.registry import FINEST, check_compensable


class FunctionStates:
    """The tensors among the arguments of a function, which may be its states."""

    def __init__(self, arguments: Callable[[], Iterable[Owned]]) -> None:
        self.all = arguments
        self.counted = 0

    def find(self, pick: Callable[[Owned], bool], warn: Warn) -> list[Owned]:
        """Return the states that may be compensated; see `compensable`."""
        self.counted = self.count()
        return compensable(self.all(), pick, warn)

    def count(self) -> int:
        """Return a number that changes when a state is made."""
        return 0

    def identities(self) -> list[int]:
        """Return numbers that change when another tensor takes the place of a state."""
        return []

    def changed(self) -> bool:
        """Return True if a state was made since they were looked for."""
        return self.count() != self.counted

    def place_numbers(self, *, traced: bool, once: bool) -> None:
        """Have step counts where a step reads them without waiting; a function has none.

        Args:
            traced: whether Dynamo traces it.
            once: whether it does not for this once only.
        """


class OptimizerStates(FunctionStates):
    """The tensors of an optimizer: parameters, their states, and those it keeps elsewhere."""

    def __init__(self, optimizer: Callable[[], Optimizer]) -> None:
        super().__init__(lambda: all_tensors_of(optimizer()))
        self.optimizer = optimizer
        self.placed: Any = None
        """The numbers that are back on the host: Dynamo moves them, and so may a checkpoint."""
        self.dtypes: list[tuple[int, torch.dtype]] = []
        """The ids of the parameters in the last step, with their dtypes."""

    def check_dtypes(self) -> None:
        """Raise ResidualError before a step if a parameter has another dtype than in the last one.

        Moments stay as they are, and a residual is of no other dtype. Who has changed them too
        goes on.
        """
        optimizer = self.optimizer()
        params = params_of(optimizer)
        dtypes = [(id(p), p.dtype) for p in params]
        before, self.dtypes = self.dtypes, dtypes
        if before in ([], dtypes):
            return
        old = dict(before)
        changed = [i for i, (p, dtype) in enumerate(dtypes) if old.get(p, dtype) is not dtype]
        changed = [i for i in changed if not _states_have(optimizer, params[i])]
        if changed:
            self.dtypes = before
            owned = [o for o in owned_tensors(optimizer) if o.owner == "param"]
            names, first = names_of(optimizer), dtypes[changed[0]]
            called = [names.get(owned[i].name, owned[i].name) for i in changed]
            raise ResidualError(
                f"{listed(called)} of {type(optimizer).__name__} had {old[first[0]]} in the last "
                f"step, and has {first[1]} now, as after model.to(dtype); moments and residuals "
                "are those of the dtype before. Nothing was done. Give the model that dtype again; "
                "to change it take whole values first, by master_state_dict(model, optimizer), and "
                "make a new optimizer"
            )

    def count(self) -> int:
        """Return a number that changes when a state is made."""
        return state_count(self.optimizer())

    def identities(self) -> list[int]:
        """Return numbers that change when another tensor takes the place of a state."""
        return identities(self.optimizer())

    def place_numbers(self, *, traced: bool, once: bool) -> None:
        """Have step counts where a step reads them without waiting."""
        self._note_numbers()
        on_host = history_of(self.optimizer()).on_host
        if traced:
            self.placed = None
        elif not once and self.placed is not on_host:
            self._return_numbers()
            self.placed = on_host

    def _note_numbers(self) -> None:
        """Note, before the first step, which numbers plain PyTorch has on the host.

        Dynamo sets `capturable` and moves step counts to the device, where its graphs read them.
        """
        optimizer = self.optimizer()
        history = history_of(optimizer)
        if history.on_host is None:
            found = _groups(optimizer)
            history.on_host = [(g.get("capturable"), _on_host(one, g)) for one, g in found]

    def _return_numbers(self) -> None:
        """Undo that for steps without Dynamo, which would wait for the device at each of them."""
        optimizer = self.optimizer()
        noted = history_of(optimizer).on_host or ()  # of the groups that there were then
        for (one, group), (capturable, names) in zip(_groups(optimizer), noted, strict=False):
            if group.get("capturable"):
                group["capturable"] = capturable
            for state in _states(one, group) if names else ():
                for name in names:
                    if name in state and not state[name].is_cpu:
                        state[name] = _moved_to_host(state[name])


def _states_have(optimizer: Optimizer, param: Tensor) -> bool:
    """Return True if a parameter has states, and these have its dtype."""
    state = optimizer.state.get(param, {})
    found = [x.dtype for x in state.values() if isinstance(x, Tensor) and x.dim()]
    return bool(found) and all(dtype is param.dtype for dtype in found)


def _groups(optimizer: Optimizer) -> Iterator[tuple[Optimizer, dict[str, Any]]]:
    return ((one, group) for one in family(optimizer) for group in groups_of(one))


def _states(optimizer: Optimizer, group: dict[str, Any]) -> list[dict[str, Any]]:
    found = (optimizer.state.get(p) for p in group["params"])
    return [state for state in found if isinstance(state, dict)]


def _on_host(optimizer: Optimizer, group: dict[str, Any]) -> list[str]:
    """Return the names of 0-d states on the host, of parameters that are elsewhere."""
    far = next((p for p in group["params"] if not p.is_cpu), None)
    if far is None:
        return []
    states = _states(optimizer, group) or [_made_for_one_like(far, optimizer, group)]
    named = (item for state in states for item in state.items())
    return sorted({k for k, v in named if isinstance(v, Tensor) and not v.dim() and v.is_cpu})


def _made_for_one_like(param: Tensor, optimizer: Optimizer, group: dict[str, Any]) -> Any:
    """Return the states that a class of torch.optim makes of a parameter; {} for other classes."""
    if init_of_torch(optimizer) is None:
        return {}
    twin = object.__new__(type(optimizer))
    p = torch.zeros(1, dtype=param.dtype, device=param.device, requires_grad=True)
    p.grad = torch.zeros_like(p)
    vars(twin).update(vars(optimizer), state=defaultdict(dict), **{STAND_IN: True})
    with torch.no_grad():
        init_states(twin, [{**group, "params": [p]}])
    return twin.state[p]


def _moved_to_host(number: Tensor) -> Tensor:
    moved, residual = number.cpu(), STORE.get(number)
    if residual is not None:
        lows = tuple(low.cpu() for low in residual.components)
        STORE.adopt(moved, lows, residual.storage, residual.name).draws = residual.draws
    return moved


class StateStorage:
    """Choice of the storage for states that are written outside Dynamo's graphs."""

    def __init__(self, config: CollageConfig, warn: Warn) -> None:
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
        """Return True if a state may be compensated; warn of one that was and is not any more."""
        tensor = owned.tensor
        if tensor.dtype in LOW_PRECISION or tensor.dtype not in FINEST:
            return tensor.dtype in LOW_PRECISION
        found = bool(self.compensable_in(owned))
        if not found and STORE.get(tensor) is not None:
            STORE.drop(tensor)
            self.dropped = self.dropped or owned.name
            self.warn(
                "residual-dropped",
                f"residuals are dropped, the first of them that of {self.dropped}: this step "
                f"leaves states of {tensor.dtype} as they are; compile it with "
                f"storage={FINEST[tensor.dtype]!r}",
            )
        return found

    def compensable_in(self, owned: Owned) -> str:
        """Return the storage for a state, if it can hold it or not; empty to leave it alone."""
        residual = STORE.get(owned.tensor)
        carried = Carried(-1, owned.state_name, owned.owner, False, owned.tensor)
        carried.present = "" if residual is None else residual.storage
        return compensable_in(carried, self.config.storage)


def init_of_torch(optimizer: Optimizer) -> Callable[..., Any] | None:
    """Return the method by which a class of torch.optim makes its states before a step.

    Dynamo calls it once, in place of tracing it. None for an `_init_group` of others, which may do
    more: see docs/stock-defects.md.
    """
    init: Any = getattr(optimizer, "_init_group", None)
    function = init
    while _module(function).startswith("torch._dynamo"):  # which has disabled it, in its place
        function = getattr(function, "__wrapped__", None)
    return init if _module(function).startswith("torch.optim.") else None


def _module(function: Any) -> str:
    """Return the module that a function stands in, whatever it says of itself."""
    name: str = getattr(function, "__globals__", {}).get("__name__", "")
    return name


def makes_states(optimizer: Optimizer) -> bool:
    """Return True if a step is the first and will make states itself, as far as can be foreseen.

    Of torch.optim's classes only SGD's momentum is left for the step to make, since Dynamo calls
    `_init_group` before. Of others the code tells: it names `state`.
    """
    if state_count(optimizer) or not stateless(optimizer):
        return False
    if init_of_torch(optimizer) is not None:
        return isinstance(optimizer, SGD) and any(g["momentum"] for g in groups_of(optimizer))
    methods = (type(optimizer).step, getattr(type(optimizer), "_init_group", None))
    codes = (getattr(inspect.unwrap(m), "__code__", None) for m in methods if m is not None)
    return any("state" in getattr(code, "co_names", ()) for code in codes)


def init_states(optimizer: Optimizer, groups: Iterable[dict[str, Any]]) -> None:
    """Make the states of one of torch.optim's classes that a step would begin by making."""
    for group in groups:
        if any([p.grad is not None and not optimizer.state.get(p) for p in group["params"]]):
            init = optimizer._init_group  # type: ignore[attr-defined]
            lists = len(inspect.signature(init).parameters) - 1
            init(group, *([] for _ in range(lists)))
