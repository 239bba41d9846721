"""The warning that a storage loses a share of a parameter's updates.

Looked at are a few elements of every parameter, in every tenth step of a hundred: the first hundred
after the rate has warmed up, and again whenever the run is twice as long, since the words of a
residual keep less the fuller they are.
"""

import math
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
from collage_fx.runtime.residuals.checksum import bits_of
from collage_fx.runtime.residuals.dtensor import shard_of
from collage_fx.runtime.residuals.residual import version
from collage_fx.runtime.residuals.store import STORE
from collage_fx.runtime.storage.registry import EXPANSIONS, FINEST, kept, value_in_float64

FIRST = 100
"""The first step that is looked at: rates have warmed up, or begun to."""
EVERY = 10
"""Steps from one look to the next."""
LOOKS = 10
"""Looks at steps that write parameters, before the loss is judged."""
ELEMENTS = 64
"""Elements of a parameter in the sample."""
LOST = 0.25
"""The share of a parameter's way from which on it is told."""
DECAYED = 0.25
"""The share of their largest size below which updates no longer matter: a rate has decayed."""
_GOLDEN = (5**0.5 - 1) / 2
_HALVINGS = 12
"""Halvings of the range that holds the largest size; they leave an error of a hundredth."""


@dataclass
class _Seen:
    """Moves of the sampled elements of a parameter, a tensor for each step."""

    owned: Owned
    storage: str
    moved: list[Tensor] = field(default_factory=list)
    """The size of each move."""
    least: list[Tensor] = field(default_factory=list)
    """The smallest change that each element keeps; zero where the gradient is zero."""


def lost_share(moved: Tensor, least: Tensor) -> tuple[Tensor, Tensor]:
    """Return how large updates are on average, and the share of the way that is lost.

    Of an update u, a storage keeps a = u rounded to a multiple of twice the smallest change that it
    keeps. The sizes of a parameter's updates are taken for uniform between the one that the sum of
    all a tells and half of it. What is lost is then 1 - E[a u] / E[u^2]: nothing where updates are
    twice the smallest change, since as many become too large as are lost, and all where none
    reaches it. Of updates of very different sizes less is lost than that, and a few that are much
    larger bound it.

    Args:
        moved: a, (parameters, samples).
        least: the smallest changes that are kept there; zero for what does not count.
    """
    counts = (least > 0) & moved.isfinite()
    moved, least = moved.where(counts, 0), least.where(counts, 0)
    number, most = counts.sum(1, keepdim=True), least.amax(1, keepdim=True)
    there = moved.sum(1, keepdim=True)
    low, high = most / 64, most + 2 * moved.amax(1, keepdim=True)
    for _ in range(_HALVINGS):
        top = (low * high).sqrt()
        less = (_rounded(top, least)[0] * counts).sum(1, keepdim=True) < there
        low, high = torch.where(less, top, low), torch.where(less, high, top)
    product = (_rounded(high, least)[1] * counts).sum(1, keepdim=True)
    some, gone = there > 0, least.where(moved == 0, 0).square().sum(1, keepdim=True)
    share = torch.where(some, 1 - 12 / 7 * product / (number * high * high), (number > 0).double())
    # No more than if all that are lost were as large as can be, beside those that are not.
    share = share.minimum((gone / (gone + moved.square().sum(1, keepdim=True))).nan_to_num())
    # Where all are lost, they may have been as large as half of what would have been kept.
    size = torch.where(some, 3 / 4 * high, least.sum(1, keepdim=True) / 2 / number)
    return size.squeeze(1).nan_to_num(), share.squeeze(1)


def kept_share(size: Tensor, least: Tensor) -> Tensor:
    """Return the share of updates that a storage keeps: E[a u] / E[u^2], as `lost_share` has them.

    Args:
        size: how large they are on average, as `lost_share` returns.
        least: the smallest change that the storage keeps.
    """
    top = 4 / 3 * size
    return 12 / 7 * _rounded(top, least)[1] / top.square()


def _rounded(top: Tensor, least: Tensor) -> tuple[Tensor, Tensor]:
    """Return E[a] and E[a u] of updates u, uniform from half the top to it, rounded to a."""
    z = (least / top).clamp(min=0.1)  # finer ones change little
    ends = [(k * z).clamp(min=0.5) for k in range(1, 11, 2)]  # from each on a is larger by 2 z
    mean = sum((1 - end).clamp(min=0) for end in ends)
    product = sum((1 - end * end).clamp(min=0) for end in ends)
    return 4 * z * mean * top, 2 * z * product * top * top


class SmallUpdates:
    """Looks at parameters in a few steps, and warns of those of whose way a quarter is lost.

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
        """Note what a step has done to a parameter."""
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
        seen.least.append(least * (elements(shard) != 0))

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
            self.session.warn_once(renamed(message, names_of(optimizer)))


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
    high, *low = (elements(x) for x in (tensor, *residual.components))
    return residual.storage, value_in_float64(residual.storage, high, low), low[-1].double()


def elements(tensor: Tensor, number: int = ELEMENTS) -> Tensor:
    """Return some elements of a tensor, of the same places for all tensors of its size."""
    count = tensor.numel()
    stride = int(count * _GOLDEN)
    while math.gcd(stride, count) > 1:  # else places come twice before all have come
        stride += 1
    places = torch.arange(number, device=tensor.device).mul_(stride).remainder_(count)
    return torch.take(tensor, places) if tensor.itemsize > 1 else _of_bytes(tensor, places)


def _of_bytes(tensor: Tensor, places: Tensor) -> Tensor:
    """Return the elements of a tensor there; `take` knows no floats of 8 bits."""
    return torch.take(bits_of(tensor), places).view(tensor.dtype)


def power_of_two(x: Tensor) -> Tensor:
    """Return the largest power of two that is not above the size of x; NaN for zero."""
    return x.abs() / (2 * torch.frexp(x).mantissa.abs())


def _rate(optimizer: Optimizer) -> float:
    """Return the largest learning rate of an optimizer; zero if it has none that is a number.

    One in a tensor on a device is none: it would be waited for.
    """
    rates = [g.get("lr") for g in groups_of(optimizer)]
    return max(map(float, filter(_is_number, rates)), default=0.0)


def _is_number(rate: Any) -> TypeGuard[float]:
    """Tell whether a rate is a number, which a tensor on a device would be waited for to be."""
    if isinstance(rate, Tensor):
        return rate.numel() == 1 and rate.is_cpu and not rate.requires_grad
    return isinstance(rate, int | float)
