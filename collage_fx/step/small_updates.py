"""The warning, once, that most updates of a parameter are smaller than what its storage keeps."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from collage_fx.compilation.session import Session
from collage_fx.optimizer.ownership import Owned, groups_of, owned_tensors
from collage_fx.optimizer.parameter_names import names_of, renamed
from collage_fx.optimizer.served import too_small
from collage_fx.runtime.kernels.triton_launch import is_capturing
from collage_fx.runtime.residuals.dtensor import shard_of
from collage_fx.runtime.residuals.residual import version
from collage_fx.runtime.residuals.store import STORE
from collage_fx.runtime.storage.registry import FINEST, kept
from collage_fx.step.first_steps import in_float64

AFTER = 100
"""The step from which on it looks: rates have warmed up, or begun to."""
LOOKS = 2
"""How many steps in turn must lose them: a schedule may pass zero in one."""
TRIES = 20
"""How many steps are looked at at most: those that a gradient scaler skips say nothing."""
PARAMETERS = 16
"""How many parameters are looked at."""
ELEMENTS = 1 << 22
"""A parameter of more elements is looked at only if there is no other."""


class SmallUpdates:
    """Looks at some parameters in a few steps, and warns if half their updates are lost.

    Fine-tuning at rates of 1e-6 with 17 bits does nothing, and nothing else would say so.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.steps = 0
        self.looks = 0
        """In how many steps there was something to see."""
        self.small: set[str] = set()
        """The parameters of which all of these lost half the updates."""

    @property
    def wanted(self) -> bool:
        """Whether there are steps to come that it looks at."""
        return self.steps < AFTER + TRIES and self.looks < LOOKS

    def step(self, run: Callable[..., Any], optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Do a step of the optimizer, and look at it if it is one of those."""
        self.steps += 1
        # A CUDA graph that is being captured writes nothing yet, and nothing of it can be read.
        if self.steps < AFTER or is_capturing():
            return run(optimizer, *args, **kwargs)
        chosen = self._chosen(optimizer)
        before = [(o, version(o.tensor), in_float64(o.tensor)) for o in chosen]
        result = run(optimizer, *args, **kwargs)
        if any(version(o.tensor) != number for o, number, _ in before):
            small = {o.name: o for o, _, old in before if self._lost(o, old)}
            self.small = self.small & set(small) if self.looks else set(small)
            self.looks += 1
            if self.looks == LOOKS and self.small:
                self._warn(optimizer, [o for name, o in small.items() if name in self.small])
        return result

    def _lost(self, owned: Owned, old: Tensor) -> bool:
        """Tell whether a step has lost half the updates of a parameter."""
        p = owned.tensor
        update = median_update(owned, old, in_float64(p))
        return update is not None and update < kept(p.dtype, self._storage(p))

    def _warn(self, optimizer: Optimizer, small: list[Owned]) -> None:
        losing = [(o.tensor.dtype, self._storage(o.tensor), o.name) for o in small]
        for message in too_small(losing):
            self.session.warn_once(renamed(message, names_of(optimizer)))

    def _storage(self, p: Tensor) -> str:
        residual = STORE.get(p)
        return "" if residual is None else residual.storage

    def _chosen(self, optimizer: Optimizer) -> list[Owned]:
        by_chance = self.session.config.rounds_by_chance
        stored = ((o, self._storage(o.tensor)) for o in moving_parameters(optimizer))
        found = [o for o, storage in stored if storage and not by_chance(storage)]
        found.sort(key=lambda one: one.tensor.numel())
        few = [one for one in found if one.tensor.numel() <= ELEMENTS]
        return few[: -PARAMETERS - 1 : -1] or found[:1]


def moving_parameters(optimizer: Optimizer) -> list[Owned]:
    """Return the 16-bit parameters that a step of an optimizer moves."""
    groups = groups_of(optimizer)
    moving = {id(p) for g in groups if g.get("lr", 1) != 0 for p in g["params"]}
    params = (o for o in owned_tensors(optimizer) if o.owner == "param" and id(o.whole) in moving)
    return [o for o in params if o.tensor.dtype in FINEST]


def median_update(owned: Owned, old: Tensor, new: Tensor) -> float | None:
    """Return the median of the updates of a parameter by a step, each relative to the value.

    Of elements that have a gradient and were not zero; None if there are none.
    """
    gradient = owned.whole.grad
    if gradient is None or gradient.layout != torch.strided:
        return None
    moved = ((new - old) / old).abs()[(shard_of(gradient) != 0) & (old != 0)]
    return float(moved.median()) if moved.numel() else None
