"""Error-free transformations (EFTs): a rounded result together with its exact rounding error.

Every function takes tensors of one floating dtype (bf16, fp16 or fp32) that broadcast against each
other and returns tensors of that dtype. `RN` is rounding to nearest even in that dtype. The
operations are PyTorch's own, which round after each of them in eager mode; a compiler that keeps
intermediates wider destroys an EFT, and `passes/rewrite/lower.py` is what prevents that.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

FP8 = {torch.float8_e4m3fn: 4, torch.float8_e5m2: 3}
"""fp8 dtype -> its precision p. There is no arithmetic in them, only conversions."""
SIXTEEN_BITS = (torch.bfloat16, torch.float16)
LOW_PRECISION = (*SIXTEEN_BITS, *FP8)
"""dtypes of states that PyTorch computes with in fp32, and then rounds."""
WIDER = {
    **dict.fromkeys(LOW_PRECISION, torch.float32),
    torch.float32: torch.float64,
}
"""dtype -> a dtype that holds any product of two values of it exactly (2p bits are enough)."""


def computed_in(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which PyTorch computes what it then rounds to a dtype."""
    return WIDER[dtype] if dtype in LOW_PRECISION else dtype


def wider_dtypes(
    dtypes: Iterable[torch.dtype], *, in_float64: bool
) -> tuple[dict[torch.dtype, torch.dtype], dict[torch.dtype, torch.dtype]]:
    """Return the dtypes in which whole values are computed with.

    Args:
        dtypes: those that may have low words.
        in_float64: whether that is float64, which holds what error-free transformations keep, for
            all but fp8; else `WIDER`.

    Returns:
        dtype -> what its values are joined in, and dtype -> what is computed in for it: fp32 too is
        float64 beside values of float64.
    """
    wide = {d: torch.float64 if in_float64 and d not in FP8 else WIDER[d] for d in dtypes}
    return wide, {**wide, torch.float32: torch.float64} if in_float64 else wide


def two_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return (s, t) with s = RN(a + b) and s + t = a + b exactly, unless s overflows.

    Knuth, TAOCP vol. 2; Moller 1965. No condition on the magnitudes. When s is not finite, t is
    NaN; so it is too, with a finite s, where |a| is the largest number and b about -1.5 of its ulp
    (Boldo, Graillat, Muller, TOMS 44(1), 2017).
    """
    s = a + b
    a_part = s - b
    b_part = s - a_part
    return s, (a - a_part) + (b - b_part)


def fast_two_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return (s, t) with s = RN(a + b) and s + t = a + b exactly, if |a| >= |b| or a = 0.

    Dekker 1971; the condition is on the exponents. When s is not finite, t is NaN or infinite.
    """
    s = a + b
    return s, b - (s - a)


def two_prod(a: Tensor, b: Tensor | float) -> tuple[Tensor, Tensor]:
    """Return (p, e) with p = RN(a * b) and p + e = a * b exactly.

    The product is formed exactly in `WIDER[a.dtype]`, which is what an FMA would do (2ProdFMA). `b`
    may be a Python number that the dtype represents. e is exact where |a * b| is at least 2^-118
    (bf16), 2^-3 (fp16) or 2^-102 (fp32); below, it is rounded or flushed. When p is not finite, e
    is not finite either.
    """
    wide = WIDER[a.dtype]
    p = a * b
    exact = a.to(wide) * (b.to(wide) if isinstance(b, Tensor) else b)
    return p, (exact - p.to(wide)).to(a.dtype)
