"""Full-precision weights in and out, and residuals from one storage into another."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from collage_fx.config import CollageConfig
from collage_fx.optimizer.checkpoints import state_dicts
from collage_fx.optimizer.checkpoints.places import hand_on
from collage_fx.optimizer.checkpoints.saved_residuals import names_entry
from collage_fx.optimizer.ownership import Owned, compensated_tensors, owned_tensors
from collage_fx.optimizer.parameter_names import naming
from collage_fx.optimizer.storage_patterns import Patterns, warn_now
from collage_fx.passes.ir.program import LOW_PRECISION
from collage_fx.runtime.errors import CheckpointError, OptionError, SubjectError
from collage_fx.runtime.residuals.dtensor import place_of, placed, shard_of, sharded_like
from collage_fx.runtime.residuals.residual import Residual
from collage_fx.runtime.residuals.store import STORE
from collage_fx.runtime.storage.registry import (
    ALIASES,
    FINEST,
    STORAGES,
    Choice,
    check_compensable,
    chosen,
    split_by_chance_into,
)
from collage_fx.runtime.storage.state_name import StateName


def load_master_weights(
    model_or_optimizer: nn.Module | Optimizer,
    weights: Mapping[str, Tensor] | list[Tensor],
    *,
    storage: str | None = None,
) -> None:
    """Load weights of higher precision: the 16-bit parameters get them as high word and residual.

    Everything else that `weights` names is copied, as by `load_state_dict`. Nothing is changed
    unless all of it fits.

    Args:
        model_or_optimizer: a module, or an optimizer.
        weights: fp32 or fp64 values of the same shapes, sharded alike: for a module a state dict
            with all of its entries; for an optimizer a list in the order of its parameters, or a
            mapping by name if it was made from `model.named_parameters()`.
        storage: how to keep what the high words do not hold. By default that of the residual that
            a parameter has, else the one that keeps most; a step converts it to its own.

    Raises:
        CheckpointError: a name or shape that does not fit.
        SubjectError: neither a module nor an optimizer.
        StorageError: a parameter of a dtype that the storage cannot hold.
        OptionError: a storage that does not exist.

    Examples:
        >>> weights = {"weight": torch.randn(64, 64)}
        >>> collage_fx.load_master_weights(model, weights)
        >>> torch.equal(collage_fx.value(model.weight).float(), weights["weight"])
        True
    """
    storage = ALIASES.get(storage, storage) if isinstance(storage, str) else storage
    if storage is not None and not (isinstance(storage, str) and storage in STORAGES):
        raise OptionError(f"storage={storage!r} is not one of {', '.join(map(repr, STORAGES))}")
    targets = _tensors(model_or_optimizer)
    if not isinstance(weights, Mapping):
        weights = _in_order(targets, model_or_optimizer, weights)
    _check(targets, weights)
    places = {name: place_of(tensor) for name, tensor in targets.items()}
    targets = {name: shard_of(tensor) for name, tensor in targets.items()}
    plan = {n: s for n, t in targets.items() if (s := _storage_for(t, storage))}
    for name, kept in plan.items():
        check_compensable(targets[name].dtype, kept, name)
    with torch.no_grad():
        for name, tensor in targets.items():
            given = shard_of(weights[name])
            if name in plan:
                whole = given.detach().to(tensor.device)
                STORE.assign(tensor, whole, plan[name], StateName(None, name), places[name])
            else:
                tensor.copy_(given)


def master_state_dict(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    stochastic: bool = False,
    seed: int = 0,
) -> dict[str, Tensor]:
    """Return the model's state dict with each 16-bit parameter as its whole value.

    Args:
        model: the module.
        optimizer: its optimizer; needed if residuals that it has loaded are not in use yet.
        dtype: of the values that the parameters get, torch.float32 or torch.float64; with
            `stochastic` torch.bfloat16 or torch.float16. Other entries keep theirs.
        stochastic: True to round values to a 16-bit dtype up or down by chance, which keeps on
            average what rounding to nearest loses. In all processes and however parameters are
            sharded the same values are rounded alike.
        seed: of the rounding.

    Returns:
        Copies, by the names of `model.state_dict()`.

    Raises:
        OptionError: another dtype.
        SubjectError: no module.

    Examples:
        >>> train(collage_fx.compile_(optimizer))
        >>> weights = collage_fx.master_state_dict(model, optimizer)
        >>> weights["weight"].dtype
        torch.float32
        >>> half = collage_fx.master_state_dict(model, dtype=torch.bfloat16, stochastic=True)
        >>> half["weight"].dtype
        torch.bfloat16
    """
    _check_dtype(dtype, stochastic)
    if optimizer is not None:
        state_dicts.attach(optimizer)
        hand_on(optimizer)
    tensors, result = _tensors(model), {}
    _clear_stale({name: shard_of(tensor) for name, tensor in tensors.items()})
    for name, tensor in tensors.items():
        shard = shard_of(tensor)
        residual = STORE.get(shard)
        low = tensor.dtype in LOW_PRECISION or residual is not None
        if residual is not None and residual.fits(shard):
            whole = residual.whole(shard)
        else:
            whole = shard.detach()
        held = low and isinstance(tensor, nn.Parameter)
        if held and stochastic:
            (whole,) = split_by_chance_into("sr", whole.float(), dtype, place_of(tensor), seed)
        else:
            whole = whole.to(dtype if held else tensor.dtype, copy=True)
        result[name] = sharded_like(whole, tensor)
    return result


def _check_dtype(dtype: torch.dtype, stochastic: bool) -> None:
    """Raise OptionError unless values can be given in a dtype, rounded by chance or as they are."""
    known = (torch.bfloat16, torch.float16) if stochastic else (torch.float32, torch.float64)
    if dtype not in known:
        words = f"dtype={dtype} is not {known[0]} or {known[1]}"
        if stochastic:
            words += ", to which stochastic=True rounds"
        elif dtype in (torch.bfloat16, torch.float16):
            words += "; stochastic=True rounds to it by chance, model.state_dict() has the nearest"
        raise OptionError(words)


def convert_residuals(optimizer: Optimizer, storage: str | Mapping[str, str]) -> None:
    """Lay out the parameters and states of an optimizer that have residuals in another storage.

    Values are kept, to the precision of the new storage. A step that was compiled with another one
    converts them back: compile it anew.

    Args:
        optimizer: of any class.
        storage: a name, or a dict that gives each state its own by patterns, as the option of this
            name; a dict and `auto` leave fp32 states as they are unless they name a storage for
            these.

    Raises:
        StorageError: a state of a dtype that the storage cannot hold; nothing is changed.
        OptionError: a storage that does not exist.

    Examples:
        >>> train(collage_fx.compile_(optimizer))
        >>> collage_fx.convert_residuals(optimizer, "mcf2")
        >>> [residual.dtype for residual in collage_fx.residuals(model.weight)]
        [torch.bfloat16]
    """
    choice = CollageConfig(storage=storage).storage  # type: ignore[arg-type]
    state_dicts.attach(optimizer)
    hand_on(optimizer)
    patterns = Patterns(choice)
    for owned in owned_tensors(optimizer):
        patterns.see(owned.state_name)
    plan = [(o, _chosen_for(o, r, choice)) for o, r in compensated_tensors(optimizer)]
    for owned, name in plan:
        check_compensable(owned.tensor.dtype, name, owned.name)
    STORE.clear_stale(
        ((o.tensor, r) for o, r in compensated_tensors(optimizer)), naming(lambda: optimizer)
    )
    for owned, name in plan:
        STORE.convert(owned.tensor, name, place_of(owned.whole))
    patterns.conclude(warn_now)


def _chosen_for(owned: Owned, residual: Residual, choice: Choice) -> str:
    """Return the storage for a state with this residual: the present one where none is chosen."""
    if choice in STORAGES:
        return str(choice)
    name = chosen(choice, owned.state_name, owned.tensor.dtype)
    return name or residual.storage


def _clear_stale(tensors: dict[str, Tensor]) -> None:
    """Clear residuals of other values than tensors have, with one warning that has their names."""
    found = {n: (t, r) for n, t in tensors.items() if (r := STORE.get(t)) is not None}
    names = {str(residual.name): name for name, (_, residual) in found.items()}
    STORE.clear_stale(found.values(), lambda name: names.get(name, name))


def _storage_for(tensor: Tensor, wanted: str | None) -> str:
    """Return the storage for the values of a tensor; empty if it is only to be copied to.

    That is the wanted one, or the one that it has, or the one that keeps most of it; an fp32 tensor
    that has none gets one only if it is wanted.
    """
    if tensor.dtype in LOW_PRECISION:
        residual = STORE.get(tensor)
        return wanted or (FINEST[tensor.dtype] if residual is None else residual.storage)
    fits = wanted is not None and tensor.dtype in STORAGES[wanted].residuals
    if fits and isinstance(tensor, nn.Parameter):
        return str(wanted)
    residual = STORE.get(tensor)
    return "" if residual is None else residual.storage


def _tensors(model_or_optimizer: nn.Module | Optimizer) -> dict[str, Tensor]:
    if isinstance(model_or_optimizer, nn.Module):
        return {
            name: tensor
            for name, tensor in model_or_optimizer.state_dict(keep_vars=True).items()
            if isinstance(tensor, Tensor) and not names_entry(name)
        }
    if not hasattr(model_or_optimizer, "param_groups"):
        raise SubjectError(
            f"expected a module or an optimizer, got {type(model_or_optimizer).__name__}"
        )
    names: dict[str, Tensor] = {}
    for group in model_or_optimizer.param_groups:
        for k, p in enumerate(group["params"]):
            given = group.get("param_names")
            names[given[k] if given else f"parameter {len(names)}"] = p
    return names


def _in_order(
    targets: dict[str, Tensor], owner: nn.Module | Optimizer, weights: list[Tensor]
) -> Mapping[str, Tensor]:
    if isinstance(owner, nn.Module):
        raise CheckpointError("weights for a module come by name, as its state_dict() has them")
    if len(weights) != len(targets):
        raise CheckpointError(f"{len(weights)} weights for {len(targets)} parameters")
    return dict(zip(targets, weights, strict=True))


def _check(targets: dict[str, Tensor], weights: Mapping[str, Any]) -> None:
    missing, unknown = targets.keys() - weights.keys(), weights.keys() - targets.keys()
    if missing or unknown:
        raise CheckpointError(
            f"the weights do not fit: missing {sorted(missing) or 'none'}, "
            f"unknown {sorted(unknown) or 'none'}"
        )
    values: dict[int, Tensor] = {}
    for name, tensor in targets.items():
        why = _misfit(tensor, weights[name])
        given = shard_of(weights[name]) if not why else weights[name]
        if not why and not torch.equal(values.setdefault(id(tensor), given), given):
            why = "another name of the same tensor has other values"
        if why:
            raise CheckpointError(f"the weights do not fit: {name} {why}")


def _misfit(tensor: Tensor, weight: Any) -> str:
    """Return the reason why a tensor cannot take these values; empty if it can."""
    if not isinstance(weight, Tensor):
        return f"is given as {type(weight).__name__}"
    if (ours := placed(tensor)) != (theirs := placed(weight)):
        return f"is {ours or 'not sharded'}, given {theirs or 'not sharded'}"
    if weight.shape != tensor.shape:
        return f"is {tuple(tensor.shape)}, given {tuple(weight.shape)}"
    if weight.layout != torch.strided or weight.is_meta:
        return f"is given as a {'meta' if weight.is_meta else 'sparse'} tensor"
    if not torch.can_cast(weight.dtype, tensor.dtype):
        return f"is {tensor.dtype}, given {weight.dtype}"
    return ""
