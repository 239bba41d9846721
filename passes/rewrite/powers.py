"""Powers of 0-d tensors in float64, where operations are done on tensors: eagerly, or traced.

In the graphs that the passes rewrite `frontend.decompose` takes them so.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from collage_fx.passes.frontend.canonicalize import single_overload
from collage_fx.passes.frontend.decompose import in_fp32, is_rounded_power
from collage_fx.passes.rewrite.op_schema import each, is_foreach, written
from collage_fx.passes.rewrite.symbolic_scalars import Table
from collage_fx.runtime.expansion.eft import computed_in

aten = torch.ops.aten

_PACKETS = (aten.pow, aten.pow_, aten._foreach_pow, aten._foreach_pow_)
POWERS = frozenset(
    op
    for packet in _PACKETS
    for op in (getattr(packet, overload) for overload in packet.overloads())
    if any("Tensor" in str(a.type) for a in op._schema.arguments)
    and not op._overloadname.endswith("out")
)
"""The operations that take powers, of one tensor or of each in a list."""


def powers_in_float64(table: Table) -> Table:
    """Return a table of decompositions for AOTAutograd by which powers are taken in float64."""
    ours = [op for op in POWERS if not written(op)]
    return table | {op: partial(_power, op, table.get(op, _not_decomposed)) for op in ours}


def in_float64(op: Any) -> Callable[..., Any]:
    """Return an operation that takes powers of 0-d tensors in float64; op if it takes none."""
    return partial(_power, op, op) if op in POWERS else op


def _not_decomposed(*_: Any, **__: Any) -> Any:
    return NotImplemented


def _power(op: Any, other: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Do an operation of POWERS: by `other`, unless powers of 0-d tensors are among it."""
    power = aten.pow.Tensor_Tensor
    singles = [operands for _, operands, _ in each(power, args, {})] if is_foreach(op) else [args]
    if kwargs or not any(_is_rounded(*operands) for operands in singles):
        return other(*args, **kwargs)
    made = [_taken(*operands) for operands in singles]
    if written(op):
        for (x, _), value in zip(singles, made, strict=True):
            x.copy_(value)
        return args[0]
    return made if is_foreach(op) else made[0]


def _taken(x: Any, y: Any) -> Tensor:
    """Take one power: in float64 if it is of 0-d tensors, of what PyTorch would take in fp32."""
    dtype = torch.result_type(x, y)
    if _is_rounded(x, y):
        x, y = (z.to(torch.float64) if isinstance(z, Tensor) else in_fp32(z) for z in (x, y))
    power: Tensor = single_overload(aten.pow.Tensor_Tensor, (x, y))(x, y)
    return power.to(computed_in(dtype)).to(dtype)


def _is_rounded(x: Any, y: Any) -> bool:
    scalar = not any(isinstance(a, Tensor) and a.dim() for a in (x, y))
    return scalar and is_rounded_power(torch.result_type(x, y), y)
