"""Read the value and the residuals of a tensor, and give them back."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from collage_fx.errors import OptionError, ResidualError, SubjectError
from collage_fx.hooks import optimizer_hooks
from collage_fx.optimizer.ownership import owners_of
from collage_fx.runtime.residuals.aliases import is_same, part_of
from collage_fx.runtime.residuals.dtensor import shard_of, sharded_like
from collage_fx.runtime.residuals.memory import empty_as
from collage_fx.runtime.residuals.residual import Residual
from collage_fx.runtime.residuals.store import STORE
from collage_fx.runtime.storage.components import storage_of
from collage_fx.runtime.storage.registry import STORAGES
from collage_fx.runtime.storage.state_name import StateName


def residuals(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the residual components of tensor, themselves, not copies; () if it has none.

    Each has the shape and device of tensor, and the dtype that its storage says: that of tensor
    for `mcf2`, whose value is the sum of both. In `ulp4` there are bytes, one for two elements in
    the order of rows; of a DTensor those of this process. A residual whose tensor was written since
    from outside does not count, nor does that of a checkpoint beside other values than it was saved
    with; the next step clears it. Where it is known which elements were written, only these do not
    count, and the components are copies until the next step.

    Args:
        tensor: a parameter, a state, an argument of a function, or a view of one.

    Raises:
        SubjectError: no tensor.

    Examples:
        >>> train(collage_fx.compile_(optimizer))
        >>> [residual.dtype for residual in collage_fx.residuals(model.weight)]
        [torch.int16]
        >>> collage_fx.residuals(torch.ones(2))
        ()
    """
    own = shard_of(_checked(tensor, "residuals"))
    of, *others = STORE.aliases.of([own])[0]
    residual, components = _present(of)
    if residual is None or components is None or others:
        return ()
    if not is_same(of, own):
        words = residual.words(of, components)
        return tuple(part_of(w, of, own) for w in words)
    if residual.packed:
        return components
    return tuple(sharded_like(c, tensor) for c in components)


def value(tensor: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return the value of the whole expansion, tensor plus residuals, in dtype.

    Shape and device are those of tensor. In float64 it is exact, for `mcf2` and `mcf3` unless the
    components are more than 2^53 apart. A tensor without residuals is converted.

    Args:
        tensor: a parameter, a state, an argument of a function, or a view of one.
        dtype: of the result, a floating one.

    Raises:
        OptionError: another dtype.
        SubjectError: no tensor.

    Examples:
        >>> train(collage_fx.compile_(optimizer))
        >>> whole = collage_fx.value(model.weight)
        >>> torch.equal(whole.bfloat16(), model.weight), torch.equal(whole, model.weight.double())
        (True, False)
    """
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise OptionError(f"dtype={dtype!r} is no floating dtype of torch")
    own = shard_of(_checked(tensor, "value"))
    found = [(t, _whole(t, dtype)) for t in STORE.aliases.of([own])[0]]
    (of, whole), *others = found
    if others:
        whole = empty_as(own, dtype)
        for part, x in found:
            part_of(whole, own, part).copy_(x)
    elif not is_same(of, own):
        whole = part_of(whole, of, own)
    return sharded_like(whole, tensor)


def draws(tensor: Tensor) -> int:
    """Return the number of roundings by chance of tensor's residual, 0 if it has none.

    Args:
        tensor: a parameter, a state, an argument of a function, or a view of one.

    Raises:
        SubjectError: no tensor.

    Examples:
        >>> train(collage_fx.compile_(optimizer, stochastic_rounding=True), steps=3)
        >>> collage_fx.draws(model.weight)
        3
    """
    ((of, *_),) = STORE.aliases.of([shard_of(_checked(tensor, "draws"))])
    residual = STORE.get(of)
    return 0 if residual is None else residual.draws


def load_residuals(
    tensor: Tensor,
    components: Sequence[Tensor],
    *,
    draws: int | None = None,
    storage: str | None = None,
) -> None:
    """Give tensor the residual components that were saved with its present value.

    Args:
        tensor: bf16 or fp16, any shape.
        components: what `residuals(tensor)` returned when it was saved, in any storage; the next
            step converts them to its own. In the place of the bytes of `ulp4` there may be an int8
            for each element, as checkpoints have them: 256ths of a unit in the last place.
        draws: what `draws(tensor)` returned then, for steps with stochastic rounding: each takes
            another seed, and without it they go on from what the tensor has, or begin anew.
        storage: that of the components, where their dtypes leave it open: an int8 for each element
            is of `ulp8` unless the tensor is in `ulp4` by now, or this says so.

    Raises:
        OptionError: no such storage.
        ResidualError: the components do not fit the tensor, or it is a part of one that has a
            residual.
        SubjectError: no tensor.

    Examples:
        >>> train(collage_fx.compile_(optimizer))
        >>> copy = model.weight.detach().clone()
        >>> collage_fx.load_residuals(copy, collage_fx.residuals(model.weight))
        >>> torch.equal(collage_fx.value(copy), collage_fx.value(model.weight))
        True
    """
    name = _name_of(_checked(tensor, "load_residuals"))
    components = [shard_of(_checked(c, "load_residuals")) for c in components]
    of, *others = STORE.aliases.of([shard_of(tensor)])[0]
    if others or not is_same(of, shard_of(tensor)):
        raise ResidualError(
            f"{name} is a view of what has a residual: give it to the tensor itself, as a whole"
        )
    tensor = of
    if draws is not None and draws < 0:
        raise ResidualError(f"{name} was given {draws} draws: less than none")
    if not components and not draws:
        raise ResidualError(f"{name} was given no residual, and no draws: there is nothing to load")
    storage = _storage_of(tensor, components, str(name), storage)
    STORE.load(tensor, components, storage=storage, name=name, draws=draws)


def _storage_of(
    tensor: Tensor, components: Sequence[Tensor], name: str, storage: str | None
) -> str:
    """Return the storage of components, by their dtypes where it is not given."""
    if storage is not None and storage not in STORAGES:
        raise OptionError(f"storage={storage!r} is not one of {', '.join(map(repr, STORAGES))}")
    residual = STORE.get(tensor)
    if storage is None and residual is not None and residual.packed and residual.fits(tensor):
        wanted = STORAGES[residual.storage].residuals[tensor.dtype]
        storage = residual.storage if [c.dtype for c in components] == [*wanted] else None
    return storage or storage_of(tensor, components, name)


def _checked(tensor: Any, function: str) -> Tensor:
    if not isinstance(tensor, Tensor):
        raise SubjectError(f"{function} takes tensors, got {type(tensor).__name__} {tensor!r:.40}")
    return tensor


def _present(tensor: Tensor) -> tuple[Residual | None, tuple[Tensor, ...] | None]:
    """Return the residual of tensor, and its components as they belong to its present value."""
    residual = STORE.get(tensor)
    return residual, None if residual is None else residual.present(tensor)


def _whole(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    residual, components = _present(tensor)
    if residual is None or components is None:
        return tensor.detach().to(dtype)
    return residual.whole(tensor, components).to(dtype)


def _name_of(tensor: Tensor) -> StateName:
    owner = owners_of(optimizer_hooks.optimizers()).get(id(shard_of(tensor)))
    if owner:
        return owner[1].state_name
    return StateName(f"a tensor of shape {tuple(tensor.shape)}")
