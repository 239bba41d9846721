"""Compile the graph of a segment on whole values, by Inductor as it stands."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._functorch import config as functorch_config
from torch._guards import TracingContext, tracing
from torch._inductor.compile_fx import compile_fx
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule

from collage_fx.compilation.inductor import compile_exactly
from collage_fx.compilation.session import Session
from collage_fx.passes.ir.listing import text_of
from collage_fx.passes.ir.program import CONVERT
from collage_fx.passes.rewrite.symbolic_scalars import keep_symbols
from collage_fx.runtime import logs, progress
from collage_fx.runtime.ops import collage

ROUNDED = (torch.bfloat16, torch.float16)
"""The dtypes of high words whose rounding Inductor can be made to carry out."""


def compile_joined(
    session: Session, gm: GraphModule, mode: FakeTensorMode, fakes: Sequence[Any]
) -> Callable[..., Any]:
    """Return the callable of a graph that joins its inputs at the beginning and splits at the end.

    Args:
        session: has Inductor's settings.
        gm: the graph.
        mode: that of the fake tensors.
        fakes: its inputs.
    """

    def inner(functional: GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        kwargs.pop("get_decomp_fn", None)
        _keep_roundings(functional)
        logs.show(logs.GRAPHS, "on whole values", lambda: text_of(functional))
        made = compile_exactly(functional, list(inputs), kwargs)
        if code := getattr(made, "source_code", ""):
            logs.show(logs.CODE, "output code", lambda: code)
        return made

    with (
        progress.work(lambda: "compiling a recorded segment", "AOTAutograd"),
        functorch_config.patch(enable_autograd_cache=False),
        tracing(TracingContext(mode)),
    ):
        compiled: Any = compile_fx(
            gm,
            list(fakes),
            inner_compile=inner,
            decompositions=keep_symbols(select_decomp_table()),
            config_patches=session.inductor or None,
        )
    function: Callable[..., Any] = compiled
    return function


def _keep_roundings(gm: GraphModule) -> None:
    """Make each rounding to 16 bits one that Inductor cannot leave out.

    It keeps 16-bit values of a kernel in fp32, where what `split` subtracts would be x - x.
    """
    for node in gm.graph.find_nodes(op="call_function", target=CONVERT):
        x, dtype = node.args
        wide = x.meta["val"].dtype
        if dtype not in ROUNDED or wide not in (torch.float32, torch.float64):
            continue
        with gm.graph.inserting_before(node):
            rounded = gm.graph.call_function(collage.round.default, (x, dtype))
            rounded.meta["val"] = x.meta["val"]
        node.update_arg(0, rounded)
        for user in list(node.users):
            if user.target is CONVERT and user.args[1] is wide:
                user.replace_all_uses_with(rounded)
    gm.graph.eliminate_dead_code()
    gm.recompile()
