"""Schemas of operations: the functional single-tensor form of in-place and foreach ones."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from collage_fx.passes.frontend.canonicalize import FOREACH, single_overload
from collage_fx.passes.frontend.decompose import DECOMPOSITIONS
from collage_fx.passes.rules import RULES

aten = torch.ops.aten

TURNS = {
    overload
    for name in ("t_", "transpose_", "squeeze_", "unsqueeze_", "swapaxes_", "swapdims_")
    for overload in (getattr(getattr(aten, name), o) for o in getattr(aten, name).overloads())
}
"""Operations that change the shape of a tensor in place, and not its memory."""


@cache
def written(op: Any) -> tuple[str, ...]:
    """Return the names of the arguments that op writes."""
    return tuple(
        a.name
        for a in op._schema.arguments
        if a.alias_info is not None and a.alias_info.is_write and "Tensor" in str(a.type)
    )


def by_name(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of op by their names."""
    names = [a.name for a in op._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


COLLECTIVE = frozenset({"c10d", "c10d_functional", "_c10d_functional"})
"""Namespaces of operations that communicate: as they are called, and as Dynamo traces them."""


def received(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments that a collective operation writes, which the schemas of c10d hide.

    Who sends what all others receive writes nothing.
    """
    named = by_name(op, args, kwargs)
    if op.namespace != "c10d":
        return [named[name] for name in written(op)]
    if op._opname in ("send", "barrier"):
        return []
    if op._opname == "broadcast_":
        group = torch.distributed.ProcessGroup.unbox(named["process_group"])
        if group.rank() == named["root_rank"]:
            return []
    return [
        value for name, value in named.items() if name == "tensors" or name.startswith("output")
    ]


@cache
def is_foreach(op: Any) -> bool:
    """Return True if op does one operation for each tensor of a list."""
    return op._schema.name.startswith("aten::_foreach_")


@cache
def functional(op: Any) -> Any:
    """Return the operation on single tensors, without side effect, that op is a form of.

    `aten._foreach_add_.Scalar` and `aten.add.Scalar` are forms of `aten.add.Tensor`, which takes a
    number too. None if there is none.
    """
    name = op._schema.name.removeprefix("aten::").removesuffix("_")
    if name.startswith("_foreach_"):
        return FOREACH.get(name)
    if not op._schema.name.startswith("aten::") or not hasattr(aten, name):
        return None
    packet = getattr(aten, name)
    overload = op._overloadname
    wanted = [overload, overload.removesuffix("out").removesuffix("_"), "Tensor", "default"]
    known = [getattr(packet, o) for o in wanted if o in packet.overloads()]
    return next(
        (o for o in known if o in RULES or o in DECOMPOSITIONS), known[0] if known else None
    )


def each(op: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """Yield the operation of a _foreach operation on each tensor: operation, arguments, by name."""
    for i in range(len(args[0] if isinstance(args[0], list | tuple) else args[1])):

        def pick(a: Any, i: int = i) -> Any:
            if isinstance(a, Tensor) and a.dim() == 1:  # one number for each tensor
                return a[i].item()
            return a[i] if isinstance(a, list | tuple) else a

        single, more = tuple(map(pick, args)), {k: pick(v) for k, v in kwargs.items()}
        if op in (aten.addcmul.default, aten.addcdiv.default) and len(single) > 3:
            single, more = single[:3], {"value": single[3]}
        yield single_overload(op, single), single, more
