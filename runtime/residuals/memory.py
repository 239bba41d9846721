"""Where tensors lie in memory: whether they have any, and whether they share it."""

from collections.abc import Iterable

import torch
from torch import Tensor


def has_memory(tensor: Tensor) -> bool:
    """Tell whether tensor is a plain strided tensor with memory of its own."""
    return (
        tensor.layout == torch.strided
        and not tensor.is_meta
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )


def overlapping(tensors: Iterable[Tensor], *, by_address: bool = False) -> set[int]:
    """Return the ids of those strided tensors that may share memory with another.

    From their first to their last element: interleaved views count as overlapping.

    Args:
        tensors: any; those without elements share nothing.
        by_address: whether two storages may hold the same memory (what numpy or dlpack lends). Not
            on devices whose data pointers are no addresses.
    """
    spans: dict[int, list[tuple[int, int, int]]] = {}
    for t in tensors:
        if t.layout is torch.strided and t.numel():
            start = t.data_ptr() if by_address else int(t.storage_offset()) * t.element_size()
            place = 0 if by_address else t.untyped_storage()._cdata
            if start or not by_address:  # or its memory was given back
                spans.setdefault(place, []).append((start, start + _bytes_spanned(t), id(t)))
    found: set[int] = set()
    for shared in spans.values():
        last_end, last = 0, 0
        for start, end, tensor in sorted(shared):
            if start < last_end:
                found |= {last, tensor}
            if end > last_end:
                last_end, last = end, tensor
    return found


def _bytes_spanned(t: Tensor) -> int:
    """Return how many bytes there are from the first element to the end of the last."""
    steps = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    return (steps + 1) * t.element_size()
