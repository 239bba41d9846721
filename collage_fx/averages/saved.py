"""Residuals of averages in their state dicts, as entries of the format that optimizers have."""

from collections.abc import Container
from typing import Any

from torch import Tensor
from torch.nn import Module

from collage_fx.errors import CheckpointError
from collage_fx.optimizer.checkpoints.reading import fitting
from collage_fx.optimizer.checkpoints.saved_residuals import (
    SavedResidual,
    entries_of,
    is_entry,
    read_entries,
    tensor_of,
)
from collage_fx.passes.ir.program import LOW_PRECISION
from collage_fx.runtime.errors import listed, warn
from collage_fx.runtime.residuals.dtensor import place_of, shard_of
from collage_fx.runtime.residuals.store import STORE
from collage_fx.runtime.storage.components import check_components
from collage_fx.runtime.storage.state_name import StateName

Read = dict[str, SavedResidual | Tensor]
"""Name of a parameter -> its residual in a state dict, or its value in a wider dtype."""
_READ = "_read"
"""Attribute of an average between the beginning and the end of a load."""


def watch(average: Module) -> None:
    """Have an average load the residuals of a state dict, also as a part of another module."""
    average.register_load_state_dict_pre_hook(_before_load)
    average.register_load_state_dict_post_hook(_after_load)


def entries(average: Any, prefix: str) -> dict[str, Tensor]:
    """Return the entries for the residuals of an average, with a prefix before each name."""
    found: dict[str, Tensor] = {}
    lent = []
    for name, p in average.module.named_parameters():
        if (residual := STORE.get(shard_of(p))) is not None and residual.fits(shard_of(p)):
            STORE.clear_stale([(shard_of(p), residual)])
            lent.append(residual)
            found |= {prefix + k: t for k, t in entries_of(name, p, residual, p.dtype).items()}
    STORE.lend(lent)
    return found


def read(average: Any, state: dict[str, Any]) -> Read:
    """Return the residuals of a state dict, without prefix, by the names of parameters.

    Raises:
        CheckpointError: an entry that cannot be read, or does not fit.
    """
    params = dict(average.module.named_parameters())
    found: Read = {}
    entries_by_name: dict[str, dict[str, Any]] = {}
    for key in filter(is_entry, state):
        entries_by_name.setdefault(tensor_of(key), {})[key] = state[key]
    for name, own in entries_by_name.items():
        if (p := params.get(name)) is None:
            raise CheckpointError(f"the state dict has a residual for {name}, which does not exist")
        (residual,) = read_entries(own, p.dtype).values()
        with fitting():
            parts = residual.parts(p.dtype, p.dtype)
            check_components(shard_of(p), parts, residual.storage, name)
        found[name] = residual
    return found


def restore(average: Any, loaded: Read, present: Container[str]) -> list[str]:
    """Give the parameters of an average what was read; return those that begin anew.

    Args:
        average: that has loaded them.
        loaded: what was read.
        present: the names of the parameters that were loaded.
    """
    anew = []
    average.ensure_residuals()
    for name, p in average.module.named_parameters():
        shard, found = shard_of(p), loaded.get(name)
        residual = STORE.get(shard)
        if isinstance(found, SavedResidual):
            STORE.load(
                shard,
                found.parts(p.dtype, p.dtype),
                storage=found.storage,
                name=StateName(None, name),
                expected=found.expected(p, p.dtype),
                draws=found.draws,
            )
        elif residual is not None and residual.fits(shard):
            if isinstance(found, Tensor):
                STORE.assign(shard, shard_of(found), residual.storage, residual.name, place_of(p))
            elif name in present:
                residual.begin_anew(shard)
                anew.append(name)
    return anew


def _before_load(average: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Take the entries for residuals out of a state dict, which Module looks through then."""
    average._refuse_swapped("load it")
    ours = {k.removeprefix(prefix): k for k in state if is_entry(k.removeprefix(prefix))}
    loaded = read(average, {name: state[k] for name, k in ours.items()})
    present = set()
    for name, p in average.module.named_parameters():
        given = state.get(f"{prefix}module.{name}")
        if given is not None:
            present.add(name)
        if name in loaded or p.dtype not in LOW_PRECISION or not isinstance(given, Tensor):
            continue
        if given.is_floating_point() and given.itemsize > p.itemsize and given.shape == p.shape:
            loaded[name] = given.detach().to(p.device)
    for k in ours.values():
        del state[k]
    setattr(average, _READ, (loaded, present))


def _after_load(average: Any, _: Any) -> None:
    """Restore what was taken out, now that the parameters have their values."""
    anew = restore(average, *vars(average).pop(_READ, ({}, ())))
    if anew:
        warn(
            "checkpoint",
            f"the checkpoint that {type(average).__name__} loaded holds no residuals; they start "
            f"at zero, as if {listed(anew)} had just been rounded to their dtype",
        )
