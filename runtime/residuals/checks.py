"""Checks of the words of tensors: which elements may have changed since they were noted.

A version counter says that a tensor was written from outside a step, and not what that has changed.
A check of each CHUNK of words, 8 bytes for 1,024 elements, tells which chunks are bit for bit what
they were, before there is any copy of the bits. A kernel on a CPU notes it of what it has just
written, which is in the nearest cache; other steps note it in a pass of its own. Tensors on other
devices have none.
"""

import ctypes
import functools
from array import array
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from collage_fx.runtime import cpp_compiler
from collage_fx.runtime.residuals.memory import address

CHUNK = 1 << 10
"""Elements that have a check together."""
DIGEST = f"""
#include <cstdint>
#include <initializer_list>
// Each of 256 words by an odd number of its own, so that the place of a word counts: 16,384 in an
// order that a generator of that period has.
struct Keys {{
  int16_t of[256];
  constexpr Keys() : of() {{
    uint32_t x = 1;
    for (int16_t& key : of) key = int16_t(2 * (x = (x * 11589u + 7919u) % 16384u) + 1);
  }}
}};
static constexpr Keys KEYS;
typedef int16_t __attribute__((aligned(1), may_alias)) Word;
static constexpr uint64_t NEXT = 0x9E3779B97F4A7C15u;
static uint32_t sum_of(const Word* words, int count) {{
  int32_t sum = 0;
  for (int i = 0; i < count; ++i) sum += int32_t(words[i]) * KEYS.of[i];
  return uint32_t(sum);
}}
// Four sums at once: each key is loaded once, and no addition waits for the one before it.
static uint64_t sums_of(const Word* words, uint64_t found) {{
  int32_t a = 0, b = 0, c = 0, d = 0;
  for (int i = 0; i < 256; ++i) {{
    a += int32_t(words[i]) * KEYS.of[i];
    b += int32_t(words[i + 256]) * KEYS.of[i];
    c += int32_t(words[i + 512]) * KEYS.of[i];
    d += int32_t(words[i + 768]) * KEYS.of[i];
  }}
  for (int32_t sum : {{a, b, c, d}}) found = found * NEXT + uint32_t(sum);
  return found;
}}
// Writes a check of each CHUNK of elements that are so many bytes wide.
static void check(const char* at, int64_t elements, int64_t width, uint64_t* found) {{
  constexpr int64_t BLOCK = sizeof(KEYS.of);
  for (; elements > 0; elements -= {CHUNK}, ++found) {{
    int64_t left = width * (elements < {CHUNK} ? elements : {CHUNK});
    uint64_t sum = 0;
    for (; left >= 4 * BLOCK; at += 4 * BLOCK, left -= 4 * BLOCK)
      sum = sums_of(reinterpret_cast<const Word*>(at), sum);
    for (int64_t size; left > 0; at += size, left -= size) {{
      size = left < BLOCK ? left : BLOCK;
      sum = sum * NEXT + sum_of(reinterpret_cast<const Word*>(at), int(size / 2));
      if (size % 2) sum += uint32_t(uint8_t(at[size - 1])) * uint32_t(KEYS.of[size / 2]);
    }}
    *found = sum;
  }}
}}
"""
"""C++ of a function `check`, for a kernel too."""
_SOURCE = (
    DIGEST
    + """
extern "C" void note(const int64_t* rows, int64_t count) {
  for (const int64_t* row = rows; row < rows + 4 * count; row += 4)
    check(reinterpret_cast<const char*>(row[0]), row[1], row[2],
          reinterpret_cast<uint64_t*>(row[3]));
}
"""
)


@functools.cache
def _library() -> Any:
    """Return the compiled function; None where no C++ compiler works."""
    try:
        return cpp_compiler.load(_SOURCE, ("-fwrapv",))
    except Exception:
        return None


class Checks:
    """The checks of the words of one tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.stride = tensor.shape, tensor.stride()
        self.size, self.width = tensor.numel(), tensor.itemsize
        self.found = torch.zeros(-(-self.size // CHUNK), dtype=torch.int64, device="cpu")
        self.address = address(self.found)

    @classmethod
    def of(cls, tensor: Tensor) -> "Checks | None":
        """Return checks for a tensor with a residual; None where there can be none.

        Chunks are of memory: the tensor has to be dense.
        """
        if tensor.device.type != "cpu" or not tensor.numel() or _library() is None:
            return None
        if not (tensor.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(tensor)):
            return None
        with torch.inference_mode(False):
            return cls(tensor)

    def fit(self, tensor: Tensor) -> bool:
        """Return True if a tensor is laid out as that of these checks: memory is read so.

        One whose memory was given back has none.
        """
        laid_out = self.stride == tensor.stride() and self.shape == tensor.shape
        return laid_out and bool(address(tensor))

    def changed(self, tensor: Tensor) -> Tensor:
        """Return a bool for each element of the tensor: whether it is in a chunk that has changed.

        They fit the tensor.
        """
        now = Checks(tensor)
        note([(address(tensor), now)])
        each = (now.found != self.found).repeat_interleave(CHUNK)
        return each.as_strided(tensor.shape, tensor.stride())


def note(pairs: Iterable[tuple[int, Checks]]) -> None:
    """Note the words of tensors as they are now.

    Args:
        pairs: where tensors of the sizes that the checks are for begin, with these.
    """
    rows = array("q", [n for at, c in pairs for n in (at, c.size, c.width, c.address)])
    if rows:
        _library().note(ctypes.c_void_p(rows.buffer_info()[0]), ctypes.c_int64(len(rows) // 4))
