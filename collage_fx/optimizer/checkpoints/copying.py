"""Residuals in copies of an optimizer, made by `copy.deepcopy` or by pickling."""

import copy
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from collage_fx.optimizer.checkpoints.history import History, history_of, set_history
from collage_fx.optimizer.checkpoints.own_methods import OwnMethod
from collage_fx.optimizer.checkpoints.places import hand_on
from collage_fx.optimizer.ownership import compensated_tensors
from collage_fx.optimizer.plain_steps import watch_copy
from collage_fx.runtime.residuals.dtensor import shard_of
from collage_fx.runtime.residuals.store import STORE
from collage_fx.runtime.storage.state_name import StateName

_HOOKS = (
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)
_STATE = "__getstate__"


def carry_over(optimizer: Optimizer) -> None:
    """Let copies of the optimizer have its residuals from now on. Idempotent.

    Python asks an object for its state under this name. What Optimizer gives is parameters, groups
    and states, so that nothing else that is kept beside them would be copied.
    """
    if not isinstance(vars(optimizer).get(_STATE), _State):
        vars(optimizer)[_STATE] = _State(optimizer)


class _State:
    """Replacement of `optimizer.__getstate__`, whose state gives copies their residuals."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = weakref.ref(optimizer)

    def __call__(self) -> Any:
        """Return the state of the class, with what puts the residuals into a copy."""
        optimizer = self.optimizer()
        assert optimizer is not None, "an optimizer is copied that is no more"
        state = type(optimizer).__getstate__(optimizer)
        if not isinstance(state, dict) or not any(True for _ in _residuals(optimizer)):
            return state
        hooks = {name: _of_ours(getattr(optimizer, name).values()) for name in _HOOKS}
        watched = {"_optimizer_step_post_hooks": watch_copy(OrderedDict())}
        own = {n: m for n, m in vars(optimizer).items() if isinstance(m, OwnMethod)}
        return {**state, **hooks, **watched, **own, "_collage_fx": _Carrier(optimizer)}


class _Carrier:
    """The last part of the state: copying it gives the copied tensors their residuals."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = weakref.ref(optimizer)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        copy_residuals(self.optimizer(), memo)

    def __reduce__(self) -> Any:
        optimizer: Any = self.optimizer()
        entries = [(t, *content) for t, content in _residuals(optimizer)]
        return _restore, (optimizer, entries, copy.deepcopy(history_of(optimizer)))


def copy_residuals(optimizer: Any, memo: dict[int, Any]) -> None:
    """Give the tensors of a deep copy the residuals that they have in the optimizer.

    Args:
        optimizer: what was copied.
        memo: of copy.deepcopy; it has the copy.
    """
    found = _residuals(optimizer)
    entries = [(copy.deepcopy(t, memo), *content) for t, content in found]
    _restore(memo[id(optimizer)], entries, copy.deepcopy(history_of(optimizer)))


def _restore(optimizer: Optimizer, entries: Iterable[Any], history: History) -> None:
    """Give the tensors of a copy, which is still being made, their residuals."""
    for tensor, name, storage, components, draws, expected in entries:
        if not isinstance(name, StateName):  # of a pickle that an earlier version has made
            name = StateName(name)
        STORE.load(
            shard_of(tensor), components, storage=storage, name=name, expected=expected, draws=draws
        )
    carry_over(optimizer)
    set_history(optimizer, history)


def _residuals(optimizer: Optimizer) -> Iterator[tuple[Tensor, tuple[Any, ...]]]:
    """Yield parameters and states with what `_restore` takes of residuals that are, or may be,
    theirs."""
    hand_on(optimizer)
    for owned, r in compensated_tensors(optimizer):
        components = r.components if r.expected is not None else r.present(owned.tensor)
        if components is not None:
            yield owned.whole, (r.name, r.storage, list(components), r.draws, r.expected)


def _of_ours(hooks: Iterable[Any]) -> "OrderedDict[Any, Any]":
    """Return the hooks of this package; not by numbers, which other hooks of a copy will get."""
    ours = [h for h in hooks if getattr(h, "__module__", "").startswith("collage_fx.")]
    return OrderedDict((f"{h.__module__}.{h.__name__}", h) for h in ours)
