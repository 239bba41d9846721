"""Patches of Dynamo that guard and notice what it forgets, in what it traces for our backend.

What each of these is for is in docs/stock-defects.md.
"""

import functools
import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from functools import partial, wraps
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from collage_fx.optimizer.discovery import init_of_torch
from collage_fx.runtime.errors import WarningName, warn
from collage_fx.runtime.torch_private import DTENSOR_SPEC_MATCH as _guard_shard
from collage_fx.runtime.torch_private import (
    ArgMappingException,
    GuardBuilder,
    InstructionTranslator,
    OptimizerSource,
    OptimizerVariable,
    SideEffects,
    TensorVariable,
    TracingContext,
    WrapperUserFunctionVariable,
    is_missing,
    traces,
)
from collage_fx.runtime.torch_private import call_obj_hasattr as _has
from collage_fx.runtime.torch_private import call_wrapped as _call
from collage_fx.runtime.torch_private import get_python_args as _args
from collage_fx.runtime.torch_private import make_dupe_guard as _make_dupe_guard
from collage_fx.runtime.torch_private import map_sources_and_install_guards as _guard_most
from collage_fx.runtime.torch_private import store_attr as _store
from collage_fx.runtime.torch_private import track_mutable as _track
from collage_fx.runtime.torch_private import variable_builder as builder

_BUILDER: Any = builder
_EFFECTS: Any = SideEffects
_TENSOR: Any = TensorVariable
_OPTIMIZER: Any = OptimizerVariable
_GUARDS: Any = GuardBuilder
_WRAPPED: Any = WrapperUserFunctionVariable
_OTHER_NAME = (
    "the step asks a tensor for its attribute {0}, or assigns it, by the result of an operation in "
    "place, of which torch.compile knows no attributes. Use the tensor itself, or keep what "
    "belongs to it in self.state"
)


_GETTER = next((n for n in ("var_getattr", "tp_getattro_impl") if n in vars(_TENSOR)), "")
"""Name of the method that traces an attribute of a tensor: the second is that of torch 2.14."""
_getter: Any = getattr(_TENSOR, _GETTER, None)


class Traces:
    """The backend of the string, and the warnings that were given."""

    backend: Any = None
    """`backend="collage"`, once torch.compile has looked it up."""
    warned: set[str] = set()  # noqa: RUF012 - one watch per process
    warned_of = WeakIdKeyDictionary()
    """Optimizer -> the warnings that name it."""


def warn_once(name: WarningName, message: str, optimizer: Optimizer | None = None) -> None:
    """Warn unless the same was said before, of that optimizer if it is known which."""
    said = Traces.warned if optimizer is None else Traces.warned_of.setdefault(optimizer, set())
    if message not in said:
        said.add(message)
        warn(name, message, stacklevel=2)


def watch_traces() -> None:
    """Have Dynamo miss nothing of the optimizers in what it traces for our backend. Idempotent.

    The sizes of DTensors it guards in all that it traces from then on.
    """
    if not traces():
        return
    _BUILDER.make_dupe_guard = _guard_of_two_names
    _EFFECTS.store_attr = _store_attr
    _EFFECTS.track_mutable = _track_mutable
    _TENSOR.call_obj_hasattr = _has_attr
    _OPTIMIZER.map_sources_and_install_guards = _guard_states
    _OPTIMIZER.get_python_args = _python_args
    _GUARDS.DTENSOR_SPEC_MATCH = _guard_whole
    _WRAPPED.call_function = _call_wrapped
    if _GETTER:
        setattr(_TENSOR, _GETTER, _get_attr)


def _traced_for() -> Any:
    """Return our backend, or the session of a step, if Dynamo traces for it now."""
    backend = getattr(tracer().output.compiler_fn, "compiler_fn", None)
    return backend if backend is Traces.backend or hasattr(backend, "refuse_each") else None


def _store_attr(effects: SideEffects, item: Any, name: str, *args: Any, **kwargs: Any) -> None:
    """Note an assignment to an attribute; refuse one that Dynamo does not write back.

    That is one to an attribute of an optimizer, of which it keeps no track, and one to an attribute
    of a tensor by the result of an operation in place. See docs/stock-defects.md.
    """
    _store(effects, item, name, *args, **kwargs)
    if _is_result_in_place(item):
        _refuse(_OTHER_NAME.format(name))
    elif isinstance(item, OptimizerVariable) and item.value not in effects:
        _refuse(
            f"the step assigns self.{name}, which torch.compile does to no optimizer: the "
            "assignment would be lost. Keep what changes in self.state or in self.param_groups, or "
            "in a list or dict",
            item.value,
        )


def _has_attr(item: Any, tx: Any, name: str) -> Any:
    """Return whether a traced tensor has an attribute; raise where Dynamo does not know."""
    found = _has(item, tx, name)
    if not found.value and _is_result_in_place(item):
        _refuse(_OTHER_NAME.format(name))
    return found


def _get_attr(item: Any, tx: Any, name: str) -> Any:
    """Return the variable of a tensor's attribute; `p.data` is a value of the graph.

    Dynamo would read it again when the graph has ended, and the parameter may have other memory
    then. See docs/stock-defects.md.
    """
    found = _getter(item, tx, name)
    if name == "data" and _traced_for() is not None:
        found.source = None
    return found


def _call_wrapped(item: Any, tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Return the result of a traced wrapper; refuse that of a cache, unless it is a number.

    Dynamo traces what `functools.cache` wraps as if there were no cache: each step would have
    another result, and what is kept in it would be lost. See docs/stock-defects.md.
    """
    made, wrapper = _call(item, tx, args, kwargs), item.wrapper_obj
    is_cache = isinstance(wrapper, functools._lru_cache_wrapper)
    if is_cache and not (wrapper.__module__.startswith("torch.") or _is_number(made)):
        _refuse(
            f"the step calls {wrapper.__qualname__}, whose results are kept by a cache of "
            "functools, which torch.compile passes over: it would have another one in each step. "
            "Keep it in self.state"
        )
    return made


def _track_mutable(effects: SideEffects, item: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the variable of a list, say, that was there before; refuse a deque with `maxlen`.

    Dynamo takes it for one without, and drops elements when the graph has ended: within it a full
    one has one more. See docs/stock-defects.md.
    """
    if isinstance(item, deque) and item.maxlen is not None:
        _refuse(
            "the step uses a deque with maxlen, which is longer than that in a graph of "
            "torch.compile when it has just dropped an element. Use a list, and drop elements "
            "yourself"
        )
    return _track(effects, item, *args, **kwargs)


def _is_number(made: Any) -> bool:
    """Return True if a Dynamo variable is a number, or several, that the trace knows."""
    if not made.is_python_constant():
        return False
    value = made.as_python_constant()
    values = value if isinstance(value, tuple) else (value,)
    return all(isinstance(x, int | float | str) for x in values)


def _python_args(item: Any, *args: Any, **kwargs: Any) -> Any:
    """Return Dynamo's arguments for `_init_group`; raise, which has it traced, where it must.

    Dynamo calls it once, so that what it returns and writes is what it was then: right where that
    makes tensors, not where it counts steps, say. Lists that are given by name stay empty. See
    docs/stock-defects.md.
    """
    if _traced_for() is None:
        return _args(item, *args, **kwargs)
    given, named = _args(item, *args, **kwargs)  # lists of their own, which it appends to
    own = init_of_torch(item.value) is None
    if any(isinstance(x, list) for x in named.values()) or (
        own and _does_more(item.value, given, named)
    ):
        raise ArgMappingException
    return _args(item, *args, **kwargs)


def _does_more(optimizer: Any, given: Any, named: Any) -> bool:
    """Return True if `_init_group` does more than make new tensors: it is tried, and undone."""
    states = list(optimizer.state.items())
    holders = [vars(optimizer), *optimizer.param_groups, *(s for _, s in states)]
    before = [(held, dict(held)) for held in holders if isinstance(held, dict)]
    tensors = [t for _, old in before for t in old.values() if isinstance(t, Tensor)]
    numbers = [(t, t.clone()) for t in tensors if not t.dim()]
    versions, drawn = [t._version for t in tensors], torch.get_rng_state()
    known = {id(held) for held in holders}
    try:
        optimizer._init_group(*given, **named)
        made = [s for s in optimizer.state.values() if isinstance(s, dict) and id(s) not in known]
        more = versions != [t._version for t in tensors]
        for held, old in [*before, *((s, {}) for s in made)]:
            new = {k: v for k, v in held.items() if k not in old or old[k] is not v}
            more |= any(k in old or not isinstance(v, Tensor | None) for k, v in new.items())
        return more
    finally:
        _undo(optimizer, states, before, numbers)
        torch.set_rng_state(drawn)


def _undo(optimizer: Any, states: Any, before: Any, numbers: Any) -> None:
    """Put back what an optimizer held: its states, what each dict had, and values of numbers."""
    optimizer.state.clear()
    optimizer.state.update(states)
    for held, old in before:
        for key in held.keys() - old.keys():
            del held[key]
        held.update(old)
    with torch.no_grad():
        for t, value in numbers:
            if not torch.equal(t, value):
                t.copy_(value)


_PLAIN = {type(None), bool, int, float}
"""The types of states that are no tensors."""


def _guard_states(item: Any, tx: Any) -> None:
    """Have Dynamo guard the states that a step is to make, and those that are None or numbers.

    Of each parameter group it guards the states of one parameter, but by mistake not those of the
    first one that has any. See docs/stock-defects.md.
    """
    _guard_most(item, tx)
    if _traced_for() is None:
        return
    places = []
    for at, state in enumerate(item.value.state.values()):
        if isinstance(state, dict):
            plain = [i for i, x in enumerate(state.values()) if type(x) in _PLAIN]
            places += [(at, plain)] if plain or not state else []
    tx.inline_user_function_return(item.build(tx, _look_at), [item, item.build(tx, places)], {})


def _look_at(optimizer: Optimizer, places: list[tuple[int, list[int]]]) -> None:
    """Compare states with a number: Dynamo, which traces this, guards what is looked at.

    Args:
        optimizer: whose states they are.
        places: of a state among all, and of its values that are looked at.
    """
    states = list(optimizer.state.values())
    for at, plain in places:
        values = list(states[at].values())
        for i in plain:
            _ = values[i] == 0


@wraps(_guard_shard)
def _guard_whole(builder: GuardBuilder, guard: Any) -> None:
    """Have Dynamo guard the sizes of a DTensor where its shard does not tell them.

    Dynamo guards those of the shard, which tell them only where all shards are alike.
    """
    _guard_shard(builder, guard)
    traced = builder.get(guard)

    def is_alike(spec: Any) -> bool:
        same: bool = spec.shape == traced.shape
        return same or not (_is_uneven(spec) or _is_uneven(traced))

    parts = ["sizes of unevenly sharded tensors"]
    builder.get_guard_manager(guard).add_lambda_guard(is_alike, parts, guard.user_stack)


def _is_uneven(spec: Any) -> bool:
    return any(n % parts for n, parts in zip(spec.shape, spec.num_shards_map, strict=True))


def _is_result_in_place(item: Any) -> bool:
    """Return True if a Dynamo variable is the result of an in-place operation.

    Dynamo knows the attributes of the tensor by the variable that the operation was given.
    """
    if not isinstance(item, TensorVariable) or item.source is not None:
        return False
    node = item.proxy.node
    value = node.meta.get("example_value")
    others = (other for other in node.graph.nodes if other is not node)
    return any(other.meta.get("example_value") is value for other in others)


def _refuse(message: str, optimizer: Optimizer | None = None) -> None:
    """Have the step that is traced for us recorded; where that cannot be, warn of what is lost."""
    if (backend := _traced_for()) is not None:
        if backend is not Traces.backend:
            backend.refuse(message)
        text = f"{message}; collage_fx.compile records such a step"
        warn_once("traced-wrong", text, optimizer)


def _guard_of_two_names(source: Any, first: Any) -> Any:
    """Return the builder of the guard that two names are still of one object, or install it.

    Dynamo leaves that out where one of them is a place in an optimizer, or where one is local and
    one global. Of a method that updates one parameter, `self.state[p]` is the state of the first
    one in every call then. Only what optimizers list is taken to stay where it is. See
    docs/stock-defects.md.
    """
    guard, backend = _make_dupe_guard(source, first), _traced_for()
    if backend is None or first is None or first == source:
        return guard
    names = sorted((first, source), key=_is_listed, reverse=True)
    of_optimizer = any(isinstance(s, OptimizerSource) for name in names for s in _along(name))
    stock = guard is not None and not of_optimizer
    if stock or all(map(_is_listed, names)):
        return guard
    place, other = names
    same = partial(GuardBuilder.DUPLICATE_INPUT, source_b=_as_of_no_optimizer(place))
    guards: Any = TracingContext.get().guards_context.dynamo_guards
    guards.add(_as_of_no_optimizer(other).make_guard(same))
    if backend is not Traces.backend:
        backend.refuse_each(other, place)
    return None


def _is_listed(source: Any) -> bool:
    """Return True if a place is in the parameter groups or the states of an optimizer.

    A gradient is not: it is another tensor in each step.
    """
    for place, inner in itertools.pairwise(_along(source)):
        member = getattr(place, "member", "")
        if member == "grad":
            return False
        if isinstance(inner, OptimizerSource):
            return member in ("param_groups", "state")
    return False


def _along(source: Any) -> Iterator[Any]:
    """Yield a place, what it is in, what that is in, and so on."""
    while source is not None:
        yield source
        source = getattr(source, "base", None)


def _as_of_no_optimizer(source: Any) -> Any:
    """Return the same place, at which Dynamo does not leave out guards."""
    if isinstance(source, OptimizerSource):
        return source.base
    base = getattr(source, "base", None)
    return source if base is None else replace(source, base=_as_of_no_optimizer(base))


def traced_code() -> CodeType | None:
    """Return the code of the function that Dynamo traces now, if it traces one."""
    traced = tracer()
    return traced.f_code if traced is not None else None


def tracer() -> Any:
    """Return Dynamo's current translator; None if it traces nothing."""
    if is_missing(InstructionTranslator):
        return None
    try:
        return InstructionTranslator.current_tx()
    except AttributeError:  # None in 2.11
        return None
