"""Floating-point formats for tests: bit patterns to draw from, and oracles that do not round.

The vectorised oracles compute in float64, in whose range sums and products of bf16, fp16 and fp32
values neither overflow nor underflow: a product of two is exact, and a sum is known exactly as the
two numbers that 2Sum returns. Tests check them against `fractions.Fraction` in turn.
"""

from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Generator, Tensor

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Format:
    """A binary format of precision p with normal exponents emin..emax."""

    dtype: torch.dtype
    p: int
    emin: int
    emax: int

    @property
    def u(self) -> float:
        """The unit roundoff."""
        return 2.0**-self.p

    @property
    def largest(self) -> float:
        return 2.0 ** (self.emax + 1) * (1 - self.u)

    @property
    def smallest(self) -> float:
        """The smallest subnormal number."""
        return 2.0 ** (self.emin - self.p + 1)

    @property
    def special(self) -> Tensor:
        """Zeros, ones, the ends of the subnormal and normal ranges, infinities and NaN."""
        tiny, one_ulp = 2.0**self.emin, 2 * self.u
        ends = [self.smallest, tiny - self.smallest, tiny, self.largest, self.largest / 2]
        values = [0.0, 1.0, 1 + one_ulp, 1 - self.u, *ends, torch.inf]
        return torch.tensor([*values, *(-v for v in values), torch.nan]).to(self.dtype)

    def random(self, n: int, g: Generator) -> Tensor:
        """Every bit pattern is equally likely, those of infinities and NaNs too."""
        half = 1 << (8 * self.dtype.itemsize - 1)
        return self._float(torch.randint(-half, half, (n,), generator=g))

    def random_near(self, x: Tensor, lowest: int, highest: int, g: Generator) -> Tensor:
        """Random signs and fractions; exponents lowest..highest above those of x, kept finite."""
        width = self.p - 1
        top = self.emax - self.emin + 2
        field = (self._bits(x) >> width) & top
        field += torch.randint(lowest, highest + 1, x.shape, generator=g)
        fraction = torch.randint(0, 1 << width, x.shape, generator=g)
        sign = torch.randint(0, 2, x.shape, generator=g) * 2 - 1
        return self._float(field.clamp(0, top - 1) << width | fraction) * sign.to(self.dtype)

    def near_negative(self, x: Tensor, ulps: int, g: Generator) -> Tensor:
        """-x plus or minus a few units in its last place."""
        return -self._float(self._bits(x) + torch.randint(-ulps, ulps + 1, x.shape, generator=g))

    def expansions(self, n: int, g: Generator) -> Pair:
        """Normalized pairs of finite numbers."""
        hi = finite(self.random(n + n // 16 + 64, g))[:n]
        return hi, self.residuals(hi, g)

    def residuals(self, hi: Tensor, g: Generator) -> Tensor:
        """Low words for hi: directly below it, further off, half an ulp, or zero."""
        near = self.random_near(hi, -self.p - 4, -self.p, g)
        far = self.random_near(hi, -self.emax, -self.p, g)
        half_ulp = power_of_two(last_place(hi.double(), self) - 1).to(self.dtype)
        kind = torch.randint(0, 8, hi.shape, generator=g)
        lo = torch.where(kind == 0, far, torch.where(kind == 1, half_ulp, near))
        return torch.where(self.is_normalized(hi, lo) & hi.isfinite(), lo, 0)

    def round(self, x: Tensor) -> Tensor:
        """RN(x) of a float64 tensor, as float64, by making the last place one.

        Where x is itself a rounded sum of two numbers of the format, the result is still the
        correctly rounded sum, since 53 >= 2p + 2.
        """
        last = last_place(x, self)
        rounded = torch.round(x * power_of_two(-last)) * power_of_two(last)
        overflow = torch.copysign(torch.full_like(x, torch.inf), x)
        rounded = torch.where(rounded.abs() > self.largest, overflow, rounded)
        return torch.where(x.isfinite(), rounded, x)

    def is_normalized(self, hi: Tensor, lo: Tensor) -> Tensor:
        """Tell where hi = RN(hi + lo)."""
        return self.round(hi.double() + lo.double()) == hi.double()

    def _bits(self, x: Tensor) -> Tensor:
        return x.view(self._integer).long()

    def _float(self, bits: Tensor) -> Tensor:
        return bits.to(self._integer).view(self.dtype)

    @property
    def _integer(self) -> torch.dtype:
        return torch.int32 if self.dtype.itemsize == 4 else torch.int16


BF16 = Format(torch.bfloat16, 8, -126, 127)
FP16 = Format(torch.float16, 11, -14, 15)
FP32 = Format(torch.float32, 24, -126, 127)


def power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent as float64, exactly (torch.ldexp and torch.pow do not promise that)."""
    return ((exponent.long() + 1023) << 52).view(torch.float64)


def exponent(x: Tensor) -> Tensor:
    """floor(log2 |x|) of a finite float64 tensor; -1 for zero."""
    return torch.frexp(torch.where(x.isfinite(), x, 1.0)).exponent.long() - 1


def last_place(x: Tensor, format: Format) -> Tensor:
    """The exponent of the unit in the last place of a float64 tensor, if rounded to the format."""
    return exponent(x).clamp(min=format.emin) - (format.p - 1)


def finite(*tensors: Tensor) -> Tensor:
    """The tensors, stacked, without the positions at which one of them is not finite."""
    stacked = torch.stack(tensors)
    kept = stacked[:, stacked.isfinite().all(0)]
    return kept if len(tensors) > 1 else kept[0]


def fraction(x: Tensor) -> Fraction:
    """The exact value of a 0-d tensor."""
    return Fraction(float(x))


def exact_sum(a: Tensor, b: Tensor) -> Pair:
    """a + b of float64 tensors as (RN, error): equal sums, and no others, give equal pairs."""
    s = a + b
    a_part = s - b
    return s, (a - a_part) + (b - (s - a_part))


def accurate_sum(*terms: Tensor, fold: int = 3) -> Tensor:
    """The sum of float64 tensors as if computed in threefold precision, then rounded.

    SumK of Ogita, Rump and Oishi (SIAM J. Sci. Comput. 26(6), 2005) with K = 3: the error is at
    most 2^-53 of the sum plus 2^-145 of the sum of the magnitudes; with K = 2, 2^-98 of these.
    """
    items = list(terms)
    for _ in range(fold - 1):
        for i in range(1, len(items)):
            items[i], items[i - 1] = exact_sum(items[i], items[i - 1])
    total = items[0]
    for item in items[1:]:
        total = total + item
    return total


def relative_error(result: Pair, terms: list[Tensor]) -> Tensor:
    """|hi + lo - sum(terms)| / |sum(terms)|, zero where both are zero."""
    difference = accurate_sum(*terms, *(-x.double() for x in result)).abs()
    return torch.where(difference == 0, 0.0, difference / accurate_sum(*terms).abs())


HALF = 2048


def random_bits(n: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Any bit pattern: all exponents, subnormals, signed zeros, infinities and NaNs."""
    return torch.randint(-(2**15), 2**15, (n,), generator=generator).to(torch.int16).view(dtype)


def mixed(scale: float, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Random bits and, since most of those overflow soon, as many ordinary values."""
    ordinary = (torch.randn(HALF, generator=generator) * scale).to(dtype)
    return torch.cat([random_bits(HALF, dtype, generator), ordinary])


def differing(a: Tensor, b: Tensor) -> int:
    bits = torch.int16 if a.element_size() == 2 else torch.int32
    same = (a.view(bits) == b.view(bits)) | (a.isnan() & b.isnan())
    return int((~same).sum())
