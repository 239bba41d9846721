"""Every storage: which values it holds, and that its words come back; exhaustive where finite.

For runtime.storage.registry and runtime.storage.layouts.
"""

import pytest
import torch
from floats import FP32
from torch import Tensor

from collage_fx.errors import StorageError
from collage_fx.runtime.expansion.eft import FP8, WIDER
from collage_fx.runtime.storage.layouts import join_remainder16, split_remainder16
from collage_fx.runtime.storage.registry import (
    STORAGES,
    TRANSIENT,
    Storage,
    check_compensable,
    join_in,
    split_into,
)

EVERY = [(s, d) for s in STORAGES.values() for d in s.residuals]
E4M3, E5M2 = FP8
BYTES = {"mcf2": 2, "mcf3": 4, "remainder16": 2, "ulp8": 1, "double_single": 4, "sr": 0} | {
    "ulp4": 8 / 15
}
"""Bytes of a residual; half as many of an fp8 state."""
LOWEST = {
    torch.bfloat16: {"*": 2.0**-100},
    torch.float16: {"*": 2.0**-8, "mcf2": 1.0, "mcf3": 1.0},
    torch.float32: {"*": 2.0**-100},
    E4M3: {"mcf2": 2.0**-5, "mcf3": 2.0**-4, "sr": 2.0**-6},
    E5M2: {"mcf2": 2.0**-13, "mcf3": 2.0**-12, "sr": 2.0**-14},
}
"""Smallest value at which a storage has its precision: below, a last word is no normal number."""
COUNT = 10**6
PER_CHUNK = 1 << 24

every = pytest.mark.parametrize(
    "storage, dtype", EVERY, ids=[f"{s.name}-{str(d)[6:]}" for s, d in EVERY]
)


def words(dtype: torch.dtype, integer: torch.dtype) -> Tensor:
    """Every bit pattern of a dtype of the size of integer, in order."""
    info = torch.iinfo(integer)
    return torch.arange(info.min, info.max + 1, dtype=torch.int32).to(integer).view(dtype)


def bits(x: Tensor) -> Tensor:
    """fp32 as integers, in which every NaN is one."""
    return torch.where(x.isnan(), torch.nan, x).view(torch.int32)


def equal(a: Tensor, b: Tensor) -> bool:
    """Equality of values: NaN equals itself, and zero a negative zero."""
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def random_bits(count: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Values of the wide dtype: fp32 with random bits, some near fp8, or float64 near such."""
    g = torch.Generator().manual_seed(0)
    x = FP32.random(count, g)
    if dtype in FP8:
        x[::2] = torch.randn(x[::2].shape, generator=g) * torch.exp2(
            torch.randint(-22, 18, x[::2].shape, generator=g).float()
        )
    if WIDER[dtype] == torch.float64:
        return x.double() * (1 + torch.rand(count, generator=g, dtype=torch.float64) * 2.0**-22)
    return x


def inside(x: Tensor, storage: Storage, dtype: torch.dtype) -> Tensor:
    """Return the mask of values for which a storage has its precision."""
    lowest = LOWEST[dtype].get(storage.name, LOWEST[dtype].get("*", 0.0))
    return (x.abs() >= lowest) & (x.abs() <= torch.finfo(dtype).max)


@every
def test_words_are_of_the_dtypes_and_bytes_that_it_says(
    storage: Storage, dtype: torch.dtype
) -> None:
    hi, *lows = storage.split(random_bits(15, dtype), dtype)
    assert hi.dtype == dtype
    assert tuple(lo.dtype for lo in lows) == storage.residuals[dtype]
    assert storage.residual_bytes(hi) == 15 * BYTES[storage.name] // (1 + (dtype in FP8))
    stored = storage.stored(lows)
    assert tuple(one.dtype for one in stored) == storage.in_memory(dtype)
    assert sum(one.nbytes for one in stored) == storage.residual_bytes(hi)


@every
def test_a_residual_of_zero_stands_for_the_high_word(storage: Storage, dtype: torch.dtype) -> None:
    integers = {1: torch.int8, 2: torch.int16}
    wide = dtype.itemsize == 4
    hi = random_bits(COUNT) if wide else words(dtype, integers[dtype.itemsize])
    lows = (torch.zeros_like(hi, dtype=d) for d in storage.residuals[dtype])
    assert equal(storage.join(hi, *lows), hi.to(WIDER[dtype]))


@every
@pytest.mark.quick(
    "mcf2-bfloat16", "mcf2-float8_e4m3fn", "mcf3-float16", "remainder16-*", "ulp8-bfloat16"
)
def test_precision_is_what_it_says(storage: Storage, dtype: torch.dtype) -> None:
    x = random_bits(8 * COUNT, dtype)
    x = x[inside(x, storage, dtype)]
    error = (storage.join(*storage.split(x, dtype)).double() - x.double()).abs() / x.double().abs()
    u = 2.0 ** -storage.precision[dtype]
    if storage.precision[dtype] == 24:
        assert error.max() == 0
    else:
        assert 0.7 * u < error.max() <= u, float(error.max()) / u


@every
def test_what_was_split_comes_back(storage: Storage, dtype: torch.dtype) -> None:
    """Split, joined and split again it is the same: nothing drifts while a state stands still."""
    first = storage.split(random_bits(COUNT, dtype), dtype)
    again = storage.split(storage.join(*first), dtype)
    assert equal(storage.join(*again), storage.join(*first))


@every
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_has_no_residual(
    storage: Storage, dtype: torch.dtype, value: float
) -> None:
    x = torch.tensor([value], dtype=WIDER[dtype])
    hi, *lows = storage.split(x, dtype)
    assert equal(hi.float(), x.to(dtype).float())
    assert dtype == E4M3 or equal(hi.float(), x.float())
    assert not any(lo.float().any() for lo in lows)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("wide", [torch.float32, torch.float64], ids=str)
def test_values_on_the_way_keep_every_bit(dtype: torch.dtype, wide: torch.dtype) -> None:
    if dtype.itemsize >= wide.itemsize:
        assert dtype not in TRANSIENT[wide].residuals
        return
    x = random_bits(COUNT).to(wide) * (1 if wide is torch.float32 else 1 + 2.0**-40)

    def differ(storage: str) -> int:
        words = split_into(storage, x, dtype)
        held = words[0].isfinite()
        return int((join_in(wide, storage, *words)[held] != x[held]).sum())

    assert differ(TRANSIENT[wide].name) == 0
    assert differ("double_single" if dtype is torch.float32 else "mcf2") > COUNT // 10  # fewer bits


def test_the_largest_numbers() -> None:
    """fp32 beyond the largest bf16 is kept by integers below it; the others overflow, cleanly."""
    x = torch.tensor([3.4e38, -3.4e38])
    for storage, dtype in EVERY:
        large = x if WIDER[dtype] == torch.float32 else 1.01 * x.double()
        whole = storage.join(*storage.split(large, dtype))
        kept = dtype is torch.bfloat16 and storage.name in ("remainder16", "ulp8", "ulp4")
        if kept:
            error = (whole.double() / x.double() - 1).abs().max()
            assert whole.isfinite().all() and error <= 2.0 ** -storage.precision[dtype]
        else:
            assert equal(whole, large.to(dtype).to(large.dtype)), storage.name
            assert dtype == E4M3 or whole.isinf().all()
    hi, lo = STORAGES["ulp8"].split(torch.tensor([65519.0, 65520.0]), torch.float16)
    assert hi.tolist() == [65504.0, torch.inf] and lo[1] == 0


def come_back(storage: Storage, hi: Tensor, low: int) -> None:
    """Assert that join and split of these high words with one low word give the same words.

    A zero has no number on the other side of it: there split never makes a negative low word.
    """
    (dtype,) = storage.residuals[hi.dtype]
    lo = torch.full_like(hi, low, dtype=dtype)
    ours = hi.isfinite() & ((hi != 0) | (lo >= 0))
    found = storage.split(storage.join(hi, lo), hi.dtype)
    integers = torch.int16
    assert torch.equal(found[0].view(integers)[ours], hi.view(integers)[ours]), low
    assert torch.equal(found[1][ours], lo[ours]), low


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.quick("dtype0")
def test_every_word_of_ulp8_comes_back(dtype: torch.dtype) -> None:
    for low in range(-128, 128):
        come_back(STORAGES["ulp8"], words(dtype, torch.int16), low)


@pytest.mark.parametrize("stride", [997, pytest.param(1, marks=pytest.mark.slow)])
def test_every_word_of_remainder16_comes_back(stride: int) -> None:
    for low in [*range(-(1 << 15), 1 << 15, stride), -1, 0, 1, (1 << 15) - 1]:
        come_back(STORAGES["remainder16"], words(torch.bfloat16, torch.int16), low)


@pytest.mark.parametrize("chunks", [[127], pytest.param(range(256), marks=pytest.mark.slow)])
def test_remainder16_holds_every_fp32_value(chunks: list[int]) -> None:
    for chunk in chunks:
        start = (chunk << 24) - (1 << 31)
        x = torch.arange(start, start + PER_CHUNK, dtype=torch.int64).to(torch.int32)
        x = x.view(torch.float32)
        hi, lo = split_remainder16(x, torch.bfloat16)
        assert torch.equal(bits(join_remainder16(hi, lo)), bits(x)), chunk


@pytest.mark.parametrize("name", ["remainder16", "ulp8"])
def test_what_others_have_written_is_no_nan(name: str) -> None:
    """A zero, say by a mask through `.data`, has no number below it, nor infinity one above."""
    storage = STORAGES[name]
    hi = torch.tensor([0.0, -0.0, torch.inf, -torch.inf], dtype=torch.bfloat16)[:, None]
    below = torch.arange(-128, 0, dtype=torch.int32).to(*storage.residuals[hi.dtype])
    zeros, infinities = hi[:2], hi[2:]
    for one, lo in ((zeros, below), (infinities, -1 - below[:-1])):
        joined = storage.join(one, lo)
        assert torch.equal(bits(joined), bits(one.float().expand_as(joined)))
    whole = zeros.float().view(torch.int32) + (below.int() << 8 * (name == "ulp8"))
    assert whole.view(torch.float32).isnan().all()  # which it would be


def test_remainder16_does_not_hold_ties_that_go_to_even() -> None:
    """The negative control, and why its high words are not PyTorch's own roundings."""
    tie = torch.tensor([0x3F818000], dtype=torch.int32).view(torch.float32)
    even = tie.to(torch.bfloat16)
    rest = tie.view(torch.int32) - even.float().view(torch.int32)
    assert rest.item() == -(1 << 15) and split_remainder16(tie, torch.bfloat16)[0] == even
    tie = torch.tensor([0x3F808000], dtype=torch.int32).view(torch.float32)
    rest = tie.view(torch.int32) - tie.to(torch.bfloat16).float().view(torch.int32)
    assert rest.item() == 1 << 15  # one more than an int16 holds
    assert split_remainder16(tie, torch.bfloat16)[0] > tie.to(torch.bfloat16)


def test_a_dtype_that_it_cannot_hold_is_refused_with_those_that_can() -> None:
    with pytest.raises(
        StorageError, match=r"remainder16.*w, which is float16; 'mcf2'.*'ulp8', 'ulp4', 'sr' can"
    ):
        check_compensable(torch.float16, "remainder16", "w")
