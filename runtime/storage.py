"""Storages: how an expansion is laid out in memory, and the way between it and one wide value."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from collage_fx.runtime.arithmetic import Expansion, finite_or_zero
from collage_fx.runtime.eft import WIDER


def join(hi: Tensor, lo: Tensor) -> Tensor:
    """Return hi + lo in `WIDER[hi.dtype]` (fp32 for bf16 and fp16), rounded once.

    The sum is exact unless the exponents of hi and lo are further apart than the wide dtype holds,
    where the error is at most 2^-24 of the sum for fp32.
    """
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

    x is a tensor of a wider dtype. Where hi is not finite, lo is zero.
    """
    hi = x.to(dtype)
    return hi, finite_or_zero((x - hi.to(x.dtype)).to(dtype))


@dataclass(frozen=True)
class Storage:
    """A layout of an expansion: hi, of the state's own dtype, and its residuals."""

    name: str
    dtypes: frozenset[torch.dtype]
    """The dtypes of the states that it can hold."""
    residuals: int
    """Number of residual tensors, each of the shape, strides and dtype of the state."""
    join: Callable[[Tensor, Tensor], Tensor]
    split: Callable[[Tensor, torch.dtype], Expansion]

    def residual_bytes(self, tensor: Tensor) -> int:
        """Return the bytes that the residuals of tensor take."""
        return self.residuals * tensor.numel() * tensor.element_size()


STORAGES = {
    "mcf2": Storage("mcf2", frozenset({torch.bfloat16, torch.float16}), 1, join, split),
}
"""name -> storage. `mcf2` is the paper's: hi and lo in one dtype, about 2p + 1 bits."""
