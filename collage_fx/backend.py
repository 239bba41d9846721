"""The Dynamo backend: from a Dynamo graph to a callable that binds residuals."""

import functools
import operator
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch._dynamo.exc import TorchDynamoException
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd.descriptors import (
    BufferAOTInput,
    ParamAOTInput,
    PlainAOTInput,
)
from torch._guards import TracingContext
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch.compiler import config as compiler_config
from torch.fx import GraphModule, Node
from torch.optim import Optimizer

from collage_fx import watch
from collage_fx.binding import Code, Residuals, Static
from collage_fx.config import CollageConfig, split_options
from collage_fx.inductor import compile_rewritten, separate_outputs
from collage_fx.ownership import (
    is_buffer,
    live_optimizers,
    owner_of,
    owners_of,
    placeholder_source,
    pretty,
    source_name,
)
from collage_fx.passes import run_passes
from collage_fx.passes.plan import spare
from collage_fx.passes.program import (
    LOW_PRECISION,
    Carried,
    Owner,
    Program,
    StatePlan,
)
from collage_fx.passes.symbolic import keep_symbols
from collage_fx.runtime.errors import CollageError, CollageWarning
from collage_fx.runtime.residuals import STORE
from collage_fx.supervisor import Supervisor


@dataclass
class Compiled:
    """One graph that the backend compiled, for `explain` and for reports."""

    program: Program
    source_code: str = ""
    runs: int = 0


@dataclass
class Session:
    """What one user of the backend (an optimizer, a function) has asked for and got."""

    config: CollageConfig
    inductor: dict[str, Any] = field(default_factory=dict)
    optimizer: Callable[[], Optimizer | None] = lambda: None
    """A weak reference to the optimizer, where `collage_fx.compile` was given one."""
    named: bool = False
    """Whether the user knows that residuals of ownerless tensors are theirs to save."""
    compiled: list[Compiled] = field(default_factory=list)
    keep: bool = False
    """Whether `compiled` is filled in; programs are large."""
    supervisor: Callable[[], Supervisor | None] = lambda: None
    """A weak reference to what watches the steps, where `collage_fx.compile` made the step: it
    holds the tensors, which Dynamo's cache must not keep alive."""
    graphs: int = 0
    """How many graphs have been compiled."""
    calls: int = 0
    """How often a graph of this session has run, compensated or not."""
    warned: set[str] = field(default_factory=set)
    notes: set[str] = field(default_factory=set)
    """What a report says beside the warnings."""

    def warn_once(self, message: str) -> None:
        """Warn unless this session has said the same before."""
        if message not in self.warned:
            self.warned.add(message)
            warnings.warn(f"collage_fx: {message}", CollageWarning, stacklevel=2)

    def note_loss(self, lost: list[str]) -> None:
        """Say what a graph does not hand over whole: in the report, where the engine does it."""
        if self.supervisor() is not None:
            self.notes.update(f"left to the eager engine: {one}" for one in lost)
        else:
            self.warn_once(f"{'; '.join(lost)}; collage_fx.compile leaves that to its eager engine")

    def __call__(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile one Dynamo graph; the callable that a Dynamo backend returns."""
        watch.count_graph()
        self.graphs += 1
        return _Step(self, gm, example_inputs)


_SESSIONS: dict[str, Session] = {}


def collage(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a graph with compensated carried states: `torch.compile(..., backend="collage")`.

    Options are the fields of `CollageConfig`; other names are settings of Inductor, as is `mode`.
    Raises OptionError for unknown names and values.
    """
    config, inductor = split_options(options or {}, mode)
    # One session per configuration, so that a warning is not repeated at every recompilation.
    session = _SESSIONS.setdefault(
        repr((config, sorted(inductor.items()))), Session(config, inductor)
    )
    return session(gm, example_inputs)


watch.install(collage)


class _Step:
    """The callable that Dynamo gets for one of its graphs."""

    def __init__(self, session: Session, gm: GraphModule, example_inputs: Sequence[Any]) -> None:
        self.session = session
        self.checked = -1
        """The generation of the store in which every residual was known to this graph."""
        self.error: CollageError | None = None
        """What the calls raise: a backend that raises it would be passed over by Dynamo."""
        self.code = self._compile(gm, example_inputs)
        supervisor = session.supervisor()
        if supervisor is not None:
            supervisor.sources[self] = gm

    def _compile(self, gm: GraphModule, inputs: Sequence[Any], args: tuple[Any, ...] = ()) -> Code:
        """Compile the graph; if that fails in a supervised step, leave it to the eager engine."""
        try:
            return _Graph(self.session, gm, args).compile(inputs)
        except Exception as error:
            supervisor = self.session.supervisor()
            if supervisor is None or isinstance(error, TorchDynamoException):
                raise  # Dynamo's own ask it to trace again
            if isinstance(error, CollageError):
                self.error = error
            else:
                supervisor.failures.note(error)
            return Code(gm, None, [], [], refused=True)

    def __call__(self, *args: Any) -> Any:
        """Run the graph, or do what it does by the eager engine if it cannot be compensated.

        Raises the CollageError that compiling it raised, before anything is written.
        """
        self.session.calls += 1
        supervisor = self.session.supervisor()
        if self.error is not None:
            raise self.error
        if supervisor is None or not supervisor.active:
            if names := self.code.drops_residual(args):
                self.session.warn_once(
                    f"{', '.join(names)}: updated by several graphs, of which one has no use for a "
                    "residual and drops it; collage_fx.compile compiles that one again, with it"
                )
            return self.code.run(args)
        if STORE.generation != self.checked and self.code.drops_residual(args):
            # Another graph, or the eager engine, has since given a residual to a state that this
            # graph writes.
            self.code = self._compile(supervisor.sources[self], args, args)
            self.code.refused |= bool(self.code.drops_residual(args))
        if STORE.generation != self.checked:
            self.code.refused |= self.code.reads_residual(args)
        if self.code.refused or supervisor.expands(args):
            return supervisor.sources[self](*args)
        self.checked = STORE.generation
        with supervisor.graph(self.code.written(args), args) as outputs:
            result = self.code.run(args)
            outputs(result)
        return result


class _Graph:
    """One Dynamo graph on its way to a callable."""

    def __init__(self, session: Session, gm: GraphModule, args: tuple[Any, ...] = ()) -> None:
        self.session = session
        self.gm = gm
        self.args = args
        """The arguments of the call for which the graph is compiled anew; () at first."""
        optimizer = session.optimizer()
        self.owners = owners_of([optimizer] if optimizer is not None else live_optimizers())
        self.sources = [placeholder_source(node) for node in gm.graph.find_nodes(op="placeholder")]
        self.inputs: Sequence[Any] = ()
        """The arguments of the call that made Dynamo compile."""
        self.locate: dict[int, Callable[[tuple[Any, ...]], Tensor | None]] = {}
        """Position of a carried state -> how to find its tensor from the arguments of a call."""
        self.residuals: Residuals | None = None
        self.plan: list[StatePlan] = []
        self.reads: list[int] = []
        self.refused = False

    def compile(self, example_inputs: Sequence[Any]) -> Code:
        """Compile the graph."""
        self.inputs = self.args or example_inputs
        # The cache of AOTAutograd sees neither our inner_compile nor the residuals it binds.
        with functorch_config.patch(enable_autograd_cache=False):
            function: Any = compile_fx(
                self.gm,
                list(example_inputs),
                inner_compile=self.inner,
                decompositions=keep_symbols(select_decomp_table()),
                config_patches=self.session.inductor or None,
            )
        states = [
            (self.locate[s.index], s)
            for s in self.plan
            if s.dtype in LOW_PRECISION and s.index in self.locate
        ]
        refused = self.refused or any(s.refused and s.dtype in LOW_PRECISION for s in self.plan)
        del self.owners, self.inputs  # they keep optimizers and tensors alive
        reads = [self.locate[index] for index in self.reads if index in self.locate]
        return Code(function, self.residuals, states, reads, refused)

    def inner(self, gm: GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        """Rewrite the functional graph, compile it and bind its residuals."""
        # Inductor's own again: ours are for AOTAutograd, and no cache can have them in its key.
        kwargs.pop("get_decomp_fn", None)
        self._refuse_outer_writes(gm)
        if not kwargs.get("is_inference", False):
            self._warn_differentiated(gm)
            return compile_fx_inner(gm, example_inputs, **kwargs)
        separate_outputs(gm)
        settings = self.session.config.settings
        is_step = self.session.optimizer() is not None
        program = run_passes(Program(gm, settings, self.describe, self.label, is_step))
        compiled = Compiled(program)
        if self.session.keep:
            self.session.compiled.append(compiled)
        self.plan, self.reads = program.plan, program.reads
        self._warn(program)
        self._warn_functional(gm)
        carried = program.residual_inputs
        where = [self.locate[c.index] for c in carried]
        left = [s.index for s in program.plan if s.dtype in LOW_PRECISION and not s.compensated]
        others = [self.locate[index] for index in left if index in self.locate]
        self.residuals = Residuals(self.session, carried, where, others, program.plan)
        if program.result is None:
            inner = compile_fx_inner(gm, example_inputs, **kwargs)
            compiled.source_code = getattr(inner, "source_code", "")
            return inner
        count = len(list(gm.graph.find_nodes(op="placeholder")))
        kwargs["static_input_idxs"] = [
            *kwargs.get("static_input_idxs", ()),
            *(count + i for i, static in enumerate(program.static_residuals) if static),
        ]
        placeholders = list(program.result.graph.find_nodes(op="placeholder"))
        fakes = [n.meta["val"] for n in placeholders[count:]]
        tag = compiler_config.cache_key_tag + "collage_fx:" + self.session.config.fingerprint
        with compiler_config.patch(cache_key_tag=tag):  # type: ignore[attr-defined]
            inputs = [*example_inputs, *fakes]
            inner, compiled.source_code = compile_rewritten(program.result, inputs, kwargs)
        return self.residuals.bind(inner)

    def describe(self, index: int, placeholder: Node) -> Carried:
        """Say which tensor a placeholder is."""
        descriptor = placeholder.meta.get("desc")
        val = placeholder.meta["val"]
        if isinstance(descriptor, ParamAOTInput | BufferAOTInput):
            tensor: Any = functools.reduce(getattr, descriptor.target.split("."), self.gm)
            self.locate[index] = Static(tensor)
            sources: Any = self.gm._param_name_to_source
            source = source_name(sources.get(descriptor.target))
            name = pretty(source) or descriptor.target
            carried = self._named(index, name, is_buffer(source), tensor, val)
            carried.static, carried.pinned = True, STORE.get(tensor) is not None
            return carried
        if isinstance(descriptor, PlainAOTInput):
            self.locate[index] = operator.itemgetter(descriptor.idx)
            source = self.sources[descriptor.idx]
            name = pretty(source) or placeholder.name
            tensor = self.inputs[descriptor.idx]
            carried = self._named(index, name, is_buffer(source), tensor, val)
            carried.pinned = bool(self.args) and STORE.get(tensor) is not None
            return carried
        return Carried(
            index, f"an input that overlaps others ({placeholder.name})", "tensor", False, val
        )

    def _named(self, index: int, name: str, is_buffer: bool, tensor: Any, val: Tensor) -> Carried:
        """Return a carried state by the name that its optimizer has for it, else by its source."""
        owned = self.owners.get(id(tensor))
        if owned is not None:
            return Carried(index, owned[1].name, owned[1].owner, False, val, owned=True)
        owner: Owner = "buffer" if is_buffer else owner_of(tensor)
        # An attribute of the optimizer being compiled, though not in its state.
        own = self.session.optimizer() is not None and not (is_buffer or name.endswith(".grad"))
        return Carried(index, name, owner, False, val, owned=own)

    def label(self, placeholder: Node) -> str:
        """Return `lr` for a 0-d input that is the `lr` of a parameter group."""
        descriptor = placeholder.meta.get("desc")
        source = self.sources[descriptor.idx] if isinstance(descriptor, PlainAOTInput) else ""
        words = re.findall(r"[A-Za-z_]\w*", source)
        return words[-1] if words else placeholder.name

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
        if any(isinstance(v, Tensor) and v.dtype in LOW_PRECISION for v in outer):
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
            if node in written and node.meta["val"].dtype in LOW_PRECISION
        ]
        spare(carried, self.session.config.states)
        names = [c.name for c in carried if not c.spared]
        if names:
            self.refused = True
            if self.session.supervisor() is not None:
                return  # the eager engine does what this graph does
            self.session.warn_once(
                f"a graph that updates 16-bit tensors ({', '.join(names)}) is part of a "
                "differentiated computation, and runs without compensation; compile the update by "
                "itself, under torch.no_grad()"
            )

    def _warn_functional(self, gm: GraphModule) -> None:
        """Say that a function that returns its new states is not seen to carry them."""
        if not self.session.named or self.session.optimizer() is not None:
            return
        if any(s.dtype in LOW_PRECISION for s in self.plan):
            return
        inputs = [n.meta.get("val") for n in gm.graph.find_nodes(op="placeholder")]
        results = [n.meta.get("val") for n in gm.graph.output_node().all_input_nodes]
        alike = [(v.shape, v.dtype) for v in inputs if isinstance(v, Tensor)]
        if any(
            isinstance(r, Tensor) and r.dtype in LOW_PRECISION and (r.shape, r.dtype) in alike
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
        refused = [f"{s.name} ({s.reason})" for s in program.plan if s.refused]
        if refused and self.session.supervisor() is not None:
            return  # the eager engine does what this graph does
        if refused:
            self.session.warn_once(f"not compensated: {'; '.join(refused)}")
        spared = {c.index for c in program.carried if c.spared}
        mine = [s for s in program.plan if s.index not in spared]
        floating = [s for s in mine if s.dtype.is_floating_point and s.shape]
        if self.session.supervisor() is None and floating and program.result is None:
            dtypes = ", ".join(sorted({str(s.dtype).removeprefix("torch.") for s in floating}))
            self.session.warn_once(
                f"nothing needed compensation: the states of this step are {dtypes}, and none of "
                "them loses updates in its dtype; collage_fx.explain gives the reason for each"
            )
