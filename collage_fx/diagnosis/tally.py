"""Tallies of tensors: sums over the updates in the steps that were looked at."""

from collections.abc import Iterator, Sequence
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
class Look:
    """Sums over the updates of a sample in one step; or in several, each times a weight."""

    stats: UpdateStats = field(default_factory=UpdateStats)
    """Count, lost count, square of the exact updates and their product with those stored."""
    gone: float = 0.0
    """The square of the exact updates that were lost whole."""
    missing: float = 0.0
    """The exact updates less the stored ones, relative to the sizes of the exact ones."""
    weight: float = 0.0
    """Total weight of the steps that have updates."""
    kept: dict[str, float] = field(default_factory=dict)
    """Storage -> the product of the exact updates and what it would keep of each."""

    def add(self, other: "Look", weight: float) -> None:
        """Add another one, times a weight."""
        s = other.stats
        self.stats += UpdateStats(
            count=s.count * weight,
            lost_count=s.lost_count * weight,
            exact_square=s.exact_square * weight,
            dot=s.dot * weight,
        )
        self.gone += other.gone * weight
        self.missing += other.missing * weight
        self.weight += other.weight * weight
        for name, product in other.kept.items():
            self.kept[name] = self.kept.get(name, 0.0) + product * weight


class Tally:
    """The looks at a tensor of 16 bits or fewer, which a tally does not keep alive."""

    def __init__(self, owned: Owned, first: Tensor) -> None:
        tensor = owned.tensor
        self.key, self.state_name = owned.key, owned.state_name
        self.same_as = id(owned.whole), owned.key
        """Equal for two optimizers that have the tensor."""
        self.like = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        """Meta tensor of its shape and dtype; for a sharded one, of this process's shard."""
        self.first = first
        """The sample as it was found."""
        self.looks: list[tuple[int, Look]] = []
        """The steps whose exact updates are known."""
        self.moved: Tensor | None = None
        """Mask of the elements of the sample that have changed."""
        self.last: Tensor | None = None
        """The sample after the last step that was looked at."""
        self.moves: list[Tensor] = []
        self.least: list[Tensor] = []
        """Size of the moves for `lost_share`, where exact updates are not known."""
        self.master = ""
        """The wide state that a parameter is a rounding of."""

    def total(self, steps: int) -> Look:
        """Return the sums over all of so many steps: a look stands for those that are nearest."""
        found, ends = Look(), [1, *(step for step, _ in self.looks), steps + 1]
        for (_, look), before, after in zip(self.looks, ends, ends[2:], strict=False):
            found.add(look, max((after - before) / 2, 0.5))
        return found

    @property
    def exact(self) -> bool:
        """True if the exact updates are known."""
        return bool(self.looks) or not self.moves

    @property
    def updated(self) -> bool:
        """True if any element of the sample had an update."""
        known = any(look.stats.count for _, look in self.looks)
        return known or any(bool((least > 0).any()) for least in self.least)

    def see(self, after: Tensor) -> None:
        """Note a sample after a step."""
        moved = after.float() != self.first.float()  # of 8 bits none are compared
        self.moved = moved if self.moved is None else self.moved | moved
        self.last = after

    def fit(self, before: Tensor, after: Tensor, gradient: Tensor) -> None:
        """Note a move whose exact update is not known."""
        old, new, given = (t.reshape(-1)[:FITTED].float() for t in (before, after, gradient))
        least = kept(self.like.dtype) * power_of_two(new).nan_to_num()
        self.moves = [*self.moves[1 - _LOOKS :], (new - old).abs()]
        self.least = [*self.least[1 - _LOOKS :], least * (given != 0)]


def storages_for(dtype: torch.dtype) -> list[str]:
    """Return the names of the storages that can hold a state of a dtype, rounded to nearest."""
    return [s.name for s in STORAGES.values() if dtype in s.residuals and not s.by_chance]


def note(changes: Sequence[Change], step: int) -> None:
    """Note what a step did to tensors of one dtype and device; the device is waited for once."""
    names = storages_for(changes[0].tally.like.dtype)
    for change, numbers in zip(changes, _sums(changes, names), strict=True):
        count, whole, square, dot, gone, way, missing, *keeps = numbers
        change.tally.looks.append(
            (
                step,
                Look(
                    UpdateStats(count=count, lost_count=whole, exact_square=square, dot=dot),
                    gone,
                    missing / way if way else 0.0,
                    float(way > 0),
                    dict(zip(names, keeps, strict=True)),
                ),
            )
        )


def _sums(changes: Sequence[Change], names: Sequence[str]) -> Iterator[list[float]]:
    """Yield sums over the sample of each tensor, in the order that `note` takes them."""
    before, after, exact = (
        torch.cat([t.reshape(-1).double() for t in ts])
        for ts in zip(*((c.before, c.after, c.exact) for c in changes), strict=True)
    )
    finite = before.isfinite() & after.isfinite() & exact.isfinite()
    update = (exact - before).where(finite, 0)
    stored = (after - before).where(finite, 0)
    lost = (update != 0) & (stored == 0)
    found = [update != 0, lost, update.square(), update * stored, update.where(lost, 0).square()]
    found += [update.abs(), update - stored]
    for name in names:
        unit = 2 * kept(changes[0].tally.like.dtype, name) * power_of_two(exact)
        found.append(((update / unit).round() * unit).nan_to_num() * update)
    each = torch.stack([one.double() for one in found])
    lengths = torch.tensor([c.before.numel() for c in changes], device=each.device)
    rows = torch.arange(len(changes), device=each.device).repeat_interleave(lengths)
    sums = each.new_zeros(len(found), len(changes)).index_add_(1, rows, each)
    yield from sums.T.tolist()
