"""One graph of Dynamo's on its way to a callable that binds residuals."""

import contextlib
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch._dynamo.exc import TorchDynamoException
from torch._functorch import config as functorch_config
from torch._functorch.aot_autograd import aot_module_simplified
from torch._guards import TracingContext, tracing
from torch._inductor.compile_fx import compile_fx
from torch._inductor.decomposition import select_decomp_table
from torch.compiler import config as compiler_config
from torch.fx import GraphModule, Node

from collage_fx.compilation.graph_inputs import Inputs, Source, source_behind
from collage_fx.compilation.inductor import compile_rewritten, separate_outputs, uses_cudagraphs
from collage_fx.compilation.partition import only_multi_tensor, split
from collage_fx.compilation.residual_binding import Code, Locate, Residuals
from collage_fx.compilation.session import Session, StandsForOthers
from collage_fx.compilation.side_inputs import Members
from collage_fx.hooks import optimizer_hooks
from collage_fx.hooks.gc_pause import no_full_collection
from collage_fx.optimizer import checkpoint
from collage_fx.optimizer.ownership import family, owners_of
from collage_fx.optimizer.served import left_by_level, nothing_compensated
from collage_fx.passes.analysis.plan import spare
from collage_fx.passes.codegen import inductor_compile
from collage_fx.passes.codegen.multi_tensor_kernel import least_members
from collage_fx.passes.dedup.deduplicate import Narrow, narrow
from collage_fx.passes.ir.program import (
    Carried,
    Copies,
    Program,
    StatePlan,
    Unlike,
    compensable_in,
    graph_of,
)
from collage_fx.passes.pipeline import run_passes
from collage_fx.passes.rewrite.symbolic_scalars import keep_symbols
from collage_fx.runtime.errors import CollageError
from collage_fx.runtime.residuals.store import STORE
from collage_fx.runtime.storage.registry import compensable_dtypes


def compile_graph(
    session: Session, gm: GraphModule, example_inputs: Sequence[Any], args: tuple[Any, ...] = ()
) -> Code:
    """Compile a graph: one member of each class of it, where that will do for all.

    Args:
        session: who asks for it.
        gm: what Dynamo made.
        example_inputs: the arguments of the call that made Dynamo compile.
        args: those of the call for which the graph is compiled anew; () at first.
    """
    optimizer = session.optimizer()
    optimizers = family(optimizer) if optimizer is not None else optimizer_hooks.optimizers()
    checkpoint.take_up(optimizers)
    owners = owners_of(optimizers)
    inputs = Inputs(
        gm,
        args or example_inputs,
        owners,
        of_optimizer=optimizer is not None,
        again=bool(args),
    )
    try:
        if session.stand_ins is not None:
            return _compile_for_others(session, session.stand_ins, inputs, example_inputs)
        code = _compile_narrow(session, inputs, example_inputs)
        if code is not None:
            return code
        return _Compilation(session, inputs, None).run(example_inputs)
    finally:
        inputs.release()


def _compile_for_others(
    session: Session, stand_ins: StandsForOthers, inputs: Inputs, example_inputs: Sequence[Any]
) -> Code:
    """Compile a graph for parameters that Dynamo has not seen too; raise Unlike if it cannot be."""
    with no_full_collection():
        narrowed = stand_ins.whole_graph(inputs, session.config)
    return _first_alike(session, inputs, narrowed, example_inputs)


def _first_alike(
    session: Session, inputs: Inputs, narrowed: Narrow, example_inputs: Sequence[Any]
) -> Code:
    """Compile one member of each class, at best without Inductor; raise Unlike if it cannot be."""
    with contextlib.suppress(Unlike):
        return _Compilation(session, inputs, narrowed, alone=True).run(example_inputs)
    return _Compilation(session, inputs, narrowed).run(example_inputs)


def _compile_narrow(session: Session, inputs: Inputs, example_inputs: Sequence[Any]) -> Code | None:
    """Compile one member of each class; return None where the graph has to be compiled whole."""
    try:
        with no_full_collection():
            narrowed = _narrowed(session, inputs)
        if narrowed is not None:
            with contextlib.suppress(Unlike):
                return _first_alike(session, inputs, narrowed, example_inputs)
    except (CollageError, TorchDynamoException):
        raise
    except Exception as error:
        session.notes.add(
            f"a graph was compiled member by member, since {type(error).__name__} was raised in "
            "narrowing it: a defect of collage_fx, please report it"
        )
    return None


def _narrowed(session: Session, inputs: Inputs) -> Narrow | None:
    settings = session.config
    if "deduplicate" in settings.without or not settings.multi_tensor:
        return None
    if uses_cudagraphs(session.inductor.get("triton.cudagraphs")):
        return None
    least, dtypes = least_members(settings), compensable_dtypes(settings.storage)
    return narrow(inputs.gm, lambda node: inputs.fact(node, settings), least, dtypes)


class _Compilation:
    """The compilation of a graph, whole or narrow."""

    def __init__(
        self, session: Session, inputs: Inputs, narrowed: Narrow | None, alone: bool = False
    ) -> None:
        """Compile a graph.

        Args:
            session: who asks for it.
            inputs: those of the whole graph.
            narrowed: the narrow graph, if that is to be compiled.
            alone: whether to raise Unlike if anything but operations for classes is left of it.
                Inductor has no part in it then, and what it does to be ready takes longer.
        """
        self.session = session
        self.alone = alone
        self.given = inputs
        self.narrow = narrowed
        gm = inputs.gm
        self.gm = narrowed.gm if narrowed else gm
        self.members = None
        if narrowed is not None:
            self.members = Members(narrowed, len(gm.graph.output_node().args[0]))  # type: ignore[arg-type]
            for k, node in narrowed.returned.items():
                self.members.returned[k] = inputs.locate(inputs.source_of(node))
        self.locate: dict[int, Locate] = {}
        """Position of a carried state -> how to find its tensor from the arguments of a call."""
        self.residuals: Residuals | None = None
        self.plan: list[StatePlan] = []
        self.reads: dict[int, str] = {}
        self.refused = False
        self.dtypes = compensable_dtypes(session.config.storage)

    def run(self, example_inputs: Sequence[Any]) -> Code:
        """Compile the graph."""
        chosen = self.narrow.inputs if self.narrow else range(len(example_inputs))
        given = [example_inputs[i] for i in chosen]
        table = keep_symbols(select_decomp_table())
        # What AOTAutograd finds out is left there, by Dynamo's call as by our own.
        context = TracingContext.try_get() or TracingContext(None)
        # The cache of AOTAutograd sees neither our inner_compile nor the residuals it binds.
        with functorch_config.patch(enable_autograd_cache=False), tracing(context):
            function: Any
            if self.alone:
                function = aot_module_simplified(
                    self.gm,
                    given,
                    fw_compiler=self.inner,
                    inference_compiler=partial(self.inner, is_inference=True),
                    decompositions=table,
                    keep_inference_input_mutations=True,
                )
            else:
                function = compile_fx(
                    self.gm,
                    given,
                    inner_compile=self.inner,
                    decompositions=table,
                    config_patches=self.session.inductor or None,
                )
        states = [(self.locate[s.index], s) for s in self.plan if s.held and s.index in self.locate]
        refused = self.refused or any(s.refused and s.held for s in self.plan)
        reads = [(self.locate[i], name) for i, name in self.reads.items() if i in self.locate]
        function = self.members.of(function) if self.members else function
        return Code(function, self.residuals, states, reads, refused)

    def inner(self, gm: GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        """Rewrite the functional graph, compile it and bind its residuals."""
        # Inductor's own again: ours are for AOTAutograd, and no cache can have them in its key.
        kwargs.pop("get_decomp_fn", None)
        self._refuse_outer_writes(gm)
        if not kwargs.get("is_inference", False):
            if self.narrow is not None:
                raise Unlike("gradients are recorded")
            self._warn_differentiated(gm)
            return inductor_compile.compile_functional(gm, example_inputs, **kwargs)
        separate_outputs(gm)
        settings = self.session.config
        is_step = self.session.optimizer() is not None
        copies = self._copies(gm)
        program = Program(gm, settings, self.describe, self.label, is_step, copies)
        with no_full_collection():
            run_passes(program, snapshots=self.session.keep)
        if self.members is not None:
            self._note_results(program, gm)
        if self.alone and not only_multi_tensor(graph_of(program.result)):
            raise Unlike("there is more in it")
        if self.members is not None and split(graph_of(program.result)) is None:
            raise Unlike("its classes cannot be updated last")
        compiled = self.session.note(program)
        self._conclude(program.plan)
        self.plan, self.reads = program.plan, program.reads
        self._warn(program)
        self._warn_functional(gm)
        carried = program.residual_inputs
        where = [self.locate[c.index] for c in carried]
        left = [s.index for s in program.plan if s.held and not s.compensated]
        others = [self.locate[index] for index in left if index in self.locate]
        self.residuals = Residuals(self.session, carried, where, others, program.plan)
        if program.result is None:
            inner = inductor_compile.compile_functional(gm, example_inputs, **kwargs)
            compiled.source_code = getattr(inner, "source_code", "")
            return inner
        placeholders = list(program.result.graph.find_nodes(op="placeholder"))
        static = [*program.static_residuals, *(True for _ in program.seeds)]
        count = len(placeholders) - len(static)
        kwargs["static_input_idxs"] = [
            *kwargs.get("static_input_idxs", ()),
            *(count + i for i, same in enumerate(static) if same),
        ]
        fakes = [n.meta["val"] for n in placeholders[len(example_inputs) :]]
        tag = compiler_config.cache_key_tag + "collage_fx:" + self.session.config.fingerprint
        with compiler_config.patch(cache_key_tag=tag):  # type: ignore[attr-defined]
            inputs = [*example_inputs, *fakes]
            inner, compiled.source_code = compile_rewritten(program.result, inputs, kwargs)
        bound = self.residuals.bind(inner, program.seeds)
        return self.members.bind(bound) if self.members is not None else bound

    def describe(self, index: int, placeholder: Node) -> Carried:
        """Say which tensor a placeholder is."""
        source = self._source(placeholder)
        val = placeholder.meta["val"]
        if source is None:
            name = f"an input that overlaps others ({placeholder.name})"
            return Carried(index, name, "tensor", False, val)
        self.locate[index] = self.given.locate(source)
        return self.given.describe(index, source, val, placeholder.name)

    def label(self, placeholder: Node) -> str:
        """Return `lr` for a 0-d input that is the `lr` of a parameter group."""
        return self.given.label(self._source(placeholder)) or placeholder.name

    def _source(self, placeholder: Node) -> Source | None:
        descriptor = placeholder.meta.get("desc")
        return source_behind(descriptor, self.narrow.inputs if self.narrow else None)

    def _copies(self, gm: GraphModule) -> list[Copies]:
        """Return what the members of the graph stand for, and note how to find that."""
        if self.narrow is None or self.members is None:
            return []
        placeholders = gm.graph.find_nodes(op="placeholder")
        place = {self._source(n): i for i, n in enumerate(placeholders)}
        self.members.written = []
        found = []
        seen = _seen_by_autograd()
        for group in self.narrow.groups:
            stayed, *others = [[self.given.source_of(n) for n in m] for m in group.inputs]
            if any(source not in place for source in stayed):
                raise Unlike("an input of a member overlaps others")
            copies = Copies([place[s] for s in stayed], [], group.shared)
            for nodes, sources in zip(group.inputs[1:], others, strict=True):
                row = []
                for node, source, at in zip(nodes, sources, copies.inputs, strict=True):
                    index = len(placeholders) + len(self.members.locate)
                    if at in seen:
                        self.members.written.append(len(self.members.locate))
                    self.locate[index] = self.given.locate(source)
                    self.members.locate.append(self.locate[index])
                    val = self.given.value(node)
                    row.append(self.given.describe(index, source, val, node.name))
                copies.others.append(row)
            found.append(copies)
        return found

    def _note_results(self, program: Program, gm: GraphModule) -> None:
        """Note which results of the whole graph the members make that were left out of it."""
        assert self.members is not None and self.narrow is not None
        if program.result is None:
            raise Unlike("nothing of it is compensated")
        made = {k for group in self.narrow.groups for k in group.results[0]}
        outputs: Any = gm.graph.output_node().args[0]
        place = {k: i for i, k in enumerate(self.narrow.results)}
        if len(outputs) != len(place) or any(place[k] not in program.made for k in made):
            raise Unlike("a result of a member is not one that its operation makes")
        for group in self.narrow.groups:
            for m, positions in enumerate(group.results[1:]):
                for k, first in zip(positions, group.results[0], strict=True):
                    self.members.made[k] = program.made[place[first]][m] - len(outputs)

    def _conclude(self, plan: list[StatePlan]) -> None:
        """Keep or drop the residuals that states were made with, now that there is a verdict."""
        for state in plan:
            find = self.locate.get(state.index)
            tensor = find(tuple(self.given.args)) if find is not None else None
            residual = STORE.get(tensor) if tensor is not None else None
            if residual is not None and tensor is not None and residual.provisional:
                residual.provisional = not (state.compensated or state.refused)
                if residual.provisional and not state.replaced:
                    STORE.drop(tensor)

    def _refuse_outer_writes(self, gm: GraphModule) -> None:
        """Refuse a graph whose new values AOTAutograd itself writes back, after the graph has run.

        So it does with a parameter that was updated through `.data`, and with one whose strides the
        step changes in place: no copy_ is in the graph.
        """
        context = TracingContext.try_get()
        metadata = context.fw_metadata if context is not None else None
        if metadata is None:
            return
        inputs = [n.meta.get("val") for n in gm.graph.find_nodes(op="placeholder")]
        turned = [i for i, info in enumerate(metadata.input_info) if info.mutates_metadata]
        indices = [*metadata.mutated_inp_runtime_indices, *turned]
        outer = [inputs[i] for i in indices if i < len(inputs)]
        if any(isinstance(v, Tensor) and v.dtype in self.dtypes for v in outer):
            self.refused = True
            if self.session.supervisor() is None:
                self.session.warn_once(
                    "not compensated: parameters updated through .data; update them in place under "
                    "torch.no_grad(), or use collage_fx.compile, which does that eagerly"
                )

    def _warn_differentiated(self, gm: GraphModule) -> None:
        """Say that a graph whose outputs are differentiated is compiled as it stands.

        Statistics of a model that is being trained are no optimizer's states: not a word on them.
        """
        placeholders = gm.graph.find_nodes(op="placeholder")
        written = {n.args[0] for n in gm.graph.nodes if str(n.target) == "aten.copy_.default"}
        carried = [
            self.describe(index, node)
            for index, node in enumerate(placeholders)
            if node in written and node.meta["val"].dtype in self.dtypes
        ]
        is_step = self.session.optimizer() is not None
        spare(carried, self.session.config.states, is_step=is_step)
        choice = self.session.config.storage
        names = [c.name for c in carried if not c.spared and compensable_in(c, choice)]
        if names:
            self.refused = True
            if self.session.supervisor() is not None:
                return  # the eager engine does what this graph does
            self.session.warn_once(
                f"a graph that updates states ({', '.join(names)}) is part of a "
                "differentiated computation, and runs without compensation; compile the update by "
                "itself, under torch.no_grad()"
            )

    def _warn_functional(self, gm: GraphModule) -> None:
        """Say that a function that returns its new states is not seen to carry them."""
        if not self.session.named or self.session.optimizer() is not None:
            return
        if any(s.held for s in self.plan):
            return
        inputs = [n.meta.get("val") for n in gm.graph.find_nodes(op="placeholder")]
        results = [n.meta.get("val") for n in gm.graph.output_node().all_input_nodes]
        alike = [(v.shape, v.dtype) for v in inputs if isinstance(v, Tensor)]
        if any(
            isinstance(r, Tensor) and r.dtype in self.dtypes and (r.shape, r.dtype) in alike
            for r in results
        ):
            self.session.warn_once(
                "not compensated: a function that returns new tensors and updates none in place. "
                "Name the arguments whose place its first results take, in order, as in "
                "collage_fx.compile(step, carries=('p', 'm')), or write them in place"
            )

    def _warn(self, program: Program) -> None:
        if program.lost:
            self.refused = True
            self.session.note_loss(program.lost)
        if self.session.supervisor() is not None:
            return  # it does what this graph cannot do, and warns of the rest
        refused = [f"{s.name} ({s.reason})" for s in program.plan if s.refused]
        if refused:
            self.session.warn_once(f"not compensated: {'; '.join(refused)}")
        spared = {c.index for c in program.carried if c.spared}
        mine = [s for s in program.plan if s.index not in spared]
        # A hook of a step, which Dynamo traces by itself, may scale gradients.
        states = [s for s in mine if not s.name.endswith(".grad")]
        floating = [s for s in states if s.dtype.is_floating_point and s.shape]
        reasons = {s.name: s.reason for s in states}
        if floating and program.result is None and not refused:
            self.session.warn_once(nothing_compensated((s.dtype for s in floating), reasons))
        elif left := left_by_level(reasons, unknown=True):
            self.session.warn_once(left)


def _seen_by_autograd() -> set[int]:
    """Return the inputs of which AOTAutograd counts up the versions when the graph runs."""
    context = TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    return set(metadata.mutated_graph_handled_indices_seen_by_autograd if metadata else ())
