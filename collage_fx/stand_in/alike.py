"""Comparison of optimizers: of two that are alike, one can use what was compiled for the other."""

import threading
from collections.abc import Hashable, Iterable
from itertools import compress
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from collage_fx.classes import class_of
from collage_fx.compilation.session import Session
from collage_fx.gradients.multiplied import FACTOR, MULTIPLIED
from collage_fx.runtime.residuals.dtensor import place_of, shard_of
from collage_fx.runtime.residuals.store import STORE
from collage_fx.runtime.storage.positions import place_in_order
from collage_fx.runtime.storage.registry import compensable_dtypes
from collage_fx.stand_in.group_numbers import GroupNumbers
from collage_fx.stand_in.members import GRAD, Members
from collage_fx.stand_in.torch_steps import code_of_step

_ASIDE = frozenset({"_opt_called", "_step_count", FACTOR, MULTIPLIED})
"""Attributes in which steps are counted for schedulers, which no step reads; and what is an input
of all graphs that read it, see `Session.shared_numbers`."""
_OF_SCHEDULERS = frozenset(
    {"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr"}
)
"""Keys of a parameter group that schedulers of torch put there for themselves."""
_MADE = frozenset({"capturable", "fused"})
"""Keys of a parameter group that a step itself may set, for its own time or for good."""

_NO_GRADIENT = "no gradient"
"""Kind of a parameter without a gradient, which no kernel updates."""

_COMPILED = WeakIdKeyDictionary()
"""Optimizer whose steps may be shared -> the session that compiles them."""
_LOCK = threading.Lock()


def register(optimizer: Optimizer, session: Session) -> None:
    """Note an optimizer of torch.optim whose step is compiled, for those that are like it."""
    if shares(session):
        with _LOCK:
            _COMPILED[optimizer] = session


def shares(session: Session) -> bool:
    """Return True if what a session compiles may be used by others, and the other way round."""
    return session.deduplicates and not session.keep and "share" not in session.config.without


def count_alike(optimizer: Optimizer, session: Session) -> int:
    """Return the number of optimizers like this one, itself among them.

    It is a guess, by which is decided what to compile; `signature` says whether two are alike.
    """
    if not shares(session):
        return 1
    with _LOCK:
        others = [(one, its) for one, its in _COMPILED.items() if one is not optimizer]
    mine = _outline(optimizer, session) if others else None
    return 1 + sum(_outline(one, its) == mine for one, its in others)


def withdraw(optimizer: Optimizer, session: Session) -> None:
    """Note that what is compiled for an optimizer cannot be shared, nor for those like it."""
    mine = _outline(optimizer, session)
    with _LOCK:
        for one, its in list(_COMPILED.items()):
            if _outline(one, its) == mine:
                del _COMPILED[one]


def _outline(optimizer: Optimizer, session: Session) -> Hashable:
    """Return in what optimizers agree that will be alike, as far as is known before a step.

    Rates are not in it: others may be about to be set to that of the first.
    """
    groups = [
        [
            (k, _exactly(v))
            for k, v in _read(group)
            if k not in _MADE and all(constants([v])) and not isinstance(v, float)
        ]
        for group in optimizer.param_groups
    ]
    members = [
        [(type(p), p.dtype, p.device, p.requires_grad, 1 in p.shape) for p in group["params"]]
        for group in optimizer.param_groups
    ]
    return repr((class_of(optimizer), session.config, _settings(session), groups, members))


def _read(group: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return the items of a parameter group that a step may read, the parameters left out."""
    return [(k, v) for k, v in group.items() if k != "params" and k not in _OF_SCHEDULERS]


def signature(
    optimizer: Optimizer,
    session: Session,
    numbers: GroupNumbers,
    members: Members,
) -> Hashable | None:
    """Return all that what is compiled for an optimizer follows from, but for what is input.

    Sizes are not in it, as a kernel takes any, and none of the steps asks for them. None if it is
    not known what else there is. Beside it matter: what the numbers of groups have been
    (`numbers_if_traced`), which residuals there are (`residuals_of`), and PyTorch's own state
    (`GlobalState`).

    Args:
        optimizer: one of torch.optim, its states being made.
        session: compiles its steps.
        numbers: floats of groups that its graph takes as inputs.
        members: its parameters.
    """
    held, code = compensable_dtypes(session.config.storage), code_of_step(optimizer)
    attributes = [(k, v) for k, v in vars(optimizer).items() if k not in _ASIDE]
    if code is None or any([isinstance(v, Tensor) for _, v in attributes]):
        return None  # GradScaler's tensors, such as the scale of gradients
    if numbers.taken and numbers.read(optimizer.param_groups) is None:
        return None
    groups: list[Hashable] = []
    kinds: list[Hashable] = []
    for g, group in enumerate(optimizer.param_groups):
        read = _read(group)
        for (key, value), constant in zip(read, constants([v for _, v in read]), strict=True):
            if (g, key) in numbers.taken:
                groups.append((g, key, _exactly(numbers.rest((g, key), value))))
            elif constant:
                groups.append((g, key, _exactly(value)))
            else:
                return None
        for member, values in members[g]:
            p = member.whole
            kind = member.kind(values, held) if values[GRAD] is not None else _NO_GRADIENT
            if kind is None:
                return None
            kinds.append((g, kind, 1 in p.shape))
    asked, same = (session.config, _settings(session)), constants([v for _, v in attributes])
    known = sorted([(k, _exactly(v)) for k, v in compress(attributes, same)])
    return code, asked, tuple(known), tuple(groups), tuple(kinds)


def residuals_of(members: Members) -> Hashable:
    """Return the kinds of residuals of an optimizer's parameters, gradients and states, and how
    surely they have these."""
    rows = [values for group in members for _, values in group]
    found = STORE.of([t for row in rows for t in row if isinstance(t, Tensor)])
    kinds = [(r.storage, r.provisional) if r is not None else None for r in found]
    return tuple(kinds), tuple(map(len, rows))


def starts_of(members: Members) -> list[int | None]:
    """Return the position of the first element of each parameter in the whole, where the others
    follow it one by one."""
    params = (member.whole for group in members for member, _ in group)
    return [
        place_in_order(shard.shape, place_of(p)) if (shard := shard_of(p)).is_contiguous() else None
        for p in params
    ]


def constants(values: Iterable[Any]) -> list[bool]:
    """Tell of each value whether it is what it is for as long as it is the same object."""
    return [
        v is None or isinstance(v, _CONSTANT) or (type(v) is tuple and all(constants(v)))
        for v in values
    ]


_CONSTANT = bool | int | float | str


_exactly = repr
"""Returns what is the same for the same constants only: 0.0 is not -0.0, and 1 not 1.0."""


def _settings(session: Session) -> str:
    return repr(sorted(session.inductor.items()))
