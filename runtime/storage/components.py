"""Components of a residual: those that a tensor can have, and the checks of given ones."""

from collections.abc import Sequence

import torch
from torch import Tensor

from collage_fx.runtime.errors import ResidualError
from collage_fx.runtime.storage.registry import STORAGES, refusal


def zeros(tensor: Tensor, storage: str) -> tuple[Tensor, ...]:
    """Return residuals for tensor without content.

    What is made in inference mode cannot be written outside of it, as the next step will.
    """
    kind, device = STORAGES[storage], tensor.device
    dtypes = kind.in_memory(tensor.dtype)
    with torch.inference_mode(False):
        if kind.packed:
            shape = kind.shape_in_memory(tensor.shape)
            return tuple(torch.zeros(shape, dtype=d, device=device) for d in dtypes)
        return tuple(torch.zeros_like(tensor, dtype=d, requires_grad=False) for d in dtypes)


def storage_of(tensor: Tensor, components: Sequence[Tensor], name: str) -> str:
    """Return the storage that these are residuals in; raises ResidualError if there is none."""
    found = tuple(c.dtype for c in components)
    fitting = (s for s in STORAGES.values() if tensor.dtype in s.residuals)
    known = {s.in_memory(tensor.dtype): s.name for s in fitting}
    if found not in known:
        raise ResidualError(
            f"{name}, {tensor.dtype}, was given residuals of {list(found)}; a storage for that "
            f"dtype has one of {[list(dtypes) for dtypes in known if dtypes]}"
        )
    return known[found]


def check_components(tensor: Tensor, components: Sequence[Tensor], storage: str, name: str) -> None:
    """Raise ResidualError unless components are residuals that tensor can have in this storage.

    Packed ones may be as memory holds them, or of the shape of tensor.
    """
    known = STORAGES.get(storage)
    if known is None:
        raise ResidualError(
            f"the residual of {name} has storage {storage!r}; known here: {', '.join(STORAGES)}"
        )
    if why := refusal(tensor.dtype, storage, name):
        raise ResidualError(why)
    dtypes = known.residuals[tensor.dtype]
    if len(components) != len(dtypes):
        raise ResidualError(
            f"{name} was given {len(components)} residual components; "
            f"storage {storage!r} has {len(dtypes)}"
        )
    shape = torch.Size(known.shape_in_memory(tensor.shape))
    in_memory = [(shape, dtype) for dtype in known.in_memory(tensor.dtype)]
    for component, dtype, held in zip(components, dtypes, in_memory, strict=True):
        if (component.shape, component.dtype) not in ((tensor.shape, dtype), held):
            raise ResidualError(
                f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)}; its residual is "
                f"{component.dtype} of shape {tuple(component.shape)}"
            )
