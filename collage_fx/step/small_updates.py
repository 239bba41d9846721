"""The warning, once, that most updates of a parameter are smaller than what its storage keeps."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from collage_fx.compilation.session import Session
from collage_fx.optimizer.ownership import Owned, owned_tensors
from collage_fx.optimizer.parameter_names import names_of, renamed
from collage_fx.optimizer.served import too_small
from collage_fx.runtime.residuals.dtensor import shard_of
from collage_fx.runtime.residuals.store import STORE
from collage_fx.runtime.storage.registry import FINEST, kept

AFTER = 100
"""The step that is looked at: rates have warmed up, or begun to."""
PARAMETERS = 16
"""How many parameters are looked at."""
ELEMENTS = 1 << 22
"""A parameter of more elements is looked at only if there is no other."""


class SmallUpdates:
    """Looks at some parameters in one step, and warns if half their updates are lost.

    Fine-tuning at rates of 1e-6 with 17 bits does nothing, and nothing else would say so.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.steps = 0

    @property
    def wanted(self) -> bool:
        """Whether the step is still to come."""
        return self.steps < AFTER

    def step(self, run: Callable[..., Any], optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Do a step of the optimizer, and look at it if it is the one."""
        self.steps += 1
        if self.steps < AFTER:
            return run(optimizer, *args, **kwargs)
        before = [(o.name, o.tensor, _whole(o.tensor), _moving(o)) for o in self._chosen(optimizer)]
        result = run(optimizer, *args, **kwargs)
        small: dict[tuple[torch.dtype, str], list[str]] = {}
        for name, p, old, moving in before:
            moved = ((_whole(p) - old) / old).abs()[moving & (old != 0)]
            held = p.dtype, self._storage(p)
            if moved.numel() and float(moved.median()) < kept(*held):
                small.setdefault(held, []).append(name)
        known = names_of(optimizer) if small else {}
        for (dtype, storage), names in small.items():
            self.session.warn_once(renamed(too_small(dtype, storage, names), known))
        return result

    def _storage(self, p: Tensor) -> str:
        residual = STORE.get(p)
        return "" if residual is None else residual.storage

    def _chosen(self, optimizer: Optimizer) -> list[Owned]:
        moving = {id(p) for g in optimizer.param_groups if g.get("lr", 1) != 0 for p in g["params"]}
        found = [
            o
            for o in owned_tensors(optimizer)
            if o.owner == "param"
            and id(o.whole) in moving
            and o.tensor.dtype in FINEST
            and self._storage(o.tensor)
            and not self.session.config.rounds_by_chance(self._storage(o.tensor))
            and o.whole.grad is not None
            and o.whole.grad.layout == torch.strided
        ]
        found.sort(key=lambda one: one.tensor.numel())
        few = [one for one in found if one.tensor.numel() <= ELEMENTS]
        return few[: -PARAMETERS - 1 : -1] or found[:1]


def _whole(p: Tensor) -> Tensor:
    """Return the value of a parameter with its residual, in float64."""
    residual = STORE.get(p)
    return p.detach().double() if residual is None else residual.whole(p).double()


def _moving(owned: Owned) -> Tensor:
    """Return which elements have a gradient."""
    gradient = owned.whole.grad
    assert gradient is not None, "chosen for having one"
    return shard_of(gradient) != 0
