"""Operations as a person would write them: `a + 0.1 * b`, `sqrt(x)`, `bf16(x)`."""

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.fx import Node

from collage_fx.passes.ir.program import CASTS
from collage_fx.runtime.ops import collage

aten = torch.ops.aten

CHOICE, COMPARISON, SUM, PRODUCT, SIGN, POWER, ATOM = range(7)
"""Precedences of operators, from the loosest."""


Pick: TypeAlias = Callable[[Node, Any], Any]


class Form(NamedTuple):
    """The way an operation is written: its text, and how tightly it binds."""

    text: str
    """Operands stand where {0}, {1}, ... are."""
    binding: int
    operands: Sequence[Any]
    needs: Sequence[int] = ()
    """Precedence that each operand needs so as not to be put in parentheses."""


_INFIX: dict[str, tuple[str, int]] = {
    "add": ("+", SUM),
    "sub": ("-", SUM),
    "mul": ("*", PRODUCT),
    "div": ("/", PRODUCT),
    "pow": ("**", POWER),
    "lt": ("<", COMPARISON),
    "le": ("<=", COMPARISON),
    "gt": (">", COMPARISON),
    "ge": (">=", COMPARISON),
    "eq": ("==", COMPARISON),
    "ne": ("!=", COMPARISON),
    "bitwise_and": ("&", COMPARISON),
    "bitwise_or": ("|", COMPARISON),
    "bitwise_xor": ("^", COMPARISON),
    "__lshift__": ("<<", COMPARISON),
    "__rshift__": (">>", COMPARISON),
    "truediv": ("/", PRODUCT),
}
_SHORT = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
}


def dtype_name(dtype: torch.dtype) -> str:
    """Return a short name of a dtype."""
    return _SHORT.get(dtype, str(dtype).removeprefix("torch."))


def number(value: Any) -> str:
    """Return a constant with as few digits as say what it is to nine of them."""
    if not isinstance(value, float) or not math.isfinite(value):
        return dtype_name(value) if isinstance(value, torch.dtype) else str(value)
    for digits in range(1, 17):
        text = f"{value:.{digits}g}"
        if math.isclose(float(text), value, rel_tol=1e-9):
            return text
    return repr(value)


def name_of(node: Node) -> str:
    """Return the name of an operation without overload or `_foreach_`."""
    target = node.target
    schema = getattr(target, "_schema", None)
    name = schema.name.split("::")[-1] if schema else getattr(target, "__name__", str(target))
    return name.removeprefix("_foreach_")


def form_of(node: Node, pick: Pick) -> Form:
    """Return the form in which a node is written.

    Args:
        node: an operation.
        pick: returns of a list of operands of a node that of the member which is shown.
    """
    name, args = name_of(node), [pick(node, a) for a in node.args]
    kwargs = {k: pick(node, v) for k, v in node.kwargs.items()}
    special = _SPECIAL.get(name)
    found = special(node, args, kwargs) if special else None
    if found is not None:
        return found
    if name in _INFIX and len(args) == 2 and not set(kwargs) - {"alpha"}:
        return _infix(name, args, kwargs)
    return _call(name, args, {k: v for k, v in kwargs.items() if v is not None})


def _infix(name: str, args: list[Any], kwargs: dict[str, Any]) -> Form:
    symbol, binding = _INFIX[name]
    alpha = kwargs.get("alpha", 1)
    if isinstance(alpha, int | float) and alpha < 0 and name in ("add", "sub"):
        symbol, alpha = {"+": "-", "-": "+"}[symbol], -alpha
    if alpha != 1:
        operands = [args[0], alpha, args[1]]
        return Form(f"{{0}} {symbol} {{1}} * {{2}}", SUM, operands, (SUM, PRODUCT, SIGN))
    right = binding if name == "pow" else binding + 1
    left = binding + 1 if name == "pow" or binding == COMPARISON else binding
    if name == "mul" and isinstance(args[0], Node) and not isinstance(args[1], Node):
        args = args[::-1]
    return Form(f"{{0}} {symbol} {{1}}", binding, args, (left, right))


def _call(name: str, args: list[Any], kwargs: dict[str, Any]) -> Form:
    holes = [f"{{{i}}}" for i in range(len(args))]
    holes += [f"{key}={{{len(args) + i}}}" for i, key in enumerate(kwargs)]
    operands = [*args, *kwargs.values()]
    return Form(f"{name}({', '.join(holes)})", ATOM, operands, [CHOICE] * len(operands))


def _cast(node: Node, args: list[Any], kwargs: dict[str, Any]) -> Form:
    to = kwargs.get("dtype") or next((a for a in args[1:] if isinstance(a, torch.dtype)), None)
    word = dtype_name(to) if isinstance(to, torch.dtype) else "copy"
    return Form(f"{word}({{0}})", ATOM, args[:1], (CHOICE,))


def _round(node: Node, args: list[Any], kwargs: dict[str, Any]) -> Form | None:
    return _cast(node, args, kwargs) if node.target is collage.round.default else None


def _scaled(symbol: str) -> Callable[..., Form]:
    """Return the writer of addcmul or addcdiv."""

    def write(node: Node, args: list[Any], kwargs: dict[str, Any]) -> Form:
        value = kwargs.get("value", args[3] if len(args) > 3 else 1)
        x, a, b = args[:3]
        if value == 1:
            text, operands = f"{{0}} + {{1}} {symbol} {{2}}", [x, a, b]
        else:
            text, operands = f"{{0}} + {{1}} * {{2}} {symbol} {{3}}", [x, value, a, b]
        return Form(text, SUM, operands, [SUM, PRODUCT, *[SIGN] * (len(operands) - 2)])

    return write


def _fma(node: Node, args: list[Any], kwargs: dict[str, Any]) -> Form:
    a, b, c = args
    a, b = (b, a) if isinstance(a, Node) and not isinstance(b, Node) else (a, b)
    return Form("{0} + {1} * {2}", SUM, [c, a, b], (SUM, PRODUCT, SIGN))


def _where(node: Node, args: list[Any], kwargs: dict[str, Any]) -> Form | None:
    if len(args) != 3:
        return None
    condition, yes, no = args
    return Form("{0} if {1} else {2}", CHOICE, [yes, condition, no], (COMPARISON,) * 3)


def _of_one(text: str, binding: int, needs: int, at: int = 0) -> Callable[..., Form]:
    """Return the writer of an operation on one operand, the one at this place."""
    return lambda node, args, kwargs: Form(text, binding, args[at : at + 1], (needs,))


_SPECIAL: dict[str, Callable[..., Form | None]] = {
    "convert_element_type": _cast,
    "_to_copy": _cast,
    "round": _round,
    "addcmul": _scaled("*"),
    "addcdiv": _scaled("/"),
    "fma": _fma,
    "where": _where,
    "neg": _of_one("-{0}", SIGN, SIGN),
    "rsub": lambda node, args, kwargs: _infix("sub", [args[1], args[0]], {}),
    "reciprocal": _of_one("1 / {0}", PRODUCT, SIGN),
    "full": _of_one("{0}", ATOM, CHOICE, at=1),
    "scalar_tensor": _of_one("{0}", ATOM, CHOICE),
}


def stands_for(node: Node, pick: Pick, *, exact: bool = False) -> Node | None:
    """Return the value that a node merely passes on, so that there is nothing to write.

    Args:
        node: any.
        pick: as of `form_of`.
        exact: whether all casts keep their values, as in lowered graphs.
    """
    if node.op != "call_function":
        return None
    if node.target is operator.getitem:
        of: Any = node.args[0]
        return of if isinstance(of.meta.get("val"), list | tuple) else None
    if node.target is aten.copy.default or name_of(node) == "copy":
        return _as_node(pick(node, node.args[1]))
    same = (aten.clone.default, aten.alias.default, aten.scalar_tensor.default)
    if node.target in same or (node.target in CASTS and (exact or _widens(node))):
        return _as_node(node.args[0])
    return None


def _as_node(value: Any) -> Node | None:
    return value if isinstance(value, Node) else None


def dtype_of(node: Node) -> torch.dtype | None:
    """Return the dtype of a value; None of a number, and of a list its first one's."""
    val = node.meta.get("val", node.meta.get("example_value"))
    val = val[0] if isinstance(val, list | tuple) and val else val
    found: torch.dtype | None = node.meta.get("dtype") or getattr(val, "dtype", None)
    return found


def _widens(node: Node) -> bool:
    """Return True if a cast keeps every value as it is."""
    source, to = dtype_of(node.all_input_nodes[0]), dtype_of(node)
    if source is None or to is None or not source.is_floating_point:
        return False
    return torch.promote_types(source, to) == to
