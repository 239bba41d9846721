"""Ownership of tensors: the optimizer that a tensor belongs to, and its name there."""

import functools
import gc
import inspect
import re
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from types import MethodType
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from collage_fx.optimizer.checkpoints.saved_residuals import is_entry
from collage_fx.passes.ir.program import Owner
from collage_fx.runtime.errors import Warn
from collage_fx.runtime.residuals.changes import changes_of
from collage_fx.runtime.residuals.dtensor import shard_of
from collage_fx.runtime.residuals.memory import has_memory, is_expanded, overlapping
from collage_fx.runtime.residuals.residual import Residual
from collage_fx.runtime.residuals.store import STORE
from collage_fx.runtime.storage.state_name import Named, StateName

PARAM = "<param>"
"""The key of a parameter itself among the carried states of that parameter."""
STAND_IN = "_collage_stand_in"
"""Attribute that marks a stand-in, which is no optimizer of the user; see `stand_in`."""


@dataclass(frozen=True)
class Owned(Named):
    """A tensor that a step may carry, with its place in the optimizer and its name."""

    tensor: Tensor
    """The tensor; for a sharded one, this process's shard."""
    group: int
    param: int
    """Position among all parameters, as in the optimizer's state_dict(); -1 for what belongs to no
    parameter."""
    key: str
    """PARAM, or the path of a state such as `exp_avg` or `history.0`."""
    state_name: StateName
    of_optimizer: bool = True
    sharded: Tensor | None = None
    """DTensor that tensor is this process's shard of, or tensor itself."""

    @property
    def whole(self) -> Tensor:
        """The tensor; of one that is sharded the whole."""
        return self.tensor if self.sharded is None else self.sharded

    @property
    def place(self) -> tuple[int, int, str]:
        """A key that stays the same when another tensor takes the place of a state."""
        return self.group, self.param, self.key

    @property
    def named(self) -> bool:
        """True for a parameter, one of its states, or an argument of a function."""
        return self.param >= 0 or not self.of_optimizer

    @property
    def owner(self) -> Owner:
        """Kind of owner: `param`, `state` of an optimizer, or `tensor` for neither."""
        if self.key == PARAM:
            return "param"
        return "state" if self.of_optimizer else "tensor"


def owned_parameters(optimizer: Optimizer) -> Iterator[Owned]:
    """Yield every parameter of the optimizer."""
    index = 0
    for g, group in enumerate(groups_of(optimizer)):
        for p, param in enumerate(group["params"]):
            own = StateName(None, f"param_groups[{g}].params[{p}]")
            yield Owned(shard_of(param), g, index, PARAM, own, sharded=param)
            index += 1


def owned_tensors(optimizer: Optimizer) -> Iterator[Owned]:
    """Yield every parameter of the optimizer and every tensor of its per-parameter states."""
    states = _states_of(optimizer)
    for param in owned_parameters(optimizer):
        yield param
        for key, tensor in tensors_in(states.get(param.whole, {})):
            own = StateName(key, param.state_name.parameter)
            yield Owned(shard_of(tensor), param.group, param.param, key, own, sharded=tensor)


def compensated_tensors(optimizer: Optimizer) -> Iterator[tuple[Owned, Residual]]:
    """Yield the tensors of an optimizer that have residuals, with these."""
    for owned in owned_tensors(optimizer):
        if (residual := STORE.get(owned.tensor)) is not None:
            yield owned, residual


def _states_of(optimizer: Optimizer) -> Any:
    """Return the states of an optimizer; none of one that wraps another, as `groups_of`."""
    return getattr(optimizer, "state", {})


def groups_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the groups; none of one that wraps another and never was an Optimizer."""
    groups: list[dict[str, Any]] = getattr(optimizer, "param_groups", [])
    return groups


def params_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of an optimizer; none of one that wraps another, as `groups_of`."""
    return [p for group in groups_of(optimizer) for p in group["params"]]


def params_within(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of an optimizer and of those that it wraps, for each that has them."""
    return [p for one in family(optimizer) for p in params_of(one)]


def bytes_by_kind(optimizer: Optimizer) -> dict[str, int]:
    """Return the bytes of parameters, of gradients, of each kind of state, and of changes."""
    found: dict[str, int] = {}
    for owned in owned_tensors(optimizer):
        kind = "parameters" if owned.key == PARAM else owned.key
        found[kind] = found.get(kind, 0) + owned.tensor.nbytes
    gradients = [shard_of(p.grad) for p in params_of(optimizer) if p.grad is not None]
    found["gradients"] = sum(map(_bytes_of, gradients))
    if noted := [c for p in params_of(optimizer) if (c := changes_of(shard_of(p))) is not None]:
        found["changes"] = sum(c.bits.nbytes for c in noted if c.bits is not None)
    return found


def _bytes_of(gradient: Tensor) -> int:
    if not gradient.is_sparse:
        return gradient.nbytes
    return gradient._indices().nbytes + gradient._values().nbytes


def all_tensors_of(optimizer: Optimizer) -> Iterator[Owned]:
    """Yield parameters and their states, and all tensors that the optimizer keeps elsewhere.

    That is in its parameter groups, under other keys of its state, in attributes, in models that
    these hold (averages of the weights), and in optimizers that it wraps. They are in no place that
    a checkpoint could name.
    """
    together = family(optimizer)
    params = {id(p) for one in together for p in params_of(one)}
    for n, one in enumerate(together):
        for owned in owned_tensors(one):
            yield owned if one is optimizer else replace(owned, group=1000 * n + owned.group)
        rest = [{k: v for k, v in g.items() if k != "params"} for g in groups_of(one)]
        elsewhere = {
            "state": {k: v for k, v in _states_of(one).items() if id(k) not in params},
            "param_groups": rest,
            **{k: v for k, v in vars(one).items() if k not in ("state", "param_groups")},
        }
        for path, tensor in tensors_in(elsewhere):
            if id(tensor) not in params:
                yield Owned(shard_of(tensor), n, -1, path, StateName(path, type(one).__name__))


def kept_elsewhere(optimizer: Optimizer) -> frozenset[int]:
    """Return id(tensor) of what an optimizer keeps that is no parameter, nor a state of one."""
    return frozenset(id(o.tensor) for o in all_tensors_of(optimizer) if o.param < 0)


def compensable(found: Iterable[Owned], held: Callable[[Owned], bool], warn: Warn) -> list[Owned]:
    """Return the states that `held` picks, each piece of memory once; warn of overlapping ones."""
    seen: set[Any] = set()
    low = []
    for owned in found:
        tensor = owned.tensor
        if has_memory(tensor) and held(owned):
            where = tensor.data_ptr(), tensor.shape, tensor.stride()
            if id(tensor) not in seen and (where not in seen or not tensor.numel()):
                seen.update((id(tensor), where))
                low.append(owned)
    named = {o.tensor.untyped_storage()._cdata for o in low if o.named}
    # What an optimizer keeps elsewhere may be views of its parameters.
    low = [o for o in low if o.named or o.tensor.untyped_storage()._cdata not in named]
    shared = overlapping(o.tensor for o in low)
    shared |= {id(o.tensor) for o in low if is_expanded(o.tensor)}
    if shared:
        names = ", ".join(o.name for o in low if id(o.tensor) in shared)
        warn(
            "overlap",
            f"not compensated: {names} overlap in memory, one another or (if expanded) themselves; "
            "give each memory of its own, by .clone()",
        )
    return [o for o in low if id(o.tensor) not in shared]


def family(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizer and those that it wraps, or whose steps it keeps."""
    found = [optimizer]
    for one in found:
        for value in vars(one).values():
            for kept in value if isinstance(value, list | tuple) else [value]:
                if type(kept) is not MethodType and not issubclass(type(kept), Optimizer):
                    continue
                inner = _behind(kept)
                known = any(inner is one for one in found)
                if issubclass(type(inner), Optimizer) and not known:
                    found.append(inner)
    return found


def _behind(kept: Any) -> Any:
    """Return the object of a method, such as an optimizer's step; anything else as it is."""
    return kept.__self__ if type(kept) is MethodType else kept


def state_count(optimizer: Optimizer) -> int:
    """Return a number that changes when the optimizer makes a state."""
    return sum(
        len(state)
        for one in family(optimizer)
        for state in _states_of(one).values()
        if isinstance(state, dict)
    )


def identities(optimizer: Optimizer) -> list[int]:
    """Return the ids of parameters, and of the states beside them that are no single numbers."""
    found: list[int] = []
    for one in family(optimizer):
        states = [state for state in _states_of(one).values() if isinstance(state, dict)]
        values = [v for state in states for v in state.values() if isinstance(v, Tensor)]
        found += map(id, [*params_of(one), *[t for t in values if t.dim()]])
    return found


def stateless(optimizer: Optimizer) -> set[int]:
    """Return the ids of the parameters with a gradient that have no state of their size."""
    found = set()
    for one in family(optimizer):
        states = _states_of(one)
        for p in (p for p in params_of(one) if p.grad is not None):
            if not any(t.shape == p.shape for _, t in tensors_in(states.get(p, {}))):
                found.add(id(p))
    return found


def rates(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the numbers of each parameter group, such as `lr` and `betas`."""
    return [{k: v for k, v in g.items() if _is_number(v)} for g in groups_of(optimizer)]


def _is_number(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(_is_number(v) for v in value)
    return isinstance(value, int | float)


def argument_tensors(
    names: list[str], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[Owned]:
    """Yield every tensor among the arguments of a function whose parameters have these names."""
    named = {names[i] if i < len(names) else f"args[{i}]": a for i, a in enumerate(args)}
    yield from _of_optimizers({**named, **kwargs})
    found = tensors_in({**named, **kwargs})
    yield from _given((key, re.sub(r"\.(\d+)", r"[\1]", key), t) for key, t in found)


def _given(tensors: Iterable[tuple[str, str, Tensor]]) -> Iterator[Owned]:
    """Yield tensors that a function is given, or refers to; each comes with a key and a name.

    For `p.data`, a view of it or what `model.state_dict()` has that is p, if p has a residual.
    """
    given = list(tensors)
    known = STORE.aliases.of([shard_of(t) for _, _, t in given])
    for (key, name, tensor), found in zip(given, known, strict=True):
        is_param = owner_of(tensor) == "param"
        for n, t in enumerate(found):
            at = f"[{n}]" if len(found) > 1 else ""
            state = StateName(name + at)
            if is_param or owner_of(t) == "param":
                state = StateName(None, name + at)
            yield Owned(t, 0, -1, key + at, state, of_optimizer=False)


def without_arguments(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that functools.partial was given."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def tensors_of_callable(function: Callable[..., Any]) -> Iterator[Owned]:
    """Yield the tensors of what a function refers to, and of the object whose method it is.

    Of a model they are its parameters: `AveragedModel.update_parameters` updates these. Of
    functools.partial also those that it passes on.
    """
    given: dict[str, Any] = {}
    while isinstance(function, functools.partial):
        given.update({f"args[{i}]": a for i, a in enumerate(function.args)}, **function.keywords)
        function = function.func
    owner = getattr(function, "__self__", None if inspect.isroutine(function) else function)
    if isinstance(owner, Optimizer | Module):
        given["self"] = owner
    else:
        given.update(getattr(owner, "__dict__", {}))
    given.update(_referred_to(function))
    yield from _of_optimizers(given)
    named = ((path.removeprefix("self."), t) for path, t in tensors_in(given))
    yield from _given((name, name, t) for name, t in named)


def _referred_to(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the variables around a function, and the tensors, models and optimizers it names."""
    function = inspect.unwrap(getattr(function, "__func__", function))
    code = getattr(function, "__code__", None)
    if code is None:
        return {}
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    found = {name: cell.cell_contents for name, cell in cells if cell != types.CellType()}
    there = {n: function.__globals__[n] for n in code.co_names if n in function.__globals__}
    states = Tensor | Module | Optimizer | MethodType | list | dict
    return found | {name: value for name, value in there.items() if isinstance(value, states)}


def _of_optimizers(tree: Any) -> Iterator[Owned]:
    """Yield the tensors of optimizers in a tree of containers."""
    leaves = (_behind(leaf) for _, leaf in _leaves(tree))
    found = (leaf for leaf in leaves if issubclass(type(leaf), Optimizer))
    for one in {id(leaf): leaf for leaf in found}.values():
        yield from all_tensors_of(one)


def tensors_in(tree: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield (dotted path, tensor) for each tensor in nested containers, of a model parameters."""
    return ((where, leaf) for where, leaf in _leaves(tree, path) if isinstance(leaf, Tensor))


_PLAIN = frozenset({float, int, bool, str, type(None)})
"""Types of most of what is in the groups of an optimizer, and is no tensor."""


def _leaves(tree: Any, path: str = "", within: tuple[int, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield (dotted path, what is there) for all that is no container, and no number or text."""
    if isinstance(tree, Tensor):
        yield path, tree
    elif isinstance(tree, Module):
        yield from _leaves(dict(tree.named_parameters()), path)
    elif is_dataclass(tree) and not isinstance(tree, type):
        if id(tree) not in within:  # it may refer to what it is part of
            known = {f.name: getattr(tree, f.name, None) for f in fields(tree)}
            yield from _leaves(known, path, (*within, id(tree)))
    elif isinstance(tree, dict):
        before = f"{path}." if path else ""
        for i, (key, value) in enumerate(tree.items()):
            # An entry is what a checkpoint has put among the states.
            if type(value) not in _PLAIN and not is_entry(key):
                # The text of a tensor has its values, and takes longer than a step.
                name = i if isinstance(key, Tensor | Module) else key
                yield from _leaves(value, f"{before}{name}", within)
    elif isinstance(tree, list | tuple | deque):
        before = f"{path}." if path else ""
        for i, value in enumerate(tree):
            if type(value) not in _PLAIN:
                yield from _leaves(value, f"{before}{i}", within)
    else:
        yield path, tree


def live_optimizers() -> list[Optimizer]:
    """Return every optimizer of this process.

    PyTorch keeps no list of them, and the optimizer whose step is being compiled is not handed to a
    backend; the garbage collector knows all of them.
    """
    # type() and not isinstance(): proxies run code of their own when asked for their __class__.
    found = [o for o in gc.get_objects() if issubclass(type(o), Optimizer)]
    return [o for o in found if STAND_IN not in vars(o)]


def owners_of(optimizers: Iterable[Optimizer]) -> dict[int, tuple[Optimizer, Owned]]:
    """Return id(tensor) -> its optimizer and place, of two optimizers the first."""
    found: dict[int, tuple[Optimizer, Owned]] = {}
    for optimizer in optimizers:
        for owned in owned_tensors(optimizer):
            found.setdefault(id(owned.tensor), (optimizer, owned))
    return found


def owner_of(tensor: Any) -> Owner:
    """Return the kind of a tensor that no optimizer owns, by the looks of it."""
    is_leaf = isinstance(tensor, Tensor) and tensor.requires_grad and tensor.is_leaf
    return "param" if is_leaf else "tensor"


def is_buffer(source: str) -> bool:
    """Return True if a source is a module's buffer: L['model']._modules['bn']._buffers['mean']."""
    return "._buffers[" in source


def source_name(source: Any) -> str:
    """Return Dynamo's name of where an input of a graph comes from; empty for None."""
    name = getattr(source, "name", "")
    return name() if callable(name) else str(name)


def pretty(source: str) -> str:
    """Return `params[0]` for Dynamo's `L['params'][0]`, `model.bn.weight` for a module's."""
    text = re.sub(r"^L\['(\w+)'\]", r"\1", source)
    text = re.sub(r"\['(\w+)'\]", r".\1", text)
    text = re.sub(r"\._(modules|buffers|parameters)\b", "", text)
    return text.removeprefix("self.")
