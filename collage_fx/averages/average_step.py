"""The update of averages as the step of an optimizer, compiled and bound as any other."""

import glob
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from collage_fx.api import compile_
from collage_fx.config import CollageConfig
from collage_fx.inspection.values import load_residuals
from collage_fx.optimizer.storage_patterns import Patterns, warn_now
from collage_fx.runtime.residuals.dtensor import shard_of
from collage_fx.runtime.residuals.store import STORE
from collage_fx.runtime.storage.registry import chosen
from collage_fx.runtime.storage.state_name import StateName


class AverageStep(Optimizer):
    """Optimizer whose step moves its parameters a share of the way to other tensors."""

    def __init__(self, params: Iterable[tuple[str, Tensor]], **options: Any) -> None:
        """Compile the step.

        Args:
            params: names and averages.
            options: as of `collage_fx.compile`, with patterns of these names.
        """
        named = list(params)
        super().__init__(named, {"share": 0.0})
        compile_(self, level="all", arithmetic="wide", **_by_place(named, options))

    @torch.no_grad()
    def step(self, values: Sequence[Tensor]) -> None:  # type: ignore[override]
        """Move the averages. No gradients have part in it, which hooks of all optimizers write.

        Args:
            values: those to move to, one for each average, with the residuals that they have.
        """
        (group,) = self.param_groups
        for p, value in zip(group["params"], values, strict=True):
            p.lerp_(value, group["share"])


def _by_place(named: list[tuple[str, Tensor]], options: dict[str, Any]) -> dict[str, Any]:
    """Return options with the storage of each name at its place, by which a step knows it.

    Warn of patterns that fit no name.
    """
    choice = CollageConfig(**options).storage
    if isinstance(choice, str):
        return options
    patterns, places = Patterns(choice), dict[str, str]()
    for i, (name, tensor) in enumerate(named):
        called = StateName(None, name)
        patterns.see(called)
        kept = chosen(choice, called, tensor.dtype, scalar=not tensor.dim())
        if kept:
            places[glob.escape(f"param_groups[0].params[{i}]")] = kept
    patterns.conclude(warn_now)
    return {**options, "storage": places or "auto"}


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
