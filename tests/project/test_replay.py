"""2000 AdamW steps on a recorded gradient stream, against float64. For benchmarks/replay.py."""

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import replay

pytestmark = pytest.mark.kernels

Recorded = tuple[list[Tensor], list[list[Tensor]]]


@pytest.fixture(scope="module")
def recorded() -> Recorded:
    return replay.record(2000)


@pytest.mark.slow
@pytest.mark.parametrize("lr", replay.RATES)
@pytest.mark.parametrize("beta2", replay.BETA2)
def test_two_thousand_steps_stay_near_float64(recorded: Recorded, beta2: float, lr: float) -> None:
    names = ["plain bf16", "collage plus", "collage plus, wide"]
    found = replay.compare(*recorded, beta2, lr, names)
    theta, v = found["collage plus"]
    assert theta <= 5e-3 and v <= 1e-3, found
    assert found["collage plus, wide"][1] <= 1e-4, found
    # The negative control: without compensation most of the update is lost on the same stream.
    assert found["plain bf16"][0] > 0.3, found


def test_two_hundred_steps_stay_near_float64() -> None:
    start, stream = replay.record(200)
    found = replay.compare(start, stream, 0.999, 1e-3, ["plain bf16", "collage plus"])
    assert found["collage plus"][0] <= 5e-3, found
    assert found["plain bf16"][0] > 0.1, found


@pytest.mark.slow
def test_a_process_beside_takes_the_same_steps(tmp_path: Path) -> None:
    start, stream = replay.record(20)
    torch.save((start, stream), tmp_path / "recorded")
    row = {"beta2": 0.999, "lr": 1e-3, "name": "collage plus"}
    beside = replay.result_of(None, str(tmp_path), **row)
    here = replay.replay(start, stream, 0.999, 1e-3, replay.VARIANTS["collage plus"])
    assert torch.equal(beside.theta, here.theta) and torch.equal(beside.v, here.v)
    assert len(beside.seconds) == 20
    # The negative control: another arithmetic has other bits.
    other = replay.replay(start, stream, 0.999, 1e-3, replay.VARIANTS["collage plus, wide"])
    assert not torch.equal(beside.theta, other.theta)
