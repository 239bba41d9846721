"""Pass 4: in arithmetic `wide`, round after operations that move elements, and not before."""

from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from collage_fx.passes.frontend.single_elements import is_16_bit
from collage_fx.passes.frontend.slice import elementwise
from collage_fx.passes.ir.graph_memory import fake_mode_of
from collage_fx.passes.ir.program import CONVERT, Program, graph_of, is_tensor, value_of
from collage_fx.passes.rules.structural import STRUCTURE

aten = torch.ops.aten
_WIDE = torch.float32
_KEEPING = STRUCTURE - {CONVERT} | {
    aten.diagonal_scatter.default,
    aten.scatter.src,
    aten.scatter.value,
    aten.select_scatter.default,
    aten.slice_scatter.default,
}
"""Operations whose results are elements of their operands."""


def moves(program: Program) -> None:
    """Round behind what moves elements, and not before it, where slices compute in fp32.

    To index, flip, transpose or put together changes no number, so that the rounding may as well
    come after it: there it is in the slice that reads the result, which does without. What is
    stored, or read by a reduction, is moved as it is there: no sum is less than an element.

    Before::

        mul = aten.mul.Tensor(g, scale)                             # bfloat16
        flip = aten.flip.default(mul, [0])
        add = aten.add.Tensor(p, flip)

    After::

        mul = aten.mul.Tensor(g32, scale32)                         # float32
        flip = aten.flip.default(mul, [0])
        rounded = prims.convert_element_type(flip, torch.bfloat16)
        add = aten.add.Tensor(p, rounded)
    """
    module = graph_of(program.canonical)
    if program.settings.arithmetic == "wide" and any(map(_moves, module.graph.nodes)):
        with fake_mode_of(module.graph.find_nodes(op="placeholder")):
            _Moves(module.graph).run()
        module.recompile()


def _moves(node: Node) -> bool:
    return _keeps(node) and is_16_bit(node) and not elementwise(node)


def _keeps(node: Node) -> bool:
    """Return True if the elements of a result are elements of its operands."""
    puts = node.target is aten.index_put.default and node.args[3:] in ((), (False,))
    return puts or node.target in _KEEPING


class _Moves:
    """Rewriter of what elementwise operations read of moved values."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.wide: dict[Node, Node] = {}
        """16-bit value -> the fp32 value of which it is the rounding."""
        self.made: set[Node] = set()

    def run(self) -> None:
        """Change the graph."""
        wanted, rounded = self._wanted(), dict[Node, Node]()
        for node in list(self.graph.nodes):
            for moved in rounded.keys() & node.all_input_nodes if elementwise(node) else ():
                node.replace_input_with(moved, rounded[moved])
            with self.graph.inserting_before(node.next):
                wide = self._unrounded(node) if node in wanted else None
                if wide is not None:
                    self._note(node, wide, rounded)
        for node in reversed(self.graph.nodes):
            if not node.users and (node in self.made or node in self.wide):
                self.graph.erase_node(node)

    def _note(self, node: Node, wide: Node, rounded: dict[Node, Node]) -> None:
        """Put the rounding of an fp32 value in place of a 16-bit one.

        Of one that was moved only elementwise operations read it: what stores it reads no rounding.
        """
        self.wide[node] = wide
        if node.target is CONVERT:
            return
        rounding = self._call(node, CONVERT, wide, value_of(node).dtype)
        self.wide[rounding] = wide
        if _moves(node):
            rounded[node] = rounding
        else:
            node.replace_all_uses_with(rounding)

    def _wanted(self) -> set[Node]:
        """Return moved values that elementwise operations read, and what they are computed of."""
        wanted: set[Node] = set()
        for node in reversed(self.graph.nodes):
            near = node.all_input_nodes
            found = near if node in wanted else filter(_moves, near if elementwise(node) else ())
            wanted.update(n for n in found if self._may_be_wide(n))
        return wanted

    def _may_be_wide(self, node: Node) -> bool:
        """Return True if a 16-bit value is computed by element, and nothing reads its rounding."""
        if node.op != "call_function" or not is_tensor(node) or not is_16_bit(node):
            return False
        return all(_moves(n) or elementwise(n) for n in (node, *node.users))

    def _unrounded(self, node: Node) -> Node | None:
        """Return the fp32 value of which a 16-bit one is the rounding; None if nothing rounds."""
        if node.target is CONVERT:
            source: Any = node.args[0]
            return source if value_of(source).dtype == _WIDE else None
        if _keeps(node) and self.wide.keys().isdisjoint(node.all_input_nodes):
            return None
        args, kwargs = map_arg((node.args, dict(node.kwargs)), self._operand)
        return self._call(node, node.target, *args, **kwargs)

    def _operand(self, node: Node) -> Node:
        """Return an operand in fp32."""
        if node in self.wide or not is_tensor(node) or not is_16_bit(node):
            return self.wide.get(node, node)
        return self._call(node, CONVERT, node, _WIDE)

    def _call(self, node: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
        """Append an operation that stems from what a node stems from."""
        new = self.graph.call_function(target, args, kwargs)
        of, by = map_arg((args, kwargs), lambda n: n.meta["val"])
        new.meta = {**node.meta, "val": target(*of, **by)}
        self.made.add(new)
        return new
