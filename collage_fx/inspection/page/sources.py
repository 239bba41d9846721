"""Lines of the user's code: where they are, what they say, what they assign to."""

import ast
import functools
import linecache
import re
from dataclasses import dataclass

_INTERNAL = ("/torch/_", "/torch/fx/", "/collage_fx/")
_FRAME = re.compile(r'File "(.+)", line (\d+), in ')
_SIMPLE = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Expr, ast.Return)


@dataclass(frozen=True)
class Source:
    """A statement of the user's code, or of torch.optim."""

    file: str
    line: int
    text: str
    variable: str = ""
    """Variable that it assigns to; empty if that is no plain name."""
    in_place: bool = False
    """True if it changes that variable, by a method with a trailing underscore."""

    @property
    def short(self) -> str:
        """File and line without the folders."""
        return f"{self.file.rsplit('/', 1)[-1]}:{self.line}"


def source_of(trace: str | None) -> Source | None:
    """Return the innermost statement of a stack trace that is not in the insides of torch."""
    lines = (trace or "").strip().splitlines()
    for at in reversed(range(len(lines))):
        frame = _FRAME.search(lines[at])
        if frame and not any(part in frame[1] for part in _INTERNAL):
            text = lines[at + 1].strip() if at + 1 < len(lines) else ""
            return _statement(frame[1], int(frame[2]), text)
    return None


@functools.lru_cache(maxsize=4096)
def _statement(file: str, line: int, text: str) -> Source:
    """Return the whole statement that a line is a part of; the line where it cannot be read."""
    around = [s for s in _statements(file) if s.lineno <= line <= (s.end_lineno or s.lineno)]
    if not around:
        return Source(file, line, text)
    found = max(around, key=lambda s: s.lineno)
    target = found.targets[0] if isinstance(found, ast.Assign) else getattr(found, "target", None)
    in_place = target is None
    if isinstance(found, ast.Expr):
        target = _changed(found.value)
    name = target.id if isinstance(target, ast.Name) else ""
    return Source(file, found.lineno, ast.unparse(found), name, in_place)


@functools.lru_cache(maxsize=64)
def _statements(file: str) -> list[ast.stmt]:
    """Return the simple statements of a file; none if it is not there, or no Python."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return []
    return [node for node in ast.walk(tree) if isinstance(node, _SIMPLE)]


def _changed(call: ast.expr) -> ast.expr | None:
    """Return the variable that `x.mul_(a).add_(b)` changes, x."""
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)):
        return None
    if not call.func.attr.endswith("_"):
        return None
    inner = call.func.value
    if isinstance(inner, ast.Name) and inner.id == "torch":  # torch._foreach_mul_(bufs, momentum)
        return call.args[0] if call.args else None
    return _changed(inner) if isinstance(inner, ast.Call) else inner
