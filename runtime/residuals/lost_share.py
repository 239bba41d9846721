"""Shares of updates that a storage loses, by the size of these, and samples that show the size."""

import math
from collections.abc import Sequence

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
        less = (_mean(top, least) * counts).sum(1, keepdim=True) < there
        low, high = torch.where(less, top, low), torch.where(less, high, top)
    product = (_product(high, least) * counts).sum(1, keepdim=True)
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
    return 12 / 7 * _product(top, least) / top.square()


def _mean(top: Tensor, least: Tensor) -> Tensor:
    """Return E[a] of updates u, uniform from half the top to it, rounded to a."""
    z, ends = _steps(top, least)
    return 4 * z * sum((1 - end).clamp(min=0) for end in ends) * top


def _product(top: Tensor, least: Tensor) -> Tensor:
    """Return E[a u] of the same."""
    z, ends = _steps(top, least)
    return 2 * z * sum((1 - end * end).clamp(min=0) for end in ends) * top * top


def _steps(top: Tensor, least: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return z = least / top, and the u / top from each of which on a / top is larger by 2 z."""
    z = (least / top).clamp(min=0.1)  # finer ones change little
    return z, [(k * z).clamp(min=0.5) for k in range(1, 11, 2)]


def elements(tensor: Tensor, number: int) -> Tensor:
    """Return some elements of a tensor, of the same places for all tensors of its size."""
    return elements_of_each([tensor], number)[0]


def elements_of_each(tensors: Sequence[Tensor], number: int) -> list[Tensor]:
    """Return the `elements` of each tensor; the places are computed once for a size."""
    kinds = {(t.numel(), t.device) for t in tensors}
    places = {(count, device): _places(count, number, device) for count, device in kinds}
    return [_taken(t, places[t.numel(), t.device]) for t in tensors]


def _places(count: int, number: int, device: torch.device) -> Tensor:
    """Return the places of elements in a tensor of `count`, as indices of all its elements."""
    stride = int(count * _GOLDEN)
    while (common := math.gcd(stride, count)) > 1 and common * number > count:
        stride += 1  # else places come twice before all have come
    return torch.arange(number, device=device).mul_(stride).remainder_(count)


def _taken(tensor: Tensor, places: Tensor) -> Tensor:
    """Return the elements of a tensor there; `take` knows no floats of 8 bits."""
    if tensor.itemsize > 1:
        return torch.take(tensor, places)
    return torch.take(bits_of(tensor), places).view(tensor.dtype)


def power_of_two(x: Tensor) -> Tensor:
    """Return the largest power of two that is not above the size of x; NaN for zero."""
    return x.abs() / (2 * torch.frexp(x).mantissa.abs())
