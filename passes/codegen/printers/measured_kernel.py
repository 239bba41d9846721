"""C++ kernels that do a member's step again in float64, and add up what 16 bits lose of it.

Its inputs are the 16-bit words before and after the step. Values with their residuals, and what
they should have become, are in memory for a block of elements at a time, from where the sums of
`runtime.kernels.update_sums` take them.
"""

import ctypes
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.fx import Node

from collage_fx.passes.codegen.printers.cpp_kernel import Unprintable, print_cpp_kernel
from collage_fx.passes.ir.exact import Function, Member, Words
from collage_fx.passes.ir.graph_memory import with_memory
from collage_fx.passes.rewrite.lower import lowered_function
from collage_fx.runtime import logs
from collage_fx.runtime.kernels.cpp_loop import ARRAY, CHUNKS, PARALLEL
from collage_fx.runtime.kernels.update_sums import COUNT, SUMS, TYPES, compiled

_DRIVER = """
static void measure_chunk(const int64_t* words, int64_t start, int64_t end, double least,
                          double* found) {{
  using namespace sums_of_updates;
  double memory[{arrays}][BLOCK];
  for (int64_t i = start; i < end; i += BLOCK) {{
    const int64_t count = end - i < BLOCK ? end - i : BLOCK;
    kernel({arguments}count);
    {sums}
  }}
}}

// For each member there are the addresses of its words, how many elements they have, and memory
// for its sums. Chunks are the same for any number of threads, and so are the sums.
extern "C" void measure(const int64_t* words, const int64_t* sizes, int64_t members, double least,
                        int64_t threads, double* found) {{
  constexpr int64_t SUMS = {states} * sums_of_updates::COUNT;
  {chunks}
  const Array<double> parts(tasks * SUMS);
  {parallel} {{
    const int64_t end = start[t] + CHUNK, size = sizes[member[t]];
    measure_chunk(words + member[t] * {arity}, start[t], end < size ? end : size, least,
                  parts.items + t * SUMS);
  }}
  for (int64_t t = 0; t < tasks; ++t)
    for (int64_t k = 0; k < SUMS; ++k) found[member[t] * SUMS + k] += parts[t * SUMS + k];
}}
"""
_SUM = """add_block<{type}>((const uint16_t*)words[{high}] + i, memory[3 * {k}],
              (const uint16_t*)words[{now}] + i, memory[3 * {k} + 1], memory[3 * {k} + 2],
              least, count, found + {k} * COUNT);"""


class Word(NamedTuple):
    """One tensor among those that a kernel reads: its dtype, and whether it is 0-d."""

    dtype: torch.dtype
    scalar: bool
    """True if it is 0-d."""


@dataclass(frozen=True)
class Signature:
    """Layouts of the tensors that a kernel reads: those of a member."""

    given: tuple[tuple[str, tuple[Word, ...]], ...]
    """Layout of each input before the step, and its words."""
    new: tuple[tuple[str, tuple[Word, ...]], ...]
    """Layout of each 16-bit state after the step, and its words."""
    states: tuple[int, ...]
    """The positions of these states among the inputs."""

    @property
    def words(self) -> list[Word]:
        """All of them in the order in which their addresses are given."""
        return [word for _, words in (*self.given, *self.new) for word in words]

    @property
    def starts(self) -> list[int]:
        """Position of the first word of each input and state in that order."""
        counts = (len(words) for _, words in (*self.given, *self.new))
        return list(accumulate(counts, initial=0))


KERNELS: WeakKeyDictionary[Function, dict[Signature, Any]] = WeakKeyDictionary()
"""Function of a class -> for what its members are like, the compiled kernel; None without one."""


def sums_of(members: Sequence[Member], least: float) -> list[list[list[float]] | None]:
    """Return for each member of a class the sums of its 16-bit states.

    None for one that no kernel can be had for: that takes bf16 or fp16 on a CPU, tensors that are
    dense in one and the same order, and operations that can be printed.

    Args:
        members: of one class, after the call.
        least: see `runtime.kernels.update_sums.update_sums`.
    """
    found: list[list[list[float]] | None] = [None] * len(members)
    alike: dict[Signature, list[int]] = {}
    for i, member in enumerate(members):
        if _fits(member):
            alike.setdefault(_signature(member), []).append(i)
    for signature, places in alike.items():
        kernel = _kernel(members[places[0]].function, signature)
        if kernel is not None:
            sums = _measured(kernel, [members[i] for i in places], least)
            for i, one in zip(places, sums, strict=True):
                found[i] = one
    return found


def _fits(member: Member) -> bool:
    """Return True if the tensors of a member are such that a kernel can read them."""
    if not member.new or not all(w.high.dim() and w.high.dtype in TYPES for w in member.new):
        return False
    words = (*member.inputs, *member.new)
    tensors = (t for w in words for t in (w.high, *w.lows))
    return all(isinstance(t, Tensor) and t.is_cpu for t in tensors) and member.alike


def _signature(member: Member) -> Signature:
    given, new = (tuple(map(_layout, words)) for words in (member.inputs, member.new))
    return Signature(given, new, tuple(member.states))


def _layout(words: Words) -> tuple[str, tuple[Word, ...]]:
    return words.storage, tuple(Word(t.dtype, not t.dim()) for t in (words.high, *words.lows))


def _kernel(function: Function, signature: Signature) -> Any:
    """Return the compiled kernel of a class for members that are like this, or None."""
    known = KERNELS.setdefault(function, {})
    if signature not in known:
        known[signature] = None
        try:
            known[signature] = compiled(print_measured_kernel(function, signature))
        except Exception as why:  # Unprintable, or of an operation that takes no other shape
            logs.LOG.info("the monitor does a class again by PyTorch's operations: %s", why)
    return known[signature]


def _measured(kernel: Any, members: list[Member], least: float) -> Iterator[list[list[float]]]:
    """Yield the sums of the states of each member, all found in one call."""
    words = array("q")
    for member in members:
        for one in (*member.inputs, *member.new):
            words.extend(t.data_ptr() for t in (one.high, *one.lows))
    sizes = array("q", (member.new[0].high.numel() for member in members))
    states = len(members[0].states)
    found = array("d", bytes(8 * COUNT * states * len(members)))
    tables = [ctypes.c_void_p(a.buffer_info()[0]) for a in (words, sizes, found)]
    count, threads = (ctypes.c_int64(n) for n in (len(members), torch.get_num_threads()))
    kernel.measure(*tables[:2], count, ctypes.c_double(least), threads, tables[2])
    rows = [found[at : at + COUNT].tolist() for at in range(0, len(found), COUNT)]
    for at in range(0, len(rows), states):
        yield rows[at : at + states]


def print_measured_kernel(function: Function, signature: Signature) -> str:
    """Return the source of a function `measure` over the elements of members.

    It takes, of all members, the addresses of the words in the order of the signature, and the
    numbers of elements; how many members there are; the least ratio of an update to its number that
    counts (see `update_sums`); the number of threads; and memory for the sums of each state of each
    member, to which it adds. Raises Unprintable.

    Args:
        function: makes the new values of the states out of the values of the inputs, in float64.
        signature: what the inputs are.
    """
    words = signature.words
    graph = lowered_function(_arrays(function, signature), words)
    outputs = graph.output_node().args[0]
    arrays = 3 * len(signature.states)
    assert isinstance(outputs, tuple) and len(outputs) == arrays
    if any(not isinstance(x, Node) or x.meta["dtype"] is not torch.float64 for x in outputs):
        raise Unprintable("a value that is a number, or not in float64")
    graph = with_memory(graph, [torch.float64] * arrays)
    scalar = [w.scalar for w in words] + [False] * arrays
    stored = range(len(words), len(words) + arrays)
    source, order = print_cpp_kernel(graph, scalar, stored, range(arrays), libm=True)
    return source + SUMS + _driver(signature, order)


def _arrays(function: Function, signature: Signature) -> Function:
    """Return a function from all words to each state's values before, after, and exactly."""

    def arrays(*tensors: Tensor) -> tuple[Tensor, ...]:
        left = iter(tensors)
        layouts = (*signature.given, *signature.new)
        read = [Words(next(left), tuple(next(left) for _ in w[1:]), s) for s, w in layouts]
        values = [words.value() for words in read]
        before, after = values[: len(signature.given)], values[len(signature.given) :]
        made = []
        for at, now, exact in zip(signature.states, after, function(*before), strict=True):
            made += [before[at], now, exact if exact.dim() else exact.expand_as(now)]
        return tuple(made)

    return arrays


def _driver(signature: Signature, order: Sequence[int]) -> str:
    words = signature.words
    starts = signature.starts
    new = starts[len(signature.given) : -1]

    def argument(i: int) -> str:
        if i >= len(words):
            return f"memory[{i - len(words)}], "
        width = 0 if words[i].scalar else words[i].dtype.itemsize
        return f"(char*)words[{i}] + i * {width}, "

    sums = [
        _SUM.format(high=starts[at], type=TYPES[words[now].dtype], now=now, k=k)
        for k, (at, now) in enumerate(zip(signature.states, new, strict=True))
    ]
    return ARRAY + _DRIVER.format(
        arrays=3 * len(new),
        arguments="".join(map(argument, order)),
        sums="\n    ".join(sums),
        states=len(new),
        arity=len(words),
        chunks=CHUNKS,
        parallel=PARALLEL,
    )
