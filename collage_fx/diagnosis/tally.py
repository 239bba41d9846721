"""What was seen of a tensor in the steps that were looked at."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from collage_fx.diagnosis.stats import UpdateStats
from collage_fx.optimizer.ownership import Owned
from collage_fx.runtime.residuals.lost_share import power_of_two
from collage_fx.runtime.storage.registry import STORAGES, kept

FITTED = 256
"""Elements of a tensor whose moves are kept where exact updates are not known."""
_LOOKS = 8
"""The looks of which they are kept, the last ones."""


@dataclass(frozen=True)
class Change:
    """A sample of a tensor before and after a step, and what the step makes of it in float64."""

    tally: "Tally"
    before: Tensor
    after: Tensor
    exact: Tensor


@dataclass
class Tally:
    """Sums over the updates of a tensor of 16 bits or fewer.

    Each look stands for the steps since the one before.
    """

    owned: Owned
    first: Tensor
    """The sample as it was found."""
    stats: UpdateStats = field(default_factory=UpdateStats)
    """Of the exact updates, where they are known; their other fields stay zero."""
    steps: int = 0
    """The steps that the looks at exact updates stand for."""
    missing: float = 0.0
    """A sum over these steps: of the exact updates less the stored ones, relative to the sizes of
    the exact ones. Positive where too little is added."""
    kept: dict[str, float] = field(default_factory=dict)
    """Storage -> the product of the exact updates and what it would keep of each."""
    moved: Tensor | None = None
    """Which elements of the sample have changed."""
    last: Tensor | None = None
    """The sample after the last step that was looked at."""
    moves: list[Tensor] = field(default_factory=list)
    least: list[Tensor] = field(default_factory=list)
    """For `lost_share`, where exact updates are not known."""
    master: str = ""
    """The fp32 state that holds the parameter."""

    @property
    def exact(self) -> bool:
        """Whether the exact updates are known."""
        return self.stats.count > 0 or not self.moves

    def see(self, after: Tensor) -> None:
        """Note a sample after a step."""
        moved = after.float() != self.first.float()  # of 8 bits none are compared
        self.moved = moved if self.moved is None else self.moved | moved
        self.last = after

    def fit(self, before: Tensor, after: Tensor, gradient: Tensor) -> None:
        """Note a move whose exact update is not known."""
        old, new, given = (t.reshape(-1)[:FITTED].float() for t in (before, after, gradient))
        least = kept(self.owned.tensor.dtype) * power_of_two(new).nan_to_num()
        self.moves = [*self.moves[1 - _LOOKS :], (new - old).abs()]
        self.least = [*self.least[1 - _LOOKS :], least * (given != 0)]


def storages_for(dtype: torch.dtype) -> list[str]:
    """Return the names of the storages that can hold a state of a dtype."""
    return [s.name for s in STORAGES.values() if dtype in s.residuals]


def add(changes: Sequence[Change], steps: int) -> None:
    """Add what a step did to tensors of one dtype and device; the device is waited for once.

    Args:
        changes: of each tensor.
        steps: how many steps it stands for.
    """
    if not changes:
        return
    dtype = changes[0].tally.owned.tensor.dtype
    before, after, exact = (
        torch.cat([t.reshape(-1).double() for t in ts])
        for ts in zip(*((c.before, c.after, c.exact) for c in changes), strict=True)
    )
    finite = before.isfinite() & after.isfinite() & exact.isfinite()
    update = (exact - before).where(finite, 0)
    stored = (after - before).where(finite, 0)
    names = storages_for(dtype)
    size = power_of_two(exact)
    found = [
        update != 0,
        (update != 0) & (stored == 0),
        update.square(),
        update * stored,
        update.abs(),
        update - stored,
    ]
    for name in names:
        unit = 2 * kept(dtype, name) * size
        found.append(((update / unit).round() * unit).nan_to_num() * update)
    each = torch.stack([one.double() for one in found])
    lengths = torch.tensor([c.before.numel() for c in changes], device=each.device)
    rows = torch.arange(len(changes), device=each.device).repeat_interleave(lengths)
    sums = each.new_zeros(len(found), len(changes)).index_add_(1, rows, each)
    numbers = sums.mul_(steps).T.tolist()
    for change, (count, whole, square, dot, way, missing, *keeps) in zip(
        changes, numbers, strict=True
    ):
        tally = change.tally
        tally.stats += UpdateStats(count=count, lost_count=whole, exact_square=square, dot=dot)
        tally.steps += steps
        tally.missing += steps * missing / way if way else 0.0
        for name, product in zip(names, keeps, strict=True):
            tally.kept[name] = tally.kept.get(name, 0.0) + product
