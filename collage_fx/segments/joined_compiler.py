"""Segments on whole values, as they stand, compiled by Inductor."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule

from collage_fx.compilation.inductor import (
    compile_by,
    compile_divided,
    compile_exactly,
    noted_roundings,
)
from collage_fx.compilation.session import Session
from collage_fx.passes.ir.listing import text_of
from collage_fx.passes.rewrite.roundings import ROUNDED, keep_user_roundings
from collage_fx.passes.rewrite.symbolic_scalars import keep_symbols
from collage_fx.runtime import logs, progress
from collage_fx.runtime.torch_private import (
    TracingContext,
    functorch_config,
    select_decomp_table,
    tracing,
)
from collage_fx.segments.low_words import LowWords
from collage_fx.segments.memory import Lows
from collage_fx.segments.segment import Call, Segment
from collage_fx.segments.segment_graph import (
    Given,
    Made,
    Numbers,
    float_guard,
    graph_of_segment,
    with_fakes,
)


@dataclass(eq=False)
class Joining:
    """Executor on whole values: low words joined in, operations as they stand, split again."""

    session: Session
    words: LowWords

    def given(self, segment: Segment, call: Call) -> Given | str:
        """Return the arguments with their low words, or why these are not to be compiled.

        That is so for fp8, whose rounding has a way of its own, for rounding by chance, and where a
        state has moved.
        """
        tensors = [*[given.data for given in call.inputs], *call.memory]
        words, left, found = self.words, segment.only_in(call.plain), list[Lows]()
        if any(t.dtype in words.wide and t.dtype not in ROUNDED for t in tensors):
            return "of its dtypes one is not rounded by the compiler"
        for at, given, written in zip(segment.inputs, call.inputs, segment.writes, strict=True):
            if at in left:
                found.append(())
                continue
            if written and any(piece.moved for piece in given.pieces):
                return "a state has moved in memory"
            found.append(words.parts(given, written=written))
            if written and any(words.by_chance(part.storage) for part, _ in found[-1]):
                return "it is rounded by chance"
        for at, t in zip(segment.live, call.memory, strict=True):
            found.append(() if at in left else words.new_parts(t))
        lows = [word for some in found for _, own in some for word in own]
        parts = tuple([tuple([part for part, _ in some]) for some in found])
        return Given(tensors, lows, call.plain, parts)

    def compile(self, segment: Segment, given: Given, numbers: Numbers) -> Made:
        """Return the function that runs a segment with these numbers, and the guard on others.

        It joins its inputs at the beginning, and splits them at the end.
        """
        gm = graph_of_segment(segment, numbers, self.words, given.parts, given.plain)
        mode, fakes = with_fakes(gm, given, numbers)
        compile_ = compile_divided if self.session.divides else compile_exactly
        whole: list[Callable[[list[Any]], Any]] = []

        def inner(functional: GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
            kwargs.pop("get_decomp_fn", None)
            keep_user_roundings(functional)
            logs.show(logs.GRAPHS, "on whole values", lambda: text_of(functional))
            made = compile_(functional, list(inputs), kwargs)
            if code := getattr(made, "source_code", ""):
                logs.show(logs.CODE, "output code", lambda: code)
            places = functional.graph.find_nodes(op="placeholder")
            if len(places) == len(fakes) and not functional.graph.output_node().all_input_nodes:
                whole.append(made)
            return made

        table = keep_symbols(select_decomp_table())
        with (
            progress.work(lambda: "compiling a recorded segment", "AOTAutograd"),
            noted_roundings() if given.plain else nullcontext(),
            functorch_config.patch(enable_autograd_cache=False),
            tracing(TracingContext(mode)),
        ):
            compiled: Any = compile_by(inner, gm, fakes, table, self.session.inductor)

        def run(args: list[Any]) -> bool:
            if len(whole) == 1:  # AOTAutograd has neither merged inputs nor left it writes
                whole[0](args)
            else:
                compiled(*args)
            return True

        return run, float_guard(mode, fakes)
