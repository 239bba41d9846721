"""Error-free transformations (EFTs): a rounded result together with its exact rounding error.

Every function takes tensors of one floating dtype (bf16, fp16 or fp32) that broadcast against each
other and returns tensors of that dtype. `RN` is rounding to nearest even in that dtype. The
operations are PyTorch's own, which round after each of them in eager mode; a compiler that keeps
intermediates wider destroys an EFT, and `passes/rewrite/lower.py` is what prevents that.
"""

import torch
from torch import Tensor

FP8 = {torch.float8_e4m3fn: 4, torch.float8_e5m2: 3}
"""fp8 dtype -> its precision p. There is no arithmetic in them, only conversions."""
LOW_PRECISION = (torch.bfloat16, torch.float16, *FP8)
"""dtypes of states that PyTorch computes with in fp32, and then rounds."""
WIDER = {
    **dict.fromkeys(LOW_PRECISION, torch.float32),
    torch.float32: torch.float64,
}
"""dtype -> a dtype that holds any product of two values of it exactly (2p bits are enough)."""


def computed_in(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which PyTorch computes what it then rounds to a dtype."""
    return WIDER[dtype] if dtype in LOW_PRECISION else dtype


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
