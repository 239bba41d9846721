"""Abstract values a*x + b in one old value x of a state, by which `recurrence` walks the graph."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import nan, prod
from typing import Any, Literal, TypeAlias

import sympy
import torch
from torch.fx import Node

from collage_fx.passes.ir.graph_memory import behind
from collage_fx.passes.ir.program import (
    CONVERT,
    SAME_VALUE,
    Branch,
    Coefficient,
    is_value,
    value_of,
)

aten = torch.ops.aten

Rest: TypeAlias = Literal["zero", "free", "chosen", "nonlinear"]
_RESTS: tuple[Rest, ...] = ("zero", "free", "chosen", "nonlinear")


@dataclass(frozen=True)
class Form:
    """Abstract value a*x + b: a is known, of b only what it has to do with x."""

    a: Coefficient
    b: Rest = "zero"
    """`zero`, `free` (independent of x), `chosen` (by x, as its sign is, and nothing of it) or
    `nonlinear` (depends on x otherwise than through a)."""
    branches: tuple[Branch, ...] = ()
    """Values that a chosen one (by a condition, a maximum, a bound) may be, a*x + B each.
    Then a is 0 and b `nonlinear`."""
    among: tuple[Coefficient, ...] = ()
    """Factors of x in the values to choose from, if one of these is not linear. Then too a is 0
    and b `nonlinear`."""

    @property
    def depends(self) -> bool:
        """True if the value has anything to do with x."""
        return self.b in ("chosen", "nonlinear") or self.a != 0

    @property
    def carries(self) -> bool:
        """True if the value may hold some of x, and is not only chosen by it."""
        if self.branches:
            return any(branch.a != 0 for branch in self.branches)
        return self.b == "nonlinear" or self.a != 0

    def plus(self, other: "Form", sign: int = 1) -> "Form":
        """Return the form of the sum, or of the difference for sign -1."""
        for chosen, rest in ((self, other.times(sign)), (other.times(sign), self)):
            if chosen.branches and not rest.depends:
                adds = rest.b != "zero"
                return _choice([Branch(p.a, p.adds or adds) for p in chosen.branches])
        rests: list[Rest] = [f.b if f.carries or not f.depends else "chosen" for f in (self, other)]
        among = () if self.depends and other.depends else self.among or other.times(sign).among
        return Form(self.a + sign * other.a, max(rests, key=_RESTS.index), among=among)

    def times(self, factor: Coefficient) -> "Form":
        """Return the form of the product with something that does not depend on x."""
        if self.branches:
            return _choice([Branch(p.a * factor, p.adds) for p in self.branches])
        # sympy asks whether what it multiplies by zero is finite, and loads much to find out.
        among = tuple(a * factor for a in self.among)
        return Form(self.a * factor if self.a != 0 else 0, self.b, among=among)

    @property
    def alternatives(self) -> list[Branch] | None:
        """The branches of this value, one if it is not chosen; None if it is not linear in x."""
        if self.branches:
            return list(self.branches)
        return None if self.b == "nonlinear" else [Branch(self.a, self.b != "zero")]

    @property
    def shares(self) -> list[Coefficient]:
        """The factors of x in this value, one if it is not chosen, beside what is not linear."""
        return [branch.a for branch in self.branches] or list(self.among) or [self.a]

    @property
    def share(self) -> Coefficient:
        """The largest of the `shares`."""
        return max(self.shares, key=bound)


FREE = Form(0, "free")
CURVED = Form(0, "nonlinear")
MUCH = 0.5
"""The weight of a state in a result that counts as its value."""
LERP = (aten.lerp.Scalar, aten.lerp.Tensor)
ADDING = (aten.add.Tensor, aten.sub.Tensor, *LERP)
"""Operations that add values to each other."""
_OVERLOADS = ("Tensor", "Scalar", "default", "self")


def _named(*names: str) -> set[Any]:
    return {
        getattr(getattr(aten, name), overload)
        for name in names
        for overload in getattr(aten, name).overloads()
        if overload in _OVERLOADS
    }


DECIDING = _named(
    *("eq", "ne", "lt", "le", "gt", "ge", "sign", "sgn", "signbit", "isnan", "isinf"),
    *("logical_and", "logical_or", "logical_xor", "logical_not", "bitwise_not"),
)
CHOOSING = _named("maximum", "minimum", "fmax", "fmin", "clamp", "clamp_min", "clamp_max", "relu")


def transfer(node: Any, forms: Mapping[Any, Form]) -> Form:
    """Return the form of what a call computes from the forms of its operands.

    Args:
        node: a graph node, or any object with its `target`, `args` and `kwargs`.
        forms: the forms of operands, graph nodes or Values, that depend on the old value; all
            others do not.
    """
    operands = [form_of(a, forms) for a in node.args]
    if not any(f.depends for f in operands):
        return FREE
    first = operands[0]
    if node.target in SAME_VALUE:
        return first
    if node.target is aten.neg.default:
        return first.times(-1)
    if node.target in (aten.add.Tensor, aten.sub.Tensor):
        sign = 1 if node.target is aten.add.Tensor else -1
        return first.plus(operands[1].times(coefficient(node.kwargs.get("alpha", 1))), sign)
    if node.target is aten.mul.Tensor and not (first.depends and operands[1].depends):
        linear, factor = (0, 1) if first.depends else (1, 0)
        return operands[linear].times(coefficient(node.args[factor]))
    if node.target is aten.div.Tensor and not operands[1].depends:
        divisor = coefficient(node.args[1])
        if divisor != 0:
            return first.times(1 / divisor)
    if node.target in LERP and not operands[2].depends:
        weight = coefficient(node.args[2])
        return first.times(1 - weight).plus(operands[1].times(weight))
    return _chosen(node, operands)


def form_of(operand: Any, forms: Mapping[Any, Form]) -> Form:
    """Return the form of an operand: a tensor's, or that of a constant."""
    return forms.get(operand, FREE) if is_value(operand) else FREE


def _chosen(node: Any, operands: list[Form]) -> Form:
    """Return the form of an operation that chooses between its operands, and of any other."""
    if node.target in DECIDING:
        return _choice([Branch(0, True)])
    if node.target is aten.abs.default:
        return _between([operands[0], operands[0].times(-1)])
    if node.target is aten.where.self:
        return _between(operands[1:])
    if node.target in CHOOSING:
        return _between([*operands, FREE] if len(operands) != 2 else operands)
    return CURVED


def _between(forms: list[Form]) -> Form:
    every = [f.alternatives for f in forms]
    if any(one is None for one in every):
        return Form(0, "nonlinear", among=tuple(f.share for f in forms))
    return _choice([branch for one in every for branch in one or []])


def _choice(branches: list[Branch]) -> Form:
    """Return the form of one of several values; a sum, where(c, x - B, x), if x has one factor."""
    if len({branch.a for branch in branches}) == 1:
        adds = any(branch.adds for branch in branches)
        return Form(branches[0].a, "chosen" if adds else "zero")
    return Form(0, "nonlinear", tuple(dict.fromkeys(branches)))


def coefficient(value: Any, depth: int = 6) -> Coefficient:
    """Return a number, or for a tensor an expression in symbols.

    A 0-d input of the graph is a symbol with its name, assumed real; what is computed from such by
    a few operations is written out, as 1 - lr*weight_decay. A power of a number up to 1, as in a
    bias correction, is like an input. Any other 0-d value is a symbol of which nothing is known,
    and so is a tensor (`t_`), unless one number fills it.
    """
    if not isinstance(value, Node):
        return value
    filled: Any = behind(value, (CONVERT,))
    if filled.target is aten.full.default and isinstance(filled.args[1], int | float):
        return filled.args[1]
    if value_of(value).dim() > 0:
        return sympy.Symbol("t_" + value.name)
    if value.op == "placeholder":
        name, copy = value.meta.get("label", value.name), aten.copy_.default
        changes = any(u.target is copy and u.args[0] is value for u in value.users)
        return sympy.Symbol(name) if changes else sympy.Symbol(name, real=True)
    if value.target is CONVERT:
        return coefficient(value.args[0], depth)
    if depth and value.target in _POWERS:
        base, exponent = (coefficient(a, depth - 1) for a in value.args)
        return sympy.Symbol(value.name, real=_decays(base, exponent) or None)
    written = _ARITHMETIC.get(value.target) if depth and not value.kwargs else None
    if written is None or any(isinstance(a, bool) for a in value.args):
        return sympy.Symbol(value.name)
    return written(*(coefficient(a, depth - 1) for a in value.args))


_ARITHMETIC: dict[Any, Any] = {
    aten.add.Tensor: lambda a, b: a + b,
    aten.sub.Tensor: lambda a, b: a - b,
    aten.rsub.Scalar: lambda a, b: b - a,
    aten.mul.Tensor: lambda a, b: a * b,
    aten.neg.default: lambda a: -a,
}
_POWERS = (aten.pow.Tensor_Tensor, aten.pow.Scalar)


def _decays(base: Coefficient, exponent: Coefficient) -> bool:
    """Return True if a power stays between 0 and 1: 0.9**step, steps being positive."""
    terms = sympy.Add.make_args(sympy.expand(exponent))
    positive = all(term.as_coeff_Mul()[0] > 0 for term in terms)
    return is_number(base) and 0 <= float(base) <= 1 and positive


def is_number(a: Coefficient) -> bool:
    """Return True if a coefficient is a constant."""
    return isinstance(a, int | float) or bool(a.is_number)


def bound(a: Coefficient) -> float:
    """Return the largest value of |a|, infinity if that is not known.

    Inputs of the graph that stay as they are (a learning rate, a weight decay) count as at most 1.
    """
    if is_number(a):
        return abs(float(a))
    expanded: Any = sympy.expand(a)
    if expanded.is_Add:
        return sum(bound(term) for term in expanded.args)
    if expanded.is_Mul:
        return prod(map(bound, expanded.args))
    if expanded.is_Pow and is_number(expanded.exp) and expanded.exp > 0:
        return float(bound(expanded.base) ** float(expanded.exp))
    return 1.0 if expanded.is_Symbol and expanded.is_real else float("inf")


_RATE = 0.06
"""Value assumed for a number that may change from step to step."""
_FACTORS = tuple(3.0**k for k in range(-8, 9))
"""Values assumed for the elements of a tensor; `cancels` is content with a factor of three."""


def cancels(b: Coefficient, a: Coefficient) -> bool:
    """Return True if b is about 1 - a, or may be, for some elements of tensors in it."""
    has_tensor = any(not s.is_real for s in getattr(b, "free_symbols", ()))
    for factor in _FACTORS if has_tensor else _FACTORS[:1]:
        weight, rest = _at(b, factor), _at(1 - a - b, factor)
        if weight and abs(rest) <= abs(weight) / 2:
            return True
    return False


def _at(a: Any, factor: float) -> float:
    """Return a coefficient with this for the elements of tensors; NaN at a pole (1/(1 - s))."""
    if is_number(a):
        return float(a)
    value = a.subs({s: _RATE if s.is_real else factor for s in a.free_symbols})
    return float(value) if value.is_real else nan


def written(a: Coefficient) -> str:
    """Return a coefficient as a factor in a text: nothing for 1, brackets round a sum."""
    if is_number(a):
        return "" if a == 1 else f"{float(a):.9g}*"
    expression: Any = sympy.expand(a)
    if not expression.is_Add:
        return f"{_product(expression)}*"
    terms = sorted(expression.args, key=lambda term: (not term.is_number, str(term)))
    text = " + ".join(_product(term) for term in terms)
    return f"({text.replace('+ -', '- ')})*"


def _product(a: Any) -> str:
    """Return a product with its constant short, and any tensor called f: lr*0.01 as 0.01*lr."""
    number, rest = a.as_coeff_Mul()
    short = {s: sympy.Symbol("f") for s in rest.atoms(sympy.Symbol) if s.name.startswith("t_")}
    short |= {f: sympy.Symbol(f"{float(f):.9g}") for f in rest.atoms(sympy.Float)}
    text = str(rest.xreplace(short))
    if number == 1:
        return text
    return (
        f"-{text}" if number == -1 else f"{float(number):.9g}" + (f"*{text}" if rest != 1 else "")
    )
