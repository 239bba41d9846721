"""Checks that all of a state dict, and what each process has loaded, is of one step.

A process cannot see from a file of its own that the others have files of another step. Where states
are sharded it can ask: each notes the step in the store by which the processes of a mesh have met,
and before its next step looks at what the others have noted. By then they have loaded too, since
gradients have been reduced. Nobody waits there for anybody: a process that loads alone goes on.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from collage_fx.errors import CheckpointError
from collage_fx.optimizer.checkpoints.saved_residuals import PREFIX
from collage_fx.optimizer.ownership import params_of
from collage_fx.runtime.residuals.dtensor import is_sharded, shard_of


@dataclass
class _Load:
    """Step and process groups of an optimizer with sharded parameters that has loaded states."""

    groups: list[tuple[Any, int]]
    """The process groups of its meshes, and which of its optimizers this is in each."""
    step: int | None = None
    """Step of the states that it has loaded since its last step."""


_LOADS = WeakIdKeyDictionary()
"""Optimizer -> its _Load."""


def fewest_steps(states: Mapping[int, Any]) -> int | None:
    """Return the least `step` of the states of some parameters; None if they have no such entry."""
    return min(counts_of_steps(states).values(), default=None)


def check_one_save(states: Mapping[int, Any], least: int | None, name: Any) -> None:
    """Raise CheckpointError for states of an earlier step than those that they were saved with.

    Later ones are of steps that plain PyTorch has taken since: their residuals begin anew. Nothing
    is known of what several processes have saved together: the entry of a group is that of one.

    Args:
        states: those of the parameters of a group, by position.
        least: what `fewest_steps` was of these when they were saved, if that is known.
        name: position -> what to call the parameter.
    """
    for index, count in () if _MERGED.get() else counts_of_steps(states).items():
        if least is not None and count < least:
            raise CheckpointError(
                f"the checkpoint was saved when all states of that group were of step {least} or "
                f"later; those of {name(index)} are of step {count}: they are from another one. "
                "To set `step` yourself, do so after loading"
            )


@contextlib.contextmanager
def loading_merged() -> Iterator[None]:
    """Load, within, state dicts in which there may be states of several processes."""
    token = _MERGED.set(True)
    try:
        yield
    finally:
        _MERGED.reset(token)


_MERGED: ContextVar[bool] = ContextVar("loading_merged", default=False)


def expect_loads(optimizer: Optimizer) -> None:
    """Number an optimizer with sharded parameters, by which other processes know it."""
    groups: list[tuple[Any, int]] = []
    with contextlib.suppress(RuntimeError):  # of a group without a store, which only tests have
        for group in _groups(optimizer):
            number = group.get_group_store().add(f"{PREFIX}optimizers.{group.rank()}", 1)
            groups.append((group, number))
    if groups:
        _LOADS[optimizer] = _Load(groups)


def note_load(optimizer: Optimizer, states: Mapping[int, Any], taken: int) -> None:
    """Note for the other processes of which step the states are that an optimizer loads.

    Args:
        optimizer: nothing is noted of one without sharded parameters.
        states: what is loaded, by position.
        taken: how many steps the optimizer had taken when it was saved, 0 if nobody knows.
    """
    load = _LOADS.get(optimizer)
    if load is not None:
        load.step = max(counts_of_steps(states).values(), default=taken)
        for group, number in load.groups:
            group.get_group_store().set(_key(number, group.rank()), str(load.step))


def check_loads(optimizer: Optimizer) -> None:
    """Raise CheckpointError before a step if another process has loaded states of another step."""
    load = _LOADS.get(optimizer)
    if load is None or not load.step:
        return
    for group, number in load.groups:
        steps = list(_noted(group, number))
        if any(step not in (0, load.step) for step in steps):
            raise CheckpointError(
                f"this process has loaded states of step {load.step}, and the processes that its "
                f"parameters are sharded over those of steps {steps}: load files of one step. "
                "Nothing has been done since they were loaded"
            )
    load.step = None
    for group, number in load.groups:  # not to be taken for the step of what is loaded next
        group.get_group_store().set(_key(number, group.rank()), "0")


def _noted(group: Any, number: int) -> Iterator[int]:
    """Yield the step that each process of a group has loaded, 0 if it has noted none."""
    store = group.get_group_store()
    for key in (_key(number, rank) for rank in range(group.size())):
        # The store of torch's fake group has all keys, and nothing in them.
        yield int(store.get(key) or 0) if store.check([key]) else 0


def _key(number: int, rank: int) -> str:
    return f"{PREFIX}loaded.{number}.{rank}"


def _groups(optimizer: Optimizer) -> Iterator[Any]:
    """Yield the process groups of the meshes of its parameters, with others than this process."""
    sharded: list[Any] = [p for p in params_of(optimizer) if is_sharded(p)]
    for mesh in {p.device_mesh: None for p in sharded}:
        if mesh.get_coordinate() is not None:
            groups = (mesh.get_group(dim) for dim in range(mesh.ndim))
            yield from (group for group in groups if group.size() > 1)


def counts_of_steps(states: Mapping[Any, Any]) -> dict[Any, int]:
    """Return parameter, as in states -> how many steps its state says that it has taken."""
    found = {}
    for index, state in states.items():
        step = state.get("step") if isinstance(state, Mapping) else None
        if isinstance(step, Tensor) and step.numel() == 1 and not step.is_meta:
            step = shard_of(step).item()
        if isinstance(step, int | float) and math.isfinite(step):
            found[index] = int(step)
    return found
