"""What a step does to a member of a class, done again in float64 and added up by one C++ kernel.

Its inputs are the 16-bit words before and after the step. Values with their residuals, and what
they should have become, are in memory for a block of elements at a time, from where the sums of
`runtime.kernels.update_sums` take them.
"""

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.fx import Graph, Node

from collage_fx.passes.codegen.printers.cpp_kernel import Unprintable, print_cpp_kernel
from collage_fx.passes.ir.exact import Function, Member, Words
from collage_fx.passes.rewrite.lower import lowered_function
from collage_fx.runtime import logs
from collage_fx.runtime.kernels.update_sums import COUNT, SUMS, compiled

_DRIVER = """
// Of one member: the addresses of its words, and how many elements they have.
extern "C" void measure(const int64_t* words, int64_t size, double least, double* found) {{
  using namespace sums_of_updates;
  double memory[{arrays}][BLOCK];
  for (int64_t i = 0; i < size; i += BLOCK) {{
    const int64_t count = size - i < BLOCK ? size - i : BLOCK;
    kernel({arguments}count);
    {sums}
  }}
}}
"""
_SUM = """add_block((const uint16_t*)words[{high}] + i, memory[{whole}],
              (const uint16_t*)words[{now}] + i, memory[{after}], memory[{exact}],
              least, count, found + {k} * COUNT);"""


@dataclass(frozen=True)
class Word:
    """What is known of one tensor among those that a kernel reads."""

    dtype: torch.dtype
    scalar: bool
    """Whether it is 0-d."""


@dataclass(frozen=True)
class Signature:
    """What is known of the tensors that a kernel reads: those of a member."""

    given: tuple[tuple[str, tuple[Word, ...]], ...]
    """Of each input before the step: how it is laid out, and its words."""
    new: tuple[tuple[str, tuple[Word, ...]], ...]
    """The same of each 16-bit state after it."""
    states: tuple[int, ...]
    """The positions of these states among the inputs."""

    @property
    def words(self) -> list[Word]:
        """All of them in the order in which their addresses are given."""
        return [word for _, words in (*self.given, *self.new) for word in words]

    def starts(self) -> Iterator[int]:
        """Yield where the words of each input and state begin in that order."""
        at = 0
        for _, words in (*self.given, *self.new):
            yield at
            at += len(words)


KERNELS: WeakKeyDictionary[Function, dict[Signature, Any]] = WeakKeyDictionary()
"""Function of a class -> for what its members are like, the compiled kernel; None without one."""


def sums_of(member: Member, least: float) -> list[tuple[Tensor, list[float]]] | None:
    """Return each 16-bit state of a member with its sums; None where no kernel can be had.

    That is for bf16 on a CPU, dense and in one order, of operations that can be printed.

    Args:
        member: after the call.
        least: see `runtime.kernels.update_sums.update_sums`.
    """
    states = [words.high for words in member.new]
    if not states or not all(t.dim() and t.is_cpu and t.dtype is torch.bfloat16 for t in states):
        return None
    words = (*member.inputs, *member.new)
    if not all(isinstance(w.high, Tensor) for w in words) or not member.alike:
        return None
    tensors = [t for w in words for t in (w.high, *w.lows)]
    if not all(t.is_cpu for t in tensors):
        return None
    kernel = _kernel(member)
    if kernel is None:
        return None
    addresses = (ctypes.c_int64 * len(tensors))(*(t.data_ptr() for t in tensors))
    found = (ctypes.c_double * (COUNT * len(states)))()
    kernel.measure(addresses, ctypes.c_int64(states[0].numel()), ctypes.c_double(least), found)
    return [(t, found[k * COUNT : (k + 1) * COUNT]) for k, t in enumerate(states)]


def _kernel(member: Member) -> Any:
    """Return the compiled kernel for members that are like this one, or None."""
    known = KERNELS.setdefault(member.function, {})
    signature = Signature(
        tuple(_layout(w) for w in member.inputs),
        tuple(_layout(w) for w in member.new),
        tuple(member.states),
    )
    if signature not in known:
        known[signature] = None
        try:
            known[signature] = compiled(print_measured_kernel(member.function, signature))
        except Exception as why:  # Unprintable, or of an operation that takes no other shape
            logs.LOG.info("the monitor does a class again by PyTorch's operations: %s", why)
    return known[signature]


def _layout(words: Words) -> tuple[str, tuple[Word, ...]]:
    return words.storage, tuple(Word(t.dtype, not t.dim()) for t in (words.high, *words.lows))


def print_measured_kernel(function: Function, signature: Signature) -> str:
    """Return the source of a function `measure` over the elements of a member.

    It takes the addresses of the words in the order of the signature, the number of elements, the
    least ratio of an update to its number that counts (see `update_sums`), and memory for the sums
    of each state, to which it adds. Raises Unprintable.

    Args:
        function: makes the new values of the states out of the values of the inputs, in float64.
        signature: what the inputs are.
    """
    words = signature.words
    graph = lowered_function(_arrays(function, signature), [(w.dtype, w.scalar) for w in words])
    outputs = graph.output_node().args[0]
    arrays = 3 * len(signature.states)
    assert isinstance(outputs, tuple) and len(outputs) == arrays
    if any(not isinstance(x, Node) or x.meta["dtype"] is not torch.float64 for x in outputs):
        raise Unprintable("a value that is a number, or not in float64")
    graph = _with_memory(graph, arrays)
    scalar = [w.scalar for w in words] + [False] * arrays
    stored = range(len(words), len(words) + arrays)
    source, order = print_cpp_kernel(graph, scalar, stored, range(arrays), libm=True)
    return source + SUMS + _driver(signature, order)


def _arrays(function: Function, signature: Signature) -> Function:
    """Return what makes of all words, for each state, its values before, after, and exactly."""

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


def _with_memory(graph: Graph, count: int) -> Graph:
    """Return a graph with more inputs: memory for what it makes."""
    made = Graph()
    env = {n: made.node_copy(n) for n in graph.find_nodes(op="placeholder")}
    for k in range(count):
        made.placeholder(f"memory{k}").meta["dtype"] = torch.float64
    made.output(made.graph_copy(graph, env))
    return made


def _driver(signature: Signature, order: Sequence[int]) -> str:
    words = signature.words
    starts = list(signature.starts())
    new = starts[len(signature.given) :]

    def argument(i: int) -> str:
        if i >= len(words):
            return f"memory[{i - len(words)}], "
        width = 0 if words[i].scalar else words[i].dtype.itemsize
        return f"(char*)words[{i}] + i * {width}, "

    sums = [
        _SUM.format(high=starts[at], now=now, whole=3 * k, after=3 * k + 1, exact=3 * k + 2, k=k)
        for k, (at, now) in enumerate(zip(signature.states, new, strict=True))
    ]
    return _DRIVER.format(
        arrays=3 * len(new), arguments="".join(map(argument, order)), sums="\n    ".join(sums)
    )
