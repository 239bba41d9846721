"""Layouts of the least error within some bytes, held against all that there are; amounts.

For budget.layout.
"""

import itertools
import math
import random

import pytest
import torch

from collage_fx.budget import layout
from collage_fx.budget.layout import Option, best, bytes_of, storages_for
from collage_fx.config import checked_budget, total_bytes
from collage_fx.errors import OptionError

NAMES = ("sr", "ulp4", "ulp8", "remainder16")


def states(seed: int, count: int) -> list[list[Option]]:
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        numel, error = draw.randint(1, 50), draw.random()
        sizes = [0, (numel + 1) // 2, numel, 2 * numel]
        errors = [error * draw.random() ** k for k in range(4)]
        found.append([Option(*one) for one in zip(NAMES, sizes, errors, strict=True)])
    return found


def total(options: list[Option]) -> tuple[int, float]:
    return sum(o.size for o in options), sum(o.error for o in options)


@pytest.mark.parametrize("seed", range(8))
def test_no_layout_within_the_bytes_is_better(seed: int) -> None:
    given = states(seed, 5)
    room = random.Random(seed).uniform(0.1, 0.4) * sum(o[-1].size for o in given)
    size, error = total(best(given, room))
    every = [total(list(choice)) for choice in itertools.product(*given)]
    assert size <= room
    assert error == pytest.approx(min(e for s, e in every if s <= room))
    # The control: with more bytes there are better ones.
    assert error > min(e for _, e in every)


def test_few_points_are_near_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    given = states(0, 40)
    room = 0.4 * sum(o[-1].size for o in given)
    _, error = total(best(given, room))
    monkeypatch.setattr(layout, "_POINTS", 200)
    size, near = total(best(given, room))
    assert size <= room
    assert error <= near <= 1.1 * error


def test_without_room_all_are_smallest() -> None:
    assert {o.storage for o in best(states(0, 5), 0)} == {"sr"}


def test_storages_are_offered_by_their_bytes() -> None:
    assert storages_for(torch.bfloat16) == list(NAMES)
    assert storages_for(torch.float16) == ["sr", "ulp4", "ulp8", "mcf2", "mcf3"]
    assert storages_for(torch.float8_e5m2) == ["sr", "mcf2", "mcf3"]
    assert storages_for(torch.float32) == []
    assert bytes_of(torch.bfloat16, "ulp4", 7) == 4
    assert bytes_of(torch.bfloat16, "remainder16", 6.5) == 14


@pytest.mark.parametrize(
    ("text", "size"),
    [("40GiB", 40 * 2**30), ("1.5 MB", 1.5e6), ("900 B", 900), ("2kB", 2000), ("3 KiB", 3072)],
)
def test_amounts_in_bytes(text: str, size: float) -> None:
    assert total_bytes(text) == size
    assert checked_budget(text) == text


@pytest.mark.parametrize("wrong", [0, -1.0, True, "900", "40 GiBs", "0GiB", [], math.inf])
def test_amounts_that_are_none(wrong: object) -> None:
    with pytest.raises(OptionError, match="bytes for each element"):
        checked_budget(wrong)
