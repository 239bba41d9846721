"""Residuals in an optimizer's ordinary state_dict() and load_state_dict().

They are further states of their parameters there, see `saved_residuals`, and one more entry of each
parameter group, `collage_fx`, says which format that is and what else a resumed run needs to know.
Optimizers carry both along untouched, so that a checkpoint loads before the first step as well,
when nothing of this package has seen the optimizer yet, and loads into plain PyTorch.
"""

import functools
import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from collage_fx.optimizer.checkpoints.agreement import expect_loads, note_load
from collage_fx.optimizer.checkpoints.copying import carry_over
from collage_fx.optimizer.checkpoints.giving import give
from collage_fx.optimizer.checkpoints.own_methods import (
    drop_orphans,
    loads_itself,
    replaces_state_dict,
    serve,
)
from collage_fx.optimizer.checkpoints.places import hand_on, note_places
from collage_fx.optimizer.checkpoints.reading import (
    ENTRY,
    Loaded,
    entry_of_group,
    note_casts,
    read_residuals,
)
from collage_fx.optimizer.checkpoints.saved_residuals import entries_of, is_entry, without_entries
from collage_fx.optimizer.ownership import (
    all_tensors_of,
    compensated_tensors,
    params_of,
)
from collage_fx.optimizer.parameter_names import names_of, naming, renamed
from collage_fx.runtime.errors import WarningName, listed, warn
from collage_fx.runtime.residuals.memory import has_memory
from collage_fx.runtime.residuals.store import STORE
from collage_fx.runtime.storage.registry import Choice
from collage_fx.runtime.torch_private import _disable_current_modes

_ELSEWHERE = "what is kept elsewhere"
_SAID = WeakIdKeyDictionary()
"""Optimizer -> of what was said that no checkpoint holds its residuals: keys, and _ELSEWHERE."""
_LOADING = WeakIdKeyDictionary()
"""Optimizer -> what is loaded while its load_state_dict() runs."""

_ATTACHED = WeakIdKeyDictionary()
"""Optimizer whose checkpoints hold residuals -> the storages that its step was compiled with, if it
was; classes may define __eq__."""


def attach(optimizer: Optimizer, storage: Choice = "") -> None:
    """Make state_dict() of the optimizer hold its residuals and load_state_dict() restore them.

    Residuals that a checkpoint has left among the states before are taken over. Copies of the
    optimizer are like it in this. Idempotent.

    Args:
        optimizer: any.
        storage: what its step is compiled with, if it is.
    """
    if not _takes_hooks(optimizer):
        return
    known = optimizer in _ATTACHED
    _ATTACHED[optimizer] = storage or _ATTACHED.get(optimizer, "")
    if known:
        return
    expect_loads(optimizer)
    carry_over(optimizer)
    if _save not in optimizer._optimizer_state_dict_post_hooks.values():  # as in a copy
        optimizer.register_state_dict_post_hook(_save)
        optimizer.register_load_state_dict_pre_hook(_before_load)
        optimizer.register_load_state_dict_post_hook(_load)
    _adopt(optimizer)
    serve(optimizer, "state_dict", _saved)
    serve(optimizer, "load_state_dict", _loaded)
    if replaces_state_dict(optimizer):
        _warn(
            "own-state-dict",
            f"state_dict() of {type(optimizer).__name__} is one of its own, which does not call "
            "that of torch.optim.Optimizer: checkpoints hold no residuals, and a resumed run "
            "begins with what is stored",
        )


def attached() -> list[Optimizer]:
    """Return the optimizers that are compiled, or have been, and what gathers their states."""
    return list(_ATTACHED)


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
    if optimizer not in _ATTACHED and _takes_hooks(optimizer):
        _ATTACHED[optimizer] = ""
        optimizer.register_state_dict_post_hook(functools.partial(_save_of_held, held))
        optimizer.register_load_state_dict_post_hook(functools.partial(_load_into_held, held))


def _takes_hooks(optimizer: Optimizer) -> bool:
    """Return False for what wraps an optimizer and has never been made one of its own.

    PostLocalSGDOptimizer is such a one: its state dict is that of the other.
    """
    return hasattr(optimizer, "_optimizer_state_dict_post_hooks")


def _save_of_held(held: list[Optimizer], optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    holds = any(any(compensated_tensors(one)) for one in held)
    for packed in state_dict["param_groups"]:
        packed[ENTRY] = entry_of_group(held[0], (), holds=holds)


def _load_into_held(held: list[Optimizer], optimizer: Optimizer) -> None:
    payloads = [group.pop(ENTRY) for group in optimizer.param_groups if ENTRY in group]
    _drop_entries(optimizer)  # copies of what the optimizers within have
    for one in held:
        _adopt(one, payloads, Loaded(lost=True))


def _save(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Add the residuals to the states of their parameters, and the entry to each group."""
    hand_on(optimizer)
    found = list(compensated_tensors(optimizer))
    pairs = ((owned.tensor, residual) for owned, residual in found)
    STORE.clear_stale(pairs, naming(lambda: optimizer))
    found = [(owned, residual) for owned, residual in found if residual.fits(owned.tensor)]
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
    for packed, group in zip(state_dict["param_groups"], optimizer.param_groups, strict=True):
        packed[ENTRY] = entry_of_group(optimizer, group["params"], holds=bool(found))
    _warn_of_unsaved(optimizer, unsaved)


def _warn_of_unsaved(optimizer: Optimizer, names: list[str]) -> None:
    """Warn, once, of residuals that no state dict of an optimizer can hold.

    Args:
        optimizer: which is saved.
        names: of states that are in no dict of their parameter.
    """
    if _ELSEWHERE not in _SAID.setdefault(optimizer, set()):
        kept = (o for o in all_tensors_of(optimizer) if o.param < 0 and has_memory(o.tensor))
        residuals = ((o.name, STORE.get(o.tensor)) for o in kept)
        names = names + [name for name, r in residuals if r is not None and r.has_content()]
        if names:
            _SAID[optimizer].add(_ELSEWHERE)
            _warn(
                "unsaved",
                f"state_dict() holds no residual of {listed(names)}, which the optimizer keeps "
                "elsewhere than in a dict of states of a parameter: a resumed run begins with what "
                "is stored of it",
            )


def _ids(state_dict: dict[str, Any]) -> list[Any]:
    """Return the ids of the parameters in a state dict, in the optimizer's order."""
    return [name for group in state_dict["param_groups"] for name in group["params"]]


def _before_load(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
    """Take our entries out of a state dict that is to be loaded.

    Raises CheckpointError before anything is loaded if the residuals do not fit.
    """
    _LOADING.pop(optimizer, None)
    final = _as_hooks_make_it(optimizer, state_dict)
    ids, params = _ids(final), params_of(optimizer)
    position = {name: index for index, name in enumerate(ids)}
    states = {position[k]: v for k, v in final["state"].items() if k in position}
    loaded = read_residuals(states, final["param_groups"], params, cast=False)
    ours = loaded is not None
    _LOADING[optimizer] = loaded = loaded or Loaded(lost=True, states=states)
    note_casts(loaded, params)
    if not ours:
        return None
    note_load(optimizer, states, loaded.history.taken)
    if loads_itself(optimizer):
        return None
    stripped = {}
    for name, state in state_dict["state"].items():
        own = without_entries(state) if isinstance(state, dict) else state
        if own is state or own or not state:  # else there was no state but for our entries
            stripped[name] = own
    groups = [{k: v for k, v in g.items() if k != ENTRY} for g in state_dict["param_groups"]]
    return {**state_dict, "state": stripped, "param_groups": groups}


def _saved(optimizer: Optimizer, state_dict: Any) -> None:
    """Leave residuals out of states that a class has given another form."""
    said = _SAID.setdefault(optimizer, set())
    if orphans := sorted({*drop_orphans(state_dict)} - said):
        said.update(orphans)
        _warn(
            "unsaved",
            f"state_dict() holds no residual of {listed(orphans)}, which that of "
            f"{type(optimizer).__name__} gives in another form: a resumed run begins with what is "
            "stored of it",
        )


def _as_hooks_make_it(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return what the hooks that follow ours make of a state dict: of a copy, before they do.

    One may give states to other parameters, by their names say.
    """
    hooks = [*optimizer._optimizer_load_state_dict_pre_hooks.values()]
    for hook in hooks[hooks.index(_before_load) + 1 :]:
        states = {k: dict(v) if isinstance(v, dict) else v for k, v in state_dict["state"].items()}
        groups = [dict(group) for group in state_dict["param_groups"]]
        copied = {**state_dict, "state": states, "param_groups": groups}
        made = hook(optimizer, copied)
        state_dict = copied if made is None else made
    return state_dict


def _loaded(optimizer: Optimizer, _: Any) -> None:
    """Give residuals to what a class has made of the states in its own load_state_dict()."""
    _drop_entries(optimizer)
    for group in optimizer.param_groups:
        group.pop(ENTRY, None)
    if (loaded := _LOADING.pop(optimizer, None)) is not None:
        _give(optimizer, loaded)


def _load(optimizer: Optimizer) -> None:
    """Give tensors the residuals that load_state_dict() came with; warn once if with none."""
    loaded = _LOADING.pop(optimizer, None) or Loaded(lost=True)
    _put_back(optimizer, loaded)
    if loads_itself(optimizer):
        _LOADING[optimizer] = loaded
    else:
        _give(optimizer, loaded)


def _put_back(optimizer: Optimizer, loaded: Loaded) -> None:
    """Give states the dtypes that they had beside their parameters, which PyTorch has cast."""
    params = params_of(optimizer)
    for index, saved in loaded.states.items():
        if loaded.dtypes and index < len(params) and params[index] in optimizer.state:
            found = _uncast(saved, optimizer.state[params[index]], loaded, params[index])
            optimizer.state[params[index]] = found


def _uncast(saved: Any, now: Any, loaded: Loaded, param: Tensor, path: str = "") -> Any:
    """Return loaded values, taken from the saved ones where these have other dtypes.

    Args:
        saved: what was saved.
        now: what PyTorch made of it.
        loaded: says which dtypes.
        param: whose state it is.
        path: the keys that lead to it, as `tensors_in` joins them.
    """
    if isinstance(now, Tensor) and isinstance(saved, Tensor):
        dtype = loaded.dtype_of(path, saved, param)
        return now if now.dtype == dtype else saved.to(now.device, dtype, copy=True)
    before = f"{path}." if path else ""
    if isinstance(now, dict) and isinstance(saved, dict):
        for k, v in [(k, v) for k, v in now.items() if k in saved]:
            now[k] = _uncast(saved[k], v, loaded, param, f"{before}{k}")
    elif isinstance(now, list | deque) and len(now) == len(saved):
        for i, v in enumerate(now):
            now[i] = _uncast(saved[i], v, loaded, param, f"{before}{i}")
    elif type(now) is tuple and len(now) == len(saved):
        pairs = enumerate(zip(saved, now, strict=True))
        return tuple(_uncast(s, v, loaded, param, f"{before}{i}") for i, (s, v) in pairs)
    return now


def _take_from_states(optimizer: Optimizer, payloads: Sequence[Any] = ()) -> Loaded | None:
    """Return the residuals that load_state_dict() left in states and groups before our hooks.

    Args:
        optimizer: whose states they are.
        payloads: entries that stood in other groups than the optimizer's own.
    """
    params = params_of(optimizer)
    known = getattr(optimizer, "state", {})
    states = {i: known[p] for i, p in enumerate(params) if p in known}
    with torch.no_grad(), _disable_current_modes():
        return read_residuals(states, optimizer.param_groups, params, payloads)


def _adopt(
    optimizer: Optimizer, payloads: Sequence[Any] = (), otherwise: Loaded | None = None
) -> None:
    """Take over what load_state_dict() has left among the states, and `otherwise` if nothing."""
    loaded = _take_from_states(optimizer, payloads) or otherwise
    if loaded is None:
        return
    note_load(optimizer, loaded.states, loaded.history.taken)
    _give(optimizer, loaded)
    _warn_of_cast(optimizer, loaded)
    _drop_entries(optimizer)
    for group in optimizer.param_groups:
        if ENTRY in group:
            group[ENTRY] = ""  # not removed: compiled graphs may guard on the group's keys


def _drop_entries(optimizer: Optimizer) -> None:
    """Remove our entries from the states."""
    for param, state in list(optimizer.state.items()):
        for key in [k for k in state if is_entry(k)] if isinstance(state, dict) else ():
            del state[key]
            if not state:  # as before the first step, which makes states where there are none
                del optimizer.state[param]


def _warn_of_cast(optimizer: Optimizer, loaded: Loaded) -> None:
    """Warn of states that PyTorch has cast, as nobody was there to keep it from that."""
    states = [state for state in optimizer.state.values() if isinstance(state, dict)]
    now = {key: {str(s[key].dtype) for s in states if key in s} for key in loaded.dtypes}
    cast = [key for key, dtype in loaded.dtypes.items() if now[key] - {f"torch.{dtype}"}]
    if cast:
        _warn(
            "cast-on-load",
            f"load_state_dict() of PyTorch has cast {listed(cast)}, which was saved as "
            f"{', '.join(sorted({loaded.dtypes[key] for key in cast}))}, to the dtype of the "
            "parameters, before collage_fx has seen the optimizer. To keep it, compile the "
            "optimizer before it loads",
        )


def _warn(name: WarningName, message: str) -> None:
    warn(name, message, stacklevel=5)


def _give(optimizer: Optimizer, loaded: Loaded) -> None:
    """Give tensors their residuals; warn once of all that is not as it was saved."""
    if messages := list(give(optimizer, loaded, _ATTACHED.get(optimizer, ""))):
        _warn("checkpoint", renamed("; ".join(messages), names_of(optimizer)))
    note_places(optimizer)
