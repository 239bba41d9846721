"""The update of averages as the step of an optimizer, compiled and bound as any other."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from collage_fx.api import compile_
from collage_fx.inspection.values import load_residuals
from collage_fx.runtime.residuals.dtensor import shard_of
from collage_fx.runtime.residuals.store import STORE


class AverageStep(Optimizer):
    """Optimizer whose step moves its parameters a share of the way to other tensors."""

    def __init__(self, params: Iterable[tuple[str, Tensor]], **options: Any) -> None:
        """Compile the step.

        Args:
            params: names and averages.
            options: as of `collage_fx.compile`.
        """
        super().__init__(params, {"share": 0.0})
        compile_(self, level="all", arithmetic="wide", **options)

    @torch.no_grad()
    def step(self, values: Sequence[Tensor]) -> None:  # type: ignore[override]
        """Move the averages. No gradients have part in it, which hooks of all optimizers write.

        Args:
            values: those to move to, one for each average, with the residuals that they have.
        """
        (group,) = self.param_groups
        for p, value in zip(group["params"], values, strict=True):
            p.lerp_(value, group["share"])


def move(optimizer: AverageStep, values: Sequence[Tensor], share: float) -> None:
    """Move averages by a share of the way, from 0 to 1.

    It is no method, as those that write parameters are recorded.
    """
    optimizer.param_groups[0]["share"] = share
    optimizer.step(values)


def on_device(value: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device, with its residual; itself if it is there."""
    if value.device == device:
        return value
    moved = value.detach().to(device)
    residual = STORE.get(shard_of(value))
    components = None if residual is None else residual.present(shard_of(value))
    if residual is not None and components:
        load_residuals(moved, [c.to(device) for c in components], storage=residual.storage)
    return moved
