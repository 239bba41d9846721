"""The two measures of lost updates, on cases computed by hand.

For tests/support/update_metrics.py.
"""

import pytest
import torch
from support.update_metrics import edq, lost_update_share

from collage_fx.runtime.expansion.arithmetic import grow

BF16 = torch.bfloat16


def test_edq_is_the_norm_when_nothing_is_lost() -> None:
    d = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    assert edq(d, d) == pytest.approx(float(torch.linalg.vector_norm(d.double())), rel=1e-14)


@pytest.mark.parametrize(
    "intended, stored, expected",
    [
        ([3.0, 4.0], [3.0, 4.0], 5.0),
        ([3.0, 4.0], [3.0, 0.0], 9 / 5),
        ([3.0, 4.0], [0.0, 0.0], 0.0),
        ([3.0, 4.0], [-3.0, -4.0], -5.0),
        ([3.0, 4.0], [4.0, -3.0], 0.0),
        ([3.0, 4.0], [6.0, 8.0], 10.0),
        ([0.0, 0.0], [1.0, 1.0], 0.0),
        ([], [], 0.0),
    ],
)
def test_edq_by_hand(intended: list[float], stored: list[float], expected: float) -> None:
    assert edq(torch.tensor(intended), torch.tensor(stored)) == pytest.approx(expected)


def test_edq_of_bf16_computes_in_float64() -> None:
    d = torch.full((4096,), 2.0**-60, dtype=BF16)
    assert edq(d, d) == pytest.approx(64 * 2.0**-60, rel=1e-14)


def test_edq_counts_what_the_caller_counts() -> None:
    """An update below half an ulp: nothing of it is in hi, all of it in hi + lo."""
    hi, update = torch.ones(8, dtype=BF16), torch.full((8,), 2.0**-10, dtype=BF16)
    new_hi, new_lo = grow(hi, torch.zeros_like(hi), update)
    assert edq(update, new_hi - hi) == 0.0
    whole = new_hi.double() + new_lo.double() - hi.double()
    assert edq(update, whole) == pytest.approx(float(update.double().norm()), rel=1e-14)


@pytest.mark.parametrize(
    "before, after, intended, expected",
    [
        ([1.0, 1.0, 1.0, 1.0], [2.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 0.0], 2 / 3),
        ([1.0, 2.0], [1.5, 2.5], [0.5, 0.5], 0.0),
        ([1.0, 2.0], [1.0, 2.0], [0.5, 0.5], 1.0),
        ([1.0, 2.0], [1.0, 2.0], [0.0, -0.0], 0.0),
        ([1.0, 2.0], [3.0, 4.0], [0.0, 0.0], 0.0),
        ([torch.nan, 1.0], [torch.nan, 1.0], [1.0, 1.0], 0.5),
        ([0.0], [-0.0], [1.0], 1.0),
        ([], [], [], 0.0),
    ],
)
def test_lost_update_share_by_hand(
    before: list[float], after: list[float], intended: list[float], expected: float
) -> None:
    tensors = (torch.tensor(x) for x in (before, after, intended))
    assert lost_update_share(*tensors) == pytest.approx(expected)


def test_lost_update_share_of_plain_and_of_compensated_bf16() -> None:
    hi, update = torch.ones(8, dtype=BF16), torch.full((8,), 2.0**-10, dtype=BF16)
    assert lost_update_share(hi, hi + update, update) == 1.0
    new_hi, new_lo = grow(hi, torch.zeros_like(hi), update)
    assert lost_update_share(hi.double(), new_hi.double() + new_lo.double(), update) == 0.0


def test_measures_take_parameters_and_mixed_dtypes() -> None:
    p = torch.nn.Parameter(torch.ones(3, dtype=BF16))
    assert edq(p, torch.ones(3)) == pytest.approx(3**0.5)
    assert lost_update_share(p, p, torch.ones(3, dtype=torch.float64)) == 1.0


def test_wrong_arguments_are_named() -> None:
    x, y = torch.zeros(2, 3), torch.zeros(3, 2)
    with pytest.raises(ValueError, match=r"edq: shapes differ: .*\(2, 3\).*\(3, 2\)"):
        edq(x, y)
    with pytest.raises(ValueError, match="lost_update_share: shapes differ"):
        lost_update_share(x, x, y)
    with pytest.raises(TypeError, match=r"edq: stored must be floating, got torch\.int64"):
        edq(x, x.long())
    with pytest.raises(TypeError, match="lost_update_share: before must be floating"):
        lost_update_share(x.long(), x, x)
