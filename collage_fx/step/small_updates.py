"""The warning that a storage loses a share of a parameter's updates.

Looked at are a few elements of every parameter, in every tenth step of a hundred: the first hundred
after the rate has warmed up, and again whenever the run is twice as long, since the words of a
residual keep less the fuller they are.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor
from torch.compiler import disable
from torch.nn import Parameter
from torch.optim import Optimizer

from collage_fx.compilation.session import Session
from collage_fx.optimizer.ownership import Owned, groups_of, owned_parameters
from collage_fx.optimizer.parameter_names import names_of, renamed
from collage_fx.optimizer.served import way_lost
from collage_fx.runtime.kernels.triton_launch import is_capturing
from collage_fx.runtime.residuals.dtensor import shard_of
from collage_fx.runtime.residuals.lost_share import elements_of_each, lost_share, power_of_two
from collage_fx.runtime.residuals.residual import Residual, version
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


class _Sample(NamedTuple):
    """Elements of parameters of one storage, dtype and device: a row of ELEMENTS for each."""

    owned: list[Owned]
    storage: str
    value: Tensor
    """The values, in float64."""
    last: Tensor
    """The last words of their residuals, in float64."""


class _Moves(NamedTuple):
    """The moves of a sample in a step; matrices as in a sample."""

    owned: list[Owned]
    storage: str
    moved: Tensor
    """The size of each move."""
    least: Tensor
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
        self.seen: list[list[_Moves]] = []
        """The moves in each step that was looked at and wrote parameters."""
        self.rate: float | None = None
        """The largest rate when the first of these steps was taken."""
        self.largest: dict[str, float] = {}
        """Parameter -> how large its updates were on average, when they were largest."""
        self.told: dict[str, float] = {}
        """Parameter -> the share that was told."""

    def due(self, optimizer: Optimizer) -> bool:
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
            samples = _samples(moving_parameters(optimizer), by_chance)
        versions = [[version(o.tensor) for o in sample.owned] for sample in samples]
        result = run(optimizer, *args, **kwargs)
        written = [_written(*old) for old in zip(samples, versions, strict=True)]
        # Steps that a gradient scaler skips say nothing.
        if any(written):
            with torch.no_grad():
                moves = [_moves(*old) for old in zip(samples, written, strict=True)]
            self.seen.append([m for m in moves if m is not None])
        if len(self.seen) == LOOKS:
            self._judge(optimizer)
        return result

    def _judge(self, optimizer: Optimizer) -> None:
        """Warn of what is lost, unless the rate still warms up, and will soon be large enough."""
        seen, rate = self.seen, self.rate
        self.seen, self.rate = [], None
        if rate is not None and _rate(optimizer) > rate:
            return
        self.next = 2 * self.steps
        losing = []
        for owned, storage, size, share in _judged(seen):
            name = owned.name
            self.largest[name] = max(size, self.largest.get(name, 0.0))
            decayed = size < self.largest[name] * DECAYED
            if not decayed and share >= max(LOST, 2 * self.told.get(name, 0.0)):
                self.told[name] = share
                losing.append((owned.tensor.dtype, storage, (share, name)))
        for message in way_lost(losing, EVERY * LOOKS):
            self.session.warn_once("updates-lost", renamed(message, names_of(optimizer)))


def _judged(seen: Sequence[Collection[_Moves]]) -> list[tuple[Owned, str, float, float]]:
    """Return each parameter, its storage, the size of its updates and the share that is lost.

    A device is waited for once.
    """
    kinds = {o.name: (o, m.storage) for moves in seen for m in moves for o in m.owned}
    if not kinds:
        return []
    row = {name: i for i, name in enumerate(kinds)}
    device = next(m.moved.device for moves in seen for m in moves)
    moved = torch.zeros(len(row), len(seen), ELEMENTS, dtype=torch.float64, device=device)
    least = torch.zeros_like(moved)
    for step, moves in enumerate(seen):
        for m in moves:
            rows = [row[o.name] for o in m.owned]
            moved[rows, step], least[rows, step] = m.moved.to(device), m.least.to(device)
    found = torch.stack(lost_share(moved.flatten(1), least.flatten(1)), 1).tolist()
    return [(*kind, size, share) for kind, (size, share) in zip(kinds.values(), found, strict=True)]


def moving_parameters(optimizer: Optimizer) -> list[Owned]:
    """Return the 16-bit parameters that a step of an optimizer moves."""
    groups = groups_of(optimizer)
    groups = [g for g in groups if not is_number(lr := g.get("lr")) or float(lr) != 0]
    moving = {id(p) for g in groups for p in g["params"]}
    params = (o for o in owned_parameters(optimizer) if id(o.whole) in moving)
    return [o for o in params if o.tensor.dtype in FINEST]


def _samples(parameters: Iterable[Owned], by_chance: Callable[[str], bool]) -> list[_Sample]:
    """Return samples of the parameters, by storage, dtype and device.

    Left out are those without elements or a residual of their shape, tensors of other classes, and
    those in storages that are rounded by chance, which lose nothing on average.
    """
    kinds: dict[Any, list[tuple[Owned, Residual]]] = {}
    for owned in parameters:
        tensor, residual = owned.tensor, _residual(owned.tensor)
        if residual is not None and not by_chance(residual.storage):
            kind = residual.storage, tensor.dtype, tensor.device
            kinds.setdefault(kind, []).append((owned, residual))
    return [_sample(storage, members) for (storage, *_), members in kinds.items()]


def _residual(tensor: Tensor) -> Residual | None:
    """Return the residual of a tensor; None for one that `_samples` leaves out."""
    residual = STORE.get(tensor) if type(tensor) in (Tensor, Parameter) else None
    if residual is None or not residual.is_shaped_as(tensor) or not tensor.numel():
        return None
    return residual


def _sample(storage: str, members: Collection[tuple[Owned, Residual]]) -> _Sample:
    """Return the sample of parameters of one storage, dtype and device."""
    words = zip(*((owned.tensor, *residual.components) for owned, residual in members), strict=True)
    high, *low = (torch.stack(elements_of_each(word, ELEMENTS)) for word in words)
    owned = [owned for owned, _ in members]
    return _Sample(owned, storage, value_in_float64(storage, high, low), low[-1].double())


def _written(sample: _Sample, versions: list[int]) -> list[int]:
    """Return the rows of the parameters that were written since they had these versions."""
    pairs = enumerate(zip(sample.owned, versions, strict=True))
    return [row for row, (owned, number) in pairs if version(owned.tensor) != number]


def _moves(old: _Sample, written: list[int]) -> _Moves | None:
    """Return the moves of the written parameters of a sample that was taken before a step.

    None if none of them has a residual of that storage and a dense gradient.
    """
    rows, members, gradients = [], [], []
    for row in written:
        owned = old.owned[row]
        residual, gradient = _residual(owned.tensor), _gradient(owned)
        if residual and residual.storage == old.storage and gradient is not None:
            rows.append(row)
            members.append((owned, residual))
            gradients.append(gradient)
    if not rows:
        return None
    storage, new = old.storage, _sample(old.storage, members)
    dtype = new.owned[0].tensor.dtype
    least = kept(dtype, storage) * power_of_two(new.value)
    if storage in EXPANSIONS:
        least = torch.minimum(least, kept(dtype) * power_of_two(new.last))
    counts = torch.stack([g != 0 for g in elements_of_each(gradients, ELEMENTS)])
    return _Moves(new.owned, storage, (new.value - old.value[rows]).abs(), least * counts)


def _gradient(owned: Owned) -> Tensor | None:
    """Return the gradient of a parameter, of one that is sharded this process's part of it.

    None if there is none, or a sparse one, of which elements have other places.
    """
    shard = None if owned.whole.grad is None else shard_of(owned.whole.grad)
    return shard if type(shard) is Tensor and shard.layout == torch.strided else None


def _rate(optimizer: Optimizer) -> float:
    """Return the largest learning rate of an optimizer; zero if it has none that is a number.

    One in a tensor on a device is none: it would be waited for.
    """
    rates = [g.get("lr") for g in groups_of(optimizer)]
    return max(map(float, filter(is_number, rates)), default=0.0)


def is_number(rate: Any) -> TypeGuard[float]:
    """Return True if a rate is a number, which a tensor on a device would be waited for to be."""
    if isinstance(rate, Tensor):
        return rate.numel() == 1 and rate.is_cpu and not rate.requires_grad
    return isinstance(rate, int | float)
