"""Sums over the updates of 16-bit states on a CPU, in one pass of compiled C++."""

import ctypes
import functools
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from collage_fx.runtime import cpp_compiler, logs
from collage_fx.runtime.kernels.cpp_helpers import HELPERS
from collage_fx.runtime.kernels.cpp_loop import FLAGS

COUNT = 10
"""Number of sums of a state; see `update_sums`."""

SUMS = """namespace sums_of_updates {

constexpr int64_t BLOCK = 512;
constexpr int64_t COUNT = 10;

struct bf16 {
  static constexpr uint32_t least = 1;  // exponent, as fp32 has it, of the smallest normal number
  static float widened(uint16_t x) { return widen_bf16(x); }
  static float rounded(float x) { return round_bf16(x); }
};

struct fp16 {
  static constexpr uint32_t least = 127 - 14;
  static float widened(uint16_t x) { return widen_fp16(x); }
  static float rounded(float x) { return round_fp16(x); }
};

// 1 / 2^e of its first bit 2^e; where it is subnormal, of the smallest normal number.
template <typename Type> static inline double inverse_place(float x) {
  const uint32_t exponent = bits<uint32_t>(x) << 1 >> 24;
  const uint32_t place = exponent < Type::least ? Type::least : exponent;
  return bits<double>((uint64_t)(1023 + 127 - place) << 52);
}

// Add the sums over at most BLOCK elements to those in `found`. Conditions are joined by &: of &&
// compilers make branches, and no vectors. 16-bit numbers are widened in a loop of their own: in
// vectors of so many of them the sums of the second loop would not stay in registers.
template <typename Type>
static void add_block(const uint16_t* high, const double* whole, const uint16_t* now,
                      const double* after, const double* exact, double least, int64_t count,
                      double* found) {
  double after_high[BLOCK], plain_update[BLOCK], inverse[BLOCK];
  #pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    const float x = Type::widened(high[i]);
    after_high[i] = Type::widened(now[i]);
    inverse[i] = inverse_place<Type>(x);
    // By way of fp32, as PyTorch rounds a number in float64.
    plain_update[i] = (double)Type::rounded((float)(x + (exact[i] - whole[i]))) - x;
  }
  double moved = 0, lost_plain = 0, lost = 0, square = 0, plain = 0, stored = 0, residual = 0,
         noise = 0, infinite = 0, product = 1;
  int64_t exponents = 0;
  const double most = 1 / least;
  // Each lane of a vector has sums of its own.
  #pragma omp simd reduction(+:moved,lost_plain,lost,square,plain,stored,residual,noise) \
      reduction(+:infinite,exponents) reduction(*:product)
  for (int64_t i = 0; i < count; ++i) {
    const double y = after_high[i], p = plain_update[i];
    const double u = exact[i] - whole[i], v = after[i] - whole[i], r = y - after[i];
    const double all = u + v + r + p, zero = 0;
    const bool finite = all - all == zero, moves = finite & (u != zero);
    moved += moves ? 1.0 : zero;
    lost_plain += moves & (p == zero) ? 1.0 : zero;
    lost += moves & (v == zero) ? 1.0 : zero;
    square += finite ? u * u : zero;
    plain += finite ? u * p : zero;
    stored += finite ? u * v : zero;
    residual += finite ? r * r : zero;
    noise += finite ? (v - u) * (v - u) : zero;
    infinite += y - y == zero ? zero : 1.0;
    const double share = (u < zero ? -u : u) * inverse[i];
    const double bounded = share < least ? least : share > most ? most : share;
    const double ratio = moves ? bounded : 1.0;
    // The logarithm of a product: the exponents added up, and one logarithm of all mantissas.
    const uint64_t word = bits<uint64_t>(ratio);
    exponents += (int64_t)(word >> 52);
    product *= bits<double>((word & 0x000fffffffffffffu) | 0x3ff0000000000000u);
  }
  const double logs = __builtin_log2(product) + (double)(exponents - 1023 * count);
  const double sums[COUNT] = {moved,  lost_plain, lost,     square,  plain,
                              stored, logs,       residual, noise,   infinite};
  for (int64_t i = 0; i < COUNT; ++i) found[i] += sums[i];
}

}  // namespace sums_of_updates
"""
"""Function that adds up a block of elements; `_SUMS_OF_ARRAYS` and printed kernels call it.
HELPERS are to stand before it."""

_SUMS_OF_ARRAYS = """
extern "C" void sums(const uint16_t* high, const double* whole, const uint16_t* now,
                     const double* after, const double* exact, double least, int64_t n,
                     double* found) {{
  using namespace sums_of_updates;
  for (int64_t i = 0; i < n; i += BLOCK)
    add_block<{type}>(high + i, whole + i, now + i, after + i, exact + i, least,
                      n - i < BLOCK ? n - i : BLOCK, found);
}}
"""
TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
"""dtype of a state -> the type in C++ for which there is `add_block`."""


@functools.cache
def compiled(source: str) -> Any:
    """Return the library of a source of functions without results, or None without a compiler."""
    start = time.perf_counter()
    try:
        library = cpp_compiler.load(source, FLAGS)
    except Exception:  # of the compiler, or of the file system
        return None
    logs.LOG.info("a kernel of the monitor: compiled, %.2f s", time.perf_counter() - start)
    return library


def _library(dtype: torch.dtype) -> Any:
    """Return the compiled function over arrays, or None where there is no compiler of C++."""
    return compiled(HELPERS + SUMS + _SUMS_OF_ARRAYS.format(type=TYPES[dtype]))


def update_sums(states: Sequence[Tensor], least: float) -> list[float] | None:
    """Return sums over the elements of a state, those that are not finite left out.

    Args:
        states: the state before the step in bf16 or fp16 (x) and its value with the residual in
            float64 (w), the same after the step (y, v), and what the value should be (e). Of one
            size, on the CPU.
        least: the least ratio of an update to the first place of x that is told from 0.

    Returns:
        The number of updates u = e - w that are not 0; of those of which r, x + u rounded, is x; of
        those of which v is w; the sums of u^2, u (r - x), u (v - w), the binary logarithm of |u| in
        units of the first place of x, (y - v)^2 and (v - e)^2; the number of y that are not finite.
        None where there is no compiler.
    """
    dtype, wide = states[0].dtype, torch.float64
    library = _library(dtype)
    if library is None:
        return None
    dtypes = (dtype, wide, dtype, wide, wide)
    given = [t.to(d).contiguous() for t, d in zip(states, dtypes, strict=True)]
    inputs = [ctypes.c_void_p(t.data_ptr()) for t in given]
    size, found = ctypes.c_int64(given[0].numel()), (ctypes.c_double * COUNT)()
    library.sums(*inputs, ctypes.c_double(least), size, found)
    return list(found)
