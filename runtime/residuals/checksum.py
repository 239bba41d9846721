"""Checksums of the rows of a tensor: whether a residual from a checkpoint belongs to it."""

from collections.abc import Callable
from itertools import product

import torch
from torch import Tensor

from collage_fx.runtime.torch_private import _disable_current_modes

_CHUNK = 1 << 19
"""Number of elements that are widened at once: as many as a cache holds."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
"""Bytes -> a dtype."""
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)
"""2^64 divided by the golden ratio: multiplied by it, close numbers differ in the upper bits."""
UNKNOWN = -128
"""Checksum of a row that nobody knows, as each process has a part of it."""


def row_checksums(tensor: Tensor, *residuals: Tensor) -> Tensor:
    """Return int8 checksums, one for each row: of the shape tensor.shape[:1].

    They depend on the bits and the column of each element of a tensor and of its residuals, and so
    can be cut where it is sharded by rows. None of them is UNKNOWN.
    """
    shape = tensor.shape[:1]
    height = shape.numel()
    width, device = tensor.numel() // max(height, 1), tensor.device
    sums = torch.zeros(height, dtype=torch.int64, device=device)
    # Each word by an odd number of its own.
    weights = torch.arange(1, 2 * width + 1, 2, dtype=torch.int32, device=device)
    columns = min(width, _CHUNK)
    for words in (tensor, *residuals) if tensor.numel() else ():
        matrix = words.detach().reshape(height, width).view(_INTEGERS[words.itemsize])
        found = torch.zeros(height, dtype=torch.int32, device=device)  # modulo 2^32
        rows = _CHUNK // columns
        for left, top in product(range(0, width, columns), range(0, height, rows)):
            part = matrix[top : top + rows, left : left + columns].to(torch.int32)
            own = found[top : top + rows]
            own += (part * weights[left : left + columns]).sum(dim=1, dtype=torch.int32)
        sums = sums * _ODD + found
    return (sums * _ODD >> 56).clamp_(min=UNKNOWN + 1).to(torch.int8).reshape(shape)


def same_bits(tensor: Tensor) -> Callable[..., bool]:
    """Return a predicate: a tensor has the bits that this one has now, of which it is a copy.

    For memory that nobody counts versions of: a buffer of gradients, say, written through `.data`.
    """
    with torch.no_grad(), _disable_current_modes():  # a recorder would copy the whole value
        before = bits_of(tensor).clone()

    def expected(now: Tensor, *residuals: Tensor) -> bool:
        if now.shape != before.shape or now.itemsize != before.itemsize:
            return False
        return torch.equal(bits_of(now), before)

    return expected


def bits_of(tensor: Tensor) -> Tensor:
    """Return a view of the bits of a tensor, as integers."""
    return tensor.detach().view(_INTEGERS[tensor.itemsize])


def rows_match(rows: Tensor, tensor: Tensor, *residuals: Tensor) -> bool:
    """Return True if these checksums are of a tensor and its residuals, as far as is known."""
    found = row_checksums(tensor, *residuals)
    rows = rows.to(found.device)
    return found.shape == rows.shape and bool(((rows == found) | (rows == UNKNOWN)).all())


def total_matches(total: int, tensor: Tensor, *residuals: Tensor) -> bool:
    """Return True if this is the one checksum that checkpoints of format 1 have of a tensor."""
    words = tensor.detach().reshape(-1).view(_INTEGERS[tensor.itemsize])
    found = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, words.numel(), _CHUNK):
        part = words[start : start + _CHUNK].to(torch.int64)
        place = torch.arange(start, start + part.numel(), device=words.device)
        found += (part * (2 * place + 1)).sum()
    return int(found) == total
