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


def overlapping(tensors: Iterable[Tensor]) -> set[int]:
    """Return the ids of those strided tensors that may have memory in common with another.

    By the addresses from the first to the last element: interleaved views count as overlapping.
    """
    found: set[int] = set()
    spans = sorted(
        (start, start + _bytes_spanned(t), id(t))
        for t in tensors
        if t.layout is torch.strided and t.numel() and (start := t.data_ptr())
    )
    last_end, last = 0, 0
    for start, end, tensor in spans:
        if start < last_end:
            found |= {last, tensor}
        if end > last_end:
            last_end, last = end, tensor
    return found


def _bytes_spanned(t: Tensor) -> int:
    """Return how many bytes there are from the first element to the end of the last."""
    steps = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    return (steps + 1) * t.element_size()
