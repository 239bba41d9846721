"""Inputs of kernels as memory holds them: positions, and packed residuals and bits."""

import contextlib
from array import array
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from collage_fx.passes.codegen.multi_tensor_kernel import MultiTensorKernel
from collage_fx.runtime.kernels.argument_table import Column
from collage_fx.runtime.storage import changed_bits, nibbles


@contextlib.contextmanager
def columns_of(
    kernel: MultiTensorKernel, members: Sequence[Sequence[Tensor]]
) -> Iterator[list[Column]]:
    """Yield the inputs of all members as a kernel takes them: positions by the first of each.

    What it writes to packed ones is unpacked into the members.
    """
    columns: list[Column] = [list(column) for column in zip(*members, strict=True)]
    if kernel.position is not None:
        firsts = (int(inputs[kernel.position][0]) for inputs in members)
        columns[kernel.position] = array("q", firsts)
    for i in kernel.packed:
        columns[i] = [in_memory(inputs[i]) for inputs in members]
    yield columns
    for i in kernel.packed:
        for inputs, bytes_ in zip(members, columns[i], strict=True):
            assert isinstance(bytes_, Tensor)
            inputs[i].copy_(of_memory(bytes_, inputs[i]))


def cut(kernel: MultiTensorKernel, inputs: Sequence[Tensor]) -> None:
    """Leave of packed inputs what memory holds of them."""
    for i in kernel.packed:
        inputs[i].copy_(of_memory(in_memory(inputs[i]), inputs[i]))


def in_memory(x: Tensor) -> Tensor:
    """Return the bytes in which memory holds truths, or int8 of four bits."""
    return (changed_bits if x.dtype is torch.bool else nibbles).packed(x)


def of_memory(bytes_: Tensor, like: Tensor) -> Tensor:
    """Return what `in_memory` was given."""
    if like.dtype is not torch.bool:
        return nibbles.unpacked(bytes_, like)
    found = torch.zeros_like(like)
    found.view(-1)[changed_bits.indices(bytes_)] = True
    return found
