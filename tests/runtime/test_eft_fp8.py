"""Error-free transformations in fp8, over all pairs: eft.py itself, in formats of 8 bits.

PyTorch has no arithmetic in fp8. `Emulated` rounds every fp32 result to it, which is the correctly
rounded one, since 24 >= 2p + 2; float64 is the wide dtype then.

For runtime.expansion.eft.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from floats import exponent
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from collage_fx.runtime.expansion.eft import fast_two_sum, two_prod, two_sum


class Format8(NamedTuple):
    dtype: torch.dtype
    p: int
    emin: int
    largest: float


FORMATS = [Format8(torch.float8_e4m3fn, 4, -6, 448.0), Format8(torch.float8_e5m2, 3, -14, 57344.0)]
EACH = pytest.mark.parametrize("f", FORMATS, ids=["e4m3fn", "e5m2"])


class Emulated(TorchDispatchMode):
    """Rounds every fp32 result to a format of 8 bits; beyond the largest it is no number."""

    def __init__(self, f: Format8) -> None:
        super().__init__()
        self.f = f

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not isinstance(result, Tensor) or result.dtype != torch.float32:
            return result
        rounded = result.to(self.f.dtype).to(torch.float32)
        # PyTorch makes the largest number of what is beyond it, or infinity, as the version is.
        last_place = 2.0 ** (exponent(torch.tensor(self.f.largest).double()) + 1 - self.f.p)
        return torch.where((result - rounded).abs() <= last_place / 2, rounded, torch.nan)


def pairs(f: Format8) -> tuple[Tensor, Tensor]:
    """All 65536 pairs of bit patterns, but for those with infinities and NaNs."""
    values = torch.arange(256).to(torch.uint8).view(f.dtype).float()
    values = values[values.isfinite()]
    return values.repeat_interleave(len(values)), values.repeat(len(values))


def inexact(f: Format8, operation: Callable[..., Any], a: Tensor, b: Tensor, exact: Tensor) -> Any:
    """Return the mask of finite results that with their error are not the exact one, and of the
    finite ones."""
    with Emulated(f):
        s, t = operation(a, b)
    return s.isfinite() & (s.double() + t.double() != exact), s.isfinite()


@EACH
def test_two_sum_of_all_pairs(f: Format8) -> None:
    a, b = pairs(f)
    wrong, finite = inexact(f, two_sum, a, b, a.double() + b.double())
    # Next to the largest number s - b may overflow although s does not.
    assert not wrong[a.abs() < f.largest].any()
    assert finite.double().mean() > 0.9


@EACH
def test_fast_two_sum_of_all_ordered_pairs(f: Format8) -> None:
    a, b = pairs(f)
    ordered = (exponent(a.double()) >= exponent(b.double())) | (a == 0) | (b == 0)
    wrong, _ = inexact(f, fast_two_sum, a, b, a.double() + b.double())
    assert not wrong[ordered].any()
    assert wrong[~ordered].any(), "the check can fail: the order is needed"


@EACH
def test_two_prod_of_all_pairs_from_the_edge_of_its_range_on(f: Format8) -> None:
    """exponent(a) + exponent(b) >= emin + p - 1; in e4m3fn that leaves out what is below 2^-3."""
    a, b = pairs(f)
    exact = a.double() * b.double()
    wrong, finite = inexact(f, two_prod, a, b, exact)
    place = exponent(a.double()) + exponent(b.double())
    edge = f.emin + f.p - 1
    assert edge == {4: -3, 3: -12}[f.p]
    zero = exact == 0
    assert not wrong[(place >= edge) | zero].any()
    for k in range(1, f.p):
        at = (place == edge - k) & ~zero
        assert wrong[at].any() and finite[at].all(), "the range begins where it is said to"


@EACH
def test_what_is_kept_in_fp32_until_it_is_stored_is_found(f: Format8) -> None:
    a, b = pairs(f)
    s, t = (x.to(f.dtype).float() for x in two_sum(a, b))
    finite = s.abs() <= f.largest
    assert (s.double() + t.double() != a.double() + b.double())[finite].double().mean() > 0.1
