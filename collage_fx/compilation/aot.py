"""AOTAutograd compilation of one Dynamo graph to a callable that binds residuals."""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from collage_fx.compilation.graph_inputs import AotInputs, Inputs
from collage_fx.compilation.inductor import (
    compile_by,
    compile_rewritten,
    floats_of,
    noted_roundings,
    separate_outputs,
    with_present_symbols,
)
from collage_fx.compilation.partition import Direct, kernels_in, split
from collage_fx.compilation.residual_binding import Residuals
from collage_fx.compilation.session import Session, StandsForOthers
from collage_fx.compilation.side_inputs import Code, SideInputs, in_turn
from collage_fx.compilation.uncompensated import (
    differentiated,
    note_results,
    takes_one_for_two,
    warn_of_states,
    written_outside,
)
from collage_fx.optimizer.checkpoints import state_dicts
from collage_fx.optimizer.ownership import kept_elsewhere, owners_of
from collage_fx.passes.codegen import inductor_compile
from collage_fx.passes.codegen.multi_tensor_kernel import MEMBERS, least_members, show_code
from collage_fx.passes.dedup.deduplicate import Narrow, narrow
from collage_fx.passes.dedup.equal_counts import unify_equal_counts
from collage_fx.passes.dedup.independent_parts import Repeated, calls_of_members
from collage_fx.passes.ir.exact import ExactGraph
from collage_fx.passes.ir.listing import show_program, summary
from collage_fx.passes.ir.program import Program, Unlike, graph_of
from collage_fx.passes.pipeline import run_passes
from collage_fx.passes.rewrite.roundings import (
    keep_shared_roundings,
    keep_user_roundings,
    widen_products,
)
from collage_fx.passes.rewrite.symbolic_scalars import keep_symbols
from collage_fx.runtime import logs, progress
from collage_fx.runtime.errors import CollageError, RoundingsLost
from collage_fx.runtime.storage.registry import compensable_dtypes
from collage_fx.runtime.torch_private import (
    TorchDynamoException,
    TracingContext,
    aot_module_simplified,
    functorch_config,
    select_decomp_table,
    tracing,
)


def compile_graph(
    session: Session,
    gm: GraphModule,
    example_inputs: Sequence[Any],
    args: tuple[Any, ...] = (),
    *,
    joins: bool = False,
) -> Code:
    """Compile a graph: one member of each class of it, where that will do for all.

    Args:
        session: who asks for it.
        gm: what Dynamo made.
        example_inputs: the arguments of the call that made Dynamo compile.
        args: those of the call for which the graph is compiled anew; () at first.
        joins: whether what slices would lose is to be done on joined values, in the graph.
    """
    optimizers = session.optimizers()
    state_dicts.take_up(optimizers)
    optimizer = session.optimizer()
    inputs = Inputs(
        gm,
        args or tuple(example_inputs),
        owners_of(optimizers),
        kept_elsewhere(optimizer) if optimizer is not None else frozenset(),
        of_optimizer=optimizer is not None,
        again=bool(args),
        joins=joins,
    )
    try:
        if session.steps() is not None and inputs.share_memory_of_states():
            # The parts of a memory are known to the recorder.
            session.notes.add("recorded: a gradient, or another tensor, lies in memory of a state")
            return Code(gm, None, [], [], refused=True)
        with progress.work(lambda: f"compiling {session.subject}", "AOTAutograd"):
            return _compiled_code(session, inputs, example_inputs)
    finally:
        inputs.release()


def _compiled_code(session: Session, inputs: Inputs, example_inputs: Sequence[Any]) -> Code:
    if session.stand_ins is not None:
        return _compile_for_others(session, session.stand_ins, inputs, example_inputs)
    narrow_code = _compile_narrow(session, inputs, example_inputs)
    code = narrow_code or Compilation(session, inputs, None).run(example_inputs)
    assert isinstance(code, Code)
    return code


def _compile_for_others(
    session: Session, stand_ins: StandsForOthers, inputs: Inputs, example_inputs: Sequence[Any]
) -> Code:
    """Compile a graph for parameters that Dynamo has not seen too; note it if that cannot be."""
    found: Narrow | Code | Unlike = stand_ins.whole_graph(inputs, session.settings)
    if isinstance(found, Narrow):
        found = _compile_parts(session, inputs, found, example_inputs)
    if isinstance(found, Code):
        return found
    stand_ins.unlike = found
    return Code(inputs.gm, None, [], [], refused=True)


def _first_alike(
    session: Session, inputs: Inputs, narrowed: Narrow, example_inputs: Sequence[Any]
) -> Code | Unlike:
    """Compile one member of each class, at best without Inductor."""
    alone = Compilation(session, inputs, narrowed, alone=True)
    code = alone.run(example_inputs)
    if alone.needs_inductor:
        return Compilation(session, inputs, narrowed).run(example_inputs)
    return code


def _compile_parts(
    session: Session, inputs: Inputs, narrowed: Narrow, example_inputs: Sequence[Any]
) -> Code | Unlike:
    """Compile one member of each class, and each class that is done by calls for itself."""
    if not narrowed.apart:
        return _first_alike(session, inputs, narrowed, example_inputs)
    noted = len(session.compiled)
    given = [*example_inputs, *(n.meta["example_value"] for n in narrowed.handed)]
    inputs.take_handed(len(narrowed.handed))
    apart: list[Code] = []
    first: Code | Unlike | None = None
    for one in narrowed.apart:
        code = Compilation(session, inputs, one).run(given)
        if isinstance(code, Unlike):
            first = code
            break
        apart.append(code)
    if first is None and not narrowed.idle:
        first = _first_alike(session, inputs, narrowed, example_inputs)
    if isinstance(first, Unlike):
        del session.compiled[noted:]
        return first
    outputs: Any = inputs.gm.graph.output_node().args[0]
    return in_turn(first, apart, len(outputs))


def _compile_narrow(session: Session, inputs: Inputs, example_inputs: Sequence[Any]) -> Code | None:
    """Compile one member of each class; return None where the graph has to be compiled whole."""
    config = session.config
    if not session.deduplicates:
        return None
    try:
        least, dtypes = partial(least_members, config), compensable_dtypes(config.storage)
        # A guard that Dynamo compiles anew behind pays where it saves many members.
        unify_equal_counts(inputs.gm, MEMBERS)
        fact = partial(inputs.fact, settings=config)
        states = (owned.tensor for _, owned in inputs.owners.values())
        by_chance = session.rounds_by_chance(states)
        narrowed = narrow(inputs.gm, fact, least, dtypes, calls=not by_chance)
        if narrowed is not None:
            code = _compile_parts(session, inputs, narrowed, example_inputs)
            return None if isinstance(code, Unlike) else code
    except (CollageError, RoundingsLost, TorchDynamoException):
        raise
    except Exception as error:
        session.notes.add(
            f"a graph was compiled member by member, since {type(error).__name__} was raised in "
            "narrowing it: a defect of collage_fx, please report it"
        )
    return None


@dataclass(eq=False)
class Compilation:
    """The compilation of a graph, whole or narrow."""

    session: Session
    whole: Inputs
    """Inputs of the whole graph."""
    narrow: Narrow | None
    """The narrow graph, if that is to be compiled."""
    alone: bool = False
    """True to give up if anything but operations for classes is left of it. Inductor has no part
    in it then, and what it does to be ready takes longer."""
    program: Program | None = None
    """Program of the passes; None if they do not take the graph."""
    direct: Direct | None = None
    """Rewritten graph with the kernels taken out, where that can be."""
    calls: Repeated | None = None
    """Calls of the graph, where it is one member of a class."""
    side: SideInputs | None = None
    refused: bool = False
    unlike: Unlike | None = None
    """Reason why the members in a narrow graph cannot stand for the others."""
    plain: bool = False
    """True if the step has no state, or the graph no input, of a dtype with low words."""
    needs_inductor: bool = False
    """True if it was given up as one that is compiled `alone`, and for nothing else."""

    def __post_init__(self) -> None:
        self.gm = self.narrow.gm if self.narrow else self.whole.gm
        self.inputs = AotInputs(self.whole, self.narrow)

    def run(self, example_inputs: Sequence[Any]) -> Code | Unlike:
        """Compile the graph; or say why a narrow one cannot be that of all."""
        start = time.perf_counter()
        chosen = self.narrow.inputs if self.narrow else range(len(example_inputs))
        steps, dtypes = self.session.steps(), compensable_dtypes(self.session.config.storage)
        # Of few parameters Dynamo makes attributes of the graph.
        given = (*example_inputs, *self.whole.gm.parameters(), *self.whole.gm.buffers())
        self.plain = (steps is not None and steps.plain) or not any(
            isinstance(x, Tensor) and x.dtype in dtypes for x in given
        )
        function = self._compiled([example_inputs[i] for i in chosen])
        self._log(time.perf_counter() - start)
        if self.unlike is not None:
            return self.unlike
        if self.program is None:
            return Code(function, None, [], [], self.refused)
        locate, plan = self.inputs.locate, self.program.plan
        states = [(locate[s.index], s) for s in plan if s.compensable and s.index in locate]
        places = self.program.places
        reads = [
            (locate[k], name)
            for i, name in self.program.reads.items()
            for k in places(i)
            if k in locate
        ]
        wanted = [locate[k] for i in self.program.weighty for k in places(i) if k in locate]
        refused = self.refused or any(s.refused and s.compensable for s in plan)
        direct, seeds = self.direct, self.program.seeds
        kernels = kernels_in(graph_of(self.program.result)) if self.program.result else []
        written = {k for c in self.program.carried for k in places(c.index)}
        high = [locate[i] for i in self.inputs.plain - written]
        made = (function, self.side, states, reads, refused, direct, seeds, wanted, kernels)
        return Code(*made, high=high)

    def _log(self, seconds: float) -> None:
        """Log, in one line, what was compiled or why it was not."""
        if not logs.LOG.isEnabledFor(logging.INFO):
            return
        what = self.unlike or self.program
        logs.LOG.info("%s: %s; %.2f s", self.session.subject, summary(what), seconds)

    def _compiled(self, example_inputs: list[Any]) -> Callable[..., Any]:
        """Return the callable that AOTAutograd makes of the graph, by `inner`."""
        table = keep_symbols(select_decomp_table())
        # What AOTAutograd finds out is left there, by Dynamo's call as by our own.
        context = TracingContext.try_get() or TracingContext(None)
        # A step through `.data` need not be in no_grad(), and has no gradients. AOTAutograd would
        # write its parameters after the graph has run, for a backward pass that is not to come.
        grad = nullcontext() if self.whole.differentiates else torch.no_grad()
        noted = noted_roundings() if self.plain else nullcontext()
        # The cache of AOTAutograd sees neither our inner_compile nor the residuals it binds.
        uncached = functorch_config.patch(enable_autograd_cache=False)
        with grad, noted, uncached, tracing(context), floats_of(self.whole.gm, but=self.gm):
            function: Any
            if self.alone:
                function = aot_module_simplified(
                    self.gm,
                    example_inputs,
                    fw_compiler=self.inner,
                    inference_compiler=partial(self.inner, is_inference=True),
                    decompositions=table,
                    keep_inference_input_mutations=True,
                )
            else:
                options = self.session.inductor
                function = compile_by(self.inner, self.gm, example_inputs, table, options)
        return function

    def inner(self, gm: GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        """Rewrite the functional graph, compile it and bind its residuals.

        Note it in `unlike` if that cannot be: nobody calls what is returned then.
        """
        if self.unlike is not None:  # the backward graph of one that was given up
            return gm
        example_inputs = with_present_symbols(example_inputs)
        # Inductor's own again: ours are for AOTAutograd, and no cache can have them in its key.
        kwargs.pop("get_decomp_fn", None)
        self.refused |= written_outside(self.session, gm) | takes_one_for_two(self.session, gm)
        if not kwargs.get("is_inference", False):
            if self.narrow is not None:
                self.unlike = Unlike("gradients are recorded")
                return gm
            self.refused |= differentiated(self.session, gm, self.inputs)
            return inductor_compile.compile_functional(gm, example_inputs, **kwargs)
        separate_outputs(gm)
        widen_products(gm)
        program = self._rewritten(gm)
        if isinstance(program, Unlike):
            self.unlike = program
            return gm
        self.program = program
        compiled = self.session.note(program)
        self.refused |= bool(program.lost)
        warn_of_states(self.session, program)
        note_results(self.session, gm, program.plan)
        side = self.side = self._side_inputs(program)
        show_program(program)
        if program.result is None:
            if self.plain:
                keep_user_roundings(gm)
            else:
                keep_shared_roundings(gm)
            inner = inductor_compile.compile_functional(gm, example_inputs, **kwargs)
            compiled.source_code = getattr(inner, "source_code", "")
            return inner
        inner, compiled.source_code = self._by_inductor(program, example_inputs, kwargs)
        show_code(program, compiled.source_code)
        return side.bind(inner, program.seeds)

    def _rewritten(self, gm: GraphModule) -> Program | Unlike:
        """Run the passes; say why what came out of a narrow graph is not that of all."""
        settings, inputs = self.session.settings, self.inputs
        is_step = self.session.optimizer() is not None
        copies = inputs.copies(gm)
        if isinstance(copies, Unlike):
            return copies
        joins = self.whole.joins
        begun = partial(
            Program,
            gm,
            settings,
            inputs.describe,
            inputs.label,
            is_step,
            copies,
            joins=joins,
            number=inputs.number,
        )
        program = run_passes(begun(), snapshots=self.session.keep)
        # A running maximum of a second moment, which needs both words too.
        if program.takers and program.unlike is None:
            program = run_passes(begun(program.takers), snapshots=self.session.keep)
        # An average of weights that another optimizer updates.
        if program.wholes and program.unlike is None:
            again = begun(program.keep, program.wholes)
            program = run_passes(again, snapshots=self.session.keep)
        if program.called and program.result is not None:
            self.calls = calls_of_members(program)
        unlike = program.unlike or inputs.note_results(program, gm)
        if unlike is not None:
            return unlike
        if program.result is not None:
            self.direct = split(program.result)
        narrow = self.narrow
        if narrow is not None and narrow.groups and not (narrow.called or self.direct):
            return Unlike("its classes cannot be updated last")
        if self.alone and self.direct is not None and not self.direct.is_of_numbers:
            self.needs_inductor = True
            return Unlike("there is more in it")
        return program

    def _side_inputs(self, program: Program) -> SideInputs:
        """Return the side inputs of the graph: residuals, and members that were left out."""
        locate, carried = self.inputs.locate, program.residual_inputs
        where = [locate[c.index] for c in carried]
        left = [s.index for s in program.plan if s.compensable and not s.compensated]
        others = [locate[index] for index in left if index in locate]
        plan = {s.index: s for s in program.plan}
        residuals = Residuals(self.session, carried, where, others, plan)
        seed, exact = self.session.config.seed, ExactGraph.of(program)
        return SideInputs(residuals, self.inputs.members, seed, exact)

    def _by_inductor(
        self, program: Program, example_inputs: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[Any, str]:
        """Return the callable of the rewritten graph, and Inductor's code of its part."""
        result = graph_of(program.result)
        placeholders = list(result.graph.find_nodes(op="placeholder"))
        static = [*program.static_residuals, *(True for _ in program.seeds)]
        count = len(placeholders) - len(static)
        kwargs["static_input_idxs"] = [
            *kwargs.get("static_input_idxs", ()),
            *(count + i for i, same in enumerate(static) if same),
        ]
        fakes = [n.meta["val"] for n in placeholders[len(example_inputs) :]]
        inputs, divides, calls = [*example_inputs, *fakes], self.session.divides, self.calls
        return compile_rewritten(result, self.direct, inputs, kwargs, divides=divides, calls=calls)
