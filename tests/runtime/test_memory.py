"""Tensors that share memory: by storage, and by address where two storages hold the same.

For runtime.residuals.memory and runtime.kernels.tensor_snapshot.
"""

import itertools
import random

import numpy as np
import torch
from torch import Tensor

from collage_fx.runtime.kernels.tensor_snapshot import Contents, TensorSnapshot
from collage_fx.runtime.residuals.memory import Apart, overlapping


def test_views_of_one_storage_overlap_where_they_have_elements_in_common() -> None:
    x = torch.zeros(12)
    a, b, c, empty = x[:4], x[3:8], x[8:], x[2:2]
    assert overlapping([a, b, c, empty]) == {id(a), id(b)}
    assert overlapping([a, c]) == overlapping([x]) == set()
    assert overlapping([x, a, b, c]) == {id(t) for t in (x, a, b, c)}


def test_offsets_are_of_bytes() -> None:
    buffer = torch.zeros(32, dtype=torch.uint8)
    low, wide = buffer[:8].view(torch.bfloat16), buffer[8:].view(torch.float32)
    assert wide.storage_offset() < 4 and overlapping([low, wide]) == set()
    wide = buffer[4:28].view(torch.float32)
    assert overlapping([low, wide]) == {id(low), id(wide)}


def test_what_numpy_lends_twice_overlaps_by_address_only() -> None:
    array = np.zeros(8, dtype=np.float32)
    a, b = torch.from_numpy(array), torch.from_numpy(array)
    assert overlapping([a, b]) == set()
    assert overlapping([a, b], by_address=True) == {id(a), id(b)}


def test_which_tensors_lie_in_memory_of_others() -> None:
    """Compared with every pair of bytes that they take up; they move, and keep their sizes."""
    draw, buffer = random.Random(0), torch.zeros(64)

    def views(sizes: list[int]) -> list[Tensor]:
        return [buffer[(at := draw.randrange(56)) : at + size] for size in sizes]

    def bytes_of(t: Tensor) -> set[int]:
        return set(range(t.data_ptr(), t.data_ptr() + t.nbytes))

    def pairs(states: list[Tensor], others: list[Tensor]) -> list[bool]:
        both = [*((a, b) for a in states for b in others), *itertools.combinations(states, 2)]
        return [bool(bytes_of(a) & bytes_of(b)) for a, b in both]

    outcomes = []
    for _ in range(300):
        states, others = views([3, 2, 0]), views([4, 1])
        apart, before = Apart(states, others), pairs(states, others)
        within = [k for k in range(2) if any(before[k:6:2])]
        assert apart.within == within
        for _ in range(3):
            states, others = views([3, 2, 0]), views([4, 1])
            now = pairs(states, others)
            same = [k for k in range(2) if any(now[k:6:2])] == within and now[6:] == before[6:]
            assert apart.hold(states, others) == same
            outcomes.append(same)
    assert set(outcomes) == {True, False}


def test_memory_that_was_given_back_is_shared_by_nobody() -> None:
    states = [torch.zeros(4), torch.zeros(4)]
    apart = Apart(states, [torch.zeros(4)])
    for t in states:
        t.untyped_storage().resize_(0)
    assert apart.hold(states, [torch.zeros(4)])


def test_a_snapshot_sees_what_lies_in_memory_of_its_tensors() -> None:
    """Overlaps that were there from the beginning are let be; what was refused once is again."""
    buffer = torch.zeros(16)
    state, other, low = buffer[4:8], buffer[8:12], torch.zeros(4)

    def holds(given: Tensor, *later: Tensor) -> list[bool]:
        contents = Contents(
            guarded=[state, other],
            others=[low],
            written=[],
            given=[given],
            alike=lambda *_: True,
            arguments=[0, 1],
            given_arguments=[2],
        )
        snapshot = TensorSnapshot(contents)
        return [snapshot.holds((state, other, one)) for one in later]

    free, within = torch.zeros(4), [buffer[1:5], buffer[4:8], buffer[11:15], low.detach()]
    assert holds(free, *within, *within, free) == [False] * 8 + [True]
    assert holds(free, buffer[:4], buffer[12:], torch.zeros(4)) == [True] * 3
    assert holds(within[0], within[0], within[1], within[0]) == [True, False, True]
    assert holds(free[:0], buffer[5:5]) == [True]
