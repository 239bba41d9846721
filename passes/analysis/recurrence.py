"""Pass 6: for each class, how a step changes each carried state, x' = a*x + B."""

from torch.fx import Node

from collage_fx.passes.analysis.affine import Form, written
from collage_fx.passes.analysis.carried_path import beside, carried_path, walk
from collage_fx.passes.analysis.coupled import joint
from collage_fx.passes.ir.program import (
    Program,
    Recurrence,
    Slice,
    graph_of,
    is_tensor,
    value_of,
)


def recurrence(program: Program) -> None:
    """Give every class the recurrence of each of its carried states.

    Abstract interpretation of the representative: one walk for each state, with the coefficient of
    x carried as a number or a sympy expression in the slice's scalar inputs; then the states that
    are computed from each other as a system. The graph does not change.
    """
    read = _only_read(program)
    for group in program.classes:
        part = group.representative
        walks = [walk(part.nodes, part.old(i)) for i in range(len(part.states))]
        own = [_own(part, i, forms) for i, forms in enumerate(walks)]
        reads = [walk(part.nodes, x) for x in part.inputs if x in read]
        group.recurrences = joint(part, walks, own, reads)


def _only_read(program: Program) -> set[Node]:
    """Return the placeholders of states of the step that the graph only reads."""
    written = {c.index for c in program.carried}
    placeholders = graph_of(program.canonical).graph.find_nodes(op="placeholder")
    return {
        x
        for i, x in enumerate(placeholders)
        if i not in written
        and is_tensor(x)
        and value_of(x).is_floating_point()
        and program.describe(i, x).owner in ("param", "state")
    }


def _own(part: Slice, which: int, forms: dict[Node, Form]) -> Recurrence:
    """Return the recurrence of one state by itself."""
    x, new = part.old(which), part.states[which][2]
    if new not in forms:
        return recurrence_of(Form(0, "free"))
    path = carried_path(part, x, new, forms)
    return recurrence_of(forms[new], path, beside(part, x, path, forms))


def recurrence_of(form: Form, carried_path: tuple[Node, ...] = (), side: float = 0.0) -> Recurrence:
    """Return the recurrence of a state whose new value has this form in its old value.

    Args:
        form: what `transfer` makes of Form(1), the old value, on the way to the new one.
        carried_path: the carried path, where there is a graph.
        side: see Recurrence.
    """
    if not form.depends:
        return Recurrence("overwritten", 0.0, "x' = B")
    if not form.carries:
        return Recurrence("overwritten", 0.0, "x' = B, chosen by x")
    if form.b == "zero" and form.a == 1:
        return Recurrence("unchanged", 1.0, "x' = x", carried_path)
    if form.branches:
        words = [_affine(b.a, " + B" if b.adds else "") for b in form.branches]
        text = f"x' = {' or '.join(dict.fromkeys(words))}"
        return Recurrence("selected", 0.0, text, carried_path, side, form.branches)
    if form.a == 0:
        return Recurrence("nonlinear", 0.0, "x' = B(x)", carried_path, side)
    rest = {"zero": "", "free": " + B"}.get(form.b, " + B(x)")
    text, curved = f"x' = {_affine(form.a, rest)}", form.b == "nonlinear"
    return Recurrence("linear", form.a, text, carried_path, side, curved=curved)


def _affine(a: object, rest: str) -> str:
    return f"{written(a)}x{rest}" if a != 0 else rest.removeprefix(" + ") or "0"
