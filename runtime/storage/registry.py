"""Storages: how an expansion is laid out in memory, and the way between it and one wide value."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from collage_fx.runtime.errors import StorageError
from collage_fx.runtime.expansion.arithmetic import Expansion, finite_or_zero
from collage_fx.runtime.expansion.eft import FP8, LOW_PRECISION, WIDER
from collage_fx.runtime.expansion.stochastic import chance, round_by_chance

Components = tuple[Tensor, ...]
"""hi and its residuals."""


def join(hi: Tensor, lo: Tensor) -> Tensor:
    """Return hi + lo in `WIDER[hi.dtype]` (float64 for fp32, else fp32), rounded once.

    The sum is exact unless the exponents of hi and lo are further apart than the wide dtype holds,
    where the error is at most 2^-24 of the sum in fp32, 2^-53 in float64. What `split` made is
    joined exactly. For fp8, whose lo is scaled, see `join8`.
    """
    if hi.dtype in FP8:
        return join8(hi, lo)
    wide = WIDER[hi.dtype]
    return hi.to(wide) + lo.to(wide)


def decay(hi: Tensor, lo: Tensor, gap: Tensor | float) -> Tensor:
    """Return (hi + lo) * gap in the wide dtype; zero where hi is not finite.

    With gap = c - 1 it is what turns x into c * x when added to it, for c > 0. An infinite x then
    stays infinite, as in plain arithmetic, instead of becoming inf - inf.
    """
    return finite_or_zero(join(hi, lo)) * gap


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
    return hi, finite_or_zero((x - hi.to(x.dtype)).to(dtype))


def split_by_chance(x: Tensor, dtype: torch.dtype, seed: Tensor) -> Components:
    """Return (hi, lo) of dtype with hi = RN(x) and lo = x - hi rounded up or down by chance.

    On average over the seeds hi + lo is x; see `stochastic.round_by_chance`.
    """
    if dtype in FP8:
        return split8(x, dtype, 1, seed)
    hi = x.to(dtype)
    rest = finite_or_zero(x - hi.to(x.dtype))
    return hi, round_by_chance(rest, dtype, chance(x, seed))


def join3(hi: Tensor, mid: Tensor, lo: Tensor) -> Tensor:
    """Return hi + mid + lo in fp32; exact for what `split3` made of an fp32 value."""
    if hi.dtype in FP8:
        return join8(hi, mid, lo)
    wide = WIDER[hi.dtype]
    return hi.to(wide) + (mid.to(wide) + lo.to(wide))


def decay3(hi: Tensor, mid: Tensor, lo: Tensor, gap: Tensor | float) -> Tensor:
    """Return (hi + mid + lo) * gap in the wide dtype; zero where hi is not finite: see `decay`."""
    return finite_or_zero(join3(hi, mid, lo)) * gap


def split3(x: Tensor, dtype: torch.dtype) -> Components:
    """Return (hi, mid, lo) of dtype, each the rounding of what the ones before leave of x.

    In bf16 they hold every fp32 value from 2^-110 on, exactly; below, and in fp16 below one, they
    are off by at most half the smallest number of dtype (2^-134, 2^-25). For fp8 see `split8`.
    """
    if dtype in FP8:
        return split8(x, dtype, 2)
    hi = x.to(dtype)
    rest = finite_or_zero(x - hi.to(x.dtype))
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


def split8(x: Tensor, dtype: torch.dtype, count: int, seed: Tensor | None = None) -> Components:
    """Return (hi, *lows) of an fp8 dtype, each to nearest even: hi = RN(x), lows[i] = RN(r_i).

    With a seed the last is rounded up or down by chance.

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
        seed: int32, 0-d.
    """
    words = [x.to(dtype)]
    most = _MOST[dtype]
    rest = torch.where(x.abs() <= LAST[dtype], x.clamp(-most, most) - words[0].to(x.dtype), 0.0)
    for k in range(count):
        rest = rest * 2.0 ** FP8[dtype]
        if seed is not None and k == count - 1:
            words.append(round_by_chance(rest, dtype, chance(x, seed)))
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
    """Return the fp32 value of which hi and lo are the upper and the lower half; exact."""
    return _float(_bits(hi.to(torch.float32)) + lo.to(torch.int32))


def split_remainder16(x: Tensor, dtype: torch.dtype) -> Components:
    """Return (hi, lo): the bf16 nearest to x, ties away from zero, and the int16 that x has beyond.

    Every fp32 value is held exactly, subnormal ones and those that bf16 rounds to infinity too. Of
    a NaN hi is a NaN. Sign and magnitude count: lo of -x is that of x.
    """
    hi, lo = _low_bits(_bits(x), 16)
    finite = x.abs() < math.inf
    return torch.where(finite, hi, x).to(dtype), torch.where(finite, lo, 0).to(torch.int16)


def join_ulp8(hi: Tensor, lo: Tensor) -> Tensor:
    """Return hi + lo/256 units in its last place, in the direction of its magnitude; exact."""
    bits = _bits(hi.to(torch.float32))
    below = lo.to(torch.int32) << (_PLACES[hi.dtype] - 8)
    if hi.dtype is not torch.float16:
        return _float(bits + below)
    sign, magnitude = bits & _SIGN, _float(bits & ~_SIGN)
    small = (magnitude < _NORMAL) | ((magnitude == _NORMAL) & (lo < 0))
    anchor = small.to(torch.float32) * _NORMAL
    return _float(_bits(_float(_bits(magnitude + anchor) + below) - anchor) | sign)


def split_ulp8(x: Tensor, dtype: torch.dtype, seed: Tensor | None = None) -> Components:
    """Return (hi, lo): x rounded to 8 more bits than dtype has, the int8 lo being those.

    That is 16 bits for bf16 and 19 for fp16, to nearest, ties to even, or with a seed by chance; hi
    is what is nearest to that, ties away from zero. Below the normal numbers of dtype the last
    place stays where it is. Where hi is not finite, lo is zero.
    """
    places = _PLACES[dtype]
    bits, anchor = _bits(x), torch.zeros((), dtype=x.dtype, device=x.device)
    sign = bits & _SIGN
    if dtype is torch.float16:  # subnormals end where the numbers from 2^-14 to 2^-13 end
        anchor = (x.abs() < _NORMAL).to(x.dtype) * _NORMAL
        bits = _bits(x.abs() + anchor)
    unit = 1 << (places - 8)
    if seed is None:
        up = (unit // 2 - 1) + ((bits >> (places - 8)) & 1)
    else:
        up = chance(x, seed) >> (16 - (places - 8))
    nearest, lo = _low_bits((bits + up) & -unit, places)
    if dtype is torch.float16:
        nearest = _float(_bits(nearest - anchor) | sign)
    hi = nearest.to(dtype)
    finite = (x.abs() < math.inf) & (hi.abs() < math.inf)
    lo = torch.where(finite, lo >> (places - 8), 0)
    return torch.where(finite, hi, x.to(dtype)), lo.to(torch.int8)


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
    low = ((bits & (2 * half - 1)) ^ half) - half
    return _float(bits - low), low


@dataclass(frozen=True)
class Storage:
    """A layout of an expansion: hi, of the state's own dtype, and its residuals."""

    name: str
    residuals: dict[torch.dtype, tuple[torch.dtype, ...]]
    """dtype of a state that it can hold -> those of its residuals, of the state's shape each."""
    precision: dict[torch.dtype, int]
    """dtype -> the significant bits of the whole, for numbers far from the ends of its range."""
    join: Callable[..., Tensor]
    """(hi, *residuals) -> the value in `WIDER[hi.dtype]`."""
    split: Callable[[Tensor, torch.dtype], Components]
    """(a value of the wide dtype, dtype of hi) -> (hi, *residuals). In all layouts residuals of
    zero stand for hi itself."""
    split_by_chance: Callable[[Tensor, torch.dtype, Tensor], Components] | None = None
    """The same with a seed, an int32 of 31 bits: the last residual is rounded up or down by chance,
    which is right on average. None where nothing is left to round."""

    def residual_bytes(self, tensor: Tensor) -> int:
        """Return the bytes that the residuals of tensor take."""
        return sum(r.itemsize for r in self.residuals[tensor.dtype]) * tensor.numel()


_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32
_E4M3, _E5M2 = FP8

STORAGES = {
    s.name: s
    for s in (
        Storage(
            "mcf2",
            {d: (d,) for d in LOW_PRECISION},
            {_BF16: 17, _FP16: 23, _E4M3: 9, _E5M2: 7},
            join,
            split,
            split_by_chance,
        ),
        Storage(
            "mcf3",
            {d: (d, d) for d in LOW_PRECISION},
            {_BF16: 24, _FP16: 24, _E4M3: 14, _E5M2: 11},
            join3,
            split3,
        ),
        Storage(
            "remainder16", {_BF16: (torch.int16,)}, {_BF16: 24}, join_remainder16, split_remainder16
        ),
        Storage(
            "ulp8",
            {_BF16: (torch.int8,), _FP16: (torch.int8,)},
            {_BF16: 16, _FP16: 19},
            join_ulp8,
            split_ulp8,
            split_ulp8,
        ),
        Storage("double_single", {_FP32: (_FP32,)}, {_FP32: 49}, join, split),
    )
}
"""name -> storage. `mcf2` is the paper's: hi and lo in one dtype, about 2p + 1 bits. `remainder16`
is that of Transformer Engine and apex, `ulp8` that of FlashOptim. `double_single` is mcf2 of fp32
under the name that it has there, so that fp32 states are left alone unless it is asked for."""

EXPANSIONS = {"mcf2": 2, "mcf3": 3}
"""Storage -> of how many floats of the state's own dtype it is the sum; for these, and no others,
there is arithmetic `eft`."""

Choice = str | tuple[tuple[str, str], ...]
"""A storage, `auto`, or pairs of a pattern for names of states and one of these."""


class Unnamed(str):
    """The storage of states without residuals where none is named; others go on in their own."""

    def __repr__(self) -> str:
        return f"{super().__repr__()} (by default)"


DEFAULT = Unnamed("mcf2")
AUTO = {_BF16: "remainder16", **dict.fromkeys((_FP16, *FP8), "mcf2")}
"""dtype -> what keeps most of a state for as many bytes again; fp32 states stay as they are."""
FINEST = {_BF16: "remainder16", **dict.fromkeys((_FP16, *FP8), "mcf3"), _FP32: "double_single"}
"""dtype -> what keeps most of a state."""


def chosen(
    choice: Choice, name: str, dtype: torch.dtype, *, is_param: bool, scalar: bool = False
) -> str:
    """Return the storage for a state; empty for one that is left as it is.

    That is `auto` for one that no pattern fits. Patterns, as in fnmatch, are for the kind of the
    state (`param`, `exp_avg_sq`) or its name. For a state of low precision it may be one that
    cannot hold it: see `check_compensable`. Such a storage leaves states of other dtypes alone.

    Args:
        choice: what the user asks for.
        name: of the state.
        dtype: of the state.
        is_param: whether it is a parameter.
        scalar: whether it is 0-d. A number in fp32 is mostly a count of steps, exact up to 2^24,
            and is left alone unless it is a parameter or a pattern other than `*` fits it.
    """
    pattern = "*"
    if not isinstance(choice, str):
        kind = kind_of(name, is_param=is_param)
        fitting = (c for c in choice if fits(c[0], kind, name))
        pattern, choice = next(fitting, ("*", "auto"))
    storage = AUTO.get(dtype, "") if choice == "auto" else str(choice)
    if dtype in LOW_PRECISION:
        return storage
    held = storage in STORAGES and dtype in STORAGES[storage].residuals
    counts = scalar and not is_param and pattern == "*"
    return storage if held and not counts else ""


def kind_of(name: str, *, is_param: bool) -> str:
    """Return `param`, or `exp_avg_sq` for the state of that name of any parameter."""
    return "param" if is_param else name.partition(" of ")[0]


def fits(pattern: str, kind: str, name: str) -> bool:
    """Tell whether a pattern, as in fnmatch, is one for a state of this kind and name."""
    return fnmatchcase(kind, pattern) or fnmatchcase(name, pattern)


def compensable_dtypes(choice: Choice) -> tuple[torch.dtype, ...]:
    """Return the dtypes of states that may get residuals: fp32 where a storage for it is named."""
    names = [choice] if isinstance(choice, str) else [name for _, name in choice]
    held = {d: None for name in names if name in STORAGES for d in STORAGES[name].residuals}
    return (*LOW_PRECISION, *(d for d in held if d not in LOW_PRECISION))


def transforms(dtype: torch.dtype, storage: str) -> bool:
    """Tell whether there are error-free transformations for expansions that are so laid out."""
    return storage in EXPANSIONS and dtype not in FP8


def layout_of(hi: Tensor, lows: Sequence[Tensor]) -> Storage:
    """Return the storage that these are the high word and the residuals in."""
    found = tuple(lo.dtype for lo in lows)
    return next(s for s in STORAGES.values() if s.residuals.get(hi.dtype) == found)


def join_in(dtype: torch.dtype, storage: str, hi: Tensor, *lows: Tensor) -> Tensor:
    """Return the value of an expansion in a dtype, the wide one of hi or float64.

    The words of an error-free transformation may be further apart than fp32 holds; in float64 their
    sum is rounded at 2^-53.
    """
    if dtype is WIDER[hi.dtype] or not transforms(hi.dtype, storage):
        return STORAGES[storage].join(hi, *lows).to(dtype)
    total = lows[-1].to(dtype)
    for word in (*lows[-2::-1], hi):
        total = word.to(dtype) + total
    return total


def split_into(storage: str, x: Tensor, dtype: torch.dtype) -> Components:
    """Return the words of dtype in which a storage holds x, which is in the wide one or float64."""
    exact = x if transforms(dtype, storage) else x.to(WIDER[dtype])
    return STORAGES[storage].split(exact, dtype)


def kept(dtype: torch.dtype, storage: str = "") -> float:
    """Return the smallest change, relative to a state, that a storage does not round away.

    That is half a unit in the last place of the whole: 2^-8 for plain bf16 (no storage), 2^-24 for
    remainder16. Smaller ones are lost, or count as one, as it happens.
    """
    return 2.0 ** -STORAGES[storage].precision[dtype] if storage else torch.finfo(dtype).eps / 2


def refusal(dtype: torch.dtype, storage: str, name: str) -> str:
    """Return why a storage cannot hold the state of this dtype and name; empty if it can."""
    if dtype in STORAGES[storage].residuals:
        return ""
    others = [repr(s.name) for s in STORAGES.values() if dtype in s.residuals]
    return (
        f"storage {storage!r} cannot hold {name}, which is {str(dtype).removeprefix('torch.')};"
        f" {', '.join(others) or 'no storage'} can"
    )


def check_compensable(dtype: torch.dtype, storage: str, name: str) -> None:
    """Raise StorageError unless a storage can hold the state of this dtype and name."""
    if why := refusal(dtype, storage, name):
        raise StorageError(why)
