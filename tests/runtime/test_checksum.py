"""Checksums of rows: beside Python's own integers, and what they tell apart.

For runtime.residuals.checksum.
"""

import pytest
import torch
from torch import Tensor

from collage_fx.runtime.residuals import checksum
from collage_fx.runtime.residuals.checksum import UNKNOWN, row_checksums, rows_match

ODD = 0x9E3779B97F4A7C15


def expected(*words: Tensor) -> list[int]:
    """The same in Python, row by row."""
    found = []
    for row in range(words[0].shape[0]):
        total = 0
        for tensor in words:
            ints = {1: torch.int8, 2: torch.int16, 4: torch.int32}[tensor.itemsize]
            bits = tensor[row].reshape(-1).view(ints).tolist()
            part = sum(x * (2 * k + 1) for k, x in enumerate(bits)) % 2**32
            total = (total * ODD + (part ^ 1 << 31) - (1 << 31)) % 2**64
        top = (total * ODD % 2**64) >> 56
        found.append(max(top - 256 * (top > 127), UNKNOWN + 1))
    return found


@pytest.mark.parametrize("shape", [(5, 7), (9,), (3, 2, 4), (1, 300), (40, 1), (2, 0), (0, 3)])
def test_they_are_those_of_python(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksum, "_CHUNK", 64)  # rows and columns are cut
    torch.manual_seed(0)
    hi, lo = torch.randn(shape).bfloat16(), torch.randint(-128, 128, shape).to(torch.int8)
    want = expected(hi, lo) if hi.numel() else [0] * shape[0]
    assert row_checksums(hi, lo).tolist() == want
    part = slice(1, None)
    assert torch.equal(row_checksums(hi[part], lo[part]), row_checksums(hi, lo)[part])


def test_one_number_has_one_and_a_transposed_tensor_those_of_its_values() -> None:
    assert row_checksums(torch.tensor(1.0)).shape == ()
    x = torch.randn(4, 6)
    assert torch.equal(row_checksums(x.t().contiguous()), row_checksums(x.t()))


def test_each_bit_of_each_word_counts() -> None:
    """Of 8 bits a change keeps the same by chance once in 256: of these, none or a few."""
    hi, lo = torch.randn(16, 8).bfloat16(), torch.randn(16, 8).bfloat16()
    rows, missed, tried = row_checksums(hi, lo), 0, 0
    for words in (hi, lo):
        for bit in range(16):
            for element in range(0, 128, 5):
                words.view(torch.int16).view(-1)[element] ^= -(1 << 15) if bit == 15 else 1 << bit
                missed += rows_match(rows, hi, lo)
                words.view(torch.int16).view(-1)[element] ^= -(1 << 15) if bit == 15 else 1 << bit
                tried += 1
    assert rows_match(rows, hi, lo) and missed <= tried // 50


def test_rows_that_nobody_knows_match_all() -> None:
    rows = torch.full((3,), UNKNOWN, dtype=torch.int8)
    assert rows_match(rows, torch.randn(3, 2)) and not rows_match(rows, torch.randn(2, 2))
    rows[1] = 0
    assert not all(rows_match(rows, torch.randn(3, 2)) for _ in range(4))
