"""Restoring of residuals, and of values beyond a tensor's dtype, from a state dict."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.optim import Optimizer

from collage_fx.optimizer.checkpoints.history import set_history
from collage_fx.optimizer.checkpoints.reading import Loaded
from collage_fx.optimizer.checkpoints.saved_residuals import SavedResidual
from collage_fx.optimizer.ownership import PARAM, Owned, owned_tensors, params_of
from collage_fx.passes.ir.program import LOW_PRECISION
from collage_fx.runtime.errors import listed
from collage_fx.runtime.residuals.dtensor import place_of
from collage_fx.runtime.residuals.store import STORE
from collage_fx.runtime.storage.registry import FINEST, Choice, chosen, is_alone, refusal


def give(optimizer: Optimizer, loaded: Loaded, storage: Choice) -> Iterator[str]:
    """Give tensors their residuals; yield what to warn of, for all tensors.

    A parameter for which there is none keeps its own as long as that is of its present value, of
    which the state dict of an optimizer says nothing. A state that was saved in a wider dtype gets
    what its own rounds off. Others begin anew.

    Args:
        optimizer: which has loaded it.
        loaded: what the state dict says.
        storage: what the step is compiled with, if it is.
    """
    set_history(optimizer, loaded.history)
    params, new, missing = params_of(optimizer), [], []
    for owned in owned_tensors(optimizer):
        place = owned.param, owned.key
        residual = STORE.get(owned.tensor)
        if place in loaded.residuals:
            _load(owned, loaded.residuals[place], params[owned.param].dtype)
        elif place in loaded.values:
            _assign(owned, loaded.values[place](), storage)
        elif owned.key != PARAM or residual is None or not residual.is_present(owned.tensor):
            if owned.tensor.dtype in LOW_PRECISION and not _has_none(owned, storage):
                new.append(owned.name)
            if residual is not None:
                if residual.has_content():
                    missing.append(owned.name)
                residual.begin_anew(owned.tensor)
    if loaded.lost and new:
        yield (
            f"the checkpoint that {type(optimizer).__name__} loaded holds no residuals; they start "
            f"at zero, as if {listed(new)} had just been rounded to their dtype"
        )
    if not loaded.lost and missing:
        yield (
            f"the checkpoint has residuals, and none of {listed(missing)}: these begin at zero, as "
            "if the values had just been rounded to their dtype"
        )
    if loaded.cast or loaded.dropped:
        yield _about_casts(loaded)


def _has_none(owned: Owned, choice: Choice) -> bool:
    """Return True if a state is to be in a storage without residuals."""
    return bool(choice) and is_alone(chosen(choice, owned.state_name, owned.tensor.dtype))


def _about_casts(loaded: Loaded) -> str:
    """Return a warning of states that have other dtypes than in the checkpoint."""
    alike: dict[tuple[torch.dtype, torch.dtype], list[str]] = {}
    for key, dtypes in loaded.cast.items():
        alike.setdefault(dtypes, []).append(key)
    words = [
        f"{listed(keys)} from {_words(saved)} to {_words(dtype)}"
        for (saved, dtype), keys in alike.items()
    ]
    said = f"load_state_dict() has cast {', '.join(words)}, as PyTorch does"
    if loaded.values:
        said += "; what that would round off is in residuals, until a step has no use for it"
    if loaded.dropped:
        said += f"; the residuals of {listed(loaded.dropped)} do not fit, and begin at zero"
    return said


def _words(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _load(owned: Owned, saved: SavedResidual, param: torch.dtype) -> None:
    STORE.load(
        owned.tensor,
        saved.parts(owned.tensor.dtype, param),
        expected=saved.expected(owned.whole, param),
        storage=saved.storage,
        name=owned.state_name,
        draws=saved.draws,
    )


def _assign(owned: Owned, value: Tensor, choice: Choice) -> None:
    """Give a state a value of a wider dtype, as far as that and a residual hold it."""
    tensor = owned.tensor
    if tensor.dtype not in LOW_PRECISION:
        tensor.data.copy_(value)
        return
    storage = chosen(choice, owned.state_name, tensor.dtype) if choice else ""
    if not storage or refusal(tensor.dtype, storage, owned.name):
        storage = FINEST[tensor.dtype]
    residual = STORE.assign(tensor, value, storage, owned.state_name, place_of(owned.whole))
    residual.provisional = True  # a state that no verdict compensates has no use for it
