"""A lowered slice as the source of a Triton kernel that updates many tensors in one launch.

Inductor prints the operations: its lowerings break each into what a kernel can do, and its Triton
overrides write that down. Division and conversions are printed here: `a / b` in Triton is off by
up to 2 ulp, and every rounding has to stay.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch.fx import Graph, GraphModule

from collage_fx.passes.codegen.inductor_lowering import lower_region
from collage_fx.passes.codegen.printers.cpp_kernel import NONE_PACKED, PACKERS
from collage_fx.runtime.storage import changed_bits, nibbles
from collage_fx.runtime.torch_private import (
    DefaultHandler,
    GraphLowering,
    OpsValue,
    Pointwise,
    TensorBox,
    TritonOverrides,
    V,
)

_KERNEL = """\
import triton
import triton.language as tl
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.triton_helpers import libdevice, math as tl_math


@triton.jit
def divide(x, y):
    if x.dtype == tl.float64 or y.dtype == tl.float64:
        return x / y
    else:
        return tl.div_rn(x.to(tl.float32), y.to(tl.float32))


@triton.jit
def root(x):
    if x.dtype == tl.float64:
        return tl.sqrt(x)
    else:
        return tl.sqrt_rn(x)


@triton.jit
def narrow_e5m2(x):
    # Which it represents. A conversion would make the largest number of an infinity.
    bits = x.to(tl.float16).to(tl.int16, bitcast=True)
    return (bits >> 8).to(tl.int8).to(tl.float8e5, bitcast=True)


{helpers}@triton.jit
def body({inputs}):
    {body}
    return {results}


@triton.jit
def multi_tensor(
    table, members, starts, sizes, left_out,
    ALIGNED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr
):
    chunk = tl.program_id(0)
    member = tl.load(members + chunk)
    start = tl.load(starts + chunk)
    left = tl.minimum(tl.load(sizes + member) - start, CHUNK).to(tl.int32)
    if left_out is not None:
        left = tl.where(tl.load(left_out) == 0, left, 0)
    row = table + member * {arity}
    {scalars}
    {pointers}
    if ALIGNED:
        {aligned}
    if left == CHUNK:
        for at in range(0, CHUNK, BLOCK):
            i = at + tl.arange(0, BLOCK)
            {loads}
            {news} = body({inputs})
            {stores}
    else:
        for at in range(0, left, BLOCK):
            i = at + tl.arange(0, BLOCK)
            inside = i < left
            {masked_loads}
            {news} = body({inputs})
            {masked_stores}
"""


_MARK = """\
@triton.jit
def mark(pointer, at, left, y, BLOCK: tl.constexpr):
    # Sets a bit for each truth, eight to a byte.
    i = at + tl.arange(0, BLOCK)
    bits = tl.reshape((y & (i < left)).to(tl.int32), (BLOCK // 8, 8))
    eight = tl.sum(bits << tl.arange(0, 8)[None, :], 1).to(tl.uint8)
    i = at // 8 + tl.arange(0, BLOCK // 8)
    inside = i * 8 < left
    tl.store(pointer + i, tl.load(pointer + i, mask=inside, other=0) | eight, mask=inside)


"""
_NIBBLES = """\
@triton.jit
def unpack(pointer, at, left, BLOCK: tl.constexpr):
    # Two elements are in a byte, each of them the upper half of an int8 with zeros.
    i = at // 2 + tl.arange(0, BLOCK // 2)
    pairs = tl.load(pointer + i, mask=i * 2 < left)
    first, second = pairs << 4, pairs & 0xF0
    return tl.interleave(first, second).to(tl.int8, bitcast=True)


@triton.jit
def pack(pointer, at, left, y, BLOCK: tl.constexpr):
    i = at + tl.arange(0, BLOCK)
    bits = tl.where(i < left, y, 0).to(tl.uint8, bitcast=True)
    first, second = tl.split(tl.reshape(bits, (BLOCK // 2, 2)))
    i = at // 2 + tl.arange(0, BLOCK // 2)
    tl.store(pointer + i, (first >> 4) | (second & 0xF0), mask=i * 2 < left)


"""


_HELPERS = {nibbles.BITS: _NIBBLES, changed_bits.BITS: _MARK}


def print_triton_kernel(
    region: str,
    dtypes: Sequence[torch.dtype],
    scalar: Sequence[bool],
    written: Sequence[int],
    results: Sequence[int],
    position: int | None = None,
    packed: Mapping[int, int] = NONE_PACKED,
) -> str:
    """Return the source of a Triton kernel `multi_tensor`: a lowered slice over many members.

    It takes a table of addresses (one row for each member, int64, in the order of the slice's
    inputs, scalars in device memory too), the elements of each member, and for each program the
    member and the first element that it works on: `CHUNK` elements, `BLOCK` at a time. `ALIGNED`
    promises that all tensors begin at multiples of 16 bytes; then whole blocks are read and written
    16 bytes at a time. With a number `left_out`, fp32, that is not 0 it writes nothing.

    Args:
        region: the key of the lowered slice among the regions.
        dtypes: of its inputs.
        scalar: for each of them whether it is 0-d.
        written: the inputs that are overwritten.
        results: for each of them the position of its new value among the results.
        position: the input that is the number of each element, if there is one: in the table there
            is that of a member's first.
        packed: the inputs of which memory has a part of a byte for each element, with its bits, as
            in `print_cpp_kernel`.
    """
    lines, values, used = _body(region, dtypes, scalar)
    values = [values[k] for k in results]
    full = [i for i in used if not scalar[i] and i != position]
    counted = [i for i in used if i == position]
    count = [f"x{i} = (first{i} + start + i).to(tl.int32)" for i in counted]
    firsts = [f"first{i} = tl.load(row + {i})" for i in counted]
    numbers = [f"x{i} = tl.load({_address(i, dtypes[i])})" for i in used if scalar[i]]
    pointers = sorted({*full, *written})

    def address(i: int) -> str:
        if i in packed:
            return f"{_address(i, torch.uint8)} + start // {8 // packed[i]}"
        return f"{_address(i, dtypes[i])} + start"

    def loads(mask: str) -> list[str]:
        found = {i: f"tl.load(p{i} + i{mask})" for i in full}
        found |= {i: f"unpack(p{i}, at, left, BLOCK)" for i in full if i in packed}
        return [*(f"x{i} = {text}" for i, text in found.items()), *count]

    def stores(mask: str) -> list[str]:
        found = {i: f"tl.store(p{i} + i, y{i}{mask})" for i in written}
        for i in (i for i in written if i in packed):
            found[i] = f"{PACKERS[packed[i]]}(p{i}, at, left, y{i}, BLOCK)"
        return list(found.values())

    return _KERNEL.format(
        arity=len(dtypes),
        inputs=", ".join(f"x{i}" for i in used),
        body=_lines(lines, 1),
        results=", ".join(values) + ",",
        scalars=_lines([*numbers, *firsts], 1),
        helpers="".join(_HELPERS[bits] for bits in sorted({*packed.values()})),
        pointers=_lines((f"p{i} = {address(i)}" for i in pointers), 1),
        aligned=_lines((f"p{i} = tl.multiple_of(p{i}, 16)" for i in pointers), 2),
        loads=_lines(loads(""), 3),
        news=", ".join(f"y{i}" for i in written) + ",",
        stores=_lines(stores(""), 3),
        masked_loads=_lines(loads(", mask=inside"), 3),
        masked_stores=_lines(stores(", mask=inside"), 3),
    )


def _lines(lines: Iterable[str], depth: int) -> str:
    return ("\n" + depth * "    ").join(lines) or "pass"


_TYPES = {
    torch.bool: "int1",
    torch.float8_e4m3fn: "float8e4nv",
    torch.float8_e5m2: "float8e5",
    torch.float8_e4m3fnuz: "float8e4b8",
    torch.float8_e5m2fnuz: "float8e5b16",
}
"""dtype -> its name in Triton, where that is another."""


def _type_of(dtype: torch.dtype) -> str:
    return f"tl.{_TYPES.get(dtype) or str(dtype).removeprefix('torch.')}"


def _address(i: int, dtype: torch.dtype) -> str:
    return f"tl.load(row + {i}).to(tl.pointer_type({_type_of(dtype)}))"


class _Printer(DefaultHandler):
    """Inductor's handler of operations that writes each as a line, and equal ones once."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.names: dict[str, str] = {}

    def _default(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        return self._line(str(getattr(TritonOverrides, name)(*args, **kwargs)))

    def _line(self, text: str) -> str:
        if text not in self.names:
            self.names[text] = f"t{len(self.names)}"
            self.lines.append(f"{self.names[text]} = {text}")
        return self.names[text]

    def truediv(self, x: str, y: str) -> str:
        return self._line(f"divide({x}, {y})")

    def div_rn(self, x: str, y: str) -> str:
        return self.truediv(x, y)

    def sqrt(self, x: str) -> str:
        return self._line(f"root({x})")

    # Inductor's look their operands up in the kernel that it is writing.
    def tanh(self, x: str) -> str:
        return self._line(f"libdevice.tanh({x})")

    def pow(self, x: str, y: str) -> str:
        return self._line(f"libdevice.pow({x}, {y})")

    def to_dtype_bitcast(self, x: str, dtype: torch.dtype, src_dtype: torch.dtype) -> str:
        return self._line(f"{x}.to({_type_of(dtype)}, bitcast=True)")

    def to_dtype(
        self,
        x: str,
        dtype: torch.dtype,
        src_dtype: torch.dtype | None = None,
        use_compute_types: bool = True,
    ) -> str:
        if dtype is torch.float64 and not use_compute_types:
            return x  # a detour that `lower_round` makes for C++ kernels
        if dtype is torch.float8_e5m2 and use_compute_types:
            return self._line(f"narrow_e5m2({x})")
        return self._line(f"{x} != 0" if dtype is torch.bool else f"{x}.to({_type_of(dtype)})")


def _body(
    region: str, dtypes: Sequence[torch.dtype], scalar: Sequence[bool]
) -> tuple[list[str], list[str], list[int]]:
    """Return the lines of a slice, the names of its results, and the inputs that it reads."""
    used: set[int] = set()

    def input_(i: int) -> TensorBox:
        def load(index: Any) -> OpsValue:
            used.add(i)
            return OpsValue(f"x{i}")

        shape = [] if scalar[i] else [sympy.Integer(2)]
        # Lowered as for a CPU: for a GPU a division by a number becomes a product with its
        # reciprocal, which rounds twice.
        return Pointwise.create(
            device=torch.device("cpu"), dtype=dtypes[i], inner_fn=load, ranges=shape
        )

    nothing = Graph()
    nothing.output(())
    printer = _Printer()
    with V.set_graph_handler(GraphLowering(GraphModule(torch.nn.Module(), nothing))):
        boxes = lower_region([input_(i) for i in range(len(dtypes))], region)
        used.clear()
        with V.set_ops_handler(printer):
            values = [
                str(box.make_loader()([sympy.Integer(0)] * len(box.get_size()))) for box in boxes
            ]
    return printer.lines, values, sorted(used)
