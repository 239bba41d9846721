"""Share of an optimizer's update that survives being stored.

Two numbers, both computed in float64 from detached tensors, so that they measure the storage and
not themselves. Neither knows about expansions: a caller which stores a weight as hi + lo passes the
sum when it asks about the whole expansion, and hi alone when it asks about what the model computes
with.

Source of both, the lost update ("lost arithmetic") and the Effective Descent Quality: the Collage
paper, arXiv 2405.03637.
"""

from __future__ import annotations

import torch
from torch import Tensor


def edq(intended: Tensor, stored: Tensor) -> float:
    """Effective Descent Quality: the length of the stored update along the intended one.

    With the intended update ``d`` and the change ``d_hat`` which the storage really made,
    ``EDQ = <d, d_hat> / ||d||``. It equals ``||d||`` when nothing is lost and 0 when everything is
    (or when ``d`` itself is zero, where the quotient has no meaning). Divide by
    ``torch.linalg.vector_norm(intended)`` for a quality relative to 1.

    Whether ``d_hat`` counts hi only or hi + lo is up to the caller: pass the difference of the hi
    components for the former, of the full values for the latter.

    Args:
        intended: ``d``, any shape, any floating dtype.
        stored: ``d_hat``, same shape as ``intended``, any floating dtype.

    Raises:
        ValueError: the shapes differ.
        TypeError: an argument is not of a floating dtype.

    Source: Collage, arXiv 2405.03637, "Effective Descent Quality".
    """
    d, d_hat = _as_double("edq", intended=intended, stored=stored)
    norm = torch.linalg.vector_norm(d)
    if norm == 0.0:
        return 0.0
    return float((d * d_hat).sum() / norm)


def lost_update_share(before: Tensor, after: Tensor, intended: Tensor) -> float:
    """Share of the elements meant to change whose stored value did not.

    An element is lost when ``intended`` is non-zero there and ``before == after``. Elements with an
    intended update of zero are not counted at all, so the share is over those that should have
    moved; it is 0 when there are none. A NaN never equals itself and so is never counted as lost.

    ``before`` and ``after`` must hold everything which is stored: for an expansion the sum of its
    components in float64, where hi + lo of two 16-bit floats fits unless they lie more than 2**44
    apart. Counting hi only would call updates lost which the residual has kept.

    Args:
        before: the stored value before the step, any shape, any floating dtype.
        after: the stored value after the step, same shape.
        intended: the update in exact or much higher precision, same shape.

    Raises:
        ValueError: the shapes differ.
        TypeError: an argument is not of a floating dtype.

    Source: Collage, arXiv 2405.03637, "lost arithmetic".
    """
    old, new, update = _as_double(
        "lost_update_share", before=before, after=after, intended=intended
    )
    meant = update != 0.0
    lost = meant & (old == new)
    return float(lost.sum() / meant.sum().clamp(min=1))


def _as_double(function: str, **tensors: Tensor) -> list[Tensor]:
    """The tensors detached in float64, once their shapes agree and their dtypes are floating."""
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise TypeError(f"{function}: {name} must be floating, got {tensor.dtype}")
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) > 1:
        raise ValueError(f"{function}: shapes differ: {shapes}")
    return [tensor.detach().to(torch.float64) for tensor in tensors.values()]
