"""The sums of `UpdateStats` over a member of a class, by one call of compiled C++."""

import ctypes
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from collage_fx.passes.codegen.printers.cpp_kernel import Unprintable
from collage_fx.passes.codegen.printers.measured_kernel import (
    Signature,
    Word,
    print_measured_kernel,
)
from collage_fx.passes.ir.exact import Function, Member, Words
from collage_fx.runtime import logs
from collage_fx.runtime.kernels.update_sums import COUNT, compiled

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
        try:
            source = print_measured_kernel(member.function, signature)
        except Unprintable as why:
            logs.LOG.info("the monitor does a class again by PyTorch's operations: %s", why)
            known[signature] = None
        else:
            known[signature] = compiled(source)
    return known[signature]


def _layout(words: Words) -> tuple[str, tuple[Word, ...]]:
    return words.storage, tuple(Word(t.dtype, not t.dim()) for t in (words.high, *words.lows))
