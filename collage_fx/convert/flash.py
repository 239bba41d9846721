"""Numbers of flashoptim: error bits of weights, and moments in groups of eight-bit numbers."""

from typing import Any

import torch
from torch import Tensor

from collage_fx.errors import CheckpointError

_FRACTION = {torch.bfloat16: 7, torch.float16: 10}
"""dtype of a weight -> bits of its fraction."""
_LEAST = {torch.bfloat16: -126, torch.float16: -14}
"""dtype -> exponent of its smallest normal number; below it units stay as they are."""
_BIASES = {torch.bfloat16: 127, torch.float16: 15}
_MOST = {torch.int8: 127, torch.int16: 32767}
_GROUP = 32
"""Elements that share a scale."""


def with_error_bits(weight: Tensor, bits: Tensor, width: Any, name: str) -> Tensor:
    """Return the fp32 value of a weight and its error bits.

    That is weight + bits / most * half a unit in the last place of the weight, where most is 127
    or 32767, in the order and the precision (fp32) in which flashoptim 0.1.4 computes it
    (flashoptim/optimizers.py, `reconstruct_fp32_param`). Its state dict has int8 as numbers of the
    weight's dtype, and int16 as bits of it; `master_bytewidth` in the group says which.

    Args:
        weight: bf16 or fp16.
        bits: of its shape.
        width: `master_bytewidth` of the group: 3 for int8, 4 for int16.
        name: of the weight, for errors.

    Raises:
        CheckpointError: bits that mean nothing.
    """
    number = _as_integers(weight, bits, width, name)
    if bool((number.to(torch.int32).abs() > _MOST[number.dtype]).any()):
        raise CheckpointError(f"error_bits of {name} are out of range")
    exponent = _half_unit(weight)
    fraction = number.to(torch.float32) / _MOST[number.dtype]
    # In two factors, as neither overflows where their product does not.
    first = torch.div(exponent, 2, rounding_mode="floor")
    error = fraction * _power(first) * _power(exponent - first)
    return weight.to(torch.float32) + error


def _as_integers(weight: Tensor, bits: Tensor, width: Any, name: str) -> Tensor:
    if weight.dtype not in _FRACTION:
        raise CheckpointError(f"{name} is {weight.dtype} and has error_bits, which mean nothing")
    if bits.dtype in _MOST:
        return bits
    dtype = {3: torch.int8, 4: torch.int16}.get(width)
    if dtype is None or bits.dtype != weight.dtype:
        raise CheckpointError(
            f"error_bits of {name} are {bits.dtype}, and master_bytewidth of its group is "
            f"{width!r}: flashoptim writes 3 or 4"
        )
    if dtype is torch.int16:
        return bits.view(torch.int16)
    if not torch.equal(bits.to(torch.int8).to(bits.dtype), bits):
        raise CheckpointError(f"error_bits of {name} are no numbers of eight bits")
    return bits.to(torch.int8)


def _half_unit(weight: Tensor) -> Tensor:
    """Return the exponent of half a unit in the last place of each element, int32."""
    places = _FRACTION[weight.dtype]
    field = (weight.view(torch.int16).to(torch.int32) & 0x7FFF) >> places
    unbiased = torch.where(field == 0, _LEAST[weight.dtype], field - _BIASES[weight.dtype])
    return unbiased - places - 1


def _power(exponent: Tensor) -> Tensor:
    """Return 2^exponent in fp32, exactly, for exponents of normal numbers."""
    return ((exponent + 127) << 23).view(torch.float32)


def dequantized(numbers: Tensor, scales: Tensor, key: str, name: str) -> Tensor:
    """Return a moment that flashoptim has saved in groups of 32 numbers with a scale, in fp32.

    A signed moment y / 127 = 2x / (1 + |x|) of its scale; of `exp_avg_sq` it is the root, y / 255.

    Args:
        numbers: `<key>::quantized`, of the shape of the moment.
        scales: `<key>::scales`, fp16 or bits of it in bf16, one for each group.
        key: of the moment.
        name: of its parameter, for errors.

    Raises:
        CheckpointError: scales of another number or dtype.
    """
    scales = scales.view(torch.float16) if scales.dtype == torch.bfloat16 else scales
    count = -(-numbers.numel() // _GROUP)
    if scales.dtype != torch.float16 or scales.shape != (count,):
        raise CheckpointError(
            f"{key}::scales of {name} are {scales.dtype} {tuple(scales.shape)}; they are to be "
            f"float16 ({count},)"
        )
    each = scales.to(torch.float32).repeat_interleave(_GROUP)[: numbers.numel()]
    root = key == "exp_avg_sq"
    share = numbers.reshape(-1).to(torch.float32) / (255.0 if root else 127.0)
    value = (share * each).square() if root else share / (2.0 - share.abs()) * each
    return value.reshape(numbers.shape)
