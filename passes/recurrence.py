"""Pass 4: for each class, how a step changes each carried state, x' = a*x + B."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import sympy
import torch
from torch.fx import Node

from collage_fx.passes.program import (
    LOW_PRECISION,
    Program,
    Recurrence,
    StateClass,
    is_value,
    value_of,
)

aten, prims = torch.ops.aten, torch.ops.prims

Coefficient: TypeAlias = sympy.Expr | float


@dataclass(frozen=True)
class Form:
    """Abstract value a*x + b: a is known, of b only what it has to do with x."""

    a: Coefficient
    b: str = "zero"
    """`zero`, `free` (independent of x) or `nonlinear` (depends on x otherwise than through a)."""
    selects: bool = False
    """Whether b may be x itself, chosen by a condition or a maximum."""
    adds: bool = False
    """Whether, on any way from x to here, a term is added."""

    @property
    def depends(self) -> bool:
        """Whether the value depends on x."""
        return self.b == "nonlinear" or self.a != 0

    def plus(self, other: "Form", sign: int = 1) -> "Form":
        """Return the form of the sum, or of the difference for sign -1."""
        worst = max(self.b, other.b, key=("zero", "free", "nonlinear").index)
        return Form(self.a + sign * other.a, worst, self.selects or other.selects, True)

    def times(self, factor: Coefficient) -> "Form":
        """Return the form of the product with something that does not depend on x."""
        return Form(self.a * factor, self.b, self.selects, self.adds)


_FREE = Form(0, "free")
_ADDING = {aten.add.Tensor, aten.sub.Tensor, aten.lerp.Scalar, aten.lerp.Tensor}
_SCALING = {aten.mul.Tensor, aten.div.Tensor}
_SELECTING = {
    aten.where.self,
    aten.maximum.default,
    aten.minimum.default,
    aten.clamp.default,
    aten.clamp_min.default,
    aten.clamp_max.default,
}
_CAST = {prims.convert_element_type.default, aten._to_copy.default, aten.clone.default}


def recurrence(program: Program) -> None:
    """Give every class the recurrence of each of its carried states.

    Abstract interpretation of the representative: one walk for each state, with the coefficient of
    x carried as a number or a sympy expression in the slice's scalar inputs. The graph does not
    change.
    """
    for group in program.classes:
        group.recurrences = [_analyse(group, i) for i in range(len(group.representative.states))]


def _analyse(group: StateClass, which: int) -> Recurrence:
    part = group.representative
    _, position, new = part.states[which]
    x = part.inputs[position]
    forms: dict[Node, Form] = {x: Form(1)}
    for node in part.nodes:
        forms[node] = transfer(node, forms)
    form = forms[new]
    if not form.depends:
        return recurrence_of(form)
    spine = tuple(_spine(x, new, forms, _distances(x, part.nodes)))
    side = float(_tangled(spine, x, forms))
    if form.a != 0:
        side = max(side, _number(form.a - _along(spine, x)))
    return recurrence_of(form, spine, side)


def recurrence_of(form: Form, spine: tuple[Node, ...] = (), side: float = 0.0) -> Recurrence:
    """Return the recurrence of a state whose new value has this form in its old value.

    Args:
        form: what `transfer` makes of Form(1), the old value, on the way to the new one.
        spine: the carried path, where there is a graph.
        side: see Recurrence.
    """
    if not form.depends:
        return Recurrence("overwritten", 0.0, "x' = B")
    if form.b == "zero" and form.a == 1:
        return Recurrence("unchanged", 1.0, "x' = x", spine)
    if form.a == 0:
        return Recurrence("nonlinear", 0.0, "x' = B(x)", spine, side, form.adds)
    rest = {"zero": "", "free": " + B", "nonlinear": " + B(x)"}[form.b]
    return Recurrence("linear", form.a, f"x' = {_coefficient(form.a)}x{rest}", spine, side)


def _tangled(spine: tuple[Node, ...], x: Node, forms: dict[Node, Form]) -> bool:
    """Tell whether x meets itself on the spine: in other than a sum, or whole, by a selection."""
    previous = x
    for node in spine:
        others = [forms[a] for a in node.all_input_nodes if a is not previous and a in forms]
        if node.args.count(previous) == 1:
            if any(f.selects for f in others):
                return True
            if node.target not in _ADDING and any(f.depends for f in others):
                return True
            if node.target in _SCALING and any(
                _computed_factor(a, x) for a in node.args[:2] if a is not previous
            ):
                return True
        previous = node
    return False


def _computed_factor(operand: Any, x: Node) -> bool:
    """Tell whether operand is a 16-bit tensor of the step's own making, such as exp(-lr * g).

    It may have been rounded to one on the way, so eft would multiply by nothing.
    """
    if not isinstance(operand, Node) or operand.op == "placeholder" or operand is x:
        return False
    near = operand.target in _CAST and isinstance(operand.args[0], Node)
    return value_of(operand).dtype in LOW_PRECISION or (
        near and _computed_factor(operand.args[0], x)
    )


def _along(spine: tuple[Node, ...], x: Node) -> Coefficient:
    """Return the coefficient of x along the spine alone."""
    form, previous = Form(1), x
    for node in spine:
        form, previous = transfer(node, {previous: form}), node
    return form.a


def _number(a: Coefficient) -> float:
    """Return a constant coefficient; a symbolic one (lr * weight_decay, say) counts as small."""
    return float(a) if isinstance(a, int | float) or a.is_number else 0.0


def _coefficient(a: Coefficient) -> str:
    if a == 1:
        return ""
    text = f"{float(a):.9g}" if isinstance(a, int | float) or a.is_number else str(a)
    return f"({text})*" if " " in text else f"{text}*"


def transfer(node: Any, forms: Mapping[Any, Form]) -> Form:
    """Return the form of what a call computes from the forms of its operands.

    Args:
        node: a graph node, or any object with its `target`, `args` and `kwargs`.
        forms: the forms of operands, graph nodes or Values, that depend on the old value; all
            others do not.
    """

    def form(operand: Any) -> Form:
        return forms.get(operand, _FREE) if is_value(operand) else _FREE

    operands = [form(a) for a in node.args]
    if not any(f.depends for f in operands):
        return _FREE
    first = operands[0]
    if node.target in _CAST:
        return first
    if node.target is aten.neg.default:
        return first.times(-1)
    if node.target in (aten.add.Tensor, aten.sub.Tensor):
        sign = 1 if node.target is aten.add.Tensor else -1
        scale = _factor(node.kwargs.get("alpha", 1))
        return first.plus(operands[1].times(scale), sign)
    if node.target is aten.mul.Tensor and not (first.depends and operands[1].depends):
        linear, factor = (0, 1) if first.depends else (1, 0)
        return operands[linear].times(_factor(node.args[factor]))
    by_number = node.target is aten.div.Tensor and not operands[1].depends
    if by_number and (is_value(node.args[1]) or node.args[1] != 0):
        return first.times(1 / _factor(node.args[1]))
    if node.target in (aten.lerp.Scalar, aten.lerp.Tensor) and not form(node.args[2]).depends:
        weight = _factor(node.args[2])
        return first.times(1 - weight).plus(operands[1].times(weight))
    adds = node.target in _ADDING or any(f.adds for f in operands)
    return Form(0, "nonlinear", node.target in _SELECTING, adds)


def _factor(value: Any) -> Coefficient:
    """Return a number or, for a tensor, a symbol with the node's name."""
    if not is_value(value):
        return value
    name = value.name if isinstance(value, Node) else f"s{id(value):x}"
    return sympy.Symbol(name if value_of(value).dim() == 0 else "t_" + name)


def _distances(x: Node, nodes: list[Node]) -> dict[Node, int]:
    """Return how many operations lie between x and each node that depends on it."""
    distance = {x: 0}
    for node in nodes:
        near = [distance[a] for a in node.all_input_nodes if a in distance]
        if near:
            distance[node] = 1 + min(near)
    return distance


def _spine(x: Node, new: Node, forms: dict[Node, Form], distance: dict[Node, int]) -> list[Node]:
    """Return the carried path: backwards from the new value, by the shortest way to x.

    Where x enters twice (weight decay added to the gradient, say) the longer way is part of B: it
    reads the high word.
    """
    path: list[Node] = []
    node = new
    while node is not x:
        path.append(node)
        node = min(
            (a for a in node.all_input_nodes if a in distance),
            key=lambda a: (forms[a].a == 0, distance[a]),
        )
    return path[::-1]
