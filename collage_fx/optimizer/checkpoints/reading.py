"""Reading of residuals in a state dict: the entry of parameter groups, and both formats."""

import dataclasses
import functools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from collage_fx.optimizer.checkpoints.agreement import check_one_save, fewest_steps
from collage_fx.optimizer.checkpoints.history import History, history_of
from collage_fx.optimizer.checkpoints.saved_residuals import SavedResidual, read_entries
from collage_fx.optimizer.ownership import PARAM, tensors_in
from collage_fx.passes.ir.program import LOW_PRECISION
from collage_fx.runtime.errors import CheckpointError, ResidualError
from collage_fx.runtime.residuals.dtensor import shard_of
from collage_fx.runtime.storage.components import check_components
from collage_fx.runtime.storage.registry import value_in_float64
from collage_fx.runtime.storage.state_name import StateName

ENTRY = "collage_fx"
FORMAT = 2
_LEAST = "least_step"
_NEEDS = "0.2"
"""The first version of collage_fx that reads this format."""


@dataclass
class Loaded:
    """Residuals, history and dtypes read from a state dict."""

    residuals: dict[tuple[int, str], SavedResidual] = field(default_factory=dict)
    """(position of the parameter among all, key of the tensor) -> its residual."""
    history: History = field(default_factory=History)
    lost: bool = False
    """True if there were residuals when it was saved, of which none has come here."""
    states: dict[int, Any] = field(default_factory=dict)
    """Position -> the state as it was saved, of which PyTorch casts what has another dtype than the
    parameter."""
    dtypes: dict[str, str] = field(default_factory=dict)
    """Key of states that had another dtype than their parameter -> that dtype."""
    values: dict[tuple[int, str], Callable[[], Tensor]] = field(default_factory=dict)
    """Keys as of residuals -> function that returns the state's value, where dtypes differ."""
    cast: dict[str, tuple[torch.dtype, torch.dtype]] = field(default_factory=dict)
    """Key of states that get another dtype than they were saved in -> the two."""
    dropped: list[str] = field(default_factory=list)
    """The names of residuals that were cast with what they belong to, and are of no use."""

    def dtype_of(self, key: str, saved: Tensor, param: Tensor) -> torch.dtype:
        """Return the dtype that a state gets: the one that it had beside its parameter."""
        if key == "step" or not param.is_floating_point() or saved.dtype == param.dtype:
            return saved.dtype
        return dtype_named(self.dtypes[key]) if key in self.dtypes else param.dtype


def dtype_named(name: Any) -> torch.dtype:
    """Return the dtype of a name such as `bfloat16`; raises ValueError if there is none."""
    found = getattr(torch, str(name), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is no dtype")
    return found


def entry_of_group(optimizer: Optimizer, params: Sequence[Any], *, holds: bool) -> str:
    """Return the entry of a parameter group.

    Args:
        optimizer: which is saved.
        params: those of the group whose states are all there.
        holds: whether it has residuals.
    """
    dtypes = _other_dtypes(
        (state, param) for param, state in optimizer.state.items() if isinstance(param, Tensor)
    )
    states = {i: optimizer.state[p] for i, p in enumerate(params) if p in optimizer.state}
    about = {"format": FORMAT, "needs": _NEEDS, "holds": holds, "dtypes": dtypes}
    about[_LEAST] = fewest_steps(states)
    return json.dumps({**about, **dataclasses.asdict(history_of(optimizer))})


def _other_dtypes(states: Iterable[tuple[Any, Tensor]]) -> dict[str, str]:
    """Return the dtypes of states that are not those of their parameters, by their keys."""
    return {
        key: str(value.dtype).removeprefix("torch.")
        for state, param in states
        for key, value in tensors_in(state)
        if key != "step" and value.dtype != param.dtype
    }


def read_residuals(
    states: dict[int, Any],
    groups: list[dict[str, Any]],
    params: list[Tensor],
    others: Sequence[Any] = (),
    *,
    cast: bool = True,
) -> Loaded | None:
    """Return the residuals in states and groups of a checkpoint; None if there are none.

    Args:
        states: by position of their parameters.
        groups: the parameter groups.
        params: the parameters.
        others: entries of other groups.
        cast: whether the states have the dtypes that PyTorch gives them, and not yet those that
            they were saved in.

    Raises CheckpointError for another format, and for residuals that do not fit.
    """
    payloads = [*others, *(payload for group in groups if (payload := group.get(ENTRY)))]
    loaded = Loaded(states=states)
    for index, state in states.items():
        dtype = params[index].dtype if index < len(params) else torch.float32
        for key, residual in read_entries(state, dtype).items():
            loaded.residuals[index, key] = residual
    if not payloads and not loaded.residuals:
        return None
    for payload in payloads:
        about = _payload(payload)
        loaded.lost |= about.get("holds", False)
        pairs = ((states[i], p) for i, p in enumerate(params) if i in states)
        loaded.dtypes.update(about["dtypes"] if "dtypes" in about else _other_dtypes(pairs))
        known = {f.name for f in dataclasses.fields(History)} & about.keys()
        loaded.history = History(**{name: about[name] for name in known})
        for index, by_key in about.get("residuals", {}).items():
            loaded.residuals.update({(index, k): _of_format_1(e) for k, e in by_key.items()})
    loaded.lost &= not loaded.residuals
    _check_one_save(states, groups)
    for index, key in list(loaded.residuals):
        _check_fit(loaded, (index, key), params, groups, cast=cast)
    return loaded


def note_casts(loaded: Loaded, params: list[Tensor]) -> None:
    """Note the states that PyTorch will give another dtype, and keep what that would round off."""
    for index, param in enumerate(params):
        for key, saved in tensors_in(loaded.states.get(index, {})):
            dtype = loaded.dtype_of(key, saved, param)
            if dtype == saved.dtype or not saved.is_floating_point():
                continue
            loaded.cast[key] = saved.dtype, dtype
            known = {(index, key)} & (loaded.residuals.keys() | loaded.values.keys())
            if dtype in LOW_PRECISION and saved.itemsize > dtype.itemsize and not known:
                loaded.values[index, key] = functools.partial(shard_of, saved)


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
    """Return True if what stands in an entry is of the kinds that it is read as."""
    numbers, recorded = about.get("numbers", {}), about.get("recorded") or []
    lists = (about.get("began") or [], recorded, *recorded)
    words = ({"storage", "components", "checksum"}, about.get("residuals", {}).values())
    return (
        isinstance(about.get("taken", 0), int)
        and all(map(dtype_named, about.get("dtypes", {}).values()))
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
    loaded: Loaded,
    place: tuple[int, str],
    params: list[Tensor],
    groups: list[dict[str, Any]],
    *,
    cast: bool,
) -> None:
    """Raise CheckpointError unless a residual fits the tensor that it is for.

    Of a state that gets another dtype than it was saved in it becomes a part of the value; it is
    dropped where that cannot be told.
    """
    index, key = place
    residual, name = loaded.residuals[place], _name(index, groups)
    known = index < len(params)
    states = dict(tensors_in(loaded.states.get(index, {}))) if known else {}
    owner = params[index] if known and key == PARAM else states.get(key)
    name = str(StateName(None if key == PARAM else key, name))
    if owner is None:
        raise CheckpointError(f"the checkpoint has a residual for {name}, which does not exist")
    param, saved = params[index], shard_of(owner)
    kept = cast or key == PARAM
    dtype = saved.dtype if kept else loaded.dtype_of(key, saved, param)
    change = not cast and any(loaded.dtype_of(k, s, param) != s.dtype for k, s in states.items())
    try:
        _check_parts(residual, saved, dtype, param.dtype, name)
    except ResidualError as error:
        if not (change and residual.was_cast(saved.shape)):
            raise CheckpointError(f"the checkpoint does not fit this optimizer: {error}") from error
        del loaded.residuals[place]
        try:
            _check_parts(residual, saved, saved.dtype, saved.dtype, name)
            loaded.values[place] = functools.partial(_whole, residual, saved)
        except ResidualError:
            loaded.dropped.append(name)


def _check_parts(
    residual: SavedResidual, saved: Tensor, dtype: torch.dtype, param: torch.dtype, name: str
) -> None:
    """Raise ResidualError unless a tensor of a dtype can have a residual.

    Args:
        residual: that one.
        saved: of the shape of the tensor.
        dtype: that of the tensor.
        param: that of its parameter.
        name: what to call it.
    """
    like = torch.empty(saved.shape, dtype=dtype, device="meta")
    check_components(like, residual.parts(dtype, param), residual.storage, name)


def _whole(residual: SavedResidual, saved: Tensor) -> Tensor:
    return value_in_float64(residual.storage, saved, residual.parts(saved.dtype, saved.dtype))


def _name(index: int, groups: list[dict[str, Any]]) -> str:
    """Return the name of a parameter: the one that it has there, or its index."""
    names: list[Any] = []
    for group in groups:
        names += group.get("param_names", group["params"])
    known = index < len(names) and isinstance(names[index], str)
    return f"parameter {names[index] if known else index}"
