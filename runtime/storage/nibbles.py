"""Residuals of four bits an element, two to a byte in memory."""

import torch
from torch import Tensor

BITS = 4
"""Bits of an element."""


def size_of(numel: int) -> int:
    """Return the number of bytes for so many elements."""
    return (numel + 1) // 2


def packed(word: Tensor) -> Tensor:
    """Return the upper four bits of each element, in the order of rows, two to a byte.

    The first of two is in the lower half of a byte; after an odd number of them the last is zero.

    Args:
        word: int8, of any shape without symbols.

    Returns:
        uint8, one dimension, of `size_of` bytes.
    """
    flat = word.reshape(-1)
    if flat.numel() % 2:
        flat = torch.constant_pad_nd(flat, [0, 1])
    first, second = flat.view(-1, 2).unbind(1)
    return (((first >> 4) & 15) | (second & -16)).view(torch.uint8)


def unpacked(bytes_: Tensor, like: Tensor) -> Tensor:
    """Return the elements that `packed` was given, their lower four bits zero.

    Args:
        bytes_: what it returned.
        like: a tensor of the shape that they are to have.

    Returns:
        int8, contiguous.
    """
    pairs = bytes_.view(torch.int8)
    both = torch.stack([pairs << 4, pairs & -16], dim=1)
    return both.view(-1).narrow(0, 0, like.numel()).view(like.shape)
