"""Memory of tensors: whether they have any, where it is, and whether they share it."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from collage_fx.runtime.torch_private import new_with_weak_ptr

_BASE: Any = Tensor.__base__
address = _BASE.data_ptr
"""Returns where a tensor begins: `Tensor.data_ptr`, which a recorded step has flush what waits."""


def has_memory(tensor: Tensor) -> bool:
    """Return True if tensor is a plain strided tensor with memory of its own."""
    if tensor.layout != torch.strided or tensor.is_meta or tensor._is_zerotensor():
        return False
    try:
        tensor.untyped_storage()
    except NotImplementedError:  # as of what torch.func wraps
        return False
    return True


def overlapping(tensors: Iterable[Tensor], *, by_address: bool = False) -> set[int]:
    """Return the ids of those strided tensors that may share memory with another.

    From their first to their last element: interleaved views count as overlapping.

    Args:
        tensors: any; those without elements share nothing.
        by_address: whether two storages may hold the same memory (what numpy or dlpack lends). Not
            on devices whose data pointers are no addresses.
    """
    spans: dict[int, list[tuple[int, int, int]]] = {}
    strided = [t for t in tensors if t.layout is torch.strided and t.numel()]
    for t, size in zip(strided, extents(strided), strict=True):
        start = address(t) if by_address else int(t.storage_offset()) * t.element_size()
        place = 0 if by_address else t.untyped_storage()._cdata
        if start or not by_address:  # or its memory was given back
            spans.setdefault(place, []).append((start, start + size, id(t)))
    merged = chain.from_iterable(map(_merged, spans.values()))
    return {tensor for _, _, shared in merged if len(shared) > 1 for tensor in shared}


class Apart:
    """Addresses of states, and the other tensors that lie in memory of states."""

    def __init__(self, states: Sequence[Tensor], others: Sequence[Tensor] = ()) -> None:
        """Note the present addresses."""
        sizes = extents((*states, *others))
        self.sizes, self.other_sizes = sizes[: len(states)], sizes[len(states) :]
        starts, beside = list(map(address, states)), list(map(address, others))
        self.shared, bounds = self._placed(starts)
        """The places of states that share memory."""
        self.last = starts, beside, bounds
        """Addresses of each state and each other tensor in the last call that was as the first, and
        `bounds`: replaced as one, since another thread may ask too."""
        self.within = self._within(bounds, beside)
        """The places of others that lie in memory of states."""

    @property
    def bounds(self) -> Sequence[int]:
        """The bounds of the memory of all states, begin and end by turns, in order."""
        return self.last[2]

    def hold(self, states: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
        """Return True if those that share memory are the same, all being laid out as they were."""
        starts, beside = list(map(address, states)), list(map(address, others))
        known, known_beside, bounds = self.last
        if starts != known:
            shared, bounds = self._placed(starts)
            if shared != self.shared:
                return False
        elif beside == known_beside:
            return True
        if self._within(bounds, beside) != self.within:
            return False
        self.last = starts, beside, bounds
        return True

    def is_like(self, other: "Apart") -> bool:
        """Return True if those that share memory are the same, whatever their sizes."""
        return self.shared == other.shared and self.within == other.within

    def _placed(self, starts: Sequence[int]) -> tuple[set[frozenset[int]], Sequence[int]]:
        sized = enumerate(zip(starts, self.sizes, strict=True))
        # At 0 there is no memory any more.
        each = [(at, at + n, k) for k, (at, n) in sized if at and n]
        spans, shared = _merged(each), set[frozenset[int]]()
        if len(spans) < len(each):
            shared = {frozenset(places) for _, _, places in spans if len(places) > 1}
        return shared, [bound for start, end, _ in spans for bound in (start, end)]

    def _within(self, bounds: Sequence[int], starts: Sequence[int]) -> list[int]:
        count, found = len(bounds), []
        for k, (start, size) in enumerate(zip(starts, self.other_sizes, strict=True)):
            at = bisect_right(bounds, start)
            if size and (at % 2 or (at < count and bounds[at] < start + size)):
                found.append(k)
        return found


def _merged(spans: list[tuple[int, int, int]]) -> list[tuple[int, int, list[int]]]:
    """Return the spans of memory, begin, end and whose it is, those that overlap as one of all."""
    merged: list[tuple[int, int, list[int]]] = []
    last = 0
    for start, end, one in sorted(spans):
        if merged and start < last:
            begin, _, shared = merged[-1]
            shared.append(one)
            last = max(last, end)
            merged[-1] = begin, last, shared
        else:
            merged.append((start, end, [one]))
            last = end
    return merged


def shared_between_storages(tensors: Iterable[Tensor]) -> bool:
    """Return True if two tensors share memory in two storages, as with a NumPy array."""
    found = [t for t in tensors if t.is_cpu and has_memory(t)]
    shared = [t for t in found if not t.untyped_storage().resizable()]
    return len(shared) > 1 and overlapping(shared, by_address=True) != overlapping(shared)


def has_values(t: Tensor) -> bool:
    """Return True if a tensor's memory has its values, and not their negatives, as of conjugated
    complex numbers, or none, as of zeros that autograd has not made yet."""
    return has_memory(t) and not t.is_neg()


def is_expanded(t: Tensor) -> bool:
    """Return True if elements of a strided tensor are one in memory, as of `x.expand(...)`."""
    if t.layout is not torch.strided:
        return False
    return any(s == 0 and n > 1 for n, s in zip(t.shape, t.stride(), strict=True))


def extents(tensors: Sequence[Tensor]) -> list[int]:
    """Return the bytes that strided tensors take up, each from its first to its last element."""
    return [
        t.element_size() * (t.numel() if t.is_contiguous() else span(t.shape, t.stride())[1])
        for t in tensors
    ]


def span(size: Sequence[int], stride: Sequence[int], offset: int = 0) -> tuple[int, int]:
    """Return the first element of a view, and the one after its last."""
    if 0 in size:
        return offset, offset
    return offset, offset + 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))


def covers(tensor: Tensor, part: Tensor) -> bool:
    """Return True if part, in the same storage, lies in tensor, from its first element to its last.

    Elements between those of a tensor that is not dense count as its own.
    """
    start, end = span(tensor.shape, tensor.stride(), int(tensor.storage_offset()))
    first, last = span(part.shape, part.stride(), int(part.storage_offset()))
    return start <= first and last <= end


def is_dense(tensor: Tensor) -> bool:
    """Return True if each element between the first and the last is one of tensor, and one only."""
    return tensor.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(tensor)


def new_memory(
    size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return memory without values."""
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


def tensor_on(
    storage: StorageWeakRef,
    dtype: torch.dtype,
    size: Sequence[int],
    stride: Sequence[int],
    offset: int = 0,
) -> Tensor:
    """Return a new tensor on memory that is still in use."""
    memory = new_with_weak_ptr(storage.cdata)
    return torch.empty(0, dtype=dtype, device=memory.device).set_(memory, offset, size, stride)


def is_laid_out_as(t: Tensor, like: Tensor) -> bool:
    """Return True if t, of the shape of like, has the strides that `torch.zeros_like` gives it."""
    strides = like.stride()
    if t.stride() == strides:
        return True
    if not is_dense(like):
        strides = torch.empty_like(like, device="meta").stride()
    return all(n < 2 or s == r for n, s, r in zip(like.shape, t.stride(), strides, strict=True))


def empty_as(t: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return memory of the size and the strides of a tensor, of its dtype or another one."""
    return torch.empty_strided(t.size(), t.stride(), dtype=dtype or t.dtype, device=t.device)
