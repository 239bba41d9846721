"""Which tensors share memory: by storage, and by address where two storages hold the same."""

import numpy as np
import torch

from collage_fx.runtime.residuals.memory import overlapping


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
