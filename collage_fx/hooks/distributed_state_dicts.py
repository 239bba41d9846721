"""Patches by which functions of torch.distributed.checkpoint load residuals in state dicts.

get_state_dict() and set_state_dict() look a flattened state dict up for the keys that the optimizer
has in its states and groups, and residuals are never among these. And for an optimizer without
states, such as SGD without momentum, they take a step with a rate of zero whenever they are
called, also between the two where a checkpoint has been written into the tensors already. The entry
of a parameter group is that of one process, whoever's states are loaded with it. And load() wants
to find in a checkpoint all that it is given, where there may be no residuals, or others.
"""

import functools
import operator
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from collage_fx.optimizer.checkpoints.agreement import counts_of_steps, loading_merged
from collage_fx.optimizer.checkpoints.history import history_of
from collage_fx.optimizer.checkpoints.reading import ENTRY
from collage_fx.optimizer.checkpoints.saved_residuals import PREFIX, empty_entry, names_entry
from collage_fx.optimizer.ownership import compensated_tensors, params_of
from collage_fx.runtime.residuals.dtensor import shard_of
from collage_fx.runtime.residuals.store import STORE

_MODULE = "torch.distributed.checkpoint.state_dict"
_PLANNERS = "torch.distributed.checkpoint.default_planner"


def know_residuals() -> None:
    """Patch torch.distributed.checkpoint so that residuals are loaded, and are states. Idempotent.

    To be called where an optimizer is given to this package and where it takes its first step: the
    module is not imported for it, which would take a second.
    """
    module = sys.modules.get(_MODULE)
    for name, function in _FUNCTIONS.items():
        plain = getattr(module, name, None)
        if plain is not None and not hasattr(plain, "_collage"):
            ours = functools.partial(function, plain)
            ours._collage = True  # type: ignore[attr-defined]
            setattr(module, name, ours)
    planner: Any = getattr(sys.modules.get(_PLANNERS), "DefaultLoadPlanner", None)
    if planner is not None and not hasattr(planner.create_local_plan, "_collage"):
        planner.create_local_plan = _with_saved(planner.create_local_plan)


def _with_saved(plain: Any) -> Any:
    """Return a function that plans a load, in which the residuals that are there are asked for.

    They may be in another storage, of more states or fewer, or none: the optimizer converts them,
    and says what it misses, when it loads the state dict.
    """

    @functools.wraps(plain)
    def create_local_plan(planner: Any) -> Any:
        if planner.metadata is not None:
            _ask_for_saved(planner, planner.metadata.state_dict_metadata)
        return plain(planner)

    create_local_plan._collage = True  # type: ignore[attr-defined]
    return create_local_plan


def _ask_for_saved(planner: Any, held: dict[str, Any]) -> None:
    """Replace those residuals in a state dict to be loaded that are not in the checkpoint.

    Args:
        planner: DCP's, of the state dict.
        held: key -> the metadata of what is in the checkpoint.
    """
    # Where the state dict is not flattened there are none.
    asked = {key: path for key, path in planner.mappings.items() if len(path) > 1}
    given = dict(planner.state_dict)
    wanted, saved = _by_tensor(asked), _by_tensor(held)
    params = {tensor.rpartition(f".{PREFIX}")[0] for tensor in wanted.keys() | saved.keys()}
    beside: dict[str, list[str]] = {}
    for key in asked:
        parts = key.split(".")
        heads = (".".join(parts[:n]) for n in range(len(parts) - 1, 0, -1))
        beside.setdefault(next((head for head in heads if head in params), ""), []).append(key)
    for tensor in wanted.keys() | saved.keys():
        near = beside.get(tensor.rpartition(f".{PREFIX}")[0], [])
        old, new = wanted.get(tensor, []), saved.get(tensor, [])
        if near and not (old and all(key in held for key in old)):
            values = (given[key] for key in near)
            size = held[min(new)].size if new else None  # that of the first component
            like = next((v for v in values if getattr(v, "shape", None) == size), None)
            for key in new:
                place = _place(key, [(one, asked[one]) for one in near])
                if place is not None:
                    meta = held[key]
                    made = empty_entry(key, meta.size, meta.properties.dtype, like)
                    planner.state_dict[key] = _parent(planner, place)[place[-1]] = made
                    planner.mappings[key] = place
            for key in old:
                if key not in held:
                    _forget(planner, key, asked[key])
    for key, path in asked.items():
        if key not in held and ".param_groups." in f".{key}" and key.endswith(f".{ENTRY}"):
            _forget(planner, key, path)


def _by_tensor(keys: Iterable[str]) -> dict[str, list[str]]:
    """Return the keys of residuals by what those of one tensor have in common."""
    found: dict[str, list[str]] = {}
    for key in filter(names_entry, keys):
        found.setdefault(key.rsplit(".", 2)[0], []).append(key)
    return found


def _place(key: str, beside: list[tuple[str, Any]]) -> Any:
    """Return the path to a key in a state dict that is flattened; None where it has no place.

    Args:
        key: what the whole path is in the flattened one.
        beside: keys and paths of the same parameter.
    """
    for near, path in beside:
        before = near.removesuffix(str(path[-1]))
        if near != before and key.startswith(before):
            return *path[:-1], key.removeprefix(before)
    return None


def _forget(planner: Any, key: str, path: Any) -> None:
    del planner.state_dict[key], _parent(planner, path)[path[-1]]


def _parent(planner: Any, path: Any) -> Any:
    return functools.reduce(operator.getitem, path[:-1], planner.original_state_dict)


def _load(plain: Any, *args: Any, **kwargs: Any) -> None:
    with loading_merged():
        plain(*args, **kwargs)


def _unflatten(plain: Any, optim: Optimizer, state_dict: dict[str, Any], info: Any) -> Any:
    found = plain(optim, state_dict, info)
    entries = [key for key in state_dict if f".{PREFIX}" in key]
    for name, state in found["state"].items():
        start = f"state.{name}."
        ours = (key for key in entries if key.startswith(start + PREFIX))
        state.update((key.removeprefix(start), state_dict[key]) for key in ours)
    for group in found["param_groups"]:
        entry = f"param_groups.{group['params'][0]}.{ENTRY}"
        if entry in state_dict:
            group[ENTRY] = state_dict[entry]
    return found


def _init(plain: Any, optim: Optimizer) -> None:
    """Make states and residuals, if there are none, by steps that change nothing else.

    Steps are taken only where PyTorch takes one, which it does where nothing has begun: in a run
    they would let its averages decay, and lose what is accumulated in its gradients.
    """
    history = history_of(optim)
    if not optim.state and history.numbers and any(compensated_tensors(optim)):
        return  # it has taken steps, and has no states but for residuals
    taken = history.taken
    plain(optim)
    if history.taken > taken:
        _settle(optim)
    elif not taken and _has_not_begun(optim):
        with _states_kept(optim):
            _take_zero_step(optim)
            _settle(optim)
    history.taken = taken


def _has_not_begun(optim: Optimizer) -> bool:
    """Return True if there are states, which its constructor has made, and no steps."""
    counts = counts_of_steps(optim.state)
    idle = all(p.grad is None for p in params_of(optim))
    return bool(counts) and not any(counts.values()) and idle


@contextmanager
def _states_kept(optim: Optimizer) -> Iterator[None]:
    """Give back, after steps, the values of all states."""
    states = (state for state in optim.state.values() if isinstance(state, dict))
    tensors = [t for state in states for t in state.values() if isinstance(t, Tensor)]
    before = [t.clone() for t in tensors]
    yield
    with torch.no_grad():
        for now, value in zip(tensors, before, strict=True):
            now.copy_(value)


def _settle(optim: Optimizer) -> None:
    """Take steps until each state has a verdict.

    A first step may be recorded, and makes a residual for each new state. Which of these remain
    only the next step tells: without it the keys were not those of the checkpoint to be loaded.
    """
    with _counts_kept(optim):
        for _ in range(_STEPS):
            if not any(residual.provisional for _, residual in compensated_tensors(optim)):
                return
            _take_zero_step(optim)


_STEPS = 3
"""Number of steps after which each state has a verdict."""


@contextmanager
def _counts_kept(optim: Optimizer) -> Iterator[None]:
    """Give back, after steps that change no values, the counts of steps among the states."""
    before = {
        (param, key): value.clone() if isinstance(value, Tensor) and not value.dim() else value
        for param, state in optim.state.items()
        if isinstance(state, dict)
        for key, value in state.items()
        if not isinstance(value, Tensor) or (not value.dim() and STORE.get(shard_of(value)) is None)
    }
    yield
    for (param, key), value in before.items():
        now = optim.state[param].get(key)
        if isinstance(now, Tensor) and isinstance(value, Tensor):
            now.copy_(value)
        elif isinstance(value, int | float):
            optim.state[param][key] = value


def _take_zero_step(optim: Optimizer) -> None:
    """Take a step with gradients and rates of zero, as the first was, and give the rates back."""
    before = [group.get("lr") for group in optim.param_groups]
    for group, lr in zip(optim.param_groups, before, strict=True):
        if lr is not None:
            group["lr"] = torch.zeros_like(lr) if isinstance(lr, Tensor) else 0.0
        for p in group["params"]:
            p.grad = torch.zeros_like(p) if p.requires_grad else None
    try:
        optim.step()
    finally:
        optim.zero_grad(set_to_none=True)
        for group, lr in zip(optim.param_groups, before, strict=True):
            if lr is not None:
                group["lr"] = lr


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "_load_optim_state_dict": _load,
    "_unflatten_optim_state_dict": _unflatten,
    "_init_optim_state": _init,
}
