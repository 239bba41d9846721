"""Stochastic rounding: up or down by chance, with the probability that is right on average."""

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from collage_fx.runtime.errors import CaptureError

_INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}
_FACTORS = (0x21F0AAAD, 0x735A2D97)
_SPREAD = 0x79B9
"""Odd, of 15 bits: times 16 bits it stays below 2^31. Without it the bits of positions that are
4,096 apart are correlated, by .02."""


def seed_of(seed: int, draw: int) -> int:
    """Return the 31 bits that the draw-th rounding of a tensor is seeded with."""
    digest = hashlib.blake2b(f"{seed} {draw}".encode(), digest_size=4).digest()
    return int.from_bytes(digest) >> 1


class Seeds:
    """The seeds of a step: a 0-d tensor on each device, with another value at each call."""

    def __init__(self, seed: int, devices: Sequence[torch.device]) -> None:
        """Make the tensors.

        Raises CaptureError while a CUDA graph is captured, which would make them anew each time.
        """
        if any(map(_capturing, devices)):
            raise CaptureError(
                "a CUDA graph is being captured, and the seed of stochastic rounding has not been "
                "made: take a step that is not captured first, and compile nothing anew since"
            )
        self.seed = seed
        self.tensors = [torch.zeros((), dtype=torch.int32, device=d) for d in devices]

    def draw(self, draw: int) -> list[Tensor]:
        """Return the tensors, with the seed of this draw.

        A CUDA graph that is captured gets none of them, but what makes, whenever it is replayed,
        another seed of the last one.
        """
        for tensor in self.tensors:
            if _capturing(tensor.device):
                advance(tensor)
            else:
                tensor.fill_(seed_of(self.seed, draw))
        return self.tensors


def _capturing(device: torch.device) -> bool:
    """Return True if the current stream of a device is being captured."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):  # what is asked is the current device
        return torch.cuda.is_current_stream_capturing()


def advance(seed: Tensor) -> None:
    """Overwrite a seed with the next one of a sequence, on its device.

    A linear congruential generator modulo the prime 2^31 - 1, with the multiplier of C++'s
    minstd_rand: but for one number, from which it does not move, it goes through all others.

    Args:
        seed: int32, 0-d, 31 bits.
    """
    seed.copy_((seed.to(torch.int64) * 48271 + 1) % 0x7FFFFFFF)


def chance(x: Tensor, seed: Tensor, position: Tensor) -> Tensor:
    """Return 16 random bits for each element of x: a hash of its position, keyed by the seed.

    Of all values of a step at one position it is the same 32 bits, which a kernel computes once;
    what each value rounds by is these and its own last bits, one or the other. Elements at two
    positions round apart, where they are equal too, and equal ones at one position alike, so that
    the copies of a parameter in data-parallel training stay equal, however they are sharded. It is
    the hash "lowbias32" (shifts by 16 and 15, factors of the hash-prospector project), of which the
    upper half is taken; int32 wraps around.

    Args:
        x: fp32 or fp64, of any shape.
        seed: int32, 0-d, 31 bits.
        position: int32, of the shape of x: the number of each element in the whole tensor, modulo
            2^32.

    Returns:
        int32 of the shape of x, from 0 to 2^16 - 1.
    """
    # Compilers know how far a position goes: no product of it may overflow.
    mixed = seed ^ (position >> 16) ^ ((position & 0xFFFF) * _SPREAD)
    first, second = _FACTORS
    mixed = (mixed ^ ((mixed >> 16) & 0xFFFF)) * first
    mixed = (mixed ^ ((mixed >> 15) & 0x1FFFF)) * second
    return ((mixed >> 16) ^ x.view(_INTEGERS[x.dtype]).to(torch.int32)) & 0xFFFF


def round_by_chance(x: Tensor, dtype: torch.dtype, bits: Tensor) -> Tensor:
    """Return one of the two values of dtype around x, the nearer one the more probably.

    Over all 16-bit numbers the mean of the results is x, to 2^-16 of a unit in the last place of
    dtype, and to 2^-13 below its normal numbers; a value of dtype stays what it is.

    Args:
        x: finite, of a wider dtype.
        dtype: fp8, bf16, fp16 or fp32.
        bits: int32, 16 random bits for each element.
    """
    return moved_by_chance(x, dtype, bits).to(dtype)


def moved_by_chance(x: Tensor, dtype: torch.dtype, bits: Tensor) -> Tensor:
    """Return `round_by_chance` in the dtype of x."""
    places = round(math.log2(torch.finfo(dtype).eps / torch.finfo(x.dtype).eps))
    integers, tiny = _INTEGERS[x.dtype], torch.finfo(dtype).tiny
    noise = bits & ((1 << min(places, 16)) - 1)
    if places > 16:
        noise = bits.to(integers) << (places - 16)
    if tiny == torch.finfo(x.dtype).tiny:  # of bits with a sign the magnitude grows
        return ((x.view(integers) + noise) & -(1 << places)).view(x.dtype)
    magnitude = x.abs()  # below tiny the last place of dtype stays where it is
    anchor = (magnitude < tiny).to(x.dtype) * tiny
    word = (magnitude + anchor).view(integers)
    rounded = ((word + noise) & -(1 << places)).view(x.dtype) - anchor
    return torch.where(x < 0, -rounded, rounded)
