"""Positions of the elements of shards in the whole tensor.

For runtime.storage.positions.
"""

import itertools
from typing import Any

import pytest
import torch

from collage_fx.runtime.storage.positions import (
    Place,
    contiguous_strides,
    place_in_order,
    positions,
)

SHAPE = (6, 5, 4)


@pytest.mark.parametrize("cut", [(slice(2, 5),), (slice(None), slice(1, 4)), (slice(1, 6), 2)])
def test_positions_of_a_shard_are_those_that_it_has_in_the_whole(cut: Any) -> None:
    whole = torch.arange(120, dtype=torch.int32).view(SHAPE)
    shard = whole[cut]
    keeps = [isinstance(c, slice) for c in (*cut, *[slice(None)] * (3 - len(cut)))]
    strides = tuple(itertools.compress(whole.stride(), keeps))
    place = Place(int(shard.flatten()[0]), strides)
    assert torch.equal(positions(shard, place), shard)
    first, in_order = int(shard.flatten()[0]), torch.arange(shard.numel()).view(shard.shape)
    follows = torch.equal(shard - first, in_order.to(torch.int32))
    assert place_in_order(shard.shape, place) == (first if follows else None)
    assert not torch.equal(positions(shard), shard)  # the control
    assert torch.equal(positions(whole), whole) and place_in_order(SHAPE, None) == 0


def test_strides_are_those_of_contiguous_tensors() -> None:
    for shape in (SHAPE, (), (3, 0, 2), (0,), (1, 7)):
        assert contiguous_strides(shape) == torch.empty(shape).stride()
