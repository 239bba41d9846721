"""Where tensors lie in memory: whether they have any, and whether they share it."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch._C._dynamo.guards import _empty_strided_cpu  # type: ignore[attr-defined]
from torch.multiprocessing.reductions import StorageWeakRef

address = torch._C.TensorBase.data_ptr
"""Returns where a tensor begins: `Tensor.data_ptr`, which a recorded step has flush what waits."""


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
            start = address(t) if by_address else int(t.storage_offset()) * t.element_size()
            place = 0 if by_address else t.untyped_storage()._cdata
            if start or not by_address:  # or its memory was given back
                end = start + span(t.shape, t.stride())[1] * t.element_size()
                spans.setdefault(place, []).append((start, end, id(t)))
    found: set[int] = set()
    for shared in spans.values():
        last_end, last = 0, 0
        for start, end, tensor in sorted(shared):
            if start < last_end:
                found |= {last, tensor}
            if end > last_end:
                last_end, last = end, tensor
    return found


def shared_between_storages(tensors: Iterable[Tensor]) -> bool:
    """Tell whether two tensors share memory in two storages, as with a NumPy array."""
    found = [t for t in tensors if t.is_cpu and has_memory(t)]
    shared = [t for t in found if not t.untyped_storage().resizable()]
    return len(shared) > 1 and overlapping(shared, by_address=True) != overlapping(shared)


def is_expanded(t: Tensor) -> bool:
    """Tell whether elements of a strided tensor are one in memory, as of `x.expand(...)`."""
    if t.layout is not torch.strided:
        return False
    return any(s == 0 and n > 1 for n, s in zip(t.shape, t.stride(), strict=True))


def span(size: Sequence[int], stride: Sequence[int], offset: int = 0) -> tuple[int, int]:
    """Return the first element of a view, and the one after its last."""
    if 0 in size:
        return offset, offset
    return offset, offset + 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))


def new_memory(
    size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return memory without values, on the CPU as Inductor's code has it: in a third of the time.

    The size must be no torch.Size, but a tuple.
    """
    if device.type == "cpu":
        made: Tensor = _empty_strided_cpu(size, stride, dtype)
        return made
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


def tensor_on(
    storage: StorageWeakRef,
    dtype: torch.dtype,
    size: Sequence[int],
    stride: Sequence[int],
    offset: int = 0,
) -> Tensor:
    """Return a new tensor on memory that is still in use."""
    memory = torch.UntypedStorage._new_with_weak_ptr(storage.cdata)
    return torch.empty(0, dtype=dtype, device=memory.device).set_(memory, offset, size, stride)


def is_laid_out_as(t: Tensor, like: Tensor) -> bool:
    """Tell whether t, of the shape of like, has the strides that `torch.zeros_like` gives it."""
    strides = like.stride()
    if t.stride() == strides:
        return True
    if not torch.ops.aten.is_non_overlapping_and_dense(like):
        strides = torch.empty_like(like, device="meta").stride()
    return all(n < 2 or s == r for n, s, r in zip(like.shape, t.stride(), strides, strict=True))


def empty_as(t: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return memory of the size and the strides of a tensor, of its dtype or another one."""
    return torch.empty_strided(t.size(), t.stride(), dtype=dtype or t.dtype, device=t.device)
