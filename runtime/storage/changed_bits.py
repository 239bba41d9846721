"""Bits that tell which elements of a tensor have changed: eight to a byte, in the order of rows."""

import torch
from torch import Tensor

BITS = 1
"""Bits of an element."""
_PLACES = (1, 2, 4, 8, 16, 32, 64, 128)


def size_of(numel: int) -> int:
    """Return the number of bytes for so many elements."""
    return (numel + 7) // 8


def packed(changed: Tensor) -> Tensor:
    """Return the bits of a bool for each element, the first of eight in the lowest place.

    Args:
        changed: bool, of any shape without symbols.

    Returns:
        uint8, one dimension, of `size_of` bytes.
    """
    flat = changed.reshape(-1).to(torch.uint8)
    if flat.numel() % 8:
        flat = torch.constant_pad_nd(flat, [0, -flat.numel() % 8])
    first, *rest = flat.view(-1, 8).unbind(1)
    for place, bit in zip(_PLACES[1:], rest, strict=True):
        first = first | (bit * place)
    return first


def indices(bits: Tensor) -> Tensor:
    """Return the places of the bits that are set, int64, in order.

    Waits for the device of the bits.

    Args:
        bits: as `packed` returns them, or several such results or-ed.
    """
    where = bits.nonzero()
    places = torch.tensor(_PLACES, dtype=torch.uint8, device=bits.device)
    row, bit = (bits[where] & places).nonzero().unbind(1)
    return where.squeeze(1)[row] * 8 + bit
