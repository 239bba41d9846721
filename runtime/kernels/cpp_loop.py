"""One compiled kernel over many tensors in one call: what Python would loop over, in C++."""

import ctypes
import itertools
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from collage_fx.runtime import cpp_compiler
from collage_fx.runtime.kernels.argument_table import Column, addresses
from collage_fx.runtime.residuals.checks import CHUNK as CHECKED
from collage_fx.runtime.residuals.checks import DIGEST

FLAGS = (
    "-fschedule-insns",  # before registers are given out: divisions begin early; up to a fifth less
    "-fno-math-errno",  # a root is one instruction
    "-fno-trapping-math",
    "-fwrapv",
)
"""Flags of kernels beyond those of all libraries, to be fast."""

CHUNK = 1 << 14
"""Elements that a thread takes at a time: a few cache lines past a tail cost nothing there."""
ARRAY = """
#include <cstdint>
// Of <vector>, which a compiler takes a quarter of its time to read.
template <typename T> struct Array {
  T* const items;
  explicit Array(int64_t count) : items(new T[count]()) {}
  Array(const Array&) = delete;
  ~Array() { delete[] items; }
  T& operator[](int64_t i) const { return items[i]; }
};
"""
"""C++ that CHUNKS need; zeros to begin with."""
CHUNKS = f"""constexpr int64_t CHUNK = {CHUNK};
  int64_t tasks = 0;
  for (int64_t m = 0; m < members; ++m) tasks += (sizes[m] + CHUNK - 1) / CHUNK;
  const Array<int64_t> member(tasks), start(tasks);
  for (int64_t m = 0, t = 0; m < members; ++m)
    for (int64_t s = 0; s < sizes[m]; s += CHUNK, ++t) {{
      member[t] = m;
      start[t] = s;
    }}"""
"""C++ that divides `members` of these `sizes` into tasks: each begins at `start` of a `member`."""
PARALLEL = """\
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (tasks > 1 && threads > 1)
  for (int64_t t = 0; t < tasks; ++t)"""
"""C++ that does what follows for each task t, by several threads if there are."""

_DRIVER = """
using Kernel = void (*)({pointers}int64_t);
extern "C" void run(void* kernel, const int64_t* table, const int64_t* sizes, const int64_t* widths,
                    int64_t members, int64_t threads, int64_t count, const int64_t* checked,
                    const int64_t* checks) {{
  {chunks}
  {parallel} {{
    const int64_t* at = table + member[t] * {arity};
    const int64_t left = sizes[member[t]] - start[t];
    const int64_t end = start[t] + (left < CHUNK ? left : CHUNK);
    // What is checked is still in the nearest cache.
    const int64_t step = count ? {each} : CHUNK;
    for (int64_t s = start[t]; s < end; s += step) {{
      const int64_t size = end - s < step ? end - s : step;
      reinterpret_cast<Kernel>(kernel)({arguments}size);
      for (int64_t k = 0; k < count; ++k) {{
        const int64_t column = checked[k], width = widths[column] / 8;
        check(reinterpret_cast<char*>(at[column] + s * width), size, width,
              reinterpret_cast<uint64_t*>(checks[member[t] * count + k]) + s / {each});
      }}
    }}
  }}
}}
"""


_NONE = array("q")


@dataclass(frozen=True)
class Loop:
    """A C++ kernel for flat tensors of any size, and how to call it."""

    kernel: int
    """Address of the compiled C++ function."""
    order: tuple[int, ...]
    """Position among the inputs of the slice, for each pointer that it takes."""
    widths: tuple[int, ...]
    """Bits from one element to the next, for each pointer: 0 for a scalar."""
    driver: Any
    """The compiled loop."""
    library: str
    """The file with the kernel."""

    @classmethod
    def of(cls, library: str | Path, order: Sequence[int], widths: Sequence[int]) -> "Loop":
        """Return the loop around the kernel in a shared library; OSError if there is none."""
        opened = ctypes.CDLL(str(library))
        address = ctypes.cast(opened.kernel, ctypes.c_void_p).value
        assert address is not None
        # A kernel of our own has its loop in the same library.
        driver = opened if hasattr(opened, "run") else cpp_compiler.load(_driver(len(order)), FLAGS)
        return cls(address, tuple(order), tuple(widths), driver, str(library))

    def run(self, columns: Sequence[Column], sizes: Sequence[int]) -> None:
        """Run the kernel over all members: see `Runner`."""
        starts = [addresses(column) for column in columns]
        table = itertools.chain.from_iterable(zip(*(starts[i] for i in self.order), strict=True))
        self.launch(array("q", table), array("q", sizes))

    def launch(
        self,
        table: "array[int]",
        sizes: "array[int]",
        checked: "array[int]" = _NONE,
        checks: "array[int]" = _NONE,
    ) -> None:
        """Run the kernel over members.

        Args:
            table: for each member the addresses of its inputs, in the order of `order`.
            sizes: the elements of each member.
            checked: places in `order` of inputs that the kernel writes, and notes checks of.
            checks: for each member the addresses of these checks.
        """
        arrays = (table, sizes, array("q", self.widths), checked, checks)
        *where, columns, found = [ctypes.c_void_p(a.buffer_info()[0]) for a in arrays]
        numbers = (len(sizes), torch.get_num_threads(), len(checked))
        counts = [ctypes.c_int64(n) for n in numbers]
        self.driver.run(ctypes.c_void_p(self.kernel), *where, *counts, columns, found)


def _driver(arity: int) -> str:
    """Return the source of the loop over a kernel that takes so many pointers."""
    return (
        ARRAY
        + DIGEST
        + _DRIVER.format(
            pointers="void*, " * arity,
            arguments="".join(
                f"reinterpret_cast<void*>(at[{k}] + s * widths[{k}] / 8), " for k in range(arity)
            ),
            arity=arity,
            each=CHECKED,
            chunks=CHUNKS,
            parallel=PARALLEL,
        )
    )


def compile_loop(source: str, order: Sequence[int], widths: Sequence[int]) -> Loop:
    """Compile a kernel of our own, with the loop around it, by way of the cache on disk.

    Args:
        source: of a function `kernel` that takes the pointers and the number of elements.
        order: see `Loop`.
        widths: see `Loop`.
    """
    library = cpp_compiler.load(source + _driver(len(order)), FLAGS)
    return Loop.of(library._name, order, widths)


def loop_over(call: Any, size: int, samples: list[Tensor]) -> Loop | None:
    """Return the loop over the one kernel that Inductor's wrapper calls; None if it is not so.

    Args:
        call: `Runner.call` of a graph that takes the number of elements and tensors, overwrites
            some of them and returns nothing.
        size: the number of elements of the samples.
        samples: inputs of it, flat or 0-d. What the wrapper hands to its kernel for them shows the
            order; the kernel does not run.
    """
    scope = getattr(getattr(call, "__func__", None), "__globals__", {})
    kernels = [name for name in scope if name.startswith("cpp_fused")]
    if len(kernels) != 1:
        return None
    calls: list[tuple[Any, ...]] = []
    kernel = scope[kernels[0]]
    scope[kernels[0]] = lambda *args: calls.append(args)
    try:
        call([size, *samples])
    finally:
        scope[kernels[0]] = kernel
    return _loop(kernel, calls[0], size, samples) if len(calls) == 1 else None


def _loop(
    kernel: Callable[..., Any], args: tuple[Any, ...], size: int, samples: list[Tensor]
) -> Loop | None:
    place = {sample.data_ptr(): i for i, sample in enumerate(samples)}
    pointers = [a.data_ptr() for a in args[:-1] if isinstance(a, Tensor)]
    path = getattr(getattr(kernel, "__self__", None), "__file__", None)
    known = len(pointers) == len(args) - 1 and all(p in place for p in pointers)
    if path is None or not known or args[-1] != size:
        return None
    order = tuple(place[p] for p in pointers)
    widths = tuple(8 * samples[i].element_size() if samples[i].dim() else 0 for i in order)
    return Loop.of(path, order, widths)
