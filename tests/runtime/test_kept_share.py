"""The share of updates that a storage keeps, beside a sum over updates in float64.

For runtime.residuals.lost_share.
"""

import pytest
import torch
from torch import Tensor

from collage_fx.runtime.residuals.lost_share import kept_share

SIZE = 1.5
"""Mean of updates that are uniform between 1 and 2."""


def kept_of_each(least: float) -> float:
    """Return E[a u] / E[u^2] of updates u that are rounded to a, multiples of twice the least."""
    u = torch.linspace(1, 2, 200_001, dtype=torch.float64)
    a = (u / (2 * least)).round() * 2 * least
    return float((a * u).mean() / u.square().mean())


def kept(least: float) -> float:
    size, smallest = (torch.tensor(x, dtype=torch.float64) for x in (SIZE, least))
    share: Tensor = kept_share(size, smallest)
    return float(share)


@pytest.mark.parametrize("least", [0.21, 0.3, 0.55, 0.7, 1.1, 1.4, 1.9, 2.5])
def test_it_is_that_of_each_update(least: float) -> None:
    assert kept(least) == pytest.approx(kept_of_each(least), abs=1e-4)


def test_the_shares_differ() -> None:
    """The control: another least change would be seen; nothing is kept of updates below it."""
    assert abs(kept(1.4) - kept_of_each(1.3)) > 1e-2
    assert kept(2.5) == 0 and kept(1.1) > 1 > kept(1.9) > 0
