"""2000 AdamW steps on a recorded gradient stream, against float64."""

import sys
from pathlib import Path

import pytest
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
