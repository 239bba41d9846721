"""Segments on whole values, as they stand, compiled by Inductor."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.fx import GraphModule

from collage_fx.compilation.inductor import (
    compile_by,
    compile_divided,
    compile_exactly,
    noted_roundings,
)
from collage_fx.compilation.session import Session
from collage_fx.passes.ir.listing import text_of
from collage_fx.passes.rewrite.powers import powers_in_float64
from collage_fx.passes.rewrite.roundings import ROUNDED, keep_user_roundings
from collage_fx.passes.rewrite.symbolic_scalars import Table, keep_symbols
from collage_fx.runtime import logs, progress
from collage_fx.runtime.residuals.store import STORE
from collage_fx.runtime.torch_private import (
    FakeTensorMode,
    TracingContext,
    functorch_config,
    select_decomp_table,
    tracing,
)
from collage_fx.segments.low_words import LowWords
from collage_fx.segments.memory import Input, Part, Piece
from collage_fx.segments.segment import Call, Segment
from collage_fx.segments.segment_graph import (
    Given,
    Made,
    Numbers,
    float_guard,
    graph_of_segment,
    with_fakes,
)
from collage_fx.segments.trie import Layout, layout_of


@dataclass(eq=False)
class Joining:
    """Executor on whole values: low words joined in, operations as they stand, split again."""

    session: Session
    words: LowWords
    before: dict[int, "_Before"] = field(default_factory=dict)
    """Position of a segment in its step -> the operands that it was given in the last one."""

    def given(self, segment: Segment, call: Call) -> Given | str:
        """Return the arguments with their low words, or why these are not to be compiled.

        That is so for fp8, whose rounding has a way of its own, for rounding by chance, and where a
        state has moved.
        """
        tensors = [*[given.data for given in call.inputs], *call.memory]
        before = self.before.get(call.at)
        if before is not None and before.segment is segment:
            same = before.lows(call, self.words)
            if same is not None:
                return Given(tensors, same, before.structure, call.plain, before.parts)
        wide = self.words.wide
        if any(t.dtype in wide and t.dtype not in ROUNDED for t in tensors):
            return "of its dtypes one is not rounded by the compiler"
        found, lows = [], list[Tensor]()
        left = segment.only_in(call.plain)
        for at, given, written in zip(segment.inputs, call.inputs, segment.writes, strict=True):
            parts = [] if at in left else self._parts(given, lows, written=written)
            if isinstance(parts, str):
                return parts
            found.append(parts)
        for at, t in zip(segment.live, call.memory, strict=True):
            mine = () if at in left else self.words.lows_of_result(t)
            lows += mine
            found.append(self._all_of(layout_of(t), mine))
        before = self.before[call.at] = _Before.of(segment, call, found, wide)
        return Given(tensors, lows, before.structure, call.plain, found)

    def _parts(self, given: Input, lows: list[Tensor], *, written: bool) -> list[Part] | str:
        """Return the parts of memory that have low words, or, where it is written, get some.

        These are added to `lows`. Text, if it is written as no compiled segment does: the reason.
        """
        layout = given.layout
        if mine := self.words.between(given, written=written):
            lows += mine
            return self._all_of(layout, mine)
        found = []
        for piece in given.pieces:
            if piece.moved and written:
                return "a state has moved in memory"
            if written:
                self.words.mark_written(piece.owned)
                piece.residual = self.words.ensure(piece.owned)
                if piece.residual is not None and self.words.by_chance(piece.residual.storage):
                    return "it is rounded by chance"
            if (r := piece.residual) is not None:
                lows += r.components
                found.append(Part(layout, piece.layout, r.storage, len(r.components)))
        return found

    def _all_of(self, layout: Layout, lows: tuple[Tensor, ...]) -> list[Part]:
        """Return all of some memory as a part, which has these low words; nothing without any."""
        return (
            [Part(layout, layout, self.words.transient[layout[0]].name, len(lows))] if lows else []
        )

    def compile(self, segment: Segment, given: Given, numbers: Numbers) -> Made:
        """Return the function that runs a segment with these numbers, and the guard on others."""
        gm = graph_of_segment(segment, numbers, self.words, given.parts, given.plain)
        mode, fakes = with_fakes(gm, given, numbers)
        table = select_decomp_table()
        if len(given.plain) < len(segment.strands):
            table = powers_in_float64(table)
        with noted_roundings() if given.plain else nullcontext():
            function = compile_joined(self.session, gm, mode, fakes, keep_symbols(table))

        def run(args: list[Any]) -> bool:
            function(args)
            return True

        return run, float_guard(mode, fakes)


@dataclass(eq=False)
class _Before:
    """Operands of a segment in the last step, and the low words that it takes as long as they are
    the same."""

    segment: Segment
    generation: int
    """Generation of the store. As long as it is the same, no other residual has the id of one."""
    inputs: list[tuple[int, bool, list[Any] | None]]
    """The position of each that may have low words, whether it is written, and its states; None
    where it had low words and is no state."""
    parts: list[list[Part]]
    results: list[int]
    """The positions of the results that have low words."""
    structure: Any

    @classmethod
    def of(cls, segment: Segment, call: Call, parts: list[list[Part]], wide: Any) -> "_Before":
        """Note the operands of a segment, and which parts of them have low words."""
        inputs: list[tuple[int, bool, list[Any] | None]] = []
        for i, (given, written) in enumerate(zip(call.inputs, segment.writes, strict=True)):
            if given.layout[0] in wide:
                states = list(map(_looks, given.pieces)) if given.pieces or not parts[i] else None
                inputs.append((i, written, states))
        results = [k for k, some in enumerate(parts[len(call.inputs) :]) if some]
        structure = tuple(tuple((part.view, part.storage) for part in some) for some in parts)
        return cls(segment, STORE.generation, inputs, parts, results, (structure, call.plain))

    def lows(self, call: Call, words: LowWords) -> list[Tensor] | None:
        """Return the low words for a call, as `given` does; None if it is given something else."""
        if STORE.generation != self.generation or call.plain != self.structure[1]:
            return None
        found: list[Tensor] = []
        for i, written, states in self.inputs:
            given = call.inputs[i]
            if words.memory[given.key].between is not None:
                between = words.between(given, written=written)
                if states is not None or not between:
                    return None
                found += between
                continue
            if states is None or len(states) != len(given.pieces):
                return None
            for piece, state in zip(given.pieces, states, strict=True):
                if _looks(piece) != state or (written and not _can_be_written(piece, words)):
                    return None
                if piece.residual is not None:
                    found += piece.residual.components
        for k in self.results:
            found += words.lows_of_result(call.memory[k])
        return found


def _looks(piece: Piece) -> tuple[Any, ...]:
    """Return a key of the low words of a state, and of what its storage depends on."""
    owned = piece.owned
    return id(piece.residual), owned.key, owned.state_name, piece.layout


def _can_be_written(piece: Piece, words: LowWords) -> bool:
    """Note a state that is written; return True if it is where it was, with what it is to have."""
    if piece.moved:
        return False
    words.mark_written(piece.owned)
    return piece.residual is not None or words.ensure(piece.owned) is None


def compile_joined(
    session: Session,
    gm: GraphModule,
    mode: FakeTensorMode,
    fakes: Sequence[Any],
    table: Table,
) -> Callable[[list[Any]], Any]:
    """Return the function of a graph that joins its inputs at the beginning and splits at the end.

    Its inputs are those fake tensors, of this mode. It returns nothing. AOTAutograd decomposes by
    this table.
    """
    whole: list[Callable[[list[Any]], Any]] = []

    def inner(functional: GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        kwargs.pop("get_decomp_fn", None)
        keep_user_roundings(functional)
        logs.show(logs.GRAPHS, "on whole values", lambda: text_of(functional))
        compile_ = compile_divided if session.divides else compile_exactly
        made = compile_(functional, list(inputs), kwargs)
        if code := getattr(made, "source_code", ""):
            logs.show(logs.CODE, "output code", lambda: code)
        places = functional.graph.find_nodes(op="placeholder")
        if len(places) == len(fakes) and not functional.graph.output_node().all_input_nodes:
            whole.append(made)
        return made

    with (
        progress.work(lambda: "compiling a recorded segment", "AOTAutograd"),
        functorch_config.patch(enable_autograd_cache=False),
        tracing(TracingContext(mode)),
    ):
        compiled: Any = compile_by(inner, gm, fakes, table, session.inductor)
    if len(whole) == 1:  # AOTAutograd has neither merged inputs nor left writes to its wrapper
        return whole[0]
    return lambda args: compiled(*args)
