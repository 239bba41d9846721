"""Compilation of functional graphs by Inductor, which nothing else calls.

All that collage_fx compiles goes through here, so that the key of Inductor's cache covers our
lowerings, and tests can put an interpreter in its place.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import config as compiler_config
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from collage_fx.passes.codegen.inductor_lowering import register_lowerings, register_region
from collage_fx.passes.codegen.rounding_probe import check_roundings
from collage_fx.passes.frontend.slice import elementwise
from collage_fx.passes.ir.cache_key import source_digest
from collage_fx.passes.ir.graph_memory import base_of
from collage_fx.passes.ir.program import is_tensor
from collage_fx.runtime import cpp_compiler, progress
from collage_fx.runtime.ops import collage
from collage_fx.runtime.torch_private import TracingContext, tracing

aten = torch.ops.aten
_OVERWRITING = {
    *(aten.index_put.default, aten._unsafe_index_put.default, aten.put.default),
    *(aten.index_add.default, aten.index_copy.default, aten.index_reduce.default),
    *(aten.index_fill.int_Scalar, aten.index_fill.int_Tensor, aten.masked_scatter.default),
    *(aten.scatter.src, aten.scatter.value, aten.scatter_add.default, aten.scatter_reduce.two),
}
"""Operations that Inductor may do in place, each on an operand that nobody reads any more."""


def fake_mode_of(values: Sequence[Any]) -> Any:
    """Return the mode of the fake tensors among values; None if there are none."""
    modes = (getattr(x, "fake_mode", None) for x in values)
    return next((mode for mode in modes if mode is not None), None)


def compile_functional(gm: GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
    """Return the boxed callable that Inductor makes of a functional graph.

    Raises RoundingsLost where the compiler would leave out roundings.

    Args:
        gm: aten and collage:: operations, new values of states copied to placeholders at the end.
        inputs: its (fake) inputs.
        **kwargs: what AOTAutograd hands to `compile_fx_inner` beside them.
    """
    for device in {x.device for x in inputs if isinstance(x, Tensor)}:
        check_roundings(device, "by Inductor", _run)
    keep_old_values(gm)
    make_values_of_views(gm)
    keep_factors(gm)
    return _compiled(gm, inputs, **kwargs)


def keep_old_values(gm: GraphModule) -> None:
    """Copy the old value of an input that another one takes over, where both are written.

    AOTAutograd and Inductor leave out `clone`, and the order of the writes is that of the inputs:
    p is overwritten before it is stored in the other.

    Before::

        copy_ = aten.copy_.default(arg0_1, add)
        copy__1 = aten.copy_.default(arg1_1, arg0_1)  # the sum

    After::

        lift_fresh_copy = aten.lift_fresh_copy.default(arg0_1)
        copy_ = aten.copy_.default(arg0_1, add)
        copy__1 = aten.copy_.default(arg1_1, lift_fresh_copy)
    """
    overwritten, taken = set[Node](), list[Node]()
    writes = gm.graph.find_nodes(op="call_function", target=aten.copy_.default)
    for write in writes:
        if is_tensor(write.args[1]) and base_of(write.args[1]) in overwritten:
            taken.append(write)
        overwritten.add(write.args[0])
    for write in taken:
        old: Any = write.args[1]
        with gm.graph.inserting_before(writes[0]):
            # The one copy that neither of them leaves out.
            kept = gm.graph.call_function(aten.lift_fresh_copy.default, (old,))
        kept.meta["val"] = old.meta["val"]
        write.update_arg(1, kept)
    if taken:
        gm.recompile()


def make_values_of_views(gm: GraphModule) -> None:
    """Make a new value of bits seen as another dtype, where an operation overwrites a part of it.

    Inductor has such operations overwrite memory of their own: until torch 2.14 it goes on with the
    bits as they were, in silence (`index_put` with a mask), or raises NotImplementedError. It
    leaves out copies, and two negations change no bit.

    Before::

        view = aten.view.dtype(add, torch.float32)
        index_put = aten.index_put.default(view, [gt], mul)

    After::

        view = aten.view.dtype(add, torch.float32)
        neg = aten.neg.default(view)
        neg_1 = aten.neg.default(neg)
        index_put = aten.index_put.default(neg_1, [gt], mul)
    """
    nodes = [n for n in gm.graph.nodes if n.target in _OVERWRITING]
    for node in nodes:
        for old in node.all_input_nodes:
            if _sees_bits(old) and old.meta["val"].is_floating_point():
                _make_new(gm.graph, old, node)
    if nodes:
        gm.recompile()


def keep_factors(gm: GraphModule) -> None:
    """Make a new value of what is no operation of each element, where it is added with a factor.

    Of a matrix product and what it is added to Inductor makes `addmm`, and drops alpha, in silence.

    Before::

        mm = aten.mm.default(arg0_1, arg1_1)
        add = aten.add.Tensor(arg2_1, mm, alpha=-0.001)

    After::

        neg = aten.neg.default(mm)
        neg_1 = aten.neg.default(neg)
        add = aten.add.Tensor(arg2_1, neg_1, alpha=-0.001)
    """
    sums = gm.graph.find_nodes(op="call_function", target=aten.add.Tensor)
    scaled = [n for n in sums if n.kwargs.get("alpha", 1) != 1]
    for node in scaled:
        for old in node.all_input_nodes:
            base = base_of(old)
            if base.op == "call_function" and is_tensor(old) and not elementwise(base):
                _make_new(gm.graph, old, node)
    if scaled:
        gm.recompile()


def _make_new(graph: Graph, old: Node, user: Node) -> None:
    """Hand a node another tensor with the bits of an operand."""
    new = old
    with graph.inserting_before(user):
        for _ in range(2):
            new = graph.call_function(aten.neg.default, (new,))
            new.meta["val"] = old.meta["val"]
    user.replace_input_with(old, new)


def _sees_bits(node: Node) -> bool:
    """Return True for a view of the bits of another dtype, or a view of one."""
    base = base_of(node)
    while node is not base and node.target is not aten.view.dtype:
        node = node.all_input_nodes[0]
    return node is not base


def _compiled(gm: GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
    from collage_fx.runtime.torch_private import compile_fx_inner

    cpp_compiler.quote_cache_dir()
    register_lowerings()
    # A graph of another version may have the same text, and other code.
    tag = compiler_config.cache_key_tag + "collage_fx:" + source_digest()
    with (
        progress.doing(progress.counted("Inductor's graph")),
        compiler_config.patch(cache_key_tag=tag),  # type: ignore[attr-defined]
    ):
        return compile_fx_inner(gm, inputs, **kwargs)


def _run(lowered: Graph, given: list[Tensor]) -> Sequence[Tensor]:
    """Compile a lowered graph; return its results for operands."""
    key = register_region(GraphModule(torch.nn.Module(), lowered))

    def step(*xs: Tensor) -> tuple[Tensor, ...]:
        return tuple(collage.region.default(list(xs), key))

    graph = make_fx(step, tracing_mode="fake")(*given)
    fakes = [n.meta["val"] for n in graph.graph.find_nodes(op="placeholder")]
    with tracing(TracingContext(fake_mode_of(fakes))):
        results: Sequence[Tensor] = _compiled(graph, fakes)(list(given))
    return results
