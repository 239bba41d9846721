"""Changes of parameters: the elements that steps have changed since somebody asked.

Kernels set a bit for each element that they change, and steps without such a kernel are compared
with a copy. What both do not see, a write from outside of steps, is known by the version counter
and the address of the tensor, and counts as a change of all of it.
"""

import ctypes
import functools
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakIdKeyDictionary

from collage_fx.runtime import cpp_compiler
from collage_fx.runtime.residuals.memory import address, has_memory
from collage_fx.runtime.residuals.residual import Residual, version
from collage_fx.runtime.storage import changed_bits

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an element -> a dtype that compares bits."""


_SOURCE = """
#include <cstdint>
#include <cstring>
static uint64_t word(const uint8_t* bits, int64_t at, int64_t bytes) {
  uint64_t found = 0;
  std::memcpy(&found, bits + at, bytes - at < 8 ? bytes - at : 8);
  return found;
}
extern "C" int64_t count(const uint8_t* bits, int64_t bytes) {
  int64_t found = 0;
  for (int64_t at = 0; at < bytes; at += 8) found += __builtin_popcountll(word(bits, at, bytes));
  return found;
}
extern "C" void places(const uint8_t* bits, int64_t bytes, int64_t* found) {
  for (int64_t at = 0; at < bytes; at += 8)
    for (uint64_t left = word(bits, at, bytes); left; left &= left - 1)
      *found++ = 8 * at + __builtin_ctzll(left);
}
"""


"""One pass over bits, of which PyTorch takes several."""

Place: TypeAlias = tuple[StorageWeakRef | None, int, torch.Size, tuple[int, ...], torch.dtype]


class Seen(NamedTuple):
    """A value of a tensor, as far as it is known without reading it."""

    version: int
    place: Place
    """The memory itself, which a later one at the same address is not."""

    @classmethod
    def of(cls, tensor: Tensor) -> "Seen":
        """Return the present one."""
        storage = StorageWeakRef(tensor.untyped_storage()) if has_memory(tensor) else None
        layout = int(tensor.storage_offset()), tensor.shape, tensor.stride()
        return cls(version(tensor), (storage, *layout, tensor.dtype))


@dataclass(eq=False)
class Changes:
    """The elements of one tensor that have changed since `take`."""

    seen: Seen
    """The last value up to which all changes are noted; kernels that run without Python leave that
    to the residual of the tensor."""
    whole: bool = False
    """True if any element may have changed."""
    bits: Tensor | None = None
    """A bit for each element, set if it has changed: uint8, see `changed_bits`."""
    before: Tensor | None = None
    """A copy of the bits of the elements, while a step runs that is compared with it."""
    unnoted: int = 0
    """The number of writes that have set no bits."""
    by_copy: bool = False
    """True if the last step that was traced has made some of these."""

    def knows(self, tensor: Tensor, residual: Residual | None, now: Seen) -> bool:
        """Return True if all that was written to the tensor is noted.

        Args:
            tensor: the one that this is of.
            residual: that of the tensor, if it has one.
            now: its present value.
        """
        if now.version < 0:  # an inference tensor counts none
            return False
        if self.seen == now:
            return True
        if residual is None or residual.changes is not self:
            return False
        return self.seen.place == now.place and residual.fits(tensor) and residual.belongs(tensor)

    def look(self, tensor: Tensor, residual: Residual | None) -> None:
        """Notice what was written from outside of steps that are compared with a copy."""
        now = Seen.of(tensor)
        self.whole |= self.before is None and not self.knows(tensor, residual, now)
        self.seen = now

    def written(self, tensor: Tensor) -> None:
        """Note a write that has set no bits."""
        now = Seen.of(tensor)
        if now != self.seen:
            self.unnoted += 1
            self.whole |= self.before is None
            self.seen = now

    def noted(self, tensor: Tensor) -> None:
        """Record that the bits tell all that was written to the tensor."""
        self.seen = Seen.of(tensor)

    def room(self, tensor: Tensor) -> Tensor:
        """Return the bits, made where there are none."""
        size = changed_bits.size_of(tensor.numel())
        if self.bits is None or self.bits.device != tensor.device or len(self.bits) != size:
            self.whole |= self.bits is not None
            with torch.inference_mode(False):
                self.bits = torch.zeros(size, dtype=torch.uint8, device=tensor.device)
        return self.bits

    def begin(self, tensor: Tensor) -> None:
        """Keep a copy of the elements, with which `end` compares."""
        self.before = _words(tensor).clone()

    def end(self, tensor: Tensor) -> None:
        """Note the elements that are not what they were when `begin` was called."""
        before, self.before = self.before, None
        assert before is not None
        now = _words(tensor)
        if now.shape == before.shape and now.dtype == before.dtype and now.device == before.device:
            self.room(tensor).bitwise_or_(changed_bits.packed((now != before).any(dim=1)))
        else:
            self.whole = True
        self.seen = Seen.of(tensor)

    def take(self, tensor: Tensor, residual: Residual | None) -> Tensor:
        """Return the places of the elements that have changed since the last call; clear them.

        Args:
            tensor: the one that this is of.
            residual: that of the tensor, if it has one.

        Returns:
            int64, one dimension, in the order of rows, ascending.
        """
        self.look(tensor, residual)
        if self.whole:
            found = torch.arange(tensor.numel(), device=tensor.device)
        elif self.bits is None:
            found = torch.empty(0, dtype=torch.int64, device=tensor.device)
        else:
            found = places_of(self.bits)
        self.whole = False
        if self.bits is not None:
            self.bits.zero_()
        return found


def _words(tensor: Tensor) -> Tensor:
    """Return the bits of the elements as integers, a row for each: two of a complex one."""
    flat = tensor.detach().reshape(-1)
    rows = torch.view_as_real(flat) if flat.is_complex() else flat.unsqueeze(1)
    return rows.view(_INTEGERS[rows.itemsize])


_CHANGES: WeakIdKeyDictionary = WeakIdKeyDictionary()


def changes_of(tensor: Tensor) -> Changes | None:
    """Return the changes of a tensor, None if nobody has asked to note them."""
    found: Changes | None = _CHANGES.get(tensor)
    return found


def note_changes(tensor: Tensor, *, whole: bool = False) -> Changes:
    """Return the changes of a tensor, which are noted from now on if they were not before.

    Args:
        tensor: any.
        whole: whether all of it counts as changed then.
    """
    if (found := changes_of(tensor)) is None:
        found = _CHANGES[tensor] = Changes(Seen.of(tensor), whole)
    return found


def note_write(tensor: Tensor) -> None:
    """Note a write that has set no bits, and that the version of a tensor may not count: a step's
    through a view. One that is compared with a copy is seen without."""
    changes = changes_of(tensor) if _CHANGES else None
    if changes is not None and changes.before is None:
        changes.whole = True


@functools.cache
def _library() -> Any:
    """Return the compiled functions; None where no C++ compiler works."""
    try:
        library = cpp_compiler.load(_SOURCE)
    except Exception:
        return None
    library.count.restype = ctypes.c_int64
    return library


def places_of(bits: Tensor) -> Tensor:
    """Return the places of the bits that are set, int64, ascending; waits for their device.

    Args:
        bits: uint8, one dimension, contiguous; the first of eight bits is the lowest of a byte.
    """
    library = _library() if bits.device.type == "cpu" else None
    if library is None:
        return changed_bits.indices(bits)
    at, size = ctypes.c_void_p(address(bits)), ctypes.c_int64(len(bits))
    found = torch.empty(library.count(at, size), dtype=torch.int64, device=bits.device)
    library.places(at, size, ctypes.c_void_p(address(found)))
    return found
