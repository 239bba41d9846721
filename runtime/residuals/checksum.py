"""Checksums of the rows of a tensor: whether a residual from a checkpoint belongs to it."""

import torch
from torch import Tensor

_CHUNK = 1 << 22
"""How many elements are widened to int64 at once."""
_ROWS = 1 << 12
"""How many rows are added up at once."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
"""Bytes -> a dtype."""
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)
"""2^64 divided by the golden ratio: multiplied by it, close numbers differ in the upper bits."""
UNKNOWN = -128
"""In place of the checksum of a row that nobody knows, as each process has a part of it."""


def row_checksums(tensor: Tensor, *residuals: Tensor) -> Tensor:
    """Return int8 checksums, one for each row: of the shape tensor.shape[:1].

    They depend on the bits and the column of each element of a tensor and of its residuals, and so
    can be cut where it is sharded by rows. None of them is UNKNOWN.
    """
    shape = tensor.shape[:1]
    sums = torch.zeros(shape.numel(), dtype=torch.int64, device=tensor.device)
    for words in (tensor, *residuals) if tensor.numel() else ():
        sums *= _ODD
        matrix = words.detach().reshape(len(sums), -1).view(_INTEGERS[words.itemsize])
        for some, rows in zip(sums.split(_ROWS), matrix.split(_ROWS), strict=True):
            _add_up(some, rows)
    return (sums * _ODD >> 56).clamp_(min=UNKNOWN + 1).to(torch.int8).reshape(shape)


def _add_up(sums: Tensor, words: Tensor) -> None:
    """Add to each of some int64 sums its row of words, each word by its place."""
    columns = max(_CHUNK // len(sums), 1)
    for start in range(0, words.shape[1], columns):
        part = words[:, start : start + columns].to(torch.int64)
        place = torch.arange(start, start + part.shape[1], device=words.device)
        sums += (part * (2 * place + 1)).sum(dim=1)


def rows_match(rows: Tensor, tensor: Tensor, *residuals: Tensor) -> bool:
    """Tell whether these checksums are of a tensor and its residuals, as far as they are known."""
    found = row_checksums(tensor, *residuals)
    rows = rows.to(found.device)
    return found.shape == rows.shape and bool(((rows == found) | (rows == UNKNOWN)).all())


def total_matches(total: int, tensor: Tensor, *residuals: Tensor) -> bool:
    """Tell whether this is the one checksum that checkpoints of format 1 have of a tensor."""
    words = tensor.detach().reshape(-1).view(_INTEGERS[tensor.itemsize])
    found = torch.zeros(1, dtype=torch.int64, device=tensor.device)
    _add_up(found, words[None])
    return int(found) == total
