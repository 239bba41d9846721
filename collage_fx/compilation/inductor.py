"""Workarounds without which Inductor gives wrong results, or none, for the graphs of a step."""

import copy
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from collage_fx.compilation.partition import Direct
from collage_fx.passes.codegen import inductor_compile
from collage_fx.passes.dedup.independent_parts import Repeated, divide
from collage_fx.passes.ir.program import is_tensor
from collage_fx.runtime.torch_private import (
    TensorifyState,
    TracingContext,
    compile_fx,
    inductor_config,
)
from collage_fx.runtime.torch_versions import drops_roundings

aten = torch.ops.aten


def compile_by(
    inner: Callable[..., Any],
    gm: GraphModule,
    inputs: Sequence[Any],
    table: dict[Any, Callable[..., Any]],
    options: dict[str, Any],
) -> Any:
    """Compile a Dynamo graph by Inductor, its functional graph by `inner`.

    Args:
        inner: what comes after AOTAutograd and Inductor's passes over joint graphs.
        gm: the graph.
        inputs: examples.
        table: how AOTAutograd decomposes.
        options: settings of Inductor.
    """
    if drops_roundings():
        # One of these passes has a rounding to 16 bits, of what goes on in fp32, left out.
        matches = options.get("pattern_matcher", inductor_config.pattern_matcher)
        inner = inductor_config.patch(pattern_matcher=matches)(inner)
        options = {**options, "pattern_matcher": False}
    patches = options or None
    return compile_fx(
        gm, list(inputs), inner_compile=inner, decompositions=table, config_patches=patches
    )


def separate_outputs(gm: GraphModule) -> None:
    """Give each result of a graph memory of its own.

    Simplified, a state made in the step (0*m + grad) is the gradient, and states that begin equal
    are one node: what overwrites one of them in the next step would overwrite the others.
    """
    output = gm.graph.output_node()
    results: Any = output.args[0]
    seen: set[Node] = set()
    separate = list(results)
    with gm.graph.inserting_before(output):
        for i, node in enumerate(results):
            if is_tensor(node) and (node in seen or node.op == "placeholder"):
                separate[i] = gm.graph.call_function(aten.clone.default, (node,))
                separate[i].meta["val"] = aten.clone.default(node.meta["val"])
            elif isinstance(node, Node):
                seen.add(node)
    output.args = (type(results)(separate),)
    gm.recompile()


def with_present_symbols(inputs: Sequence[Any]) -> list[Any]:
    """Return the inputs of a graph, with the symbols that stand for its sizes and counts by now.

    Where two counts turn out to be equal one symbol takes the place of the other, in the graph but
    not in what Inductor reads of an input: its code would use a name that it does not define.
    """
    return [_with_present_symbol(x) if isinstance(x, torch.SymInt) else x for x in inputs]


def _with_present_symbol(number: torch.SymInt) -> Any:
    node = number.node
    if node._expr == node.expr:
        return number
    return node.shape_env.create_symintnode(node.expr, hint=node.hint)


@contextmanager
def floats_of(whole: GraphModule, *, but: GraphModule) -> Iterator[None]:
    """Have AOTAutograd pass over floats that are inputs of a graph, but not of a part of it.

    A float that the graph which it traces does not use it takes for one that cannot be an input,
    and has Dynamo trace the step again, with its value as a constant.

    Args:
        whole: the graph that Dynamo traced.
        but: the part of it that is compiled.
    """
    others = _floats(whole) - _floats(but) - TensorifyState.force_specializations
    TensorifyState.force_specializations |= others
    try:
        yield
    finally:
        TensorifyState.force_specializations -= others


def _floats(gm: GraphModule) -> set[str]:
    """Return the names of symbols for floats that are read out of inputs of a graph."""
    read = (
        n.meta.get("example_value") for n in gm.graph.find_nodes(op="call_method", target="item")
    )
    return {str(x.node.expr) for x in read if isinstance(x, torch.SymFloat)}


def compile_rewritten(
    gm: GraphModule,
    direct: Direct | None,
    inputs: list[Any],
    kwargs: dict[str, Any],
    *,
    divides: bool = False,
    calls: Repeated | None = None,
) -> tuple[Any, str]:
    """Return the callable of a rewritten graph, and Inductor's code of what it compiled.

    Args:
        gm: the graph.
        direct: the same with the kernels taken out, if they run beside what Inductor compiles.
        inputs: examples.
        kwargs: for Inductor.
        divides: whether to compile once what it does over and over, see `compile_divided`.
        calls: calls of the graph, where it is one member of a class.
    """
    compile_ = compile_divided if divides else compile_exactly
    if calls is not None:
        run = _compile_parts(gm, [calls], inputs, kwargs)
        return run, run.source_code
    if direct is None:
        inner = compile_(gm, inputs, kwargs)
        return inner, getattr(inner, "source_code", "")
    if direct.rest is None or direct.is_of_numbers:
        return direct.interpreted(), ""
    place = {i: k for k, i in enumerate(direct.inputs)}
    static = kwargs.get("static_input_idxs", ())
    kwargs = {**kwargs, "static_input_idxs": [place[i] for i in static if i in place]}
    inner = compile_(direct.rest, [inputs[i] for i in direct.inputs], kwargs)
    return direct.bind(inner), getattr(inner, "source_code", "")


# On a GPU Inductor divides approximately, and contracts a product and a sum to one rounding. A
# residual is an error that was computed, and must be that of the operation that is carried out.
_EXACT = {"eager_numerics.division_rounding": True, "emulate_precision_casts": True}


def noted_roundings() -> AbstractContextManager[None]:
    """Have AOTAutograd note, within, which nodes are 16-bit operations of the step."""
    patched: AbstractContextManager[None] = inductor_config.patch(emulate_precision_casts=True)
    return patched


def compile_exactly(gm: GraphModule, inputs: list[Any], kwargs: dict[str, Any]) -> Any:
    """Compile a graph; without fusion, if Inductor's fusion of it fails."""
    gpu = any(isinstance(x, Tensor) and x.device.type != "cpu" for x in inputs)
    with inductor_config.patch(_EXACT if gpu else {}):
        try:
            return inductor_compile.compile_functional(_copied(gm), inputs, **kwargs)
        except RuntimeError:  # as Inductor raises what it fails by
            # 2.13 fuses the outer loops of a row-wise reduction and of the update behind it, and
            # looks for a read that a buffer's in-place user does not have (KeyError in cpp.py).
            with inductor_config.patch(max_fusion_size=1):
                return inductor_compile.compile_functional(gm, inputs, **kwargs)


def compile_divided(gm: GraphModule, inputs: list[Any], kwargs: dict[str, Any]) -> Any:
    """Compile a graph; what it does over and over, to other tensors each time, once.

    On a GPU, where each call is a launch, it stays whole.
    """
    on_cpu = all(x.device.type == "cpu" for x in inputs if isinstance(x, Tensor))
    divided = divide(gm.graph) if on_cpu else None
    if divided is None:
        return compile_exactly(gm, inputs, kwargs)
    return _compile_parts(gm, divided, inputs, kwargs)


def _compile_parts(
    gm: GraphModule, divided: list[Repeated], inputs: list[Any], kwargs: dict[str, Any]
) -> Any:
    """Compile the graphs which, called one after another, do what a graph does."""
    static = set(kwargs.get("static_input_idxs", ()))
    calls, codes = [], []
    for repeated in divided:
        taken = list(zip(*(call.inputs for call in repeated.calls), strict=True))
        own = {**kwargs, "static_input_idxs": [i for i, at in enumerate(taken) if static >= {*at}]}
        part = GraphModule(gm, repeated.graph)
        with TracingContext.report_output_strides():  # each graph's own: AOTAutograd needs none
            made = compile_exactly(part, [inputs[at[0]] for at in taken], own)
        codes.append(getattr(made, "source_code", ""))
        calls += [(_getter(call.inputs), made, call.results) for call in repeated.calls]
    run = _in_turn(gm, calls)
    run.source_code = "\n\n".join(codes)  # type: ignore[attr-defined]
    return run


def _getter(places: list[int]) -> Callable[[list[Any]], Sequence[Any]]:
    """Return a function that picks items out of a list."""
    if len(places) > 1:
        return operator.itemgetter(*places)
    return lambda args: [args[i] for i in places]


def _in_turn(gm: GraphModule, calls: list[Any]) -> Callable[[list[Any]], Any]:
    """Return the boxed callable of a graph that is divided.

    Args:
        gm: the graph.
        calls: which inputs each call takes, what is called, and which results it returns.
    """
    output: Any = gm.graph.output_node().args[0]
    place = {n: i for i, n in enumerate(gm.graph.find_nodes(op="placeholder"))}
    returned = [(k, place[n]) for k, n in enumerate(output) if n in place]
    constants = [None if isinstance(n, Node) else n for n in output]
    made = [k for _, _, results in calls for k in results]
    constants += [None] * (max(made, default=-1) + 1 - len(constants))

    def run(args: list[Any]) -> Any:
        results = constants.copy()
        for k, i in returned:
            results[k] = args[i]
        for taken, function, made in calls:
            for k, result in zip(made, function([*taken(args)]), strict=True):
                results[k] = result
        args.clear()
        return results

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _copied(gm: GraphModule) -> GraphModule:
    """Return a copy of a graph over the same constants: under the fake mode they have no copies."""
    copied = GraphModule(gm, copy.deepcopy(gm.graph))  # nobody reads its code
    copied.meta = dict(gm.meta)
    return copied
