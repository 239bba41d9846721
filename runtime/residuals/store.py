"""The residual store: which tensor has which residual."""

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.weak import WeakIdRef

from collage_fx.runtime.errors import warn
from collage_fx.runtime.expansion.eft import WIDER
from collage_fx.runtime.residuals.aliases import Aliases, View, is_same, part_of, view_of
from collage_fx.runtime.residuals.changes import changes_of, note_changes
from collage_fx.runtime.residuals.checksum import bits_of
from collage_fx.runtime.residuals.memory import (
    covers,
    empty_as,
    is_dense,
    is_laid_out_as,
)
from collage_fx.runtime.residuals.residual import (
    Expected,
    Residual,
    Sums,
    clear_stale,
    next_draw,
    warn_of_cleared,
)
from collage_fx.runtime.storage.components import check_components, storage_of
from collage_fx.runtime.storage.positions import Place
from collage_fx.runtime.storage.registry import (
    STORAGES,
    check_compensable,
    is_by_chance,
    split_by_chance_into,
    split_into,
)
from collage_fx.runtime.storage.state_name import StateName
from collage_fx.runtime.torch_private import _disable_current_modes


class Marked(Protocol):
    """A state of a graph."""

    marked: bool
    """True if the graph notes which of its elements change."""


class ResidualStore:
    """Residuals by identity of their tensors; an entry goes when its tensor does."""

    def __init__(self) -> None:
        self._residuals: dict[int, tuple[WeakIdRef, Residual]] = {}
        """Entries by id, with what drops each when its tensor goes: one is found without Python
        code, as a WeakIdKeyDictionary does not."""
        self.of_view: dict[View, Residual] = {}
        """Residuals by storage and layout, for tensors made anew at each call, as `p.data` is."""
        self._shared: set[int] = set()
        """The addresses of these storages."""
        self.aliases = Aliases(self)
        """The tensors with residuals by their storages."""
        self._coarser: set[tuple[str, str]] = set()
        self.generation = 0
        """Number of changes: a tensor was given a residual, or other components, or what `get` says
        changed in another way: who remembers answers of the store asks anew then."""
        self.gradients = 0
        """Number of times that a gradient was given a residual: gradients are new tensors in each
        step, and what is known of states holds on."""

    @property
    def counts(self) -> tuple[int, int]:
        """A value that changes with `generation` and with `gradients`."""
        return self.generation, self.gradients

    def hand_on(self, before: Tensor | None, tensor: Tensor, residual: Residual) -> bool:
        """Give a tensor the residual of one in whose place it is, if that may be of its value.

        Args:
            before: the tensor that was there; None if it is gone. While it has the value that the
                residual is of, an equal tensor gets a copy, and another one none. Else the value
                decides at the next step, as after a write from outside.
            tensor: without residual.
            residual: that of the one before.

        Returns False if the tensor can have no such residual, being of another shape or dtype.
        """
        if before is None and residual.is_shaped_as(tensor):
            residual.bring_to(tensor.device)
        if not residual.fits(tensor):
            return residual.is_shaped_as(tensor)
        if before is not None and residual.fits(before) and residual.is_present(before):
            if _are_equal(before, tensor):
                self.copy(residual, tensor)
            return True
        if before is not None:
            self._residuals.pop(id(before), None)
        residual.forget_tensor()
        self._keep(tensor, residual)
        self.generation += 1
        return True

    def copy(self, residual: Residual, tensor: Tensor) -> Residual:
        """Give a tensor a copy of the residual of an equal one."""
        lows = tuple(c.clone() for c in residual.components)
        copied = self.adopt(tensor, lows, residual.storage, residual.name)
        copied.draws = residual.draws
        return copied

    def lend(self, residuals: Iterable[Residual]) -> None:
        """Have the next step see whether who was given residuals has written them."""
        for residual in residuals:
            residual.lend()
        self.generation += 1

    def get(self, tensor: Tensor) -> Residual | None:
        """Return the residual of tensor, or of another one that is the same piece of memory."""
        return self.of([tensor])[0]

    def of(self, tensors: Sequence[Tensor]) -> list[Residual | None]:
        """Return the residuals of these tensors, as `get` returns each."""
        entries = map(self._residuals.get, map(id, tensors))
        found = [entry and entry[1] for entry in entries]
        if self.of_view:
            pairs = zip(tensors, found, strict=True)
            return [self._by_memory(t) if r is None else r for t, r in pairs]
        return found

    def _by_memory(self, tensor: Tensor) -> Residual | None:
        """Give a tensor the residual of another one that is the same piece of memory."""
        if tensor.layout != torch.strided or tensor.untyped_storage()._cdata not in self._shared:
            return None
        residual = self.of_view.get(view_of(tensor))
        if residual is not None:
            self._renew(residual)
            self._keep(tensor, residual)
            # Its version counter may be a new one, which tells nothing of what happened before.
            residual.settle(tensor)
            if _lives_on(tensor):
                residual.shared = False
                self.generation += 1
        return residual

    def _keep(self, tensor: Tensor, residual: Residual) -> None:
        """Make a residual that of a tensor, for as long as there is this."""
        # It is called with the reference, which is what it returns for an entry that is gone.
        forget = functools.partial(self._residuals.pop, id(tensor))
        self._residuals[id(tensor)] = WeakIdRef(tensor, forget), residual

    def _renew(self, residual: Residual) -> None:
        """Note a residual that another tensor than before finds: by its bits from now on."""
        if residual.expected is None and not residual.renewed:
            before = (t for t, r in self if r is residual)
            if not any(map(residual.belongs, before)):
                residual.expected = _never
        residual.renewed = True

    def follow(self, tensor: Tensor, residual: Residual) -> None:
        """Have a residual laid out as its tensor is by now: kernels walk over both.

        It is of no present value then. A graph that serves other strides ensures its residuals.
        """
        strides = tensor.stride()
        same = strides == residual.stride
        for component in () if residual.packed or not same else residual.components:
            same = same and (component.stride() == strides or is_laid_out_as(component, tensor))
        if not same:
            residual.lay_out(tensor)
            self.generation += 1

    def clear_stale(
        self, pairs: Iterable[tuple[Tensor, Residual]], named: Callable[[str], str] = str
    ) -> None:
        """Clear residuals as the function `clear_stale`, of tensors of whatever layout by now."""
        found = list(pairs)
        for tensor, residual in found:
            if residual.is_shaped_as(tensor):
                self.follow(tensor, residual)
            else:
                residual.forget_tensor()
        clear_stale(found, named)

    def share_by_memory(self, tensor: Tensor) -> None:
        """Let later tensors on the same memory have the residual of this one."""
        residual, key = self._residuals[id(tensor)][1], view_of(tensor)
        if self.of_view.get(key) is residual:
            return
        storage = tensor.untyped_storage()
        self.of_view[key] = residual
        self._shared.add(storage._cdata)
        weakref.finalize(storage, self._forget_memory, key).atexit = False
        if residual.renewed is False:
            residual.shared, residual.renewed = not _lives_on(tensor), None
        self.generation += 1

    def share(self, tensor: Tensor) -> bool:
        """Let tensor have the residual of a living one that is the same memory, if there is one."""
        ((first, *others),) = self.aliases.of([tensor])
        if others or first is tensor or not is_same(first, tensor):
            return False
        self.share_by_memory(first)
        return True

    def _forget_memory(self, key: tuple[Any, ...]) -> None:
        """Drop the residual of memory that is gone."""
        self.of_view.pop(key, None)
        self._shared.discard(key[0].cdata)

    def ensure(
        self,
        tensor: Tensor,
        storage: str,
        name: StateName,
        found: Residual | None = None,
        place: Place | None = None,
    ) -> Residual:
        """Return the residual of tensor, made of zeros if there was none of this shape yet.

        One of another storage is converted. `found` is what `get` has returned, if that was asked;
        `place` that of a shard in the whole tensor.
        """
        residual = found or self.get(tensor)
        if residual is not None and not residual.fits(tensor):
            if residual.has_content():
                warn_of_cleared([str(name)], "the tensor has another shape, dtype or device by now")
            residual = None
        if residual is None:
            residual = self.adopt(tensor, None, storage, name)
            self._take_over(tensor, residual)
            return residual
        self.follow(tensor, residual)
        if residual.storage != storage:
            self._warn_coarser(residual, storage, tensor.dtype)
            return self.convert(tensor, storage, place)
        return residual

    def is_lasting(self, tensor: Tensor) -> bool:
        """Return True for a tensor with a residual that is an optimizer's state, or a parameter."""
        entry = self._residuals.get(id(tensor))
        return entry is not None and not entry[1].shared

    def _take_over(self, tensor: Tensor, residual: Residual) -> None:
        """Give a new state what its memory had before it: that of p after `p.data[:8]`."""
        for other in self.aliases.near(tensor) if self._shared else ():
            found, is_part = self.get(other), covers(tensor, other)
            whole, part = (tensor, other) if is_part else (other, tensor)
            if found is None or not found.shared or not found.fits(other):
                continue
            if not is_dense(whole) or not covers(whole, part):
                continue
            self.clear_stale([(other, found)])
            if found.storage != residual.storage:
                found = self.convert(other, residual.storage)
            with torch.no_grad(), _disable_current_modes():
                words = [empty_as(tensor, w.dtype).copy_(w) for w in residual.words(tensor)]
                for mine, its in zip(words, found.words(other), strict=True):
                    if is_part:
                        part_of(mine, tensor, other).copy_(its)
                    else:
                        mine.copy_(part_of(its, other, tensor))
                residual.hold(words)
            residual.settle(tensor)
            if is_part:
                self.drop(other)

    def _warn_coarser(self, residual: Residual, storage: str, dtype: torch.dtype) -> None:
        """Warn, once for each pair of storages, that a residual goes into one that keeps less."""
        pair = residual.storage, storage
        old, new = (STORAGES[name].precision[dtype] for name in pair)
        if new < old and pair not in self._coarser and not residual.provisional:
            self._coarser.add(pair)
            warn(
                "coarser-storage",
                f"the residual of {residual.name} was kept in storage {pair[0]!r} and "
                f"goes on in {pair[1]!r}, which keeps {new} bits instead of {old}: that is what "
                f"this step was compiled with. Compile it with storage={pair[0]!r} to keep them; "
                "two optimizers of one parameter need one storage",
                stacklevel=2,
            )

    @contextmanager
    def unheard(self) -> Iterator[None]:
        """Leave the warnings of this context out of those that are given once: of copies, say."""
        before = set(self._coarser)
        try:
            yield
        finally:
            self._coarser = before

    def adopt(
        self,
        tensor: Tensor,
        lows: tuple[Tensor, ...] | None,
        storage: str,
        name: StateName,
        sums: Sums | None = None,
    ) -> Residual:
        """Make lows, or zeros, the residual of tensor, themselves and not copies.

        Lows are in the storage that their dtypes say; zeros are made for this one. `sums` are those
        that tensor is one of, if it is a gradient.
        """
        storage = storage if lows is None else storage_of(tensor, lows, str(name))
        old = self._residuals.get(id(tensor))
        residual = Residual(tensor, storage, name, lows, sums=sums)
        self._keep(tensor, residual)
        if old is not None:
            residual.draws, residual.provisional = old[1].draws, old[1].provisional
            residual.changes = old[1].changes
            if residual.changes is not None and not old[1].belongs(tensor):
                residual.changes.written(tensor)
        if sums is None:
            self.generation += 1
        else:
            self.gradients += 1
        return residual

    def bits_for(
        self, pairs: Iterable[tuple[Tensor, Residual]], states: Iterable[Marked]
    ) -> list[Tensor | None]:
        """Return the bits that a kernel sets, of those tensors that it marks; None for others.

        Args:
            pairs: tensors with their residuals, before the kernel runs.
            states: those of the graph that they are.
        """
        found: list[Tensor | None] = []
        for (tensor, residual), state in zip(pairs, states, strict=True):
            if not state.marked:
                found.append(None)
                continue
            if residual.changes is None:
                residual.changes = note_changes(tensor, whole=True)
                residual.changes.look(tensor, None)
                self.generation += 1  # who sets no bits is to notice it
            elif not residual.belongs(tensor):
                residual.changes.written(tensor)
            found.append(residual.changes.room(tensor))
        return found

    def drop(self, tensor: Tensor) -> None:
        """Forget the residual of tensor."""
        _, residual = self._residuals.pop(id(tensor))
        for key in list(self.of_view):
            if self.of_view.get(key) is residual:
                del self.of_view[key]
        self.generation += 1

    def convert(self, tensor: Tensor, storage: str, place: Place | None = None) -> Residual:
        """Lay out the whole value of tensor, which has a residual, in another storage.

        The high word changes where the storages round it differently. `place` is as in `assign`.
        """
        _, old = self._residuals[id(tensor)]
        check_compensable(tensor.dtype, storage, str(old.name))
        self.clear_stale([(tensor, old)])
        with torch.no_grad(), _disable_current_modes():
            return self.assign(tensor, old.whole(tensor), storage, old.name, place)

    def assign(
        self,
        tensor: Tensor,
        value: Tensor,
        storage: str,
        name: StateName,
        place: Place | None = None,
    ) -> Residual:
        """Write value, of a wider dtype than tensor, into tensor and its residual.

        A storage that is rounded by chance keeps it on average.

        Args:
            tensor: of low precision, or fp32.
            value: of its shape.
            storage: the layout of its residual.
            name: what the residual is said to be of.
            place: that of tensor in the whole tensor, if it is a shard.
        """
        wide, dtype = value.to(WIDER[tensor.dtype]), tensor.dtype
        residual = self.adopt(tensor, None, storage, name)
        if is_by_chance(storage):
            draw = next_draw([residual])
            hi, *lows = split_by_chance_into(storage, wide, dtype, place, 0, draw)
        else:
            hi, *lows = split_into(storage, wide, dtype)
        tensor.data.copy_(hi)  # what serves the steps counts writes to tensor itself
        residual.hold(lows)
        if (changes := changes_of(tensor)) is not None:
            changes.whole = True
        return residual

    def load(
        self,
        tensor: Tensor,
        components: Sequence[Tensor],
        *,
        storage: str,
        name: StateName,
        expected: Expected | None = None,
        draws: int | None = None,
    ) -> None:
        """Give tensor these residual components, copied; and a count of draws, if that is known.

        Raises ResidualError if the storage does not exist or components do not fit it and tensor.
        """
        check_components(tensor, components, storage, str(name))
        residual = self.get(tensor)
        if residual is None or residual.storage != storage or not residual.fits(tensor):
            residual = self.adopt(tensor, None, storage, name)
        residual.load(tensor, components, expected)
        self.generation += 1
        residual.draws = residual.draws if draws is None else draws

    def __iter__(self) -> Iterator[tuple[Tensor, Residual]]:
        # The list is made without tuples, for which garbage may be collected, and entries with it.
        entries = ((key(), residual) for key, residual in list(self._residuals.values()))
        return ((t, residual) for t, residual in entries if t is not None)


def _are_equal(one: Tensor, other: Tensor) -> bool:
    with torch.no_grad(), _disable_current_modes():
        return torch.equal(bits_of(one), bits_of(other))


def _never(tensor: Tensor, *components: Tensor) -> bool:
    return False


def _lives_on(tensor: Tensor) -> bool:
    """Return True for a parameter, which others see by views that they make anew."""
    return tensor.requires_grad and tensor.is_leaf


STORE = ResidualStore()
"""The residuals of this process."""
