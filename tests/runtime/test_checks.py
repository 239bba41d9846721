"""Checks of the words of tensors: which chunks have changed, whatever has been done to them.

For runtime.residuals.checks.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from collage_fx.runtime.residuals import checks
from collage_fx.runtime.residuals.checks import CHUNK, Checks, note

SIZES = (1, 2, 7, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5)
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e5m2)


def words(size: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=g).to(dtype)


def noted(tensor: Tensor) -> Checks:
    found = Checks.of(tensor)
    assert found is not None
    note([(tensor.data_ptr(), found)])
    return found


def chunks(found: Checks, tensor: Tensor) -> list[int]:
    """Return which chunks have changed; of a chunk all elements have."""
    changed = found.changed(tensor).flatten().split(CHUNK)
    assert all(bool(c.all()) == bool(c.any()) for c in changed)
    return [k for k, c in enumerate(changed) if c.any()]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_one_changed_element_is_seen_in_its_chunk_alone(size: int, dtype: torch.dtype) -> None:
    x = words(size, dtype)
    before = noted(x)
    assert chunks(before, x) == []
    bits = x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.itemsize])
    for at in {0, size // 2, size - 1}:
        for bit in (0, 8 * x.itemsize - 1):
            changed = 1 << bit if bit < 31 else -(1 << 31)
            changed = -(1 << 15) if x.itemsize == 2 and bit == 15 else changed
            bits[at] ^= changed
            assert chunks(before, x) == [at // CHUNK]
            bits[at] ^= changed
    assert chunks(before, x) == []


CHANGES: dict[str, Callable[[Tensor], object]] = {
    "signs": lambda x: x.neg_(),
    "signs of a half": lambda x: x[1::2].neg_(),
    "signs of two": lambda x: x.view(4, -1)[:, 5:9:2].neg_(),
    "powers of two": lambda x: x.mul_(2),
    "rows in another order": lambda x: x.copy_(x.view(-1, 32).flip(0).flatten()),
    "neighbours exchanged": lambda x: x.copy_(x.view(-1, 2).flip(1).flatten()),
    "moved by one": lambda x: x.copy_(x.roll(1)),
    "two chunks exchanged": lambda x: x.copy_(x.roll(CHUNK)),
    "zeros": lambda x: x.zero_(),
    "-0.0 for 0.0": lambda x: x[::7].neg_(),
    "one in the last place": lambda x: x.view(torch.int16).add_(1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_all_chunks_is_seen_in_each(change: str) -> None:
    for seed in range(50):
        x = words(4 * CHUNK, torch.bfloat16, seed)
        x[::7] *= change != "-0.0 for 0.0"
        before = noted(x)
        CHANGES[change](x)
        assert chunks(before, x) == [0, 1, 2, 3]


def test_two_elements_exchanged_are_seen() -> None:
    for seed in range(2000):
        x = words(CHUNK, torch.bfloat16, seed)
        g = torch.Generator().manual_seed(seed)
        one, other = torch.randperm(CHUNK, generator=g)[:2].tolist()
        before = noted(x)
        x[[one, other]] = x[[other, one]]
        assert chunks(before, x) == ([0] if x[one] != x[other] else []), (one, other)


def test_each_place_has_a_key_of_its_own() -> None:
    keys = set()
    for place in range(CHUNK):
        x = torch.zeros(CHUNK, dtype=torch.int16).view(torch.bfloat16)
        x.view(torch.int16)[place] = 1
        keys.add(int(noted(x).found[0]))
    assert len(keys) == CHUNK and all(key % 2 for key in keys)


def test_sums_without_keys_would_not_see_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: the same test fails where each word has the same key."""
    monkeypatch.setattr(checks, "_SOURCE", checks._SOURCE.replace("* KEYS.of[i]", ""))
    checks._library.cache_clear()
    try:
        with pytest.raises(AssertionError):
            test_what_changes_all_chunks_is_seen_in_each("neighbours exchanged")
    finally:
        checks._library.cache_clear()


def test_chunks_are_of_memory() -> None:
    x = words(8 * CHUNK, torch.bfloat16).view(8, CHUNK).t()
    before = noted(x)
    x[3, 5] += 1
    changed = before.changed(x)
    assert changed[:, 5].all() and changed.sum() == CHUNK


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(0), torch.ones(4, device="meta"), torch.ones(8)[::2]],
    ids=["empty", "no CPU", "gaps"],
)
def test_some_tensors_have_none(tensor: Tensor) -> None:
    assert Checks.of(tensor) is None


def test_without_a_compiler_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_library", lambda: None)
    assert Checks.of(torch.ones(4)) is None
