"""Residuals in an optimizer's ordinary state_dict() and load_state_dict().

They travel as one more entry of each parameter group, `collage_fx`. Optimizers carry unknown group
entries along untouched and uncast, so that a checkpoint loads before the first step as well, when
nothing of this package has seen the optimizer yet, and loads into plain PyTorch.
"""

import copy
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from collage_fx.optimizer.copying import RECORDED, carry_over
from collage_fx.optimizer.ownership import PARAM, owned_tensors, tensors_in
from collage_fx.runtime.errors import CheckpointError, CollageWarning, ResidualError
from collage_fx.runtime.residuals.dtensor import shard_of
from collage_fx.runtime.residuals.store import STORE, check_components, checksum, clear_stale

ENTRY = "collage_fx"
FORMAT = 1

_ATTACHED = WeakIdKeyDictionary()
"""The optimizers whose checkpoints hold residuals, as a set; classes may define __eq__."""


def attach(optimizer: Optimizer) -> None:
    """Make state_dict() of the optimizer hold its residuals and load_state_dict() restore them.

    Residuals that a checkpoint left in the parameter groups before are taken over. Copies of the
    optimizer are like it in this. Idempotent.
    """
    if optimizer in _ATTACHED or not hasattr(optimizer, "_optimizer_state_dict_post_hooks"):
        return  # the latter wraps another optimizer, and has never been an Optimizer of its own
    _ATTACHED[optimizer] = True
    carry_over(optimizer)
    if _save not in optimizer._optimizer_state_dict_post_hooks.values():  # as in a copy
        optimizer.register_state_dict_post_hook(_save)
        optimizer.register_load_state_dict_pre_hook(_check)
        optimizer.register_load_state_dict_post_hook(_load)
    if any(group.get(ENTRY) for group in optimizer.param_groups):
        _adopt(optimizer)


def take_up(optimizers: Iterable[Optimizer]) -> None:
    """Give residuals that checkpoints left in parameter groups to the tensors, before any step.

    They stay in the groups until `attach`: Dynamo may have looked at these already.
    """
    for optimizer in optimizers:
        if any(group.get(ENTRY) for group in getattr(optimizer, "param_groups", ())):
            with torch.no_grad(), _disable_current_modes():
                _give(optimizer)


def attach_around(optimizer: Optimizer) -> None:
    """Make an optimizer that gathers the states of others say that it gathers no residuals."""
    if optimizer not in _ATTACHED:
        _ATTACHED[optimizer] = True
        optimizer.register_state_dict_post_hook(_save_nothing)
        optimizer.register_load_state_dict_post_hook(_load)


def _save_nothing(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    name = type(optimizer).__name__
    warnings.warn(
        f"collage_fx: state_dict() of {name} holds no residuals; that of the optimizer within it "
        "does (optimizer.optim.state_dict()), in each process those of its parameters: save and "
        "load it there",
        CollageWarning,
        stacklevel=3,
    )


def _save(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Add the residuals: {parameter index: {state key: storage, components, checksum}}."""
    entries: list[dict[str, Any]] = []
    sums: list[Tensor] = []
    residuals: dict[int, dict[int, dict[str, Any]]] = {
        g: {} for g in range(len(optimizer.param_groups))
    }
    found = [(o, r) for o in owned_tensors(optimizer) if (r := STORE.get(o.tensor)) is not None]
    clear_stale((owned.tensor, residual) for owned, residual in found)
    for owned, residual in found:
        entries.append({"storage": residual.storage, "components": list(residual.components)})
        if residual.draws:
            entries[-1]["draws"] = residual.draws
        sums.append(checksum(owned.tensor).cpu())
        residuals[owned.group].setdefault(owned.param, {})[owned.key] = entries[-1]
    for entry, total in zip(entries, torch.stack(sums).tolist() if sums else [], strict=True):
        entry["checksum"] = total
    for g, packed in enumerate(state_dict["param_groups"]):
        packed[ENTRY] = {"format": FORMAT, "residuals": residuals[g]}
        if optimizer in RECORDED:
            packed[ENTRY]["recorded"] = copy.deepcopy(RECORDED[optimizer])


def _check(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Raise CheckpointError before anything is loaded if the residuals do not fit."""
    params = [shard_of(p) for group in optimizer.param_groups for p in group["params"]]
    for group in state_dict["param_groups"]:
        payload = group.get(ENTRY)
        if not payload:
            continue
        if payload["format"] != FORMAT:
            raise CheckpointError(
                f"the checkpoint's residuals have format {payload['format']}; "
                f"this collage_fx reads format {FORMAT}: update it"
            )
        for index, by_key in payload["residuals"].items():
            for key, entry in by_key.items():
                _check_entry(index, key, entry, params, state_dict["state"])


@contextmanager
def _fitting() -> Iterator[None]:
    """Raise CheckpointError for residuals that do not fit."""
    try:
        yield
    except ResidualError as error:
        raise CheckpointError(f"the checkpoint does not fit this optimizer: {error}") from error


def _check_entry(
    index: int, key: str, entry: dict[str, Any], params: list[Tensor], states: dict[int, Any]
) -> None:
    name = f"parameter {index}" if key == PARAM else f"{key} of parameter {index}"
    owner = params[index] if key == PARAM and index < len(params) else None
    for path, tensor in tensors_in(states.get(index, {})):
        owner = shard_of(tensor) if path == key else owner
    if owner is None:
        raise CheckpointError(f"the checkpoint has a residual for {name}, which does not exist")
    with _fitting():
        check_components(owner, entry["components"], entry["storage"], name)


def _load(optimizer: Optimizer) -> None:
    """Take over what load_state_dict() left in the parameter groups; warn once if nothing."""
    if any(ENTRY in group for group in optimizer.param_groups):
        _adopt(optimizer)
        for group in optimizer.param_groups:
            group.pop(ENTRY, None)
        return
    for owned in owned_tensors(optimizer):
        residual = STORE.get(owned.tensor)
        if residual is not None:
            residual.begin_anew(owned.tensor)
    warnings.warn(
        f"collage_fx: the checkpoint that {type(optimizer).__name__} loaded holds no residuals; "
        "they start at zero, as if its weights and states had just been rounded to their dtype.",
        CollageWarning,
        stacklevel=3,
    )


def _adopt(optimizer: Optimizer) -> None:
    _give(optimizer)
    for group in optimizer.param_groups:
        # Emptied in place rather than removed: compiled graphs may guard on the group's keys.
        group.get(ENTRY, {}).clear()


def _give(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        if (recorded := group.get(ENTRY, {}).get("recorded")) is not None:
            RECORDED[optimizer] = recorded
    entries = {
        (index, key): entry
        for group in optimizer.param_groups
        for index, by_key in group.get(ENTRY, {}).get("residuals", {}).items()
        for key, entry in by_key.items()
    }
    for owned in owned_tensors(optimizer):
        entry = entries.get((owned.param, owned.key))
        residual = STORE.get(owned.tensor)
        if entry is not None:
            with _fitting():
                STORE.load(
                    owned.tensor,
                    entry["components"],
                    storage=entry["storage"],
                    name=owned.name,
                    expected=entry["checksum"],
                    draws=entry.get("draws", 0),
                )
        elif residual is not None:
            residual.begin_anew(owned.tensor)
