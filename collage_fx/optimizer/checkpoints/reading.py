"""What a state dict says of residuals: the entry of parameter groups, and both formats read."""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from collage_fx.optimizer.checkpoints.agreement import check_one_save, fewest_steps
from collage_fx.optimizer.checkpoints.history import History, history_of
from collage_fx.optimizer.checkpoints.saved_residuals import SavedResidual, is_entry, read_entries
from collage_fx.optimizer.ownership import PARAM, tensors_in
from collage_fx.runtime.errors import CheckpointError, ResidualError
from collage_fx.runtime.residuals.components import check_components
from collage_fx.runtime.residuals.dtensor import shard_of

ENTRY = "collage_fx"
FORMAT = 2
_LEAST = "least_step"
_NEEDS = "0.1"
"""The first version of collage_fx that reads this format."""


@dataclass
class Loaded:
    """What a state dict says of residuals."""

    residuals: dict[tuple[int, str], SavedResidual] = field(default_factory=dict)
    """(position of the parameter among all, key of the tensor) -> its residual."""
    history: History = field(default_factory=History)
    lost: bool = False
    """Whether there were residuals when it was saved, of which none has come here."""
    states: dict[int, Any] = field(default_factory=dict)
    """Position -> the state as it was saved, of which PyTorch casts what has another dtype than the
    parameter."""
    dtypes: dict[str, str] = field(default_factory=dict)
    """Key of states that it casts -> the dtype that they were saved in."""


def entry_of_group(optimizer: Optimizer, params: Sequence[Any], *, holds: bool) -> str:
    """Return the entry of a parameter group.

    Args:
        optimizer: which is saved.
        params: those of the group whose states are all there.
        holds: whether it has residuals.
    """
    dtypes = {
        key: str(value.dtype).removeprefix("torch.")
        for param, state in optimizer.state.items()
        if isinstance(param, Tensor) and isinstance(state, dict)
        for key, value in state.items()
        if isinstance(value, Tensor) and value.dtype != param.dtype
        if key != "step" and not is_entry(key)
    }
    states = {i: optimizer.state[p] for i, p in enumerate(params) if p in optimizer.state}
    about = {"format": FORMAT, "needs": _NEEDS, "holds": holds, "dtypes": dtypes}
    about[_LEAST] = fewest_steps(states)
    return json.dumps({**about, **dataclasses.asdict(history_of(optimizer))})


def read_residuals(
    states: dict[int, Any],
    groups: list[dict[str, Any]],
    params: list[Tensor],
    others: Sequence[Any] = (),
) -> Loaded | None:
    """Return what states and groups of a checkpoint say of residuals; None if nothing.

    Args:
        states: by position of their parameters.
        groups: the parameter groups.
        params: the parameters.
        others: entries of other groups.

    Raises CheckpointError for another format, and for residuals that do not fit.
    """
    payloads = [*others, *(payload for group in groups if (payload := group.get(ENTRY)))]
    loaded = Loaded(states=states)
    for index, state in states.items():
        for key, residual in read_entries(state).items():
            loaded.residuals[index, key] = residual
    if not payloads and not loaded.residuals:
        return None
    for payload in payloads:
        about = _payload(payload)
        loaded.lost |= about.get("holds", False)
        loaded.dtypes.update(about.get("dtypes", {}))
        known = {f.name for f in dataclasses.fields(History)} & about.keys()
        loaded.history = History(**{name: about[name] for name in known})
        for index, by_key in about.get("residuals", {}).items():
            loaded.residuals.update({(index, k): _of_format_1(e) for k, e in by_key.items()})
    loaded.lost &= not loaded.residuals
    _check_one_save(states, groups)
    for (index, key), residual in loaded.residuals.items():
        _check_fit(index, key, residual, params, states, groups)
    return loaded


def _check_one_save(states: dict[int, Any], groups: list[dict[str, Any]]) -> None:
    first = 0
    for group in groups:
        positions = range(first, first + len(group["params"]))
        if group.get(ENTRY):
            inside = {index: states[index] for index in positions if index in states}
            check_one_save(inside, _payload(group[ENTRY]).get(_LEAST), lambda i: _name(i, groups))
        first = positions.stop


def _payload(payload: Any) -> dict[str, Any]:
    """Return the entry of a group read; raises CheckpointError for what is of no known format."""
    try:
        about = json.loads(payload) if isinstance(payload, str) else dict(payload)
        known, needs = about["format"] in (1, FORMAT), about.get("needs", "a newer version")
        if known and not _well_formed(about):
            raise ValueError
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f"the checkpoint's entry {ENTRY!r} of a parameter group cannot be read: {payload!r:.80}"
        ) from error
    if not known:
        raise CheckpointError(
            f"the checkpoint's residuals have format {about['format']}; this collage_fx reads "
            f"formats 1 and {FORMAT}. collage_fx {needs} reads it: update"
        )
    return about


def _well_formed(about: dict[str, Any]) -> bool:
    """Tell whether what stands in an entry is of the kinds that it is read as."""
    numbers, recorded = about.get("numbers", {}), about.get("recorded") or []
    lists = (about.get("began") or [], recorded, *recorded)
    words = ({"storage", "components", "checksum"}, about.get("residuals", {}).values())
    return (
        isinstance(about.get("taken", 0), int)
        and isinstance(about.get("traced", False), bool)
        and isinstance(about.get(_LEAST), int | None)
        and all(isinstance(one, dict) for one in (numbers, about.get("dtypes", {})))
        and all(isinstance(n, int | float | None) for n in numbers.values())
        and all(isinstance(one, list) for one in lists)
        and all(words[0] <= entry.keys() for by_key in words[1] for entry in by_key.values())
    )


def _of_format_1(entry: dict[str, Any]) -> SavedResidual:
    components = dict(enumerate(entry["components"]))
    return SavedResidual(
        entry["storage"], components, total=entry["checksum"], draws=entry.get("draws", 0)
    )


@contextmanager
def fitting() -> Iterator[None]:
    """Raise CheckpointError for residuals that do not fit."""
    try:
        yield
    except ResidualError as error:
        raise CheckpointError(f"the checkpoint does not fit this optimizer: {error}") from error


def _check_fit(
    index: int,
    key: str,
    residual: SavedResidual,
    params: list[Tensor],
    states: dict[int, Any],
    groups: list[dict[str, Any]],
) -> None:
    param = _name(index, groups)
    name = param if key == PARAM else f"{key} of {param}"
    owner = params[index] if key == PARAM and index < len(params) else None
    for path, tensor in tensors_in(states.get(index, {})):
        owner = tensor if path == key else owner
    if owner is None or index >= len(params):
        raise CheckpointError(f"the checkpoint has a residual for {name}, which does not exist")
    shard = shard_of(owner)
    with fitting():
        parts = residual.parts(shard.dtype, params[index].dtype)
        check_components(shard, parts, residual.storage, name)


def _name(index: int, groups: list[dict[str, Any]]) -> str:
    """Return what to call a parameter: the name that it has there, if it has one."""
    names: list[Any] = []
    for group in groups:
        names += group.get("param_names", group["params"])
    known = index < len(names) and isinstance(names[index], str)
    return f"parameter {names[index] if known else index}"
