"""Segments on whole values, as they stand, compiled by Inductor."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch._functorch import config as functorch_config
from torch._guards import TracingContext, tracing
from torch._inductor.compile_fx import compile_fx
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule

from collage_fx.compilation.inductor import compile_exactly
from collage_fx.compilation.session import Session
from collage_fx.passes.ir.listing import text_of
from collage_fx.passes.rewrite.roundings import ROUNDED, keep_roundings
from collage_fx.passes.rewrite.symbolic_scalars import keep_symbols
from collage_fx.runtime import logs, progress
from collage_fx.segments.low_words import LowWords
from collage_fx.segments.segment import Call, Segment
from collage_fx.segments.segment_graph import (
    Given,
    Made,
    Numbers,
    float_guard,
    joined_graph,
    with_fakes,
)


@dataclass(eq=False)
class Joining:
    """Does segments on whole values: low words joined in, operations as they stand, split again."""

    session: Session
    words: LowWords

    def given(self, segment: Segment, call: Call) -> Given | str:
        """Return the arguments with their low words, or why these are not to be compiled.

        That is so for fp8, whose rounding has a way of its own, for rounding by chance, and where a
        state has moved.
        """
        if self.session.config.stochastic_rounding:
            return "it is rounded by chance"
        found = []
        tensors = [*(given.data for given in call.inputs), *call.memory]
        if any(t.dtype in self.words.wide and t.dtype not in ROUNDED for t in tensors):
            return "of its dtypes one is not rounded by the compiler"
        for at, given in zip(segment.inputs, call.inputs, strict=True):
            parts = self.words.parts(given, written=at in segment.written)
            if parts is None:
                return "a state has moved in memory"
            found.append(parts)
        wide = self.words.wide
        found += [[self.words.part_of_result(t)] if t.dtype in wide else [] for t in call.memory]
        lows = [lo for parts in found for part in parts for lo in part.lows]
        return Given(tensors, lows, tuple(tuple(p.structure for p in ps) for ps in found), found)

    def compile(self, segment: Segment, given: Given, numbers: Numbers) -> Made:
        """Return what runs a segment with these numbers, and for which others it is right."""
        dtypes = [t.dtype for t in given.args]
        wide, computed = self.words.wide, segment.computed(self.words)
        gm = joined_graph(segment, numbers, wide, computed, dtypes, given.parts)
        mode, fakes = with_fakes(gm, given.args, numbers.given, given.lows)
        function = compile_joined(self.session, gm, mode, fakes)

        def run(args: list[Any]) -> bool:
            function(*args)
            return True

        return run, float_guard(mode, fakes)


def compile_joined(
    session: Session, gm: GraphModule, mode: FakeTensorMode, fakes: Sequence[Any]
) -> Callable[..., Any]:
    """Return the callable of a graph that joins its inputs at the beginning and splits at the end.

    Its inputs are those fake tensors, of this mode.
    """

    def inner(functional: GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        kwargs.pop("get_decomp_fn", None)
        keep_roundings(functional)
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
