"""Pass 3: keep what a reduction of 16-bit tensors returns in fp32 until it is used."""

import math
import operator
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from collage_fx.passes.frontend.decompose import like
from collage_fx.passes.frontend.single_elements import (
    is_16_bit,
    is_one_of_many,
    makes_scale,
    tensors_of,
)
from collage_fx.passes.frontend.slice import elementwise, shape_of
from collage_fx.passes.ir.graph_memory import ORIGIN, PLACES, WIDENED, mutations
from collage_fx.passes.ir.program import (
    CASTS,
    CONVERT,
    Program,
    graph_of,
    is_scalar,
    is_tensor,
    value_of,
)
from collage_fx.runtime.expansion.eft import SIXTEEN_BITS

aten = torch.ops.aten
WIDE = torch.float32
SUMS = frozenset(
    {
        aten.mean.default,
        aten.mean.dim,
        aten.prod.default,
        aten.prod.dim_int,
        aten.sum.default,
        aten.sum.dim_IntList,
        aten._foreach_norm.Scalar,
    }
)
"""Reductions that round what they return, and can be told not to. AOTAutograd has made sums of
norms and of dot products."""
CHOICES = frozenset({aten.amax.default, aten.amin.default, aten.max.default, aten.min.default})
"""Reductions that return one of the numbers they are given."""
MOVES = frozenset(
    {
        aten.cat.default,
        aten.permute.default,
        aten.select.int,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.unbind.int,
        aten.unsqueeze.default,
        aten.view.default,
        operator.getitem,
    }
)
"""Operations that bring results of reductions together and apart again."""
ROUNDED_ONCE = frozenset({aten.add.Tensor, aten.div.Tensor, aten.mul.Tensor, aten.sub.Tensor})
"""Operations that are exact but for one rounding, for which an operand need not be rounded too."""
PRODUCTS = frozenset({aten.div.Tensor, aten.mul.Tensor})
"""Operations of these whose results need not be rounded before the next of them either."""
HOLDS = MOVES | {aten.copy_.default, "output"}
"""Users that store a product, or parts of it: the rest of the step is to compute with what is
stored."""
SMOOTH = (ROUNDED_ONCE | SUMS | HOLDS | CASTS) | {
    aten.lerp.Scalar,
    aten.lerp.Tensor,
    aten.pow.Tensor_Scalar,
    aten.reciprocal.default,
    aten.rsqrt.default,
    aten.sqrt.default,
}
"""Operations that may follow on a product that is not rounded. A step that compares, clamps or
chooses may rely on all of it being rounded: no quotient of a tensor and its largest element
passes 1."""
CONSTANTS = frozenset({aten.full.default, aten.scalar_tensor.default})


def reductions(program: Program) -> None:
    """Keep the results of reductions, and what is computed of them alone, in fp32.

    So are other 0-d values of 16 bits that scale larger tensors: an element, a median, a state of
    one number. In 16 bits `1 - lr * s` is 1.

    A trust ratio, a global norm or a distance estimate is one number for many elements: what is
    lost by rounding it to 16 bits does not average out over them. PyTorch adds up in fp32, rounds
    the sum, and then each operation on it. Here it is rounded where it is stored in 16 bits, and
    where an operation needs it in the dtype of larger tensors. Products of it and those, a factored
    update say, are not rounded before the next product either, unless the step may rely on their
    roundings: stores them, casts them by itself, compares or clamps. A state that it enters, a
    factored second moment say, is read in fp32 too by what comes after its update: with its low
    word, where it has one.

    Before::

        sum_1 = aten.sum.default(abs_1)                             # bfloat16
        l1 = aten.add.Tensor(l1_old, sum_1)                         # float32

    After::

        sum_1 = aten.sum.default(abs_1, dtype=torch.float32)
        l1 = aten.add.Tensor(l1_old, sum_1)
    """
    module = graph_of(program.canonical)
    casts = {n.name for n in program.source.graph.nodes if n.target in CASTS and _is_called(n)}
    widening = _Widening(module.graph, casts)
    for node in list(module.graph.nodes):
        widening.take(node)
    for node in reversed(widening.replaced):
        if not node.users:
            module.graph.erase_node(node)
    module.recompile()


def _is_done_by_element(node: Node, operands: list[Node]) -> bool:
    """Return True if a node is elementwise, and has the shape of one of these operands."""
    return elementwise(node) and any(shape_of(node) == shape_of(a) for a in operands)


def _rounded_alone(node: Node) -> Node | None:
    """Return the fp32 value of which a node is the rounding, if nothing else uses it.

    Who uses both splits it into two words.
    """
    if node.target is not CONVERT or not is_16_bit(node):
        return None
    source = node.args[0]
    assert isinstance(source, Node)
    return source if len(source.users) == 1 and value_of(source).dtype == WIDE else None


def _is_handed_on(node: Node) -> bool:
    """Return True if a value is stored in a state, and read besides."""
    stored = {u for u in node.users if u.target is aten.copy_.default}
    return bool(stored) and len(stored) < len(node.users)


def _is_called(node: Node) -> bool:
    """Return True if the step calls a cast itself: AOTAutograd makes such of norms, say."""
    return node.meta.get("original_aten", node.target) in CASTS


def _rough(graph: Graph) -> set[Node]:
    """Return the nodes on which something depends that is not smooth, and not through a sum."""
    rough: set[Node] = set()
    for node in reversed(graph.nodes):
        if any(_is_choice(u) or (u in rough and u.target not in SUMS) for u in node.users):
            rough.add(node)
    return rough


def _is_choice(node: Node) -> bool:
    """Return True if an operation is not smooth, as is a norm that is the largest element."""
    return is_largest(node) or node.target not in SMOOTH


def is_largest(node: Node) -> bool:
    """Return True if a node is a norm that is the largest element."""
    return node.target is aten._foreach_norm.Scalar and any(
        isinstance(a, float) and math.isinf(a) for a in (*node.args, *node.kwargs.values())
    )


class _Widening:
    """Walk once through a graph, in the order of its nodes, which widens them."""

    def __init__(self, graph: Graph, casts: set[str]) -> None:
        self.graph = graph
        self.inputs = list(graph.find_nodes(op="placeholder"))
        self.written = mutations(graph)
        """The inputs that are written: a state is in a slice, where nothing is rounded."""
        self.casts = casts
        """Names of the casts of the step itself, in its source."""
        self.wide: dict[Any, Node] = {}
        """16-bit value, or list of such -> the fp32 value of which it is the rounding."""
        self.products: dict[Any, Node] = {}
        """Rounding of a product that such an fp32 value enters, in any dtype -> the product."""
        self.entered: set[Node] = set()
        """Products in fp32 that such a value enters."""
        self.rough = _rough(graph)
        self.reduced: set[Node] = set()
        """Results of reductions in other dtypes, and what is computed of them and scalars."""
        self.scalars: set[Node] = set()
        """Constants, 0-d inputs of other dtypes, and what is computed of them alone."""
        self.small: set[Node] = set()
        """Nodes of the shape of results of reductions, computed of these and of other tensors."""
        self.replaced: list[Node] = []
        """Nodes that may be of no use, in the order of the graph."""

    def take(self, node: Node) -> None:
        """Widen a 16-bit node that is a reduction or computed of such, else what it reads."""
        if node.op == "placeholder":
            if is_scalar(node) and not is_16_bit(node):
                self.scalars.add(node)
            elif is_scalar(node) and node not in self.written and makes_scale(node):
                self._hand_on(node)
        elif node.op != "call_function":
            return
        elif (wide := self._rounded_from(node)) is not None:
            self.wide[node] = wide
            wide.meta[WIDENED] = True
            self.replaced.append(node)
        elif is_16_bit(node) and self._is_reduced(node):
            self._widen(node)
        else:
            rounded = self._read_wide(node)
            self._note(node)
            self._note_product(node)
            if node.target is CONVERT and not self._is_cast(node):
                self._note_conversion(node)
            if self._is_as_small(node):
                self.small |= {node, rounded}
                if is_16_bit(rounded) and _is_handed_on(rounded):
                    self._hand_on(rounded)

    def _rounded_from(self, node: Node) -> Node | None:
        """Return the result of a reduction in fp32 of which a node is the rounding, or None."""
        source = _rounded_alone(node)
        return source if source in self.reduced else None

    def _is_reduced(self, node: Node) -> bool:
        """Return True if a node is a reduction, or computed of their results and scalars alone."""
        if node.target in SUMS or node.target in CHOICES:
            return node.kwargs.get("dtype") is None
        if is_one_of_many(node):
            return True
        return node.target not in CASTS and bool(self._reduced_operands(node))

    def _reduced_operands(self, node: Node) -> list[Node] | None:
        """Return the operands that are results of reductions; None if a node is not of their kind.

        It is if all others are scalars, and it is elementwise and no larger, or moves elements,
        whatever the indices.
        """
        operands = [a for a in node.all_input_nodes if tensors_of(a)]
        places = getattr(node.target, "_opname", "") in PLACES
        if places:
            operands = [a for a in operands if any(t.is_floating_point() for t in tensors_of(a))]
        of = [a for a in operands if a in self.wide or a in self.reduced]
        if not operands or not all(a in of or a in self.scalars for a in operands):
            return None
        small = _is_done_by_element(node, of or operands)
        return of if small or places or node.target in MOVES else None

    def _widen(self, node: Node) -> None:
        """Put a node in fp32 behind a 16-bit one, and its rounding in place of that."""
        with self.graph.inserting_before(node.next):
            wide = self.wide[node] = self._in_fp32(node)
            self.reduced.add(wide)
            self.replaced += [node, wide]
            if wide.target is CONVERT or not is_tensor(node):
                return  # nothing was rounded; or the items of a list are widened one by one
            self.wide[self._round(node, wide)] = wide

    def _round(self, node: Node, wide: Node) -> Node:
        """Put the rounding of an fp32 value in place of a 16-bit one."""
        val = value_of(node)
        rounded = self._call(node, CONVERT, wide, val.dtype, val=val)
        node.replace_all_uses_with(rounded)
        self.replaced.append(rounded)
        return rounded

    def _is_given(self, node: Node) -> bool:
        """Return True if a node returns elements of 16-bit operands, or rounds its own result."""
        if node.target in SUMS or any(a in self.wide for a in node.all_input_nodes):
            return False
        return node.target in CHOICES or is_one_of_many(node)

    def _in_fp32(self, node: Node) -> Node:
        vals = [like(v, WIDE) for v in tensors_of(node)]
        val = vals[0] if is_tensor(node) else vals
        if self._is_given(node):
            return self._call(node, CONVERT, node, WIDE, val=val)
        if node.target in SUMS:
            args = map_arg(node.args, lambda a: self.wide.get(a, a))
            kwargs = {**node.kwargs, "dtype": WIDE}
        else:
            both = (node.args, dict(node.kwargs))
            args, kwargs = map_arg(both, lambda a: self._operand(node, a))
        return self._call(node, node.target, *args, val=val, **kwargs)

    def _operand(self, node: Node, operand: Node) -> Node:
        """Return an operand where a node is computed in fp32."""
        if self._reads_unrounded(node, operand):
            return self._unrounded(operand)
        if not is_16_bit(operand):
            return operand
        return self._call(node, CONVERT, operand, WIDE, val=like(value_of(operand), WIDE))

    def _unrounded(self, node: Node) -> Node:
        """Return the fp32 value of which a node is the rounding, or the node."""
        return self.wide.get(node) or self.products.get(node, node)

    def _call(self, node: Node, target: Any, *args: Any, val: Any, **kwargs: Any) -> Node:
        """Add an operation that stems from what a node stems from."""
        new = self.graph.call_function(target, args, kwargs)
        new.meta = {**node.meta, "val": val, WIDENED: True}
        return new

    def _is_as_small(self, node: Node) -> bool:
        """Return True if a result has the shape of a reduction that it is computed of."""
        known = (self.wide, self.reduced, self.small)
        return _is_done_by_element(
            node, [a for a in node.all_input_nodes if any(a in some for some in known)]
        )

    def _hand_on(self, node: Node) -> None:
        """Put a value in fp32 behind a number that is given, or the new value of a state, for what
        is computed of it."""
        last = self.inputs[-1] if node.op == "placeholder" else node
        with self.graph.inserting_after(last):
            whole = self._call(node, CONVERT, node, WIDE, val=like(value_of(node), WIDE))
            self.wide[node] = whole
            self.reduced.add(whole)
            self.replaced.append(whole)

    def _read_wide(self, node: Node) -> Node:
        """Let a node read the fp32 values of what was widened, where it can take them.

        Return the node that has its value then: its rounding, or itself.
        """
        if node.target in SUMS and node.kwargs.get("dtype") == WIDE:
            node.args = map_arg(node.args, lambda a: self.wide.get(a, a))
        read = [a for a in node.all_input_nodes if self._reads_unrounded(node, a)]
        if not read or not elementwise(node):
            return node
        if not is_16_bit(node):
            if all(a in read for a in node.all_input_nodes if is_16_bit(a)):
                node.args = map_arg(node.args, lambda a: self._unrounded(a) if a in read else a)
                if node.target is CONVERT:
                    self._leave_out(node)
        elif node.target in ROUNDED_ONCE:
            return self._round_once(node)
        return node

    def _reads_unrounded(self, node: Node, operand: Node) -> bool:
        """Return True if an operand is a rounding that this node need not read.

        Of products only products need not: a step that adds, or casts, may go on to compute what
        it has lost by that, which is nothing where nothing was rounded.
        """
        return operand in self.wide or (operand in self.products and node.target in PRODUCTS)

    def _is_cast(self, node: Node) -> bool:
        """Return True if a node is a cast that the step does, and not one put in by a pass."""
        return node.target in CASTS and node.meta.get(ORIGIN) in self.casts

    def _round_once(self, node: Node) -> Node:
        """Compute a 16-bit node in fp32 of what was not rounded; return its rounding."""
        relied_on = self._is_relied_on(node)
        with self.graph.inserting_before(node.next):
            args = map_arg(node.args, lambda a: self._operand(node, a))
            wide = self._call(node, node.target, *args, val=like(value_of(node), WIDE))
            self.replaced += [node, wide]
            rounded = self._round(node, wide)
        self._note_product(wide)
        if wide in self.entered and not relied_on:
            self.products[rounded] = wide
        return rounded

    def _note_product(self, node: Node) -> None:
        """Note a product in fp32 that a value enters which was not rounded."""
        if node.target not in PRODUCTS or value_of(node).dtype != WIDE:
            return
        if any(a in self.reduced or a in self.entered for a in node.all_input_nodes):
            self.entered.add(node)

    def _note_conversion(self, node: Node) -> None:
        """Note the rounding of such a product, or what is that in fp32 again."""
        source = node.args[0]
        if (wide := _rounded_alone(node)) in self.entered and not self._is_relied_on(node):
            self.products[node] = wide
        elif source in self.products and node.args[1] == WIDE:
            self.products[node] = self.products[source]
        else:
            return
        self.replaced.append(node)

    def _is_relied_on(self, node: Node) -> bool:
        """Return True if the step may rely on the rounding of a product."""
        held = any(user.target in HOLDS or self._is_cast(user) for user in node.users)
        return held or node in self.rough

    def _leave_out(self, node: Node) -> None:
        """Take out a conversion if it has become one to the same dtype, but for its memory."""
        source = node.args[0]
        assert isinstance(source, Node)
        if value_of(source).dtype != node.args[1]:
            return
        if all(elementwise(user) for user in node.users):
            node.replace_all_uses_with(source)
            self.replaced.append(node)
        else:  # it may be a result, or viewed by one
            node.target, node.args = aten.clone.default, (source,)

    def _note(self, node: Node) -> None:
        """Note a node in more than 16 bits that is computed of reductions and scalars alone."""
        if node.target in CONSTANTS:
            self.scalars.add(node)
        elif node.target in SUMS or node.target in CHOICES:
            # A list of norms may be of both kinds.
            if not any(v.dtype in SIXTEEN_BITS for v in tensors_of(node)):
                self.reduced.add(node)
        elif (of := self._reduced_operands(node)) is not None and not (of and is_16_bit(node)):
            (self.reduced if of else self.scalars).add(node)
