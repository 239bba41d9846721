"""Parameters of a saved optimizer, and the weights of a model that they are."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor

from collage_fx.convert.structure import Path, SavedOptimizer
from collage_fx.errors import CheckpointError
from collage_fx.optimizer.checkpoints.saved_residuals import is_entry, tensor_of
from collage_fx.optimizer.ownership import PARAM

_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
"""The last words of names that layers of torch give to tensors which no optimizer has."""
_REMEDY = (
    "Give their names with --names FILE, one a line in the order of the optimizer's parameters, or "
    "make the optimizer from model.named_parameters(), which then stand in its state dict"
)


def match(
    optimizer: SavedOptimizer,
    models: Mapping[Path, Mapping[str, Tensor]],
    given: Sequence[str] | None = None,
) -> tuple[Path, list[str]]:
    """Return which weights are the parameters of an optimizer.

    Names that stand in the checkpoint decide, else names that are given; without any it is the
    order, which is that of the model, as far as that tells all of them.

    Args:
        optimizer: the saved one.
        models: the models beside it.
        given: names in the order of the optimizer's parameters.

    Returns:
        The path of the model, and the name of each parameter.

    Raises:
        CheckpointError: no model fits, or several do, or shapes fit in several ways.
    """
    if not models:
        raise CheckpointError(
            "there are states of an optimizer and no weights: the values of 16-bit states are "
            "those of both together. Save the model's state dict in the same file"
        )
    found: dict[Path, list[str]] = {}
    why: list[str] = []
    for path, tensors in models.items():
        try:
            found[path] = _in_model(optimizer, _distinct(tensors), tensors, given)
        except CheckpointError as error:
            why.append(f"{text_of(path) or 'the model'}: {error}")
    if len(found) == 1:
        return next(iter(found.items()))
    raise CheckpointError(_several(found) if found else "; ".join(why[:3]))


def _several(places: Iterable[Path]) -> str:
    """Return the reason why none of several models is taken."""
    words = " and ".join(f"{text_of(path)!r}" for path in places)
    return (
        f"the optimizer's parameters fit the weights in {words}: it cannot be told whose they are. "
        "Say it with --model"
    )


def text_of(path: Path) -> str:
    """Return the keys of a path joined by dots, as `--model` takes them."""
    return ".".join(map(str, path))


def _distinct(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what may be parameters: of two names for one tensor the first."""
    found: dict[tuple[object, ...], str] = {}
    for name, tensor in tensors.items():
        own = is_entry(name) or name.endswith(_BUFFERS)
        if tensor.is_floating_point() and not own:
            found.setdefault(memory_of(tensor), name)
    return {name: tensors[name] for name in found.values()}


def memory_of(tensor: Tensor) -> tuple[object, ...]:
    """Return what tells a tensor from all that are no other names of it."""
    if not tensor.numel():
        return (id(tensor),)
    start = tensor.untyped_storage().data_ptr(), tensor.storage_offset()
    return *start, tensor.shape, tensor.stride(), tensor.dtype


def _in_model(
    optimizer: SavedOptimizer,
    weights: Mapping[str, Tensor],
    tensors: Mapping[str, Tensor],
    given: Sequence[str] | None,
) -> list[str]:
    shapes = [shape_of(optimizer.states.get(name, {})) for name in optimizer.ids]
    names = _names(optimizer, given)
    if names is not None:
        return _named(names, shapes, tensors)
    if len(optimizer.groups) == 1 and len(shapes) == len(weights):
        return _named(list(weights), shapes, tensors)
    return _by_shape(optimizer, shapes, weights)


def _names(optimizer: SavedOptimizer, given: Sequence[str] | None) -> list[str] | None:
    """Return the names of an optimizer's parameters, if the checkpoint or the user says them."""
    ids = optimizer.ids
    if given is not None:
        if len(given) != len(ids):
            raise CheckpointError(
                f"--names has {len(given)} names, and the optimizer {len(ids)} parameters"
            )
        return list(given)
    if all(isinstance(name, str) and not name.isdecimal() for name in ids):
        return list(ids)
    named = [list(map(str, group.get("param_names", ()))) for group in optimizer.groups]
    sizes = [len(group["params"]) for group in optimizer.groups]
    return [*chain.from_iterable(named)] if list(map(len, named)) == sizes else None


def _named(
    names: Sequence[str], shapes: Sequence[torch.Size | None], tensors: Mapping[str, Tensor]
) -> list[str]:
    for name, shape in zip(names, shapes, strict=True):
        if name not in tensors:
            raise CheckpointError(f"there is no weight {name!r}, which the optimizer has")
        if shape is not None and tensors[name].shape != shape:
            raise CheckpointError(
                f"{name} is {tuple(tensors[name].shape)}, and the states in its place are "
                f"{tuple(shape)}. {_REMEDY}"
            )
    if len(set(names)) < len(names):
        (twice, _), *_ = Counter(names).most_common(1)
        raise CheckpointError(f"{twice!r} is named twice")
    return list(names)


def _by_shape(
    optimizer: SavedOptimizer, shapes: Sequence[torch.Size | None], weights: Mapping[str, Tensor]
) -> list[str]:
    """Return names by shapes, where all of a shape are in one group, in the model's order."""
    found: list[str] = [""] * len(shapes)
    for shape in dict.fromkeys(shapes):
        where = [index for index, one in enumerate(shapes) if one == shape]
        named = [name for name, weight in weights.items() if weight.shape == shape]
        groups = {optimizer.group_of(index) for index in where}
        if shape is None or len(named) != len(where) or (len(groups) > 1 and len(where) > 1):
            size = "of unknown shape" if shape is None else f"of shape {tuple(shape)}"
            raise CheckpointError(
                f"it cannot be told which weights are the optimizer's: it has {len(where)} "
                f"parameters {size} in {len(groups)} groups, and the model {len(named)}. {_REMEDY}"
            )
        for index, name in zip(where, named, strict=True):
            found[index] = name
    return found


def shape_of(state: Mapping[str, object]) -> torch.Size | None:
    """Return the shape of the parameter that a state is of; None where states do not agree."""
    found = set()
    for key, value in state.items():
        if is_entry(key) and (tensor_of(key) != PARAM or key.endswith((".rows", ".draws"))):
            continue
        if isinstance(value, Tensor) and value.dim() and not _is_beside(key, value):
            found.add(value.shape)
    return found.pop() if len(found) == 1 else None


def _is_beside(key: str, value: Tensor) -> bool:
    """Return True for tensors of peers that are not of the parameter's shape: see `formats`."""
    return key.endswith("::scales") or (key == "kahan_comp" and value.numel() == 1)
