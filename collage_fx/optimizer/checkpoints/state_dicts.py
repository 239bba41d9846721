"""Residuals in an optimizer's ordinary state_dict() and load_state_dict().

They are further states of their parameters there, see `saved_residuals`, and one more entry of each
parameter group, `collage_fx`, says which format that is and what else a resumed run needs to know.
Optimizers carry both along untouched, so that a checkpoint loads before the first step as well,
when nothing of this package has seen the optimizer yet, and loads into plain PyTorch.
"""

import dataclasses
import functools
import itertools
import json
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from collage_fx.optimizer.checkpoints.copying import carry_over
from collage_fx.optimizer.checkpoints.history import History, history_of, set_history
from collage_fx.optimizer.checkpoints.saved_residuals import (
    SavedResidual,
    entries_of,
    is_entry,
    read_entries,
    without_entries,
)
from collage_fx.optimizer.ownership import PARAM, owned_tensors, params_of, tensors_in
from collage_fx.runtime.errors import CheckpointError, CollageWarning, ResidualError
from collage_fx.runtime.residuals.dtensor import shard_of
from collage_fx.runtime.residuals.store import STORE, check_components, clear_stale

ENTRY = "collage_fx"
FORMAT = 2
_NEEDS = "0.1"
"""The first version of collage_fx that reads this format."""


@dataclass
class _Loaded:
    """What a state dict says of residuals."""

    residuals: dict[tuple[int, str], SavedResidual] = field(default_factory=dict)
    """(position of the parameter among all, key of the tensor) -> its residual."""
    history: History = field(default_factory=History)
    lost: bool = False
    """Whether there were residuals when it was saved, of which none has come here."""
    uncast: dict[tuple[int, Any], Tensor] = field(default_factory=dict)
    """(the same position, key of a state) -> it, where PyTorch casts it to another dtype."""


_LOADING = WeakIdKeyDictionary()
"""Optimizer -> what is loaded while its load_state_dict() runs."""

_ATTACHED = WeakIdKeyDictionary()
"""The optimizers whose checkpoints hold residuals, as a set; classes may define __eq__."""


def attach(optimizer: Optimizer) -> None:
    """Make state_dict() of the optimizer hold its residuals and load_state_dict() restore them.

    Residuals that a checkpoint has left among the states before are taken over. Copies of the
    optimizer are like it in this. Idempotent.
    """
    if optimizer in _ATTACHED or not hasattr(optimizer, "_optimizer_state_dict_post_hooks"):
        return  # the latter wraps another optimizer, and has never been an Optimizer of its own
    _ATTACHED[optimizer] = True
    carry_over(optimizer)
    if _save not in optimizer._optimizer_state_dict_post_hooks.values():  # as in a copy
        optimizer.register_state_dict_post_hook(_save)
        optimizer.register_load_state_dict_pre_hook(_before_load)
        optimizer.register_load_state_dict_post_hook(_load)
    _adopt(optimizer)


def take_up(optimizers: Iterable[Optimizer]) -> None:
    """Give residuals that checkpoints left among the states to the tensors, before any step.

    They stay there until `attach`: Dynamo may have looked at these already.
    """
    for optimizer in optimizers:
        if optimizer not in _ATTACHED and "param_groups" in vars(optimizer):
            loaded = _take_from_states(optimizer)
            if loaded is not None:
                with torch.no_grad(), _disable_current_modes():
                    _give(optimizer, loaded)


def attach_around(optimizer: Optimizer, held: list[Optimizer]) -> None:
    """Make checkpoints of an optimizer that gathers the states of others hold residuals too.

    The states that ZeroRedundancyOptimizer.consolidate_state_dict() collects have theirs; here is
    added what is in the groups, and given to the optimizers within what was loaded into them.
    """
    if optimizer not in _ATTACHED:
        _ATTACHED[optimizer] = True
        optimizer.register_state_dict_post_hook(functools.partial(_save_of_held, held))
        optimizer.register_load_state_dict_post_hook(functools.partial(_load_into_held, held))


def _save_of_held(held: list[Optimizer], optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    holds = any(STORE.get(owned.tensor) for one in held for owned in owned_tensors(one))
    for packed in state_dict["param_groups"]:
        packed[ENTRY] = _about(held[0], holds=holds)


def _load_into_held(held: list[Optimizer], optimizer: Optimizer) -> None:
    payloads = [group.pop(ENTRY) for group in optimizer.param_groups if ENTRY in group]
    for state in optimizer.state.values():
        for key in [k for k in state or () if is_entry(k)]:  # copies that nobody needs
            del state[key]
    for one in held:
        if not payloads:
            _begin_anew(one)
        _adopt(one, payloads)


def _save(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Add the residuals to the states of their parameters, and the entry to each group."""
    found = [(o, r) for o in owned_tensors(optimizer) if (r := STORE.get(o.tensor)) is not None]
    clear_stale((owned.tensor, residual) for owned, residual in found)
    STORE.lend(residual for _, residual in found)
    params, ids = params_of(optimizer), _ids(state_dict)
    state_dict["state"] = states = dict(state_dict["state"])
    unsaved: list[str] = []
    for index, held in itertools.groupby(found, lambda pair: pair[0].param):
        state = states.get(ids[index], {})
        if not isinstance(state, dict):
            unsaved += [owned.name for owned, _ in held]
            continue
        param = params[index]
        states[ids[index]] = state = without_entries(state)  # what was there is the optimizer's own
        for owned, residual in held:
            state.update(entries_of(owned.key, owned.whole, residual, param.dtype))
    for packed in state_dict["param_groups"]:
        packed[ENTRY] = _about(optimizer, holds=bool(found))
    if unsaved:
        warnings.warn(
            f"collage_fx: state_dict() holds no residual of {', '.join(unsaved)}: the states of "
            "these parameters are no dicts",
            CollageWarning,
            stacklevel=3,
        )


def _about(optimizer: Optimizer, *, holds: bool) -> str:
    """Return the entry of each parameter group.

    Args:
        optimizer: which is saved.
        holds: whether it has residuals.
    """
    history = dataclasses.asdict(history_of(optimizer))
    return json.dumps({"format": FORMAT, "needs": _NEEDS, "holds": holds, **history})


def _ids(state_dict: dict[str, Any]) -> list[Any]:
    """Return what the parameters are called in a state dict, in the order of the optimizer's."""
    return [name for group in state_dict["param_groups"] for name in group["params"]]


def _read(
    states: dict[int, Any],
    groups: list[dict[str, Any]],
    params: list[Tensor],
    others: Sequence[Any] = (),
) -> _Loaded | None:
    """Return what states and groups of a checkpoint say of residuals; None if nothing.

    Args:
        states: by position of their parameters.
        groups: the parameter groups.
        params: the parameters.
        others: entries of other groups.

    Raises CheckpointError for another format, and for residuals that do not fit.
    """
    payloads = [*others, *(payload for group in groups if (payload := group.get(ENTRY)))]
    loaded = _Loaded()
    for index, state in states.items():
        for key, residual in read_entries(state).items():
            loaded.residuals[index, key] = residual
    if not payloads and not loaded.residuals:
        return None
    for payload in payloads:
        about = _payload(payload)
        loaded.lost |= about.get("holds", False)
        known = {f.name for f in dataclasses.fields(History)} & about.keys()
        loaded.history = History(**{name: about[name] for name in known})
        for index, by_key in about.get("residuals", {}).items():
            loaded.residuals.update({(index, k): _of_format_1(e) for k, e in by_key.items()})
    loaded.lost &= not loaded.residuals
    for (index, key), residual in loaded.residuals.items():
        _check_fit(index, key, residual, params, states, groups)
    return loaded


def _payload(payload: Any) -> dict[str, Any]:
    """Return the entry of a group read; raises CheckpointError for what is of no known format."""
    try:
        about = json.loads(payload) if isinstance(payload, str) else dict(payload)
        known, needs = about["format"] in (1, FORMAT), about.get("needs", "a newer version")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f"the checkpoint's entry {ENTRY!r} of a parameter group cannot be read: {payload!r:.80}"
        ) from error
    if not known:
        raise CheckpointError(
            f"the checkpoint's residuals have format {about['format']}; this collage_fx reads "
            f"formats 1 and {FORMAT}. collage_fx {needs} reads it: update"
        )
    return about


def _of_format_1(entry: dict[str, Any]) -> SavedResidual:
    components = dict(enumerate(entry["components"]))
    return SavedResidual(
        entry["storage"], components, total=entry["checksum"], draws=entry.get("draws", 0)
    )


@contextmanager
def _fitting() -> Iterator[None]:
    """Raise CheckpointError for residuals that do not fit."""
    try:
        yield
    except ResidualError as error:
        raise CheckpointError(f"the checkpoint does not fit this optimizer: {error}") from error


def _check_fit(
    index: int,
    key: str,
    residual: SavedResidual,
    params: list[Tensor],
    states: dict[int, Any],
    groups: list[dict[str, Any]],
) -> None:
    param = _name(index, groups)
    name = param if key == PARAM else f"{key} of {param}"
    owner = params[index] if key == PARAM and index < len(params) else None
    for path, tensor in tensors_in(states.get(index, {})):
        owner = tensor if path == key else owner
    if owner is None or index >= len(params):
        raise CheckpointError(f"the checkpoint has a residual for {name}, which does not exist")
    shard = shard_of(owner)
    with _fitting():
        parts = residual.parts(shard.dtype, params[index].dtype)
        check_components(shard, parts, residual.storage, name)


def _name(index: int, groups: list[dict[str, Any]]) -> str:
    """Return what to call a parameter: the name that it has there, if it has one."""
    names: list[Any] = []
    for group in groups:
        names += group.get("param_names", group["params"])
    known = index < len(names) and isinstance(names[index], str)
    return f"parameter {names[index] if known else index}"


def _before_load(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
    """Take what is ours out of a state dict that is to be loaded.

    Raises CheckpointError before anything is loaded if the residuals do not fit.
    """
    _LOADING.pop(optimizer, None)
    ids, params = _ids(state_dict), params_of(optimizer)
    position = {name: index for index, name in enumerate(ids)}
    states = {position[k]: v for k, v in state_dict["state"].items() if k in position}
    loaded = _read(states, state_dict["param_groups"], params)
    if loaded is None:
        return None
    _LOADING[optimizer] = loaded
    loaded.uncast.update(_cast_by_torch(states, params))
    stripped = {}
    for name, state in state_dict["state"].items():
        own = without_entries(state) if isinstance(state, dict) else state
        if own is state or own or not state:  # else there was no state but for our entries
            stripped[name] = own
    groups = [{k: v for k, v in g.items() if k != ENTRY} for g in state_dict["param_groups"]]
    return {**state_dict, "state": stripped, "param_groups": groups}


def _cast_by_torch(states: dict[int, Any], params: list[Tensor]) -> dict[tuple[int, Any], Tensor]:
    """Return the states that load_state_dict() casts to the dtype of their parameter."""
    return {
        (index, key): value
        for index, state in states.items()
        if isinstance(state, dict) and index < len(params)
        for key, value in state.items()
        if isinstance(value, Tensor) and value.is_floating_point()
        if value.dtype != params[index].dtype and key != "step" and not is_entry(key)
    }


def _load(optimizer: Optimizer) -> None:
    """Give tensors the residuals that load_state_dict() came with; warn once if with none."""
    loaded = _LOADING.pop(optimizer, None)
    if loaded is not None:
        _put_back(optimizer, loaded)
        _give(optimizer, loaded)
        return
    _begin_anew(optimizer)


def _begin_anew(optimizer: Optimizer) -> None:
    """Take what was loaded as it stands, with a warning: nothing of ours was in it."""
    set_history(optimizer, History())
    for owned in owned_tensors(optimizer):
        residual = STORE.get(owned.tensor)
        if residual is not None:
            residual.begin_anew(owned.tensor)
    warnings.warn(
        f"collage_fx: the checkpoint that {type(optimizer).__name__} loaded holds no residuals; "
        "they start at zero, as if its weights and states had just been rounded to their dtype.",
        CollageWarning,
        stacklevel=4,
    )


def _put_back(optimizer: Optimizer, loaded: _Loaded) -> None:
    """Give states the dtypes that they were saved in, which load_state_dict() has changed."""
    params = params_of(optimizer)
    for (index, key), saved in loaded.uncast.items():
        state = optimizer.state[params[index]]
        if isinstance(now := state.get(key), Tensor) and now.dtype != saved.dtype:
            state[key] = saved.to(device=now.device, copy=True)


def _take_from_states(optimizer: Optimizer, payloads: Sequence[Any] = ()) -> _Loaded | None:
    """Return what load_state_dict() has left among states and groups before anyone knew better.

    Args:
        optimizer: whose states they are.
        payloads: entries that stood in other groups than the optimizer's own.
    """
    params = params_of(optimizer)
    known = getattr(optimizer, "state", {})
    states = {i: known[p] for i, p in enumerate(params) if p in known}
    with torch.no_grad(), _disable_current_modes():
        return _read(states, optimizer.param_groups, params, payloads)


def _adopt(optimizer: Optimizer, payloads: Sequence[Any] = ()) -> None:
    loaded = _take_from_states(optimizer, payloads)
    if loaded is None:
        return
    _give(optimizer, loaded)
    for param, state in list(optimizer.state.items()):
        for key in [k for k in state if is_entry(k)] if isinstance(state, dict) else ():
            del state[key]
            if not state:  # as before the first step, which makes states where there are none
                del optimizer.state[param]
    for group in optimizer.param_groups:
        if ENTRY in group:
            group[ENTRY] = ""  # not removed: compiled graphs may guard on the group's keys


def _give(optimizer: Optimizer, loaded: _Loaded) -> None:
    if loaded.lost:
        _begin_anew(optimizer)
    set_history(optimizer, loaded.history)
    params = params_of(optimizer)
    for owned in owned_tensors(optimizer):
        saved = loaded.residuals.get((owned.param, owned.key))
        residual = STORE.get(owned.tensor)
        if saved is not None:
            dtype = params[owned.param].dtype
            parts, expected = (
                saved.parts(owned.tensor.dtype, dtype),
                saved.expected(owned.whole, dtype),
            )
            known: Any = {"storage": saved.storage, "name": owned.name, "draws": saved.draws}
            with _fitting():
                STORE.load(owned.tensor, parts, expected=expected, **known)
        elif residual is not None:
            residual.begin_anew(owned.tensor)
