"""The warning that a storage loses a share of a parameter's updates.

Looked at are a few elements of every parameter, in every tenth step of a hundred: the first hundred
after the rate has warmed up, and again whenever the run is twice as long, since the words of a
residual keep less the fuller they are.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.compiler import disable
from torch.nn import Parameter
from torch.nn.utils.rnn import pad_sequence
from torch.optim import Optimizer

from collage_fx.compilation.session import Session
from collage_fx.optimizer.ownership import Owned, groups_of, owned_tensors
from collage_fx.optimizer.parameter_names import names_of, renamed
from collage_fx.optimizer.served import way_lost
from collage_fx.runtime.kernels.triton_launch import is_capturing
from collage_fx.runtime.residuals.dtensor import shard_of
from collage_fx.runtime.residuals.lost_share import elements, lost_share, power_of_two
from collage_fx.runtime.residuals.residual import version
from collage_fx.runtime.residuals.store import STORE
from collage_fx.runtime.storage.registry import EXPANSIONS, FINEST, kept, value_in_float64

FIRST = 100
"""The first step that is looked at: rates have warmed up, or begun to."""
EVERY = 10
"""Steps from one look to the next."""
LOOKS = 10
"""Number of steps that write parameters which are looked at before the loss is judged."""
ELEMENTS = 64
"""Elements of a parameter in the sample."""
LOST = 0.25
"""The share of a parameter's way from which on it is told."""
DECAYED = 0.25
"""The share of their largest size below which updates no longer matter: a rate has decayed."""


@dataclass
class _Seen:
    """Moves of the sampled elements of a parameter, a tensor for each step."""

    owned: Owned
    storage: str
    moved: list[Tensor] = field(default_factory=list)
    """The size of each move."""
    least: list[Tensor] = field(default_factory=list)
    """The smallest change that each element keeps; zero where the gradient is zero."""


class SmallUpdates:
    """Observer of parameters in a few steps, which warns of those that lose a quarter of their way.

    Fine-tuning at rates of 1e-6 with 17 bits does little, and nothing else would say so. What is
    looked at stays on its device until there is enough to judge.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.steps = 0
        self.next = FIRST
        """The next step that is looked at."""
        self.looks = 0
        self.seen: dict[str, _Seen] = {}
        self.rate: float | None = None
        """The largest rate when the first of these steps was taken."""
        self.largest: dict[str, float] = {}
        """Parameter -> how large its updates were on average, when they were largest."""
        self.told: dict[str, float] = {}
        """Parameter -> the share that was told."""

    def due(self) -> bool:
        """Count a step; return whether it is one to look at."""
        self.steps += 1
        return self.steps >= self.next

    @disable  # where the whole training step is compiled
    def step(
        self, run: Callable[..., Any], optimizer: Optimizer, /, *args: Any, **kwargs: Any
    ) -> Any:
        """Do a step of the optimizer, and look at what it does."""
        # A CUDA graph that is being captured writes nothing yet, and nothing of it can be read.
        if is_capturing():
            return run(optimizer, *args, **kwargs)
        self.next = self.steps + EVERY
        if self.rate is None:
            self.rate = _rate(optimizer)
        with torch.no_grad():
            by_chance = self.session.config.rounds_by_chance
            values = ((o, _value(o.tensor)) for o in moving_parameters(optimizer))
            before = [(o, version(o.tensor), v[1]) for o, v in values if v and not by_chance(v[0])]
        result = run(optimizer, *args, **kwargs)
        with torch.no_grad():
            written = [(o, old) for o, number, old in before if version(o.tensor) != number]
            for owned, old in written:
                self._see(owned, old)
        # Steps that a gradient scaler skips say nothing.
        self.looks += bool(written)
        if self.looks == LOOKS:
            self._judge(optimizer)
        return result

    def _see(self, owned: Owned, old: Tensor) -> None:
        """Note a step's update of a parameter."""
        gradient, found = owned.whole.grad, _value(owned.tensor)
        shard = None if gradient is None else shard_of(gradient)
        if found is None or type(shard) is not Tensor or shard.layout != torch.strided:
            return
        storage, new, last = found
        dtype = owned.tensor.dtype
        least = kept(dtype, storage) * power_of_two(new)
        if storage in EXPANSIONS:
            least = torch.minimum(least, kept(dtype) * power_of_two(last))
        seen = self.seen.setdefault(owned.name, _Seen(owned, storage))
        seen.moved.append((new - old).abs())
        seen.least.append(least * (elements(shard, ELEMENTS) != 0))

    def _judge(self, optimizer: Optimizer) -> None:
        """Warn of what is lost, unless the rate still warms up, and will soon be large enough."""
        seen, rate = self.seen, self.rate
        self.seen, self.rate, self.looks = {}, None, 0
        if rate is not None and _rate(optimizer) > rate:
            return
        self.next = 2 * self.steps
        losing = []
        for one, (size, share) in zip(seen.values(), _judged(seen.values()), strict=True):
            name = one.owned.name
            self.largest[name] = max(size, self.largest.get(name, 0.0))
            decayed = size < self.largest[name] * DECAYED
            if not decayed and share >= max(LOST, 2 * self.told.get(name, 0.0)):
                self.told[name] = share
                losing.append((one.owned.tensor.dtype, one.storage, (share, name)))
        for message in way_lost(losing, EVERY * LOOKS):
            self.session.warn_once("updates-lost", renamed(message, names_of(optimizer)))


def _judged(seen: Collection[_Seen]) -> list[tuple[float, float]]:
    """Return the size of the updates of each parameter and the share that is lost.

    A device is waited for once.
    """
    if not seen:
        return []
    device = next(iter(seen)).moved[0].device
    moved, least = (
        pad_sequence([torch.cat([t.to(device) for t in x]) for x in xs], batch_first=True)
        for xs in ([one.moved for one in seen], [one.least for one in seen])
    )
    return [(size, share) for size, share in torch.stack(lost_share(moved, least), 1).tolist()]


def moving_parameters(optimizer: Optimizer) -> list[Owned]:
    """Return the 16-bit parameters that a step of an optimizer moves."""
    groups = groups_of(optimizer)
    groups = [g for g in groups if not _is_number(lr := g.get("lr")) or float(lr) != 0]
    moving = {id(p) for g in groups for p in g["params"]}
    params = (o for o in owned_tensors(optimizer) if o.owner == "param" and id(o.whole) in moving)
    return [o for o in params if o.tensor.dtype in FINEST]


def _value(tensor: Tensor) -> tuple[str, Tensor, Tensor] | None:
    """Return the storage of some elements, what they are, and their last words, in float64.

    None for a tensor without a residual of its shape, and for one of a class of its own.
    """
    residual = STORE.get(tensor) if type(tensor) in (Tensor, Parameter) else None
    if residual is None or not residual.is_shaped_as(tensor) or not tensor.numel():
        return None
    high, *low = (elements(x, ELEMENTS) for x in (tensor, *residual.components))
    return residual.storage, value_in_float64(residual.storage, high, low), low[-1].double()


def _rate(optimizer: Optimizer) -> float:
    """Return the largest learning rate of an optimizer; zero if it has none that is a number.

    One in a tensor on a device is none: it would be waited for.
    """
    rates = [g.get("lr") for g in groups_of(optimizer)]
    return max(map(float, filter(_is_number, rates)), default=0.0)


def _is_number(rate: Any) -> TypeGuard[float]:
    """Return True if a rate is a number, which a tensor on a device would be waited for to be."""
    if isinstance(rate, Tensor):
        return rate.numel() == 1 and rate.is_cpu and not rate.requires_grad
    return isinstance(rate, int | float)
