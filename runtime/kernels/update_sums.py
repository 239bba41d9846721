"""Sums over the updates of a state in bf16 on a CPU, in one pass of compiled C."""

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._inductor.codecache import CppCodeCache

from collage_fx.runtime.kernels.cpp_loop import FLAGS

_SOURCE = """
#include <cmath>
#include <cstdint>
#include <cstring>

constexpr int64_t BLOCK = 512;

static inline float wide(uint16_t x) {
  const uint32_t bits = (uint32_t)x << 16;
  float result;
  std::memcpy(&result, &bits, 4);
  return result;
}

static inline float rounded(double x) {  // to the nearest bf16, by way of fp32 as PyTorch does
  const float single = (float)x;
  uint32_t bits;
  std::memcpy(&bits, &single, 4);
  bits = (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000u;
  float result;
  std::memcpy(&result, &bits, 4);
  return result;
}

static inline double place(float x) {  // of its first bit; the least normal one below that
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  bits &= 0x7f800000u;
  float result;
  std::memcpy(&result, &bits, 4);
  return bits ? result : 1.17549435e-38f;
}

extern "C" void sums(const uint16_t* high, const double* whole, const uint16_t* now,
                     const double* after, const double* exact, double least, int64_t n,
                     double* found) {
  double moved = 0, lost_plain = 0, lost = 0, square = 0, plain = 0, stored = 0, logs = 0,
         residual = 0, infinite = 0;
  const double most = 1 / least;
  for (int64_t start = 0; start < n; start += BLOCK) {
    const int64_t count = n - start < BLOCK ? n - start : BLOCK;
    double ratio[BLOCK];
    // Each lane of a vector has sums of its own.
    #pragma omp simd reduction(+:moved,lost_plain,lost,square,plain,stored,residual,infinite)
    for (int64_t k = 0; k < count; ++k) {
      const int64_t i = start + k;
      const float x = wide(high[i]), y = wide(now[i]);
      const double u = exact[i] - whole[i], v = after[i] - whole[i], r = y - after[i];
      const double p = (double)rounded(x + u) - x;
      const double all = u + v + r + p, zero = 0;
      const bool finite = all - all == zero, moves = finite && u != zero;
      moved += moves ? 1.0 : zero;
      lost_plain += moves && p == zero ? 1.0 : zero;
      lost += moves && v == zero ? 1.0 : zero;
      square += finite ? u * u : zero;
      plain += finite ? u * p : zero;
      stored += finite ? u * v : zero;
      residual += finite ? r * r : zero;
      infinite += y - y == 0 ? zero : 1.0;
      const double share = (u < zero ? -u : u) / place(x);
      const double bounded = share < least ? least : share > most ? most : share;
      ratio[k] = moves ? bounded : 1.0;
    }
    for (int64_t k = count; k < BLOCK; ++k) ratio[k] = 1;
    // One logarithm for eight: products of so many are finite, and not 0.
    for (int64_t half = BLOCK / 2; half >= BLOCK / 8; half /= 2)
      for (int64_t k = 0; k < half; ++k) ratio[k] *= ratio[k + half];
    for (int64_t k = 0; k < BLOCK / 8; ++k) logs += std::log2(ratio[k]);
  }
  const double sums[] = {moved, lost_plain, lost, square, plain, stored, logs, residual, infinite};
  std::memcpy(found, sums, sizeof(sums));
}
"""
_FLAGS = (*FLAGS, "-fno-finite-math-only", "-fno-unsafe-math-optimizations")


@functools.cache
def _library() -> Any:
    """Return the compiled function, or None where there is no compiler of C++."""
    try:
        library = CppCodeCache.load(_SOURCE, extra_flags=_FLAGS)
    except Exception:  # Inductor's own, of the compiler, or of the file system
        return None
    library.sums.restype = None
    return library


def update_sums(states: Sequence[Tensor], least: float) -> list[float] | None:
    """Return sums over the elements of a state, those that are not finite left out.

    Args:
        states: the state before the step in bf16 (x) and its value with the residual in float64
            (w), the same after the step (y, v), and what the value should be (e). Of one
            size, on the CPU.
        least: the least ratio of an update to the first place of x that is told from 0.

    Returns:
        The number of updates u = e - w that are not 0; of those of which r = bf16(x + u) is x; of
        those of which v is w; the sums of u^2, u (r - x), u (v - w), the binary logarithm of |u| in
        units of the first place of x, and (y - v)^2; the number of y that are not finite. None
        where there is no compiler.
    """
    if _library() is None:
        return None
    dtypes = (torch.bfloat16, torch.float64, torch.bfloat16, torch.float64, torch.float64)
    given = [t.to(d).contiguous() for t, d in zip(states, dtypes, strict=True)]
    inputs = [ctypes.c_void_p(t.data_ptr()) for t in given]
    size, found = ctypes.c_int64(given[0].numel()), (ctypes.c_double * 9)()
    _library().sums(*inputs, ctypes.c_double(least), size, found)
    return list(found)
