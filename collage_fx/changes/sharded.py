"""Writes to DTensors between steps, such as `load_state_dict` under FSDP2.

They count a version of the DTensor and none of its shard, to which residuals belong. Here they are
counted as writes to the shard.
"""

import torch
from torch import Tensor
from torch.optim import Optimizer

from collage_fx.optimizer.ownership import params_within
from collage_fx.runtime.residuals.dtensor import is_sharded, shard_of
from collage_fx.runtime.residuals.residual import version


class ShardedWrites:
    """Versions of the parameters of one optimizer, of which some are sharded, after a step."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.versions: list[int] = []
        self.ids: list[int] = []
        """Ids of the parameters that have these versions."""
        self.note(optimizer)

    @classmethod
    def of(cls, optimizer: Optimizer) -> "ShardedWrites | None":
        """Return those of an optimizer; None for one without DTensors."""
        return cls(optimizer) if any(map(is_sharded, params_within(optimizer))) else None

    def count(self, optimizer: Optimizer) -> None:
        """Count up the versions of shards whose DTensors were written since the last step."""
        params = params_within(optimizer)
        now = _versions(params)
        if now != self.versions:
            before = dict(zip(self.ids, self.versions, strict=True))
            pairs = zip(params, now, strict=True)
            written = [p for p, number in pairs if before.get(id(p), number) != number]
            shards = [shard_of(p) for p in written if is_sharded(p)]
            torch.autograd.graph.increment_version([t for t in shards if version(t) >= 0])
            self.note(optimizer)

    def note(self, optimizer: Optimizer) -> None:
        """Note the versions that a step leaves."""
        params = params_within(optimizer)
        self.versions, self.ids = _versions(params), list(map(id, params))


def _versions(params: list[Tensor]) -> list[int]:
    try:
        return [p._version for p in params]
    except RuntimeError:  # of an inference tensor
        return list(map(version, params))
