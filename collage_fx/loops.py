"""Tell from the code of a step whether it treats each parameter by itself, and all alike.

What is read is the loop that most optimizers are written as:

    for group in self.param_groups:
        for p in group["params"]:
            ...

Its body may use the parameter, `self.state[p]`, what the group has, names that it has bound before
in the same turn, operations of torch, and numbers; it may store in names of its own and in the
parameter's state. So nothing is carried from one parameter to the next, and nothing depends on
which one it is. Whatever is not known to be so is taken not to be.
"""

import ast
import inspect
import math
import textwrap
from collections.abc import Iterable
from types import FunctionType
from typing import Any

import torch

_BUILTINS = {"abs", "min", "max", "pow"}
_PROPERTIES = {"grad", "dtype", "device", "is_sparse", "ndim", "layout", "requires_grad", "is_cuda"}
_CONVERSIONS = {"to", "float", "double", "half", "bfloat16", "type_as"}
_OF_SIZES = {
    "numel",
    "nelement",
    "size",
    "stride",
    "storage_offset",
    "is_contiguous",
    "is_same_size",
}
_OF_VALUES = {"item", "tolist", "numpy", "is_nonzero", "equal", "allclose", "unique", "nonzero"}
_OF_TENSORS = {"requires_grad_", "retain_grad", "set_", "set_data", "resize_", "detach_"}
"""What they change is not in the graph."""
_CONSTANTS = (int, float, str, torch.dtype, torch.memory_format, torch.layout)
_EXPRESSIONS = (
    ast.BinOp,
    ast.UnaryOp,
    ast.BoolOp,
    ast.Compare,
    ast.IfExp,
    ast.Tuple,
    ast.operator,
    ast.unaryop,
    ast.boolop,
    ast.cmpop,
    ast.expr_context,
)


class _Unknown(Exception):
    """It is not known what a piece of code does."""


def treats_parameters_alike(step: Any) -> bool:
    """Tell whether a step, not bound and not wrapped, is such a loop."""
    if not isinstance(step, FunctionType) or step.__closure__:
        return False
    try:
        (function,) = ast.parse(textwrap.dedent(inspect.getsource(step))).body
        _Step(step.__globals__).check(function)
    except (_Unknown, OSError, TypeError, ValueError, SyntaxError):
        return False
    return True


class _Step:
    """The code of one step."""

    def __init__(self, names: dict[str, Any]) -> None:
        self.globals = names
        self.loops = 0
        self.self = self.group = self.param = ""
        self.local: set[str] = set()
        """Names that are bound anywhere in it, and so are no global ones."""
        self.outer: set[str] = set()
        """Names that are bound outside the loop over parameters."""
        self.given: set[str] = set()
        """Names, in that loop, of what comes from the group."""
        self.states: set[str] = set()
        """Names, in that loop, of the parameter's state."""

    def check(self, function: ast.stmt) -> None:
        """Raise _Unknown unless it is such a loop."""
        if not isinstance(function, ast.FunctionDef):
            raise _Unknown
        known = [*function.args.posonlyargs, *function.args.args]
        if function.args.vararg or function.args.kwarg or function.args.kwonlyargs:
            raise _Unknown
        self.self, *more = [a.arg for a in known]
        if more not in ([], ["closure"]):
            raise _Unknown
        self.local = _stored(function)
        for statement in function.body:
            self._of_function(statement)
        if self.loops != 1 or not self.param:
            raise _Unknown

    def _of_function(self, node: ast.stmt) -> None:
        if isinstance(node, ast.For):
            self._over_groups(node)
        elif isinstance(node, ast.With) and _is_no_grad(node) and self.loops == 0:
            for statement in node.body:
                self._of_function(statement)
        elif isinstance(node, ast.Return):
            if node.value is not None and not isinstance(node.value, ast.Name):
                raise _Unknown
        elif self._of_closure(node):
            pass
        else:
            raise _Unknown

    def _of_closure(self, node: ast.stmt) -> bool:
        """Tell whether a statement is the docstring, or calls the closure if there is one."""
        match node:
            case ast.Expr(value=ast.Constant()):
                return True
            case ast.Assign(targets=[ast.Name()], value=value):
                return ast.unparse(value) in _LOSSES
            case ast.If(test=test, body=body, orelse=[]):
                return ast.unparse(test) in ("closure is not None", "closure") and _calls(body)
        return False

    def _over_groups(self, node: ast.For) -> None:
        match node:
            case ast.For(
                target=ast.Name(id=group),
                iter=ast.Attribute(value=ast.Name(id=me), attr="param_groups"),
                orelse=[],
            ) if me == self.self:
                self.group = group
            case _:
                raise _Unknown
        self.loops += 1
        for statement in node.body:
            match statement:
                case ast.For():
                    self._over_parameters(statement)
                case ast.Assign(targets=targets, value=value):
                    self._expression(value, set())
                    for one in targets:
                        self._target(one, set())
                    self.outer |= set(_bound(targets))
                case _:
                    raise _Unknown

    def _over_parameters(self, node: ast.For) -> None:
        match node:
            case ast.For(
                target=ast.Name(id=param),
                iter=ast.Subscript(value=ast.Name(id=group), slice=ast.Constant(value="params")),
                orelse=[],
            ) if group == self.group and not self.param:
                self.param = param
            case _:
                raise _Unknown
        # A name that is bound within too is carried from one turn to the next.
        within = set().union(*map(_stored, node.body))
        self.outer -= within
        if {self.self, self.group} & within or self.param in set().union(*map(_rebound, node.body)):
            raise _Unknown
        self._block(node.body, set())

    def _block(self, body: Iterable[ast.stmt], bound: set[str]) -> set[str] | None:
        """Return the names that are bound after a block; None if it ends the turn."""
        for node in body:
            match node:
                case ast.Continue():
                    return None
                case ast.Raise():
                    return None
                case ast.Pass():
                    pass
                case ast.Expr(value=value):
                    self._expression(value, bound)
                case ast.AugAssign(target=target, value=value):
                    self._expression(value, bound)
                    self._target(target, bound)
                    if isinstance(target, ast.Name):
                        self._expression(ast.Name(target.id, ast.Load()), bound)
                case ast.Assign(targets=targets, value=value):
                    self._expression(value, bound)
                    for one in targets:
                        self._target(one, bound)
                    bound = bound | set(_bound(targets))
                    self._note(targets, value)
                case ast.If(test=test, body=yes, orelse=no):
                    self._expression(test, bound)
                    after = [b for way in (yes, no) if (b := self._block(way, bound)) is not None]
                    if not after:
                        return None
                    bound = set.intersection(*after)
                case _:
                    raise _Unknown
        return bound

    def _note(self, targets: list[ast.expr], value: ast.expr) -> None:
        """Note names of the state, and of what comes from the group."""
        names = set(_bound(targets))
        parts = value.elts if isinstance(value, ast.Tuple) else [value]
        if any(map(self._is_given, parts)):
            self.given |= names
        one = len(targets) == 1 and isinstance(targets[0], ast.Name)
        if one and isinstance(value, ast.Subscript) and self._is_state(value):
            self.states |= names
        elif names & self.states:
            raise _Unknown  # it was the state, and is something else now

    def _target(self, node: ast.expr, bound: set[str]) -> None:
        """Check what is stored in: a name, or an entry of the parameter's state."""
        match node:
            case ast.Name():
                pass
            case ast.Tuple(elts=parts):
                for part in parts:
                    self._target(part, bound)
            case ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=str())):
                if name not in self.states or name not in bound:
                    raise _Unknown
            case _:
                raise _Unknown

    def _expression(self, node: ast.AST, bound: set[str]) -> None:
        match node:
            case ast.Constant():
                return
            case ast.Name(id=name):
                self._name(name, bound)
                return
            case ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=str(key))):
                if not (name == self.group and key != "params") and name not in self.states & bound:
                    raise _Unknown
                return
            case ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=int())):
                if name not in self.outer:
                    raise _Unknown
                return
            case ast.Subscript():
                if not self._is_state(node):
                    raise _Unknown
                return
            case ast.Attribute(value=ast.Name(id=name), attr=attr) if self._is_global(name):
                if not isinstance(getattr(self.globals[name], attr, None), _CONSTANTS):
                    raise _Unknown
                return
            case ast.Attribute(value=value, attr=attr):
                if attr not in _PROPERTIES:
                    raise _Unknown
                self._expression(value, bound)
                return
            case ast.Compare(left=left, ops=[ast.In() | ast.NotIn()], comparators=[right]):
                named = isinstance(right, ast.Name) and right.id in self.states & bound
                if not (named and isinstance(left, ast.Constant)):
                    raise _Unknown
                return
            case ast.Compare(ops=ops, comparators=comparators):
                which = any(isinstance(op, ast.In | ast.NotIn | ast.Is | ast.IsNot) for op in ops)
                if which and ast.unparse(comparators[0]) != "None":
                    raise _Unknown  # which parameter it is
            case ast.Call(func=function, args=args, keywords=keywords):
                self._called(function, args, bound)
                for a in (*args, *(k.value for k in keywords)):
                    self._expression(a, bound)
                return
        if not isinstance(node, _EXPRESSIONS):
            raise _Unknown
        for child in ast.iter_child_nodes(node):
            self._expression(child, bound)

    def _is_state(self, node: ast.Subscript) -> bool:
        match node:
            case ast.Subscript(
                value=ast.Attribute(value=ast.Name(id=me), attr="state"), slice=ast.Name(id=param)
            ):
                return me == self.self and param == self.param != ""
        return False

    def _name(self, name: str, bound: set[str]) -> None:
        if name in bound or name in self.outer or (name == self.param and name):
            return
        if name in (self.self, "closure") or not self._is_global(name):
            raise _Unknown
        if not isinstance(self.globals[name], _CONSTANTS):
            raise _Unknown

    def _called(self, function: ast.expr, args: list[ast.expr], bound: set[str]) -> None:
        match function:
            case ast.Name(id="len"):
                if not all(isinstance(a, ast.Name) and a.id in self.states for a in args):
                    raise _Unknown
            case ast.Name(id=name):
                if name not in _BUILTINS or name in self.globals or name in self.local:
                    raise _Unknown
            case ast.Attribute(value=ast.Name(id=name), attr=attr) if self._is_global(name):
                self._of_module(self.globals[name], attr)
            case ast.Attribute(value=ast.Name(id=name), attr="get") if name in self.states & bound:
                pass
            case ast.Attribute(value=value, attr=attr):
                known = attr in _CONVERSIONS or getattr(torch.ops.aten, attr, None) is not None
                if not known or _tells(attr) or self._is_given(value):
                    raise _Unknown
                self._expression(value, bound)
            case _:
                raise _Unknown

    def _is_given(self, node: ast.expr) -> bool:
        """Tell whether something comes from the group, and may be an object of any kind."""
        match node:
            case ast.Name(id=name):
                return name in self.outer or name in self.given
            case ast.Subscript(value=ast.Name(id=name)):
                return name == self.group or name in self.outer or name in self.given
            case ast.IfExp(body=yes, orelse=no):
                return self._is_given(yes) or self._is_given(no)
        return False

    def _is_global(self, name: str) -> bool:
        return name in self.globals and name not in self.local

    def _of_module(self, module: Any, attr: str) -> None:
        of_torch = attr == "tensor" or getattr(torch.ops.aten, attr, None) is not None
        if not (module is math or (module is torch and of_torch)) or _tells(attr):
            raise _Unknown


_LOSSES = (
    "None",
    "None if closure is None else closure()",
    "closure() if closure is not None else None",
)


def _calls(body: list[ast.stmt]) -> bool:
    """Tell whether some code is `loss = closure()`, be it under torch.enable_grad()."""
    match body:
        case [ast.With(items=[item], body=inner)] if item.optional_vars is None:
            return ast.unparse(item.context_expr) == "torch.enable_grad()" and _calls(inner)
        case [ast.Assign(targets=[ast.Name()], value=value)]:
            return ast.unparse(value) == "closure()"
    return False


def _is_no_grad(node: ast.With) -> bool:
    match node.items:
        case [ast.withitem(context_expr=ast.Call(func=function, args=[]), optional_vars=None)]:
            return ast.unparse(function) == "torch.no_grad"
    return False


def _bound(targets: Iterable[ast.expr]) -> Iterable[str]:
    """Yield the names among targets."""
    for target in targets:
        if isinstance(target, ast.Name):
            yield target.id
        elif isinstance(target, ast.Tuple):
            yield from _bound(target.elts)


def _stored(node: ast.AST) -> set[str]:
    """Return the names that are bound anywhere in a piece of code."""
    found = (n for n in ast.walk(node) if isinstance(n, ast.Name))
    return {n.id for n in found if isinstance(n.ctx, ast.Store)}


def _rebound(node: ast.AST) -> set[str]:
    """Return the names that stand for something else after a piece of code."""
    in_place = [n for n in ast.walk(node) if isinstance(n, ast.AugAssign)]
    targets = [n.target for n in in_place]
    found = (n for n in ast.walk(node) if isinstance(n, ast.Name) and n not in targets)
    return {n.id for n in found if isinstance(n.ctx, ast.Store)}


def _tells(operation: str) -> bool:
    """Tell whether an operation has an effect on Python that may differ between parameters."""
    return operation in _OF_SIZES | _OF_VALUES | _OF_TENSORS or operation.startswith("_")
