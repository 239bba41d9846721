"""AdamW written out on the functions of `runtime.expansion.arithmetic`: an oracle for bits."""

from dataclasses import dataclass

import torch
from torch import Tensor

from collage_fx.runtime.expansion.arithmetic import grow, mul
from collage_fx.runtime.expansion.components import split_constant
from collage_fx.runtime.storage.layouts import decay, join


def rounded_sqrt(hi: Tensor, lo: Tensor) -> Tensor:
    """Return RN(sqrt(hi + lo)); eager fp32 sqrt on the CPU is off by an ulp here and there."""
    return join(hi, lo).double().sqrt().float().to(hi.dtype)


def power(base: float, exponent: Tensor) -> Tensor:
    """Return the power that PyTorch has in fp32, of an fp32 number, rounded once from float64."""
    return torch.pow(torch.tensor(base).double(), exponent.double()).float()


@dataclass
class AdamW:
    """One 16-bit parameter with its states at level plus, in torch.optim.AdamW's own order."""

    p: Tensor
    foreach: bool = True
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    wd: float = 0.01

    def __post_init__(self) -> None:
        self.p_lo, self.m, self.v, self.v_lo = (torch.zeros_like(self.p) for _ in range(4))
        self.t = torch.zeros(())

    def step(self, g: Tensor) -> None:
        dtype, (beta1, beta2) = self.p.dtype, self.betas
        self.t = self.t + 1
        weight_decay = decay((self.p, self.p_lo), (1 - self.lr * self.wd) - 1)
        m, g32 = self.m.float(), g.float()
        self.m = (m + (g32 - m) * (1 - beta1)).to(dtype)
        self._second_moment(g32 * (1 - beta2) * g32, beta2)
        update = weight_decay + self.m.float() / self._denominator().float()
        self.p, self.p_lo = grow(self.p, self.p_lo, update.to(dtype))

    def _second_moment(self, square: Tensor, beta2: float) -> None:
        dtype = self.v.dtype
        if 1 - beta2 <= 5 * torch.finfo(dtype).eps / 2:
            term = decay((self.v, self.v_lo), beta2 - 1) + square
            self.v, self.v_lo = grow(self.v, self.v_lo, term.to(dtype))
        else:
            decayed = mul(self.v, self.v_lo, *split_constant(beta2, dtype, 2))
            self.v, self.v_lo = grow(*decayed, square.to(dtype))

    def _denominator(self) -> Tensor:
        beta1, beta2 = self.betas
        if self.foreach:
            step_size = torch.reciprocal((power(beta1, self.t) - 1) / self.lr)
            root = torch.sqrt(-(power(beta2, self.t) - 1))
        else:
            step_size = -(torch.reciprocal(1 - power(beta1, self.t)) * self.lr)
            root = torch.sqrt(1 - power(beta2, self.t))
        scaled = rounded_sqrt(self.v, self.v_lo) / root
        denominator = (scaled.float() + self.eps).to(self.p.dtype)
        # Beyond the range of fp16 at small rates, so it is not rounded to that.
        wide = denominator.dtype == torch.float16
        return (denominator.float() if wide else denominator) / step_size

    @property
    def stored(self) -> dict[str, Tensor]:
        """Every tensor that the step keeps."""
        return {"p": self.p, "p_lo": self.p_lo, "m": self.m, "v": self.v, "v_lo": self.v_lo}
