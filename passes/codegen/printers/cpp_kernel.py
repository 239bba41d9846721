"""A lowered slice as the source of a C++ kernel for CPUs: a plain loop that compilers vectorize.

16-bit tensors are read as words and widened by shifts, and roundings are integer operations on the
bits of an fp32 number, so that every compiler has them in vectors of any width. Inductor's own C++
rounds element by element, through memory.
"""

import math
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, cast

import torch
from torch.fx import Graph, Node

from collage_fx.passes.codegen.printers.exact_roundings import OVERFLOW, exact_roundings
from collage_fx.passes.ir.program import CONVERT
from collage_fx.runtime.kernels.cpp_helpers import HELPERS
from collage_fx.runtime.ops import collage
from collage_fx.runtime.storage import changed_bits, nibbles

aten = torch.ops.aten

_TYPES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.int8: "int8_t",
    torch.int16: "int16_t",
    torch.int32: "int32_t",
    torch.int64: "int64_t",
    torch.bool: "bool",
    torch.bfloat16: "uint16_t",
    torch.float16: "uint16_t",
}
_HALVES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_FLOATS = (torch.float32, torch.float64)
_NIBBLES = """
// Two elements are in a byte, each of them the upper half of an int8 with zeros.
static void unpack(const uint8_t* from, int64_t size, int8_t* to) {
  for (int64_t i = 0; i < (size + 1) / 2; ++i) {
    to[2 * i] = int8_t(from[i] << 4);
    to[2 * i + 1] = int8_t(from[i] & 0xf0);
  }
}
static void pack(const int8_t* from, int64_t size, uint8_t* to) {
  for (int64_t i = 0; i < size / 2; ++i)
    to[i] = uint8_t((from[2 * i] >> 4 & 0xf) | (from[2 * i + 1] & 0xf0));
  if (size % 2) to[size / 2] = uint8_t(from[size - 1] >> 4 & 0xf);
}
"""
_MARK = """
// Sets a bit for each truth, eight to a byte; the product brings the bits of eight words together.
static void mark(const uint16_t* from, int64_t size, uint8_t* to) {
  for (int64_t i = 0; i < size / 8; ++i) {
    uint64_t four, more;
    std::memcpy(&four, from + 8 * i, 8);
    std::memcpy(&more, from + 8 * i + 4, 8);
    to[i] |= uint8_t((four | more << 4) * 0x0001000200040008u >> 48);
  }
  for (int64_t i = size / 8 * 8; i < size; ++i) to[i / 8] |= uint8_t(from[i] << i % 8);
}
"""
_HELPERS = {nibbles.BITS: _NIBBLES, changed_bits.BITS: _MARK}
_BLOCKS = {nibbles.BITS: "int8_t", changed_bits.BITS: "uint16_t"}
"""Bits of an element in memory -> its type in a block; of bytes alone GCC would make no vectors."""
NONE_PACKED: Mapping[int, int] = {}
PACKERS = {nibbles.BITS: "pack", changed_bits.BITS: "mark"}
"""Bits of an element in memory -> the function of C++ that puts them there, and Triton's."""

_KERNEL = """
extern "C" void kernel({pointers}int64_t count) {{
  {casts}
  #pragma omp simd
  for (int64_t i = 0; i < count; ++i) {{
    {loads}
    {body}
    {stores}
  }}
}}
"""
_PACKED = """
constexpr int64_t BLOCK = 1024;
{helpers}
extern "C" void kernel({pointers}int64_t count) {{
  {casts}
  for (int64_t begin = 0; begin < count; begin += BLOCK) {{
    const int64_t left = count - begin, size = left < BLOCK ? left : BLOCK, end = begin + size;
    {unpacked}
    #pragma omp simd
    for (int64_t i = begin; i < end; ++i) {{
      {loads}
      {body}
      {stores}
    }}
    {packed}
  }}
}}
"""
"""The same with packed inputs: a block at a time is unpacked, and packed again, or marked."""


class Unprintable(Exception):
    """A slice has something for which there is no text; its words say what."""


def print_cpp_kernel(
    graph: Graph,
    scalar: Sequence[bool],
    stored: Sequence[int],
    results: Sequence[int],
    position: int | None = None,
    packed: Mapping[int, int] = NONE_PACKED,
    *,
    single: bool = False,
    libm: bool = False,
) -> tuple[str, list[int]]:
    """Return the source of a C++ function `kernel` over one member, and the inputs that it takes.

    It takes addresses, of those inputs in that order, and the number of elements. Raises
    Unprintable.

    Args:
        graph: a lowered slice.
        scalar: for each of its inputs whether it is 0-d.
        stored: the inputs that are overwritten.
        results: for each of them the position of its new value among the results.
        position: the input that is the number of each element, if there is one: in the place of its
            address the function takes the number of the first.
        packed: the inputs of which memory has a part of a byte for each element, with its bits: of
            int8 the upper four; of a bool one, which is not read, and stays set once it is. The
            first element is then the first of its byte.
        single: whether members have one element each, so that no vectors of them are needed.
        libm: whether functions of the C library may stand for PyTorch's, which may differ from them
            by a unit in the last place.
    """
    inputs = list(graph.find_nodes(op="placeholder"))
    outputs: Any = graph.output_node().args[0]
    if any(scalar[i] for i in stored):
        raise Unprintable("a 0-d tensor is overwritten")
    printer = _printed(graph, scalar, single, libm)
    if any(
        outputs[k].meta["dtype"] != inputs[i].meta["dtype"]
        for i, k in zip(stored, results, strict=True)
    ):
        raise Unprintable("a result is stored in memory of another dtype")
    values = [printer.names[outputs[k]] for k in results]
    read = [i for i, node in enumerate(inputs) if node.users]
    order = sorted({*read, *stored})
    types = {i: "uint8_t" if i in packed else _type(inputs[i]) for i in order}
    casts = [f"auto* p{i} = static_cast<{types[i]}*>(a{i});" for i in order if i != position]
    full = [i for i in read if not scalar[i] and i != position]
    loops = [f"const {_type(inputs[i])} x{i} = {_element(i, packed)};" for i in full]
    if position in read:
        casts.append(f"const uint32_t first = reinterpret_cast<uintptr_t>(a{position});")
        loops.append(f"const int32_t x{position} = int32_t(first + uint32_t(i));")
    for i in (i for i in read if scalar[i]):
        number = f"plain_nan(*p{i})" if inputs[i].meta["dtype"] in _FLOATS else f"*p{i}"
        casts.append(f"const {_type(inputs[i])} x{i} = {number};")
    blocks = [f"{_BLOCKS[packed[i]]} b{i}[BLOCK];" for i in order if i in packed]
    blocks += [f"unpack({_byte(i, packed)}, size, b{i});" for i in full if i in packed]
    ends = [i for i in stored if i in packed]
    kernel = (_PACKED if blocks else _KERNEL).format(
        pointers="".join(f"void* a{i}, " for i in order),
        casts="\n  ".join(casts),
        loads="\n    ".join(loops),
        body="\n    ".join(printer.lines),
        stores="\n    ".join(
            f"{_element(i, packed)} = {v};" for i, v in zip(stored, values, strict=True)
        ),
        helpers="".join(_HELPERS[bits].lstrip("\n") for bits in sorted({*packed.values()})),
        unpacked="\n    ".join(blocks),
        packed="\n    ".join(
            f"{PACKERS[packed[i]]}(b{i}, size, {_byte(i, packed)});" for i in ends
        ),
    )
    heads = {"std::": "cmath", "std::memcpy": "cstring"}
    includes = [f"#include <{head}>\n" for text, head in heads.items() if text in kernel]
    return "".join(includes) + HELPERS + kernel, order


def _element(i: int, packed: Container[int]) -> str:
    """Return the text of an element of an input that is no number."""
    return f"b{i}[i - begin]" if i in packed else f"p{i}[i]"


def _byte(i: int, packed: Mapping[int, int]) -> str:
    """Return the text of the address of a block's first byte of a packed input."""
    return f"p{i} + begin / {8 // packed[i]}"


def names_in_cpp(graph: Graph, scalar: Sequence[bool], *, single: bool = False) -> dict[Node, str]:
    """Return the name of each value of a graph in the text of `print_cpp_kernel`.

    Raises Unprintable; the arguments are as there.
    """
    return _printed(graph, scalar, single).names


def _printed(graph: Graph, scalar: Sequence[bool], single: bool, libm: bool = False) -> "_Printer":
    known = _OPERATIONS | (_SINGLE if single or libm else {}) | (_LIBM if libm else {})
    printer = _Printer(graph, known, {"alpha", "value"} if libm else set())
    for i, node in enumerate(graph.find_nodes(op="placeholder")):
        printer.names[node] = f"x{i}"
        if node.meta["dtype"] in _FLOATS and not scalar[i]:
            printer.payload.add(node)
    for node in graph.nodes:
        if node.op == "call_function":
            printer.operation(node)
    return printer


def _type(node: Node) -> str:
    """Return the C++ type of a value; 16-bit floats are words."""
    dtype = node.meta["dtype"]
    if dtype not in _TYPES:
        raise Unprintable(f"no C++ is written for {_dtype_name(dtype)}")
    return _TYPES[dtype]


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _literal(number: Any, dtype: torch.dtype) -> str:
    """Return a Python number as a C++ one of a dtype."""
    if dtype is torch.bool:
        return "true" if number else "false"
    if dtype not in _FLOATS:
        if isinstance(number, float):
            raise Unprintable(f"the number {number} beside an integer tensor")
        return f"{_TYPES[dtype]}({int(number)})"
    exact = torch.tensor(number, dtype=torch.float64).to(dtype).item()
    if not math.isfinite(exact):
        word = "NAN" if math.isnan(exact) else "INFINITY" if exact > 0 else "-INFINITY"
        return f"{_TYPES[dtype]}({word})"
    return float(exact).hex() + ("f" if dtype is torch.float32 else "")


class _Printer:
    """Printer of each operation as a line, equal ones once."""

    def __init__(self, graph: Graph, known: "dict[Any, Print]", named: set[str]) -> None:
        self.known, self.named = known, named
        """Operation -> function that prints it; and the names of keyword arguments it may have."""
        self.roundings = exact_roundings(graph)
        self.names: dict[Node, str] = {}
        self.lines: list[str] = []
        self.written: dict[str, str] = {}
        self.payload: set[Node] = set()
        """fp32 and fp64 values whose NaN may have bits beyond bf16's."""

    def operation(self, node: Node) -> None:
        """Write the line of an operation, and name its result. Raises Unprintable."""
        print_ = self.known.get(node.target)
        if print_ is None or node.kwargs.keys() - self.named:
            raise Unprintable(f"no C++ is written for {node.target}")
        text = print_(self, node)
        if not text.isidentifier():
            text = self._line(f"const {_type(node)}", text)
        self.names[node] = text
        if node.meta["dtype"] in _FLOATS and self._may_have_payload(node):
            self.payload.add(node)

    def _may_have_payload(self, node: Node) -> bool:
        if node.target is aten.view.dtype:
            return True
        if node.target is CONVERT and node.all_input_nodes[0].meta["dtype"] is torch.float16:
            return True
        if node.target is collage.round.default and node.args[1] in _HALVES:
            return node in self.roundings.exact and node.args[0] in self.payload
        return any(a in self.payload for a in node.all_input_nodes)

    def _line(self, kind: str, text: str) -> str:
        key = f"{kind} {text}"
        if key not in self.written:
            self.written[key] = f"t{len(self.written)}"
            self.lines.append(f"{kind} {self.written[key]} = {text};")
        return self.written[key]

    def operand(self, value: Any, dtype: torch.dtype) -> str:
        """Return an operand as a value of a dtype, to which it is promoted."""
        if not isinstance(value, Node):
            return _literal(value, dtype)
        if value.meta["dtype"] in _HALVES or dtype in _HALVES:
            raise Unprintable("arithmetic on 16-bit words")
        same = value.meta["dtype"] == dtype
        return self.names[value] if same else f"{_TYPES[dtype]}({self.names[value]})"

    def round(self, node: Node) -> str:
        """Return the text of collage::round."""
        x, to = node.args
        assert isinstance(x, Node) and isinstance(to, torch.dtype)
        name, dtype = self.names[x], x.meta["dtype"]
        if node in self.roundings.exact:
            overflowing = self.roundings.exact[node]
            if overflowing is None:
                return name
            limit = _literal(OVERFLOW[to], dtype)
            return f"absolute({self.names[overflowing]}) < {limit} ? {name} : NAN"
        if dtype is torch.float64 and to is torch.float32:
            return f"double(float({name}))"
        if dtype is not torch.float32 or to not in _HALVES:
            raise Unprintable(f"no C++ rounds {_dtype_name(dtype)} to {_dtype_name(to)}")
        return self._rounded(x, to)

    def _rounded(self, x: Node, to: torch.dtype) -> str:
        any_nan = to is torch.bfloat16 and x in self.payload
        return f"round_{'any_' if any_nan else ''}{_HALVES[to]}({self.names[x]})"

    def convert(self, node: Node) -> str:
        """Return the text of a conversion to another dtype."""
        x, to = node.args
        assert isinstance(x, Node) and isinstance(to, torch.dtype)
        source = x.meta["dtype"]
        if source in _HALVES:
            wide = f"widen_{_HALVES[source]}({self.names[x]})"
            return wide if to is torch.float32 else f"{_type(node)}({wide})"
        if source is torch.bool and to in _FLOATS:  # GCC makes no vectors of a conversion
            return f"{self.names[x]} ? {_literal(1, to)} : {_literal(0, to)}"
        if to not in _HALVES:
            return f"{_type(node)}({self.names[x]})"
        if source is not torch.float32:
            raise Unprintable(f"no C++ converts {_dtype_name(source)} to {_dtype_name(to)}")
        exact = self.roundings.values.get(x) is to
        return f"narrow_{_HALVES[to]}({self.names[x] if exact else self._rounded(x, to)})"

    def view(self, node: Node) -> str:
        """Return the text of the same bits as a value of another dtype."""
        x = node.args[0]
        assert isinstance(x, Node)
        return f"bits<{_type(node)}>({self.names[x]})"


Print = Callable[[_Printer, Node], str]


def _elementwise(template: str) -> Print:
    """Return the printer of an operation on operands promoted to the dtype of the result."""

    def print_(printer: _Printer, node: Node) -> str:
        dtype = node.meta["dtype"]
        return template.format(*(printer.operand(a, dtype) for a in node.args))

    return print_


def _of_floats(template: str) -> Print:
    """Return the printer of an operation that C++ has of floats only, with PyTorch's meaning."""

    def print_(printer: _Printer, node: Node) -> str:
        if node.meta["dtype"] not in _FLOATS:
            raise Unprintable(f"no C++ is written for {node.target} of integers")
        if any(isinstance(a, float) and math.isnan(a) for a in node.args):
            raise Unprintable("no C++ is written for a bound that is NaN")
        return _elementwise(template)(printer, node)

    return print_


def _comparison(symbol: str) -> Print:
    def print_(printer: _Printer, node: Node) -> str:
        dtypes = {a.meta["dtype"] for a in node.all_input_nodes}
        if len(dtypes) > 1 or torch.bool in dtypes:
            raise Unprintable("no C++ is written for a comparison of several dtypes, or of truths")
        (dtype,) = dtypes
        x, y = (printer.operand(a, dtype) for a in node.args)
        return f"{x} {symbol} {y}"

    return print_


def _where(printer: _Printer, node: Node) -> str:
    condition, *values = node.args
    x, y = (printer.operand(v, node.meta["dtype"]) for v in values)
    return f"{printer.operand(condition, torch.bool)} ? {x} : {y}"


def _same(printer: _Printer, node: Node) -> str:
    return printer.operand(node.args[0], node.meta["dtype"])


_POWERS = {2.0: "{0} * {0}", 3.0: "{0} * {0} * {0}", 0.5: "root({0})"}
"""Exponents that eager PyTorch has without the function of the C library."""


def _power(printer: _Printer, node: Node) -> str:
    base, exponent = cast(tuple[Node, float], node.args)
    dtype = node.meta["dtype"]
    if exponent not in _POWERS or dtype not in _FLOATS:
        raise Unprintable(f"no C++ is written for a power of {exponent}")
    return _POWERS[exponent].format(printer.operand(base, dtype))


_OPERATIONS: dict[Any, Print] = {
    aten.pow.Tensor_Scalar: _power,
    collage.round.default: _Printer.round,
    CONVERT: _Printer.convert,
    aten.view.dtype: _Printer.view,
    aten.add.Tensor: _elementwise("{} + {}"),
    aten.sub.Tensor: _elementwise("{} - {}"),
    aten.mul.Tensor: _elementwise("{} * {}"),
    aten.div.Tensor: _of_floats("{} / {}"),
    aten.reciprocal.default: _of_floats("1 / {}"),
    aten.neg.default: _elementwise("-{}"),
    aten.abs.default: _of_floats("absolute({})"),
    aten.sqrt.default: _of_floats("root({})"),
    aten.sign.default: _elementwise("({0} > 0) - ({0} < 0)"),
    aten.maximum.default: _elementwise("{0} > {1} || {0} != {0} ? {0} : {1}"),
    aten.minimum.default: _elementwise("{0} < {1} || {0} != {0} ? {0} : {1}"),
    aten.clamp_min.default: _of_floats("{0} < {1} ? {1} : {0}"),
    aten.clamp_max.default: _of_floats("{0} > {1} ? {1} : {0}"),
    aten.alias.default: _same,
    aten.clone.default: _same,
    aten.where.self: _where,
    aten.where.ScalarOther: _where,
    aten.where.ScalarSelf: _where,
    aten.where.Scalar: _where,
}
_COMPARISONS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
for _name, _symbol in _COMPARISONS.items():
    for _overload in ("Scalar", "Tensor"):
        _OPERATIONS[getattr(getattr(aten, _name), _overload)] = _comparison(_symbol)
for _name, _symbol in (("and", "&"), ("or", "|"), ("xor", "^")):
    for _overload in ("Scalar", "Tensor"):
        _operation = getattr(getattr(aten, f"bitwise_{_name}"), _overload)
        _OPERATIONS[_operation] = _elementwise("{} " + _symbol + " {}")
for _name, _symbol in (("__lshift__", "<<"), ("__rshift__", ">>")):
    _OPERATIONS[getattr(aten, _name).Scalar] = _elementwise("{} " + _symbol + " {}")


def _scaled(template: str, name: str) -> Print:
    """Return the printer of an operation with a number by that name, 1 if it is left out."""

    def print_(printer: _Printer, node: Node) -> str:
        dtype = node.meta["dtype"]
        operands = (printer.operand(a, dtype) for a in node.args)
        return template.format(*operands, _literal(node.kwargs.get(name, 1), dtype))

    return print_


def _any_power(printer: _Printer, node: Node) -> str:
    known = node.args[1] in _POWERS
    return (_power if known else _of_floats("std::pow({}, {})"))(printer, node)


_SINGLE: dict[Any, Print] = {
    aten.pow.Scalar: _elementwise("std::pow({}, {})"),
    aten.pow.Tensor_Scalar: _any_power,
    aten.pow.Tensor_Tensor: _of_floats("std::pow({}, {})"),
}
"""Printers by C library functions, which eager PyTorch takes of single numbers, not in vectors."""
_LIBM: dict[Any, Print] = {
    aten.add.Tensor: _scaled("{0} + {2} * {1}", "alpha"),
    aten.sub.Tensor: _scaled("{0} - {2} * {1}", "alpha"),
    aten.addcmul.default: _scaled("{0} + {3} * {1} * {2}", "value"),
    aten.addcdiv.default: _scaled("{0} + {3} * ({1} / {2})", "value"),
    aten.rsqrt.default: _of_floats("1 / root({})"),
    aten.sigmoid.default: _of_floats("1 / (1 + std::exp(-{}))"),
}
"""Printers of operations on all elements, where a unit in the last place does not matter."""
for _name in ("exp", "expm1", "log", "log1p", "log2", "tanh", "sin", "cos", "atan", "erf"):
    _LIBM[getattr(aten, _name).default] = _of_floats(f"std::{_name}({{}})")
