"""Shares of updates that a storage loses, by the size of these, and samples that show the size."""

import math

import torch
from torch import Tensor

from collage_fx.runtime.residuals.checksum import bits_of

_GOLDEN = (5**0.5 - 1) / 2
_HALVINGS = 12
"""Halvings of the range that holds the largest size; they leave an error of a hundredth."""


def lost_share(moved: Tensor, least: Tensor) -> tuple[Tensor, Tensor]:
    """Return the average size of updates, and the share of the way that is lost.

    Of an update u, a storage keeps a = u rounded to a multiple of twice the smallest change that it
    keeps. The sizes of a parameter's updates are taken for uniform between the one that the sum of
    all a tells and half of it. What is lost is then 1 - E[a u] / E[u^2]: nothing where updates are
    twice the smallest change, since as many become too large as are lost, and all where none
    reaches it. Of updates of very different sizes less is lost than that, and a few that are much
    larger bound it.

    Args:
        moved: a, (parameters, samples).
        least: the smallest changes that are kept there; zero for what does not count.
    """
    counts = (least > 0) & moved.isfinite()
    moved, least = moved.where(counts, 0), least.where(counts, 0)
    number, most = counts.sum(1, keepdim=True), least.amax(1, keepdim=True)
    there = moved.sum(1, keepdim=True)
    low, high = most / 64, most + 2 * moved.amax(1, keepdim=True)
    for _ in range(_HALVINGS):
        top = (low * high).sqrt()
        less = (_rounded(top, least)[0] * counts).sum(1, keepdim=True) < there
        low, high = torch.where(less, top, low), torch.where(less, high, top)
    product = (_rounded(high, least)[1] * counts).sum(1, keepdim=True)
    some, gone = there > 0, least.where(moved == 0, 0).square().sum(1, keepdim=True)
    share = torch.where(some, 1 - 12 / 7 * product / (number * high * high), (number > 0).double())
    # No more than if all that are lost were as large as can be, beside those that are not.
    share = share.minimum((gone / (gone + moved.square().sum(1, keepdim=True))).nan_to_num())
    # Where all are lost, they may have been as large as half of what would have been kept.
    size = torch.where(some, 3 / 4 * high, least.sum(1, keepdim=True) / 2 / number)
    return size.squeeze(1).nan_to_num(), share.squeeze(1)


def kept_share(size: Tensor, least: Tensor) -> Tensor:
    """Return the share of updates that a storage keeps: E[a u] / E[u^2], as `lost_share` has them.

    Args:
        size: how large they are on average, as `lost_share` returns.
        least: the smallest change that the storage keeps.
    """
    top = 4 / 3 * size
    return 12 / 7 * _rounded(top, least)[1] / top.square()


def _rounded(top: Tensor, least: Tensor) -> tuple[Tensor, Tensor]:
    """Return E[a] and E[a u] of updates u, uniform from half the top to it, rounded to a."""
    z = (least / top).clamp(min=0.1)  # finer ones change little
    ends = [(k * z).clamp(min=0.5) for k in range(1, 11, 2)]  # from each on a is larger by 2 z
    mean = sum((1 - end).clamp(min=0) for end in ends)
    product = sum((1 - end * end).clamp(min=0) for end in ends)
    return 4 * z * mean * top, 2 * z * product * top * top


def elements(tensor: Tensor, number: int) -> Tensor:
    """Return some elements of a tensor, of the same places for all tensors of its size."""
    count = tensor.numel()
    stride = int(count * _GOLDEN)
    while (common := math.gcd(stride, count)) > 1 and common * number > count:
        stride += 1  # else places come twice before all have come
    places = torch.arange(number, device=tensor.device).mul_(stride).remainder_(count)
    return torch.take(tensor, places) if tensor.itemsize > 1 else _of_bytes(tensor, places)


def _of_bytes(tensor: Tensor, places: Tensor) -> Tensor:
    """Return the elements of a tensor there; `take` knows no floats of 8 bits."""
    return torch.take(bits_of(tensor), places).view(tensor.dtype)


def power_of_two(x: Tensor) -> Tensor:
    """Return the largest power of two that is not above the size of x; NaN for zero."""
    return x.abs() / (2 * torch.frexp(x).mantissa.abs())
