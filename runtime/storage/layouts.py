"""Layouts of expansions in memory: from high word and residuals to one value, and back."""

import math

import torch
from torch import Tensor

from collage_fx.runtime.expansion.arithmetic import Expansion, finite_or_zero
from collage_fx.runtime.expansion.eft import FP8, WIDER
from collage_fx.runtime.expansion.stochastic import chance, moved_by_chance, round_by_chance

Components = tuple[Tensor, ...]
"""hi and its residuals."""


def join(hi: Tensor, *lows: Tensor) -> Tensor:
    """Return hi + lo, or hi + (mid + lo), in `WIDER[hi.dtype]` (float64 for fp32, else fp32).

    Of two words the sum is exact unless their exponents are further apart than the wide dtype
    holds, where the error is at most 2^-24 of the sum in fp32, 2^-53 in float64. What `split` or
    `split3` made is joined exactly. For fp8, whose lows are scaled, see `join8`.
    """
    return join8(hi, *lows) if hi.dtype in FP8 else added(WIDER[hi.dtype], hi, *lows)


def added(dtype: torch.dtype, *words: Tensor) -> Tensor:
    """Return the sum of words in a dtype, beginning with the last and smallest."""
    *rest, total = [word.to(dtype) for word in words]
    for word in reversed(rest):
        total = word + total
    return total


def decay(words: Components, gap: Tensor | float) -> Tensor:
    """Return the value of an expansion times gap, in the wide dtype; zero where hi is not finite.

    With gap = c - 1 it is what turns x into c * x when added to it, for c > 0. An infinite x then
    stays infinite, as in plain arithmetic, instead of becoming inf - inf.
    """
    return finite_or_zero(join(*words)) * gap


def split(x: Tensor, dtype: torch.dtype) -> Expansion:
    """Return (hi, lo) of dtype with hi = RN(x) and lo = RN(x - hi).

    x is a tensor of a wider dtype. Where hi is not finite, lo is zero. Of a float64 value two words
    of fp32 (a double-single) keep 49 bits, from 2^-100 on; below, and above the largest fp32
    number, they are as fp32 is. For fp8 see `split8`.
    """
    if dtype in FP8:
        hi, lo = split8(x, dtype, 1)
        return hi, lo
    hi = x.to(dtype)
    return hi, finite_or_zero(x - hi.to(x.dtype)).to(dtype)  # it is too small to overflow


def join_exact(hi: Tensor, lo: Tensor) -> Tensor:
    """Return hi + lo in the dtype of lo, a wider one, exactly as it was before `split_exact`."""
    return hi.to(lo.dtype) + lo


def split_exact(x: Tensor, dtype: torch.dtype) -> Components:
    """Return hi = RN(x) of dtype and x - hi in the dtype of x, which is exact.

    For 16-bit and 32-bit hi: the error of a rounding is a number of the wider dtype. Where hi is
    not finite, the residual is zero.
    """
    hi = x.to(dtype)
    return hi, finite_or_zero(x - hi.to(x.dtype))


def split_by_chance(x: Tensor, dtype: torch.dtype, seed: Tensor, position: Tensor) -> Components:
    """Return (hi, lo) of dtype with hi = RN(x) and lo = x - hi rounded up or down by chance.

    On average over the seeds hi + lo is x; see `stochastic.round_by_chance`.
    """
    if dtype in FP8:
        return split8(x, dtype, 1, chance(x, seed, position))
    hi, rest = split_exact(x, dtype)
    return hi, round_by_chance(rest, dtype, chance(rest, seed, position))


def join_alone(hi: Tensor) -> Tensor:
    """Return hi in the wide dtype: the value of a state without residuals."""
    return hi.to(WIDER[hi.dtype])


def split_alone(x: Tensor, dtype: torch.dtype) -> Components:
    """Return x rounded to nearest, and no residual."""
    return (x.to(dtype),)


def round_alone(x: Tensor, dtype: torch.dtype, seed: Tensor, position: Tensor) -> Components:
    """Return x rounded up or down by chance, and no residual: on average over the seeds it is x.

    Elements at two positions round apart, where they are equal too. From the largest number of fp16
    and fp8 on x is rounded to nearest, since by chance it could become infinite where it should not
    (bf16 ends within a 256th of where fp32 does).

    Args:
        x: fp32.
        dtype: bf16, fp16 or fp8.
        seed: int32, 0-d, 31 bits.
        position: int32, of the shape of x; see `stochastic.chance`.
    """
    random = chance(x, seed, position)
    if dtype is torch.bfloat16:
        return (moved_by_chance(_of_one_nan(x), dtype, random).to(dtype),)
    by_chance = moved_by_chance(x, dtype, random)
    inside = x.abs() < torch.finfo(dtype).max
    return (torch.where(inside, by_chance, x).to(dtype),)


def split3(x: Tensor, dtype: torch.dtype) -> Components:
    """Return (hi, mid, lo) of dtype, each the rounding of what the ones before leave of x.

    In bf16 they hold every fp32 value from 2^-110 on, exactly; below, and in fp16 below one, they
    are off by at most half the smallest number of dtype (2^-134, 2^-25). For fp8 see `split8`.
    """
    if dtype in FP8:
        return split8(x, dtype, 2)
    hi, rest = split_exact(x, dtype)
    mid = rest.to(dtype)
    return hi, mid, (rest - mid.to(x.dtype)).to(dtype)


def join8(hi: Tensor, *lows: Tensor) -> Tensor:
    """Return hi + lows[0] / 2^p + lows[1] / 4^p in fp32, for fp8 words of precision p.

    Exact for what `split8` made. Other words need up to 35 bits from the first to the last
    (e5m2); their sum is rounded, by at most 2^-24 of it in each addition.
    """
    total = lows[-1].to(torch.float32)
    for word in (*lows[-2::-1], hi):
        total = word.to(torch.float32) + total * 2.0 ** -FP8[hi.dtype]
    return total


def split8(x: Tensor, dtype: torch.dtype, count: int, random: Tensor | None = None) -> Components:
    """Return (hi, *lows) of an fp8 dtype, each to nearest even: hi = RN(x), lows[i] = RN(r_i).

    With 16 random bits for each element the last is rounded up or down by chance.

    r_i is what the words before leave of x, times 2^(p*(i+1)) for precision p (4 in e4m3fn, 3 in
    e5m2): without that it would mostly be below the smallest fp8 number. Scaled it is at most as
    large as hi, and as precise where hi is subnormal. The whole keeps (count+1)*(p+1) - 1 bits of x
    from 2^-5 (e4m3fn, one low), 2^-4 (two), 2^-13 (e5m2, one) or 2^-12 (two) on; below, it is off
    by at most 2^-14, 2^-18, 2^-20 or 2^-23.

    Beyond `LAST` hi is what PyTorch makes of x: infinite in e5m2; in e4m3fn, which has no infinity,
    448 in 2.13 and NaN in 2.11. There, and where x is NaN, the lows are zero. They are finite
    always. From 60928 to 61440 in e5m2 the whole is 60928.

    Args:
        x: fp32.
        dtype: of hi and of the lows.
        count: how many lows.
        random: int32, of the shape of x.
    """
    words = [x.to(dtype)]
    most = _MOST[dtype]
    rest = torch.where(x.abs() <= LAST[dtype], x.clamp(-most, most) - words[0].to(x.dtype), 0.0)
    for k in range(count):
        rest = rest * 2.0 ** FP8[dtype]
        if random is not None and k == count - 1:
            words.append(round_by_chance(rest, dtype, random))
        else:
            words.append(rest.to(dtype))
        rest = rest - words[-1].to(x.dtype)
    return tuple(words)


LAST = {torch.float8_e4m3fn: 464.0, torch.float8_e5m2: 61440 - 2.0**-8}
"""fp8 dtype -> the largest fp32 value that is nearest to one of its numbers; 448 and 57344 are the
largest of these."""
_MOST = {torch.float8_e4m3fn: 464.0, torch.float8_e5m2: 60928.0}
"""fp8 dtype -> the largest value of all words that splits into the same again: in e5m2 the next
one, 61440, is infinite."""


def join_remainder16(hi: Tensor, lo: Tensor) -> Tensor:
    """Return the fp32 value of which hi and lo are the upper and the lower half; exact.

    Of words that no value has (see `_known`) hi.
    """
    wide = hi.to(torch.float32)
    return _known(_float(_bits(wide) + lo.to(torch.int32)), wide)


def _of_one_nan(x: Tensor) -> Tensor:
    """Return x with the NaN whose low half is zero, as that of an infinite number is, for any."""
    return torch.where(x == x, x, math.nan)


def _known(joined: Tensor, hi: Tensor) -> Tensor:
    """Return a joined value; where it is no number, hi.

    Somebody has written a zero or an infinity through `.data`, say, and the low word is that of
    the value before: less than nothing, or more than infinity.
    """
    return torch.where(joined == joined, joined, hi)


def split_remainder16(x: Tensor, dtype: torch.dtype) -> Components:
    """Return (hi, lo): the bf16 nearest to x, ties away from zero, and the int16 that x has beyond.

    Every fp32 value is held exactly, subnormal ones and those that bf16 rounds to infinity too. Of
    a NaN hi is a NaN. Sign and magnitude count: lo of -x is that of x.
    """
    hi, lo = _low_bits(_bits(_of_one_nan(x)), 16)
    return hi.to(dtype), lo.to(torch.int16)


def join_ulp8(hi: Tensor, lo: Tensor) -> Tensor:
    """Return hi + lo/256 units in its last place, in the direction of its magnitude; exact.

    Of words that no value has (see `_known`) hi.
    """
    wide = hi.to(torch.float32)
    bits = _bits(wide)
    below = lo.to(torch.int32) << (_PLACES[hi.dtype] - 8)
    if hi.dtype is not torch.float16:
        return _known(_float(bits + below), wide)
    sign, magnitude = bits & _SIGN, _float(bits & ~_SIGN)
    small = (magnitude < _NORMAL) | ((magnitude == _NORMAL) & (lo < 0))
    anchor = small.to(torch.float32) * _NORMAL
    joined = _float(_bits(magnitude + anchor) + below) - anchor
    return _known(_float(_bits(joined) | sign), wide)


def split_ulp8(x: Tensor, dtype: torch.dtype) -> Components:
    """Return (hi, lo): x rounded to 8 more bits than dtype has, the int8 lo being those.

    That is 16 bits for bf16 and 19 for fp16, to nearest, ties to even; hi is what is nearest to
    that, ties away from zero. Below the normal numbers of dtype the last
    place stays where it is. Of what bf16 rounds to infinity lo keeps the rest, as `remainder16`
    does; where else hi is not finite, lo is zero.
    """
    return _split_ulp(x, dtype, 8, None)


def round_ulp8(x: Tensor, dtype: torch.dtype, seed: Tensor, position: Tensor) -> Components:
    """Return `split_ulp8` by chance: on average over the seeds hi + lo is x.

    See `stochastic.chance`; of what is above the largest number of bf16 hi may be infinite.
    """
    return _split_ulp(x, dtype, 8, chance(x, seed, position))


def split_ulp4(x: Tensor, dtype: torch.dtype) -> Components:
    """Return (hi, lo): `split_ulp8` to 4 more bits, which are the upper ones of the int8 lo."""
    return _split_ulp(x, dtype, 4, None)


def round_ulp4(x: Tensor, dtype: torch.dtype, seed: Tensor, position: Tensor) -> Components:
    """Return `split_ulp4` by chance, as `round_ulp8`."""
    return _split_ulp(x, dtype, 4, chance(x, seed, position))


def _split_ulp(x: Tensor, dtype: torch.dtype, more: int, random: Tensor | None) -> Components:
    """Return (hi, lo) with so many more bits than dtype has, the upper ones of the int8 lo.

    Args:
        x: fp32.
        dtype: bf16 or fp16.
        more: 8 at most.
        random: int32, 16 random bits for each element; None to round to nearest.
    """
    if dtype is torch.float16:
        return _split_ulp_of_fp16(x, more, random)
    hi, lo = _low_bits(_rounded_bits(_bits(_of_one_nan(x)), 16 - more, random), 16)
    return hi.to(dtype), (lo >> 8).to(torch.int8)


def _split_ulp_of_fp16(x: Tensor, more: int, random: Tensor | None) -> Components:
    """Return `_split_ulp` of fp16, whose subnormals end where numbers from 2^-14 to 2^-13 end."""
    anchor = (x.abs() < _NORMAL).to(x.dtype) * _NORMAL
    places = _PLACES[torch.float16]
    bits = _rounded_bits(_bits(x.abs() + anchor), places - more, random)
    nearest, lo = _low_bits(bits, places)
    hi = _float(_bits(nearest - anchor) | (_bits(x) & _SIGN)).half()
    finite = (x.abs() < math.inf) & (hi.abs() < math.inf)
    lo = torch.where(finite, lo >> (places - 8), 0)
    return torch.where(finite, hi, x.half()), lo.to(torch.int8)


def _rounded_bits(bits: Tensor, below: int, random: Tensor | None) -> Tensor:
    """Return the bits of fp32 numbers with so many of the last rounded off, to nearest even or by
    16 random bits."""
    unit = 1 << below
    to_even = unit // 2 - 1 + ((bits >> below) & 1)
    return (bits + (to_even if random is None else random & (unit - 1))) & -unit


def changed(old: Tensor, new: Tensor) -> Tensor:
    """Return a bool for each element: whether the bits of a high word have changed.

    Args:
        old: of low precision, or fp32.
        new: of its shape and dtype.
    """
    return _bits(old.to(torch.float32)) != _bits(new.to(torch.float32))


_SIGN = -(1 << 31)
_NORMAL = 2.0**-14
"""The smallest normal number of fp16."""
_PLACES = {torch.bfloat16: 16, torch.float16: 13}
"""dtype -> how many bits of an fp32 value it does not have."""


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.int32)


def _float(bits: Tensor) -> Tensor:
    return bits.view(torch.float32)


def _low_bits(bits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the fp32 value with the last count bits of bits rounded off, and them as a number.

    They count from -2^(count-1) on, in the direction of the magnitude: ties away from zero.
    """
    half = 1 << (count - 1)
    nearest = (bits + half) & -(2 * half)
    return _float(nearest), bits - nearest
