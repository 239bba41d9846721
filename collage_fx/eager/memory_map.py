"""Which residual lies beside which memory while a step runs outside compiled graphs.

A tensor is looked up by its memory, so that `p`, `p.data`, `p.view(-1)` and `p[0]` are one state.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from collage_fx.passes.rewrite.interpreter import Forms
from collage_fx.runtime.residuals.memory import has_memory

_PURGE = 64


@dataclass(eq=False)
class MemoryRecord:
    """What is known of one tensor: its low words, and which carried states it depends on how."""

    storage: StorageWeakRef
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    storage_device: torch.device
    made: tuple[Tensor, ...] | None
    forms: Forms = field(default_factory=dict)
    make: Callable[[], tuple[Tensor, ...]] | None = None
    """Makes the low words when they are first needed."""
    whole: bool = False
    """Whether this is a wide tensor with the value of an expansion in it, or computed from one."""

    @property
    def lows(self) -> tuple[Tensor, ...] | None:
        """The low words of all of it, or None."""
        if self.made is None and self.make is not None:
            self.made, self.make = self.make(), None
        return self.made

    @classmethod
    def of(cls, tensor: Tensor, lows: tuple[Tensor, ...] | None, forms: Forms) -> "MemoryRecord":
        """Return the record of tensor."""
        storage = StorageWeakRef(tensor.untyped_storage())
        where = int(tensor.storage_offset())
        dtype, device = tensor.dtype, tensor.device
        return cls(storage, tensor.size(), tensor.stride(), where, dtype, device, lows, forms)

    def same(self, tensor: Tensor) -> bool:
        """Tell whether tensor is all of it, element for element."""
        return (
            tensor.storage_offset() == self.offset
            and tensor.size() == self.size
            and tensor.stride() == self.stride
            and tensor.dtype == self.dtype
        )

    def covers(self, tensor: Tensor) -> bool:
        """Tell whether all of tensor lies within it, and it has no gaps."""
        start, extent = tensor.storage_offset(), _extent(self.size, self.stride)
        return (
            tensor.dtype == self.dtype
            and extent == self.size.numel()
            and self.offset <= start
            and start + _extent(tensor.size(), tensor.stride()) <= self.offset + extent
        )

    def begin_low(self, dtypes: tuple[torch.dtype, ...]) -> "MemoryRecord":
        """Make low words of zeros for all of it."""
        device = self.storage_device
        self.made = tuple(
            torch.empty_strided(self.size, self.stride, dtype=dtype, device=device).zero_()
            for dtype in dtypes
        )
        return self

    def low(self, tensor: Tensor) -> tuple[Tensor, ...] | None:
        """Return the low words of tensor, which is the whole or a view of it; None if unknown."""
        lows = self.lows
        if lows is None or self.same(tensor):
            return lows
        if any(lo.stride() != self.stride for lo in lows):
            return None
        offset = tensor.storage_offset() - self.offset
        return tuple(
            lo.as_strided(tensor.size(), tensor.stride(), offset + lo.storage_offset())
            for lo in lows
        )


def _extent(size: torch.Size, stride: tuple[int, ...]) -> int:
    if 0 in size:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))


class MemoryMap:
    """Records of tensors by their memory; one is forgotten when its memory is freed."""

    def __init__(self) -> None:
        self._by_storage: dict[int, list[MemoryRecord]] = {}
        self._added = 0

    def clear(self) -> None:
        """Forget all."""
        self._by_storage.clear()

    def find(self, tensor: Tensor) -> MemoryRecord | None:
        """Return the record of tensor, or that of a dense one that tensor is a view of."""
        if not self._by_storage or not has_memory(tensor):
            return None
        records = self._by_storage.get(tensor.untyped_storage()._cdata, ())
        if records and records[0].storage.expired():
            del self._by_storage[tensor.untyped_storage()._cdata]
            return None
        whole = next((s for s in records if s.same(tensor)), None)
        return whole or next((s for s in records if s.covers(tensor)), None)

    def add(self, tensor: Tensor, lows: tuple[Tensor, ...] | None, forms: Forms) -> MemoryRecord:
        """Make a record for tensor, in the place of one of the same elements."""
        record = MemoryRecord.of(tensor, lows, forms)
        key = tensor.untyped_storage()._cdata
        beside = [
            s
            for s in self._by_storage.get(key, ())
            if not s.storage.expired() and not s.same(tensor)
        ]
        self._by_storage[key] = [*beside, record]
        self._added += 1
        if self._added % _PURGE == 0:
            self._purge()
        return record

    def turn(self, record: MemoryRecord, tensor: Tensor) -> None:
        """Let a record have the shape and strides that its tensor has now."""
        record.size, record.stride = tensor.size(), tensor.stride()
        key = tensor.untyped_storage()._cdata
        self._by_storage[key] = [
            s for s in self._by_storage.get(key, ()) if s is record or not s.same(tensor)
        ]

    def add_around(self, tensor: Tensor) -> MemoryRecord:
        """Make a record without content for all the memory that tensor may be a view of."""
        storage = tensor.untyped_storage()
        count = storage.nbytes() // tensor.element_size()
        if count == tensor.numel():
            return self.add(tensor, None, {})
        whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return self.add(whole.set_(storage, 0, (count,), (1,)), None, {})

    def _purge(self) -> None:
        dead = [k for k, records in self._by_storage.items() if records[0].storage.expired()]
        for key in dead:
            del self._by_storage[key]
