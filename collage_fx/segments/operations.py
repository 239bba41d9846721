"""Classes of operations by what the recorder does: note one, do it at once, or flush before it; and
comparisons with tensors that one number fills, which segments do with the number."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor

from collage_fx.passes.frontend.capture import WITH_NUMBER
from collage_fx.passes.ir.graph_memory import OpOverload
from collage_fx.passes.ir.program import LOW_PRECISION
from collage_fx.passes.rewrite.op_schema import written
from collage_fx.segments.trie import Place, Value

if TYPE_CHECKING:
    from collage_fx.segments.segment import Line, Segment

aten = torch.ops.aten

Kind: TypeAlias = Literal[
    "note", "view", "composite", "read", "metadata", "label", "now", "foreign", "higher order"
]
"""`note`: done later, with the rest of its segment. `view`: done at once, which moves no data, and
noted. `composite`: replaced by the operations that it consists of. `read`: hands data to Python.
`metadata`: needs no data of its operands, and is done at once. `label`: begins or ends a part of a
profile. `now`: done at once, after what its operands wait for. `foreign`: an operator of another
library, which may read any memory: done at once, after all that waits. `higher order`: takes
functions."""


@dataclass(frozen=True)
class Operation:
    """An operation as the recorder sees it."""

    kind: Kind
    written: tuple[int | str, ...] = ()
    """Positions, or names, of the arguments that it writes."""
    returns: int | str | None = None
    """Position or name of the argument that it returns; None if it makes its results."""
    nothing: bool = False
    """True if it returns nothing."""
    sizes: bool = False
    """True if the values of its numbers say how large its result is."""
    numbers: frozenset[int | str] = frozenset()
    """Positions and names of arguments that are numbers of the arithmetic, and no sizes or axes."""

    @property
    def made_at_once(self) -> bool:
        """True if it is done when it is called, and makes or writes floating data."""
        return self.kind in ("now", "foreign")

    def written_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Return the arguments of a call, as dispatch has them, that it writes."""
        given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        return [given.get(key) for key in self.written]


_READS = ("_local_scalar_dense", "equal", "is_nonzero")
_ODD = ("inplace_view", "data_dependent", "dynamic_output", "nondeterministic_seeded")
_METADATA = (
    *("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"),
    *("rand_like", "randn_like", "randint_like"),
    "_efficientzerotensor",  # the derivative of a constant, which has no memory
)
_SOLVES = (
    *("linalg_", "cholesky", "inverse", "index_select", "gather", "take", "embedding"),
    *("floor_divide", "remainder", "fmod"),  # of integers, by zero
)
"""Beginnings of the names of operations that may fail by the values of their operands."""


class _Operations(dict[Any, Operation]):
    """Cache of what the recorder does with each overload."""

    def __missing__(self, func: Any) -> Operation:
        is_plain = isinstance(func, OpOverload)
        found = self[func] = _classified(func) if is_plain else Operation("higher order")
        return found


def _classified(func: Any) -> Operation:
    schema = func._schema
    name = schema.name.removeprefix("aten::")
    arguments = schema.arguments
    writes = [a for a in arguments if a.name in written(func)]
    places = tuple(a.name if a.kwarg_only else arguments.index(a) for a in writes)
    # Autograd decomposes it, but not within a subclass's dispatch, nor in inference mode. A
    # composite "view" may copy: to, contiguous, reshape, flatten.
    if func.has_kernel_for_dispatch_key("CompositeImplicitAutograd"):
        return Operation("composite", places)
    if func.is_view or name == "lift_fresh":
        return Operation("view")
    if name in _READS:
        return Operation("read")
    if name in _METADATA:
        return Operation("metadata")
    # What may fail by the values is done at once: the step may catch the error.
    solves = name.removeprefix("_").startswith(_SOLVES) and name != "linalg_vector_norm"
    tensors = all("Tensor" in str(r.type) for r in schema.returns)
    odd = any(t.name.startswith(_ODD) for t in func.tags)
    # Of a quantized tensor nobody knows the scale who sees its dtype and sizes.
    odd |= name.startswith(("quantize_", "dequantize")) or "_quantized" in name
    # A tensor of numbers is read on the host.
    odd |= any(a.name == "scalars" and str(a.type) == "Tensor" for a in arguments)
    if func.namespace == "profiler":
        return Operation("label")
    if func.namespace not in ("aten", "prims"):
        return Operation("foreign", places)
    if solves or not tensors or odd:
        return Operation("now", places)
    numbers = frozenset(
        key
        for i, a in enumerate(arguments)
        if str(a.type)
        in ("Tensor", "number", "List[number]", "float", "Optional[number]", "List[float]")
        for key in (i, a.name)
    )
    if not schema.returns or all(r.alias_info is None for r in schema.returns):
        nothing, sizes = not schema.returns, name in ("arange", "range")
        return Operation("note", places, nothing=nothing, sizes=sizes, numbers=numbers)
    if len(schema.returns) == len(places) == 1:
        return Operation("note", places, places[0], numbers=numbers)
    return Operation("now", places)


_FILLS = ("copy_", "_foreach_copy_", "fill_", "zero_", "_foreach_zero_")


def is_overwriting(func: Any) -> bool:
    """Return True if an operation writes its results over whatever was there."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return False
    return schema.name.removeprefix("aten::") in _FILLS or "out" in schema.overload_name


def piece_of(whole: Tensor, size: list[int], stride: list[int], offset: int) -> Tensor:
    """Return a view of the memory of a tensor, its first element being at offset from that's."""
    return whole.as_strided(size, stride, whole.storage_offset() + offset)


def flat_piece(whole: Tensor, size: list[int], offset: int) -> Tensor:
    """Return a contiguous view of a contiguous tensor, of the elements from offset on.

    AOTAutograd can functionalize writes to views of it, as it cannot for `piece_of`.
    """
    return whole.view(-1)[offset : offset + math.prod(size)].view(size)


OPERATIONS = _Operations()
"""Overload -> what the recorder does with it."""
OPERATIONS[piece_of] = OPERATIONS[flat_piece] = Operation("view")

# By the position of the number.
_FILLING = {"full": 1, "full_like": 1, "new_full": 2, "scalar_tensor": 0, "fill_": 1}


def compare_with_numbers(
    segment: "Segment", lines: Sequence["Line"], places: Sequence[Place]
) -> None:
    """Have comparisons with filled tensors take the number: see `passes.frontend.capture`.

    Args:
        segment: of which dtypes and memory are known.
        lines: its lines, which change.
        places: the places of its lines and inputs in the trie, by which shapes are known.
    """
    if not any(line.func in WITH_NUMBER for line in lines):
        return
    inputs = (place.line[1][1] for place in places if place.line[0] == "input")
    shapes: dict[int, Any] = dict(zip(segment.inputs, inputs, strict=True))
    operations = (place for place in places if place.line[0] != "input")
    filled: dict[int, Any] = {}
    for line, place in zip(lines, operations, strict=True):
        shapes |= {at: meta[0] for at, meta in zip(line.made, place.made, strict=False)}
        _compare(line, segment, shapes, filled)
        for at in line.writes:
            filled.pop(at, None)
        at = _FILLING.get(getattr(line.func, "_opname", ""), -1)
        if 0 <= at < len(line.args) and type(number := line.args[at]) is not Value:
            whole = line.made[0] if line.made else segment.root[line.args[0].at]
            if line.made or whole == line.args[0].at:
                filled[whole] = number


def _compare(
    line: "Line", segment: "Segment", shapes: dict[int, Any], filled: dict[int, Any]
) -> None:
    """Have one line take the number, if it compares with a filled tensor that is as small."""
    for at, op in enumerate(WITH_NUMBER.get(line.func, ())):
        x, other = line.args[at], line.args[1 - at]
        if type(x) is not Value or type(other) is not Value or other.at not in filled:
            continue
        low = all(segment.dtype[v.at] in LOW_PRECISION for v in (x, other))
        if low and shapes.get(x.at) == shapes[line.made[0]]:
            line.func, line.args = op, (x, filled[other.at])
            return
