"""Models and optimizers in a checkpoint, found by their form, under any keys."""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from collage_fx.errors import CheckpointError

Path = tuple[Any, ...]
"""Keys and positions from the whole of a checkpoint to a part of it."""
DROPPED = object()
"""Value that takes an entry out."""
_STATE, _GROUPS = "state", "param_groups"
_META = "param_to_group_meta"
"""The key that Megatron's FSDP has in the place of groups: a dict for each parameter, by name."""


@dataclass
class SavedOptimizer:
    """The state dict of an optimizer, as it stands in a checkpoint."""

    path: Path
    groups: list[dict[str, Any]]
    states: dict[Any, dict[Any, Any]]
    """Id of a parameter, as in the groups -> its state."""
    around: Mapping[Any, Any] = field(default_factory=dict)
    """The dict that it is an entry of."""
    flat: bool = False
    """True if it has one dict for all, whose keys are joined by dots."""

    @property
    def ids(self) -> list[Any]:
        """The ids of its parameters, in order."""
        return [name for group in self.groups for name in group["params"]]

    def group_of(self, index: int) -> int:
        """Return the number of the group with the parameter at a position of `ids`."""
        for number, group in enumerate(self.groups):
            index -= len(group["params"])
            if index < 0:
                return number
        raise IndexError(index)

    def tree(self) -> dict[str, Any]:
        """Return the state dict in the form that it had."""
        if not self.flat:
            return {_STATE: self.states, _GROUPS: self.groups}
        found: dict[str, Any] = {}
        for name, state in self.states.items():
            found.update({f"{_STATE}.{name}.{key}": value for key, value in state.items()})
        for group in self.groups:
            (name,) = group["params"]
            rest = {k: v for k, v in group.items() if k != "params"}
            found.update({f"{_GROUPS}.{name}.{key}": value for key, value in rest.items()})
        return found


@dataclass
class Parts:
    """Parts of a checkpoint that were found."""

    models: dict[Path, dict[str, Tensor]] = field(default_factory=dict)
    """Dicts with tensors by name, each where it stands."""
    optimizers: list[SavedOptimizer] = field(default_factory=list)
    keys: set[str] = field(default_factory=set)
    """All names of entries outside of states, by which formats are told that cannot be read."""


def parts_of(tree: Any) -> Parts:
    """Return the models and optimizers in a checkpoint.

    A dict with `state` and `param_groups` is an optimizer's, as is one with keys such as
    `state.weight.exp_avg`; a dict from names to tensors is a model's.
    """
    parts, flat = Parts(), []
    for path, node, around in _dicts(tree, (), {}):
        if _is_optimizer(node):
            parts.optimizers.append(_nested(path, node, around))
            continue
        if _is_flat(node):
            flat.append((path, node, around))
            continue
        parts.keys |= {key for key in node if isinstance(key, str)}
        tensors = {k: v for k, v in node.items() if isinstance(k, str) and isinstance(v, Tensor)}
        if tensors:
            parts.models[path] = tensors
    names = {name for tensors in parts.models.values() for name in tensors}
    parts.optimizers += [_flat(path, node, around, names) for path, node, around in flat]
    return parts


def _dicts(
    node: Any, path: Path, around: Mapping[Any, Any]
) -> Iterator[tuple[Path, Mapping[Any, Any], Mapping[Any, Any]]]:
    """Yield all dicts, with where they are and the dict around, but none within optimizers."""
    if isinstance(node, Mapping):
        yield path, node, around
        if not _is_optimizer(node) and not _is_flat(node):
            for key, value in node.items():
                yield from _dicts(value, (*path, key), node)
    elif isinstance(node, list | tuple):
        for position, value in enumerate(node):
            yield from _dicts(value, (*path, position), around)


def _is_optimizer(node: Mapping[Any, Any]) -> bool:
    groups = node.get(_GROUPS)
    found = isinstance(node.get(_STATE), Mapping) and isinstance(groups, list | tuple)
    if isinstance(node.get(_STATE), Mapping) and isinstance(node.get(_META), Mapping):
        return True
    return found and all(isinstance(g, Mapping) and "params" in g for g in groups or ())


def _is_flat(node: Mapping[Any, Any]) -> bool:
    """Return True for a dict with `state.<name>.<key>`, and nothing but that and groups."""
    names = [key for key in node if isinstance(key, str)]
    states = [name for name in names if name.startswith(f"{_STATE}.") and name.count(".") > 1]
    return bool(states) and all(name.startswith((f"{_STATE}.", f"{_GROUPS}.")) for name in names)


def _nested(path: Path, node: Mapping[Any, Any], around: Mapping[Any, Any]) -> SavedOptimizer:
    groups = [dict(group) for group in node.get(_GROUPS) or _groups_of(node[_META])]
    known = node[_STATE]
    states: dict[Any, dict[Any, Any]] = {}
    for name in (name for group in groups for name in group["params"]):
        # DCP has made texts of the numbers.
        state = known.get(name, known.get(str(name)))
        if isinstance(state, Mapping):
            states[name] = dict(state)
    ids = {str(name) for group in groups for name in group["params"]}
    if unknown := [name for name in known if str(name) not in ids]:
        raise CheckpointError(
            f"the states of {_words(path)} have {unknown[0]!r}, which no parameter group has"
        )
    return SavedOptimizer(path, groups, states, around)


def _groups_of(meta: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the groups of parameters that have the same settings."""
    groups: list[dict[str, Any]] = []
    for name, own in meta.items():
        alike = (g for g in groups if {k: v for k, v in g.items() if k != "params"} == dict(own))
        group = next(alike, None)
        if group is None:
            groups.append(group := {**own, "params": []})
        group["params"].append(name)
    return groups


def _flat(
    path: Path, node: Mapping[Any, Any], around: Mapping[Any, Any], names: set[str]
) -> SavedOptimizer:
    """Return an optimizer whose keys are joined by dots, taken apart by the names of a model."""
    groups: dict[str, dict[str, Any]] = {}
    states: dict[str, dict[str, Any]] = {}
    for whole, value in node.items():
        kind, _, rest = whole.partition(".")
        name = max((n for n in _heads(rest) if n in names), key=len, default=None)
        if name is None:
            raise CheckpointError(
                f"{whole!r} of {_words(path)} is of no parameter that a model there has: states "
                "are to be named after these"
            )
        groups.setdefault(name, {"params": [name]})
        target = groups[name] if kind == _GROUPS else states.setdefault(name, {})
        target[rest.removeprefix(f"{name}.")] = value
    return SavedOptimizer(path, list(groups.values()), dict(states), around, flat=True)


def _heads(text: str) -> Iterator[str]:
    """Yield what stands before each dot."""
    parts = text.split(".")
    return (".".join(parts[:k]) for k in range(1, len(parts)))


def _words(path: Path) -> str:
    return ".".join(map(str, path)) or "the checkpoint"


def replaced(node: Any, changes: Mapping[Path, Any], path: Path = ()) -> Any:
    """Return a tree with other values at some paths; what holds them is copied, and no tensor.

    Args:
        node: the tree.
        changes: path -> the value that stands there, or DROPPED.
        path: of `node`.
    """
    if path in changes:
        return changes[path]
    if isinstance(node, Mapping):
        new: Any = copy.copy(node)  # an OrderedDict of a model has attributes beside its entries
        for key in list(node):
            value = replaced(node[key], changes, (*path, key))
            if value is DROPPED:
                del new[key]
            else:
                new[key] = value
        return new
    if isinstance(node, list | tuple):
        items = [replaced(value, changes, (*path, k)) for k, value in enumerate(node)]
        return items if isinstance(node, list) else tuple(items)
    return node
