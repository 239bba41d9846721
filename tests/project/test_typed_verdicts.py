"""Code decides by kinds of verdicts, recurrences and names of states, and never by their text.

For passes.ir.verdict and runtime.storage.state_name.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_layout import LAYERS, ROOT, sources

SHOWN = {"reason", "recurrence", "cause", "verdict", "name"}
"""Attributes that are made to be read; those but the last as variables too."""
PARTING = {"startswith", "endswith", "partition", "rpartition", "split", "rsplit"}
PARTING |= {"removeprefix", "removesuffix", "find", "index", "count"}
OTHERS = {
    "collage_fx/dynamo/backend.py": {"reason.reason"},  # Dynamo's
    "collage_fx/inspection/page/operations.py": {"schema.name"},
    "collage_fx/record/at_once.py": {"key.name"},  # a dispatch key, as torch.library names it
    "collage_fx/segments/operations.py": {"schema.name", "t.name", "a.name"},
    "passes/analysis/affine.py": {"s.name"},  # a symbol
    "passes/rewrite/op_schema.py": {"op._schema.name"},
}
"""Names that are no state's: of operators and their arguments, symbols, storages."""


def _text(node: ast.expr) -> str:
    """The expression that is shown text, if this is one, be it in str(); else nothing."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "str" and node.args:
        return _text(node.args[0])
    if isinstance(node, ast.Attribute) and node.attr in SHOWN:
        return ast.unparse(node)
    return node.id if isinstance(node, ast.Name) and node.id in SHOWN - {"name"} else ""


def _is_written_out(node: ast.expr) -> bool:
    """Return True if a text, or several, stand in the code, or in a constant of a module."""
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        return any(map(_is_written_out, node.elts))
    upper = isinstance(node, ast.Name) and node.id.isupper()
    return upper or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _decides(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield what a node does to shown text, with the expression of the text."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        method, receiver = node.func.attr, node.func.value
        parts = method in PARTING
        if parts and any(isinstance(a, ast.Constant) and a.value == " of " for a in node.args):
            yield ast.unparse(node), ast.unparse(receiver)
        elif parts and (found := _text(receiver)):
            yield ast.unparse(node), found
        elif ast.unparse(receiver) == "re" and any(map(_text, node.args)):
            yield ast.unparse(node), next(filter(None, map(_text, node.args)))
    elif isinstance(node, ast.Compare) and not isinstance(node.ops[0], ast.Is | ast.IsNot):
        sides = [node.left, *node.comparators]
        for one, other in (sides[:2], sides[1::-1]):
            if isinstance(one, ast.Constant) and one.value == " of ":
                yield ast.unparse(node), ast.unparse(other)
            elif (found := _text(one)) and _is_written_out(other):
                yield ast.unparse(node), found


def decisions(code: str) -> list[tuple[str, str]]:
    """Return what is decided by shown text; f-strings only show it, but split no name."""
    tree = ast.parse(code)
    shown = {
        inner
        for outer in ast.walk(tree)
        if isinstance(outer, ast.FormattedValue)
        for inner in ast.walk(outer)
    }
    found = ((node, one) for node in ast.walk(tree) for one in _decides(node))
    return [one for node, one in found if node not in shown or "' of '" in one[0]]


def test_nothing_is_decided_by_text() -> None:
    used: dict[str, set[str]] = {}
    for path in (path for layer in LAYERS for path in sources(layer)):
        where = path.relative_to(ROOT).as_posix()
        for expression, text in decisions(Path(path).read_text()):
            assert text in OTHERS.get(where, ()), f"{where} decides by text: {expression}"
            used.setdefault(where, set()).add(text)
    assert used == OTHERS, "a name that need not be excepted"


@pytest.mark.parametrize(
    "code",
    [
        "self.replaced or self.reason.startswith(ANEW)",
        "served is not None and served.recurrence in REPLACED",
        "state.recurrence in ('', \"x' = B\")",
        "'computed anew' in state.reason",
        "state.verdict == 'refused'",
        "self.name.endswith('.grad')",
        "is_param = ' of ' not in state.name",
        "kind = name.partition(' of ')[0]",
        "own, _, param = name.rpartition(' of ')",
        "f\"{ANEW} {other.name.partition(' of ')[0]}, which accumulates\"",
        "str(state.name).split(' of ')",
        "reason.startswith(LEFT_BY_LEVEL)",
        "re.match('overwritten', plan.decision.cause)",
    ],
)
def test_a_decision_by_text_is_found(code: str) -> None:
    """The control: lines that there were, and their like."""
    assert decisions(code)


@pytest.mark.parametrize(
    "code",
    [
        "state.decision.kind is VerdictKind.ANEW",
        "state.state_name.kind == kind",
        "found.name in self.updates",
        "f\"parameter: {reason.partition(',')[0]}, but small\"",
        "served.reason is plan.reason",
    ],
)
def test_what_shows_text_or_decides_by_kinds_is_let_be(code: str) -> None:
    assert not decisions(code)
