"""Values of weights in the formats of other projects, against exact ones from their bits.

For convert.formats and convert.flash.
"""

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from collage_fx.convert import flash
from collage_fx.convert.formats import PEERS, Format
from collage_fx.errors import CheckpointError
from collage_fx.runtime.storage.registry import split_into

FORMATS = {peer.mark: peer for peer in PEERS}
LOWS = sorted({*range(-32768, 32768, 4099), -32768, -32767, -2, -1, 0, 1, 2, 32766, 32767})
"""Low halves: the ends, both sides of the sign, and some between."""


def all_bf16() -> Tensor:
    return torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def value(form: Format, weight: Tensor, entry: Any, **group: Any) -> Tensor:
    assert form.value is not None
    return form.value(weight, entry, group, "w")


def master(high: Tensor, low: Tensor) -> Tensor:
    """The bits of the fp32 weight by the words of Transformer Engine's kernel, in integers.

    A negative low half says that the high one was rounded up; the two are put side by side.
    """
    upper = high.view(torch.int16) - (low < 0).to(torch.int16)
    return (upper.to(torch.int32) << 16) | (low.to(torch.int32) & 0xFFFF)


def check_remainders(high: Tensor, low: Tensor) -> None:
    """The value has the master's bits; it splits into the same words again, but for NaNs.

    Zeros less something and infinities and more are words of no master: they are zero and infinity.
    """
    whole = value(FORMATS["master_param"], high, low)
    expected, nan = master(high, low), high.isnan()
    none = ((high == 0) & (low < 0)) | (high.isinf() & (low > 0))
    assert torch.equal(none, ((expected & 0x7FFFFFFF) > 0x7F800000) & ~nan)
    expected = torch.where(none, high.float().view(torch.int32), expected)
    assert torch.equal(whole != whole, nan)
    assert bool(((whole.view(torch.int32) == expected) | nan).all())
    hi, lo = split_into("remainder16", whole, torch.bfloat16)
    same = hi.view(torch.int16) == high.view(torch.int16)
    assert bool(((same & (lo == torch.where(none, 0, low))) | nan).all())
    assert not bool(lo[nan].any()) and bool(hi[nan].isnan().all())


@pytest.mark.parametrize("low", LOWS)
def test_remainders_are_the_low_halves_of_all_high_words(low: int) -> None:
    high = all_bf16()
    check_remainders(high, torch.full_like(high, low, dtype=torch.int16))


@pytest.mark.slow
def test_remainders_of_all_pairs() -> None:
    """All 2^32 pairs, two low halves at once: as much as a cache holds."""
    high = all_bf16().repeat_interleave(2)
    for first in range(-32768, 32768, 2):
        check_remainders(high, torch.arange(first, first + 2, dtype=torch.int16).repeat(1 << 16))


def test_a_remainder_whose_rounding_is_not_undone_is_another_value() -> None:
    """The check can fail: words side by side, as if the high one were cut off."""
    high, low = all_bf16(), torch.full((1 << 16,), -1, dtype=torch.int16)
    careless = (high.view(torch.int16).to(torch.int32) << 16) | 0xFFFF
    assert not bool((careless == master(high, low)).any())


def exact(x: float) -> Fraction:
    return Fraction(x)


def samples() -> Tensor:
    """Finite numbers of bf16 at all exponents, subnormal ones too."""
    found = all_bf16()[::37]
    return found[found.abs() < math.inf]


@pytest.mark.parametrize("mark", ["kahan_comp", "compensation"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kahan_is_added(mark: str, dtype: torch.dtype) -> None:
    """The next addition adds what the last one has left over, so it is missing from the weight."""
    weight = samples()
    ulps = torch.linspace(-0.5, 0.5, weight.numel())
    rest = (ulps * 2.0**-8 * weight.float()).to(dtype)
    found = value(FORMATS[mark], weight, rest)
    sums = [exact(w) + exact(r) for w, r in zip(weight.tolist(), rest.tolist(), strict=True)]
    assert [exact(x) for x in found.tolist()] == sums
    assert sums != [
        exact(w) - exact(r) for w, r in zip(weight.tolist(), rest.tolist(), strict=True)
    ]


def kahan_step(weight: Tensor, rest: Tensor, update: Tensor) -> None:
    """One step of the two classes, written after their descriptions."""
    rest += update
    before = weight.clone()
    weight += rest
    rest += before - weight


def test_kahan_follows_a_sum_in_float64_as_its_negative_does_not() -> None:
    weight = torch.full((64,), 1.0, dtype=torch.bfloat16)
    rest, total = torch.zeros_like(weight), weight.double()
    for step in range(100):
        update = torch.full_like(weight, 1e-4 * (1 + step % 3))
        kahan_step(weight, rest, update)
        total += update.double()
    off = (value(FORMATS["kahan_comp"], weight, rest) - total).abs().max()
    wrong = (value(FORMATS["kahan_comp"], weight, -rest) - total).abs().max()
    assert off < 3e-4 < 3e-3 < wrong


def test_weights_without_compensation_are_themselves() -> None:
    weight = samples()
    for entry in (None, torch.zeros(1, dtype=torch.uint8)):
        assert value(FORMATS["kahan_comp"], weight, entry) is weight
    assert value(FORMATS["error_bits"], weight, None) is weight


def half_unit(x: float, dtype: torch.dtype) -> Fraction:
    """Half of the gap to the next number of a dtype."""
    places, least = (7, -126) if dtype is torch.bfloat16 else (10, -14)
    exponent = max(math.frexp(x)[1] - 1, least) if x else least
    return Fraction(2) ** (exponent - places - 1)


def rounded(x: Fraction) -> float:
    """The fp32 number nearest to a rational of the size of a weight, ties to even."""
    if not x:
        return 0.0
    exponent = math.frexp(float(x))[1]
    unit = Fraction(2) ** max(exponent - 24, -149)
    return float(round(x / unit) * unit)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("integers", "width"), [(torch.int8, 3), (torch.int16, 4)])
def test_error_bits(dtype: torch.dtype, integers: torch.dtype, width: int) -> None:
    every = torch.arange(-32768, 32768, 97, dtype=torch.int32).to(torch.int16).view(dtype)
    weight = every[every.abs() < 1e30]  # so that a sum does not overflow
    most = torch.iinfo(integers).max
    number = torch.randint(-most, most + 1, weight.shape).to(integers)
    number[:4] = torch.tensor([most, -most, 0, 1])
    share = [Fraction(rounded(Fraction(n, most))) for n in number.tolist()]
    expected = [
        rounded(exact(w) + Fraction(rounded(s * half_unit(w, dtype))))
        for w, s in zip(weight.tolist(), share, strict=True)
    ]
    saved = {3: number.to(dtype), 4: number.view(dtype) if width == 4 else number}[width]
    for entry in (number, saved):
        found = value(FORMATS["error_bits"], weight, entry, master_bytewidth=width)
        assert found.tolist() == expected
    if width == 3:
        other = value(FORMATS["error_bits"], weight, -number)
        assert other.tolist() != expected


def test_error_bits_of_all_bf16_and_all_int8() -> None:
    """In float64, where no sum is rounded; units are gaps between neighbours."""
    words = torch.arange(0x7F7F, dtype=torch.int16)
    size = words.view(torch.bfloat16).double()
    unit = (words + 1).view(torch.bfloat16).double() - size
    for sign in (1.0, -1.0):
        weight = (sign * size).bfloat16()
        for number in range(-127, 128):
            share = torch.tensor(number, dtype=torch.float32) / 127
            expected = sign * size + (share.double() * unit / 2).float().double()
            entry = torch.full_like(words, number, dtype=torch.int8)
            found = value(FORMATS["error_bits"], weight, entry)
            assert torch.equal(found, expected.float())


def test_error_bits_of_what_is_not_finite() -> None:
    weight = torch.tensor([math.inf, -math.inf, math.nan, -0.0], dtype=torch.bfloat16)
    found = value(FORMATS["error_bits"], weight, torch.zeros(4, dtype=torch.int8))
    assert torch.equal(found[:2], weight[:2].float()) and bool(found[2].isnan()) and found[3] == 0


def quantized(x: Tensor, root: bool) -> tuple[Tensor, Tensor]:
    """Numbers of eight bits and scales of groups of 32, as flashoptim describes them."""
    y = x.sqrt() if root else x
    groups = torch.nn.functional.pad(y, (0, -y.numel() % 32)).view(-1, 32)
    scales = groups.abs().amax(1).clamp_min(1e-12)
    share = (groups / scales[:, None]).reshape(-1)[: x.numel()]
    if root:
        return (share * 255 + 0.5).floor().to(torch.uint8), scales.half()
    return (2 * share / (1 + share.abs()) * 127 + 0.5).floor().to(torch.int8), scales.half()


@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq"])
def test_moments_in_eight_bits(key: str) -> None:
    x = torch.randn(100).square() if key == "exp_avg_sq" else torch.randn(100)
    numbers, scales = quantized(x, key == "exp_avg_sq")
    found = flash.dequantized(numbers, scales, key, "w")
    each = scales.float().repeat_interleave(32)[:100]
    assert (
        float(((found - x).abs() / (each.square() if key == "exp_avg_sq" else each)).max()) < 0.02
    )
    bits_of_them = scales.view(torch.bfloat16)
    assert torch.equal(flash.dequantized(numbers, bits_of_them, key, "w"), found)
    other = flash.dequantized(
        numbers, scales, "exp_avg" if key == "exp_avg_sq" else "exp_avg_sq", "w"
    )
    assert not torch.allclose(other, found, rtol=0.1)
    with pytest.raises(CheckpointError, match="scales of w"):
        flash.dequantized(numbers, scales[:-1], key, "w")


def _wrong() -> dict[str, tuple[str, Callable[[], Tensor]]]:
    weight = torch.ones(4, dtype=torch.bfloat16)
    form = FORMATS
    return {
        "other shape": ("its shape", lambda: value(form["master_param"], weight, torch.ones(3))),
        "scaled": ("a scale", lambda: value(form["master_param"], weight, weight.half())),
        "other step": (
            "different steps",
            lambda: value(form["master_param"], weight, torch.zeros(4)),
        ),
        "kahan": ("compensation", lambda: value(form["kahan_comp"], weight, torch.ones(3))),
        "no bits": ("flashoptim writes", lambda: value(form["error_bits"], weight, weight)),
        "range": (
            "out of range",
            lambda: value(form["error_bits"], weight, torch.full((4,), -128, dtype=torch.int8)),
        ),
        "fp32": ("mean nothing", lambda: value(form["error_bits"], weight.float(), weight)),
    }


@pytest.mark.parametrize("case", _wrong())
def test_what_means_nothing_is_refused(case: str) -> None:
    words, decode = _wrong()[case]
    with pytest.raises(CheckpointError, match=words):
        decode()


def test_fp32_weights_are_themselves_whatever_copy_is_beside_them() -> None:
    """A step of Transformer Engine writes an fp32 weight, and leaves its copy as it was."""
    weight = torch.randn(4)
    assert value(FORMATS["master_param"], weight, torch.zeros(4)) is weight
    whole = torch.tensor([1.0, math.nan, math.inf, -0.0])
    assert value(FORMATS["master_param"], whole.bfloat16(), whole) is whole
