"""Bits of changes: eight to a byte in the order of rows, and back.

For runtime.storage.changed_bits and runtime.storage.layouts.
"""

import pytest
import torch

from collage_fx.runtime.residuals.changes import places_of
from collage_fx.runtime.storage.changed_bits import indices, packed, size_of
from collage_fx.runtime.storage.layouts import changed


@pytest.mark.parametrize("shape", [(0,), (1,), (7,), (8,), (9,), (3, 5), (64, 3), ()])
def test_places_come_back(shape: tuple[int, ...]) -> None:
    flags = torch.rand(shape, generator=torch.Generator().manual_seed(0)) < 0.4
    bits = packed(flags)
    assert bits.dtype is torch.uint8 and len(bits) == size_of(flags.numel())
    expected = flags.reshape(-1).nonzero().squeeze(1)
    every = torch.arange(flags.numel())
    for found in (indices, places_of):
        assert torch.equal(found(bits), expected)
        assert torch.equal(found(bits | packed(~flags)), every)


def test_each_bit_has_its_place() -> None:
    for k in range(24):
        bits = packed(torch.arange(24) == k)
        assert bits.tolist() == [(1 << k % 8) * (k // 8 == i) for i in range(3)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_bits_are_compared(dtype: torch.dtype) -> None:
    old = torch.tensor([1.0, 0.0, 0.0, torch.nan, 1.0, torch.inf, torch.nan], dtype=dtype)
    new = torch.tensor([1.0, 0.0, -0.0, torch.nan, torch.nan, torch.inf, 1.0], dtype=dtype)
    assert changed(old, new).tolist() == [False, False, True, False, True, False, True]
    step = torch.nextafter(old[:1].float(), torch.tensor(2.0)) if dtype is torch.float32 else None
    near = step if step is not None else (old[:1].view(torch.int16) + 1).view(dtype)
    assert changed(old[:1], near).tolist() == [True]


def test_every_bf16_number_beside_its_neighbour() -> None:
    words = torch.arange(1 << 16).to(torch.int32).to(torch.int16)
    old, new = words.view(torch.bfloat16), (words ^ 1).view(torch.bfloat16)
    assert bool(changed(old, new).all())
    numbers = old[old == old]
    assert not bool(changed(numbers, numbers).any())
