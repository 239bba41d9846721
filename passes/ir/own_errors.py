"""Rounding errors that a step computes itself, as Kahan's summation and error feedback do."""

import contextlib
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from collage_fx.passes.ir.program import CASTS, LOW_PRECISION, Slice, is_tensor, value_of
from collage_fx.passes.ir.torch_internals import unset_fake_temporarily

aten = torch.ops.aten

_ADDING = (aten.add.Tensor, aten.sub.Tensor)
_ELEMENTS, _SIZES = 16, 6
_NOTHING = 2.0**-40


def roundings_for_errors(part: Slice, whole: set[Node]) -> set[Node]:
    """Return the values in 16 bits whose roundings a slice computes the errors of.

    A sum or difference that is nothing where nothing is rounded is such an error: of g * n and of
    its rounding, say, where the step keeps both. Without the rounding it would be zero, and lost.

    Args:
        part: the slice.
        whole: new values of states with residuals, which hold the errors themselves: these, and
            what is computed of them, count without their rounding.
    """
    behind: dict[Node, set[Node]] = {}
    candidates = []
    for node in part.nodes:
        of = [behind.get(n, {n}) for n in node.all_input_nodes]
        behind[node] = {node}.union(*of)
        if node.target in _ADDING and len(of) == 2 and of[0] & of[1]:
            apart = (n for n in of[0] ^ of[1] if _is_rounded(n, part))
            candidates += [node] if any(behind[n].isdisjoint(whole) for n in apart) else []
    if not candidates:
        return set()
    with unset_fake_temporarily(), torch.no_grad():
        exact = _Exact(part).values
        errors = [node for node in candidates if node in exact and _cancels(node, exact)]
    upstream = set().union(*(behind[node] - {node} for node in errors))
    return {n for n in upstream if _is_rounded(n, part) and behind[n].isdisjoint(whole)}


def _is_rounded(node: Node, part: Slice) -> bool:
    return node not in part.inputs and value_of(node).dtype in LOW_PRECISION


class _Exact:
    """What the nodes of a slice give in float64 on random inputs, as far as they give anything."""

    def __init__(self, part: Slice) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.values: dict[Node, Any] = {}
        for node in part.inputs:
            self._add_input(node)
        for node in part.nodes:
            self._add(node)

    def _add_input(self, node: Node) -> None:
        """Add an input; a number is computed, so that what is computed twice is the same."""
        of = node.all_input_nodes
        if of and all(is_tensor(n) and value_of(n).dim() == 0 for n in (node, *of)):
            for n in of:
                if n not in self.values:
                    self._add_input(n)
            self._add(node)
        self.values.setdefault(node, self._drawn(value_of(node)))

    def _drawn(self, of: Tensor) -> Tensor:
        shape = () if of.dim() == 0 else (_ELEMENTS,)
        size = torch.randint(-_SIZES, _SIZES, shape, generator=self.generator)
        x = torch.randn(shape, dtype=torch.float64, generator=self.generator) * 2.0**size
        return x if of.dtype.is_floating_point else (x > 0).to(of.dtype)

    def _add(self, node: Node) -> None:
        target: Any = node.target
        rounds = target in CASTS and value_of(node).dtype.is_floating_point
        with contextlib.suppress(KeyError, RuntimeError, TypeError):  # nothing is known of it
            taken: Any = map_arg((node.args, dict(node.kwargs)), self.values.__getitem__)
            args, kwargs = taken
            self.values[node] = args[0].double() if rounds else target(*args, **kwargs)


def _cancels(node: Node, exact: dict[Node, Tensor]) -> bool:
    """Tell whether a sum is nothing, though what it adds up is something."""
    terms = [exact[n].abs() for n in node.all_input_nodes]
    size = torch.maximum(*terms)
    known = exact[node].isfinite() & size.isfinite() & (size > 0)
    return bool(known.any()) and bool((exact[node].abs() <= _NOTHING * size)[known].all())
