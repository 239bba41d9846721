"""Addition of a gradient to a sum with its residual: one kernel, or PyTorch's operations."""

import functools
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.fx import GraphModule

from collage_fx.passes.codegen.inductor_lowering import register_region
from collage_fx.passes.codegen.multi_tensor_kernel import MultiTensorKernel
from collage_fx.passes.rewrite.lower import lowered_function
from collage_fx.runtime import logs
from collage_fx.runtime.expansion.eft import WIDER
from collage_fx.runtime.residuals.memory import has_values
from collage_fx.runtime.residuals.residual import Residual, next_draw
from collage_fx.runtime.storage.registry import (
    STORAGES,
    is_by_chance,
    join_in,
    split_by_chance_into,
    split_into,
)

CHUNK = 1 << 18
"""Elements that are widened at once on a CPU, whose caches hold them."""
ON_DEVICES = 1 << 25
"""The same on other devices."""
_WITHOUT: set[str] = set()
"""Kinds of devices for which no kernel could be made, or run."""


def add(total: Tensor, residual: Residual, fresh: Tensor) -> None:
    """Add a gradient to a sum with its residual, in fp32, and settle that.

    Args:
        total: the sum, which has the residual.
        residual: that belongs to it.
        fresh: of its shape; any layout, and any dtype that can be added to it.
    """
    if not _added_by_kernel(total, residual, fresh):
        _add_in_parts(total, residual, fresh)
    residual.settle(total)


def _summed(storage: str, hi: Tensor, fresh: Tensor, *lows: Tensor) -> tuple[Tensor, ...]:
    """Return the words of the sum of a value in a storage and a tensor."""
    value = _whole(storage, hi, *lows) + fresh.to(WIDER[hi.dtype])
    return split_into(storage, value, hi.dtype)


def _whole(storage: str, hi: Tensor, *lows: Tensor) -> Tensor:
    """Return a value; zero has no low words, since `p.grad.data.zero_()` counts no version."""
    whole = join_in(WIDER[hi.dtype], storage, hi, *lows)
    return torch.where(hi == 0, torch.zeros_like(whole), whole)


def _added_by_kernel(total: Tensor, residual: Residual, fresh: Tensor) -> bool:
    """Add by one kernel, if there is one for these; return True then."""
    lows, device = residual.components, total.device.type
    if residual.packed or is_by_chance(residual.storage) or device in _WITHOUT:
        return False
    if type(fresh) is not type(total) or not (has_values(total) and has_values(fresh)):
        return False
    if not (total.numel() and total.is_contiguous()):
        return False
    if not all([x.stride() == total.stride() for x in (fresh, *lows)]):
        return False
    try:
        kernel = _kernel(residual.storage, total.dtype, fresh.dtype)
        kernel.run([[x] for x in (total, fresh, *lows)], [total.numel()])
    except Exception as error:  # whatever a compiler raises; nothing is written yet
        _WITHOUT.add(device)
        logs.LOG.info("sums of gradients: added operation by operation on %s: %s", device, error)
        return False
    return True


@functools.cache
def _kernel(storage: str, dtype: torch.dtype, added: torch.dtype) -> MultiTensorKernel:
    """Return the kernel that adds gradients of a dtype to sums in a storage."""
    lows = STORAGES[storage].residuals[dtype]
    dtypes = [dtype, added, *lows]
    graph = lowered_function(functools.partial(_summed, storage), [(d, False) for d in dtypes])
    region = register_region(GraphModule(torch.nn.Module(), graph))
    written = [0, *range(2, len(dtypes))]
    return MultiTensorKernel(
        region, dtypes, [False] * len(dtypes), written, [*range(len(written))], []
    )


def _add_in_parts(total: Tensor, residual: Residual, fresh: Tensor) -> None:
    """Add by PyTorch's operations."""
    storage, dtype = residual.storage, total.dtype
    for hi, lows, more in _parts(total, residual, fresh):
        if is_by_chance(storage):
            value = _whole(storage, hi, *lows) + more.to(WIDER[dtype])
            words = split_by_chance_into(storage, value, dtype, None, 0, next_draw([residual]))
        else:
            words = _summed(storage, hi, more, *lows)
        hi.copy_(words[0])
        if lows is residual.components:
            residual.hold(words[1:])
        else:
            for low, word in zip(lows, words[1:], strict=True):
                low.copy_(word)


def _parts(
    total: Tensor, residual: Residual, fresh: Tensor
) -> Iterator[tuple[Tensor, tuple[Tensor, ...], Tensor]]:
    """Yield parts of a sum, of its residual and of a gradient: all, unless that is too large."""
    size = CHUNK if total.is_cpu else ON_DEVICES
    flat = total.is_contiguous() and fresh.is_contiguous() and not residual.packed
    if not flat or is_by_chance(residual.storage) or total.numel() <= size:
        yield total, residual.components, fresh
        return
    hi, more = total.view(-1).split(size), fresh.view(-1).split(size)
    lows = [c.view(-1).split(size) for c in residual.components]
    for k, part in enumerate(hi):
        yield part, tuple(low[k] for low in lows), more[k]
