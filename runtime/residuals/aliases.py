"""Tensors with residuals that share memory with others: p for `p.data[:8]`."""

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from collage_fx.runtime.residuals.memory import (
    covers,
    empty_as,
    has_memory,
    has_values,
    is_dense,
    overlapping,
    tensor_on,
)

View: TypeAlias = tuple[StorageWeakRef, Any, torch.Size, tuple[int, ...], torch.dtype]
"""Storage, offset, size, strides and dtype of a tensor."""
Get: TypeAlias = Callable[[], Tensor | None]
"""Reference to a tensor, or function that makes it anew; None once it is gone."""


def view_of(tensor: Tensor) -> View:
    """Return the view of its storage that a tensor is."""
    storage = StorageWeakRef(tensor.untyped_storage())
    return storage, tensor.storage_offset(), tensor.size(), tensor.stride(), tensor.dtype


def is_same(one: Tensor, other: Tensor) -> bool:
    """Return True if two tensors are one view of one storage, as p and `p.data` are."""
    if one is other or not (has_values(one) and has_values(other)):
        return one is other
    return view_of(one) == view_of(other)


def part_of(x: Tensor, whole: Tensor, part: Tensor) -> Tensor:
    """Return the elements that a part of a tensor has, of x, which is of the tensor's shape.

    They are a view of x if that has the strides of the tensor.
    """
    if x.stride() != whole.stride():
        x = empty_as(whole, x.dtype).copy_(x)
    start = x.storage_offset() + part.storage_offset() - whole.storage_offset()
    return x.as_strided(part.shape, part.stride(), start)


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class Store(Protocol):
    """A store of residuals, as the index of its tensors sees it."""

    @property
    def counts(self) -> tuple[int, int]:
        """A value that changes when a tensor gets a residual."""

    @property
    def of_view(self) -> Mapping[View, Any]:
        """Views of which each new tensor has the residual that the last one had."""

    def is_lasting(self, tensor: Tensor) -> bool:
        """Return True for a tensor with a residual that is an optimizer's state, or a parameter."""

    def __iter__(self) -> Iterator[tuple[Tensor, Any]]:
        """Yield tensors, each with its residual."""


class Aliases:
    """Index of the tensors with residuals by their storages."""

    def __init__(self, store: Store) -> None:
        """Index nothing yet."""
        self.store = store
        self.counts = -1, -1
        """The `counts` of the store when the index was made."""
        self.living: list[tuple[Get, int]] = []
        """References to tensors, each with the storage that it lay in then."""
        self.index: dict[int, list[Get]] = {}

    def in_storages(self) -> dict[int, list[Get]]:
        """Return storage -> references to tensors with residuals in it, or what makes them anew."""
        if self.counts != self.store.counts or self._has_moved():
            self._make()
        return self.index

    def _has_moved(self) -> bool:
        """Return True if a tensor has other memory by now, as after `p.data = ...`."""
        return any((t := get()) is not None and _key(t) != key for get, key in self.living)

    def _make(self) -> None:
        self.counts = self.store.counts
        tensors = [t for t, _ in self.store if has_memory(t)]
        self.living = [(weakref.ref(t), _key(t)) for t in tensors]
        # The list makes no tuples, for which garbage may be collected, and entries with it.
        shared = list(self.store.of_view)
        again = [(functools.partial(self._on, view), view[0].cdata) for view in shared]
        self.index = {}
        for found in (self.living, again):
            for get, key in found:
                self.index.setdefault(key, []).append(get)

    def _on(self, view: View) -> Tensor | None:
        """Return a new tensor on memory that later tensors share, if it is still in use."""
        storage, offset, size, stride, dtype = view
        if view not in self.store.of_view or storage.expired():
            return None
        return tensor_on(storage, dtype, size, stride, offset)

    def of(self, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        """Return, for each of these, the tensors with residuals that have its elements.

        They may be in another order, as in `p.data.t()`; those of several tensors together may be
        all of its own. It is the tensor itself if there are none. What an optimizer has comes
        before what a function was given, and that before views of it.
        """
        if all(map(self.store.is_lasting, tensors)):
            return [[t] for t in tensors]
        index = self.in_storages()
        return [self._of(t, index) for t in tensors]

    def _of(self, tensor: Tensor, index: Mapping[int, Sequence[Get]]) -> list[Tensor]:
        known = index.get(_key(tensor), ()) if has_values(tensor) else ()
        if all(_is_of(get, tensor) for get in known):
            return [tensor]
        near = _near(known, tensor)
        lasting = {view: t for view, t in near.items() if self.store.is_lasting(t)}
        if found := _with_elements_of(tensor, lasting):
            return found
        if view_of(tensor) in self.store.of_view or any(t is tensor for t in near.values()):
            return [tensor]
        return _with_elements_of(tensor, near) or [tensor]

    def are_parts(self, args: Sequence[Any]) -> bool:
        """Return True if other tensors have the elements of one of these, in another layout."""
        tensors = [t for t in args if isinstance(t, Tensor)]
        found = zip(tensors, self.of(tensors), strict=True)
        return any(len(of) > 1 or not is_same(of[0], t) for t, of in found)

    def near(self, tensor: Tensor) -> list[Tensor]:
        """Return other tensors with residuals in the storage of one, of its dtype."""
        if not has_memory(tensor):
            return []
        found = _near(self.in_storages().get(_key(tensor), ()), tensor)
        return [t for t in found.values() if t is not tensor]


def _is_of(get: Get, tensor: Tensor) -> bool:
    """Return True if what is known in a storage is a tensor itself, or made anew as it is now."""
    if isinstance(get, functools.partial):
        _, *laid_out = get.args[0]
        return laid_out == list(view_of(tensor)[1:])
    return get() is tensor


def _near(known: Sequence[Get], tensor: Tensor) -> dict[View, Tensor]:
    """Return the tensors of this dtype among those that are known, one of each view."""
    found = dict[View, Tensor]()
    for get in known:  # tensors that are made anew come last
        if (t := get()) is not None and t.dtype is tensor.dtype:
            found.setdefault(view_of(t), t)
    return found


def _with_elements_of(tensor: Tensor, near: Mapping[View, Tensor]) -> list[Tensor]:
    """Return the one among these that has all elements of a tensor, or those that have some each.

    Empty if there are none.
    """
    if (same := near.get(view_of(tensor))) is not None:
        return [same]
    dense = [t for t in near.values() if is_dense(t)]
    if (whole := next((t for t in dense if covers(t, tensor)), None)) is not None:
        return [whole]
    parts = [t for t in dense if covers(tensor, t)]
    is_whole = is_dense(tensor) and sum(map(Tensor.numel, parts)) == tensor.numel()
    return parts if is_whole and not overlapping(parts) else []
