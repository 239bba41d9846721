"""The Dynamo backend: from a Dynamo graph to a callable that binds residuals."""

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from collage_fx.binding.backoff import Backoff
from collage_fx.binding.bound_graph import BoundGraph
from collage_fx.compilation.aot import compile_graph
from collage_fx.compilation.graph_inputs import located
from collage_fx.compilation.layout_guards import Layouts, static_inputs
from collage_fx.compilation.session import Outcome, Session, StandsForOthers
from collage_fx.compilation.side_inputs import MOVED, Code, Noted, is_looked_at, looked_at
from collage_fx.config import CollageConfig
from collage_fx.dynamo.options import split_options
from collage_fx.dynamo.renewed_states import (
    give_new_memory,
    renewed,
    with_renewed_states,
    with_states,
)
from collage_fx.dynamo.symbols import Symbols, writes_number
from collage_fx.gradients.graph import multiply_apart
from collage_fx.gradients.multiplied import Multiplied
from collage_fx.gradients.norm import gradients_of
from collage_fx.hooks import optimizer_hooks
from collage_fx.hooks.dynamo_settings import trace_without_numbers
from collage_fx.hooks.traces import traced_code
from collage_fx.optimizer.checkpoints.history import history_of
from collage_fx.optimizer.discovery import init_of_torch, makes_states
from collage_fx.optimizer.ownership import owned_tensors, params_of, rates, stateless
from collage_fx.optimizer.parameter_names import naming
from collage_fx.optimizer.storage_patterns import Patterns
from collage_fx.passes.dedup.denominator import one_denominator
from collage_fx.passes.dedup.repeated_tensors import divide_repeated
from collage_fx.passes.dedup.replaced_states import (
    Replaced,
    replaces_memory,
    sets_data,
    written_in_place,
)
from collage_fx.passes.frontend.read_numbers import CannotRead, read_numbers, reads_numbers
from collage_fx.passes.ir.program import LOW_PRECISION
from collage_fx.passes.ir.verdict import VerdictKind
from collage_fx.record.mode import Cause
from collage_fx.record.steps import Steps
from collage_fx.runtime import logs, progress, torch_private
from collage_fx.runtime.errors import CollageError, OptionError, own_name
from collage_fx.runtime.kernels import left_out
from collage_fx.runtime.residuals.dtensor import shard_of
from collage_fx.runtime.residuals.memory import has_memory, shared_between_storages
from collage_fx.runtime.residuals.residual import version
from collage_fx.runtime.residuals.store import STORE
from collage_fx.runtime.storage.registry import compensable_dtypes
from collage_fx.runtime.torch_private import SkipFrame, TorchDynamoException
from collage_fx.segments.memory import storage_key


@dataclass(eq=False)
class Backend(Session):
    """A session that Dynamo calls for each of its graphs: what torch.compile gets as backend."""

    steps: Callable[[], Steps | None] = lambda: None
    begun: set[int] = field(default_factory=set)
    """The ids of the parameters whose first states a recorded step made."""
    whole: frozenset[CodeType] = frozenset()
    """The code of the optimizer's step and of its decorators: a graph of any of it is all of it."""
    reads_numbers: bool = False
    """True if Dynamo traces `tensor.item()` as a symbol, and ends no graph there."""
    given: dict[Any, Any] = field(default_factory=dict)
    """A function and an argument of it -> which part of the optimizer that was."""

    def begins(self, gm: GraphModule) -> bool:
        """Return True if a graph makes states for parameters that had none before this step.

        It runs once, and what it makes would begin with its high word only: recorded, the
        states get both words, and nothing is compiled. So are, in their first call, all graphs of
        whole steps that may put new tensors in the place of states: it shows whether they do.
        """
        optimizer = self.optimizer()
        if optimizer is None or self.steps() is None:
            return False
        dtypes = compensable_dtypes(self.config.storage)
        scalars = any(not p.dim() for p in params_of(optimizer))
        made = [t for t in _made(gm) if t.dtype in dtypes and (t.dim() or scalars)]
        return bool(made) and (self._begin(optimizer) or self.is_whole(gm))

    def begins_untraced(self) -> bool:
        """Return True if a step is the first and makes its states: then Dynamo need not see it.

        It would trace all of it for a graph that is not to be compiled.
        """
        optimizer = self.optimizer()
        if optimizer is None or self.begun or self.graphs or not makes_states(optimizer):
            return False
        history_of(optimizer).began = rates(optimizer)
        return self._begin(optimizer)

    def _begin(self, optimizer: Optimizer) -> bool:
        new = stateless(optimizer) - self.begun
        self.begun |= new
        if new:
            self.notes.add("the first step was recorded, since it made states")
        return bool(new)

    def is_whole(self, gm: GraphModule) -> bool:
        """Return True if a graph that Dynamo has just made is all of an optimizer's step."""
        whole = self.whole if self.stand_ins is None else self.stand_ins.whole
        return not _is_broken_off(gm) and traced_code() in whole

    def hands_on(self, gm: GraphModule) -> bool:
        """Return True if a graph makes values for other parts of the step, out of high words only.

        A graph that is all of the step does not: its results are new states.
        """
        steps = self.steps()
        if steps is None or self.optimizer() is None or self.is_whole(gm):
            return False
        dtypes = compensable_dtypes(self.config.storage)
        floats = (t for t in _made(gm) if t.is_floating_point())
        return any(t.dtype in dtypes or steps.words.may_be_state(t) for t in floats)

    def _read_numbers(self, gm: GraphModule) -> None:
        """Compute in the graph what the step reads back; have it traced anew if that cannot be.

        A graph that ends, and hands such numbers on, would have rounded them.
        """
        try:
            if not self.is_whole(gm):
                raise CannotRead
            read_numbers(gm)
        except CannotRead:
            self.reads_numbers = False
            if (steps := self.steps()) is not None:
                steps.forget_breaks()  # there are others
            trace_without_numbers()

    def record_instead(self, why: str) -> None:
        """Have a step recorded that torch.compile does wrong; where that cannot be, warn."""
        if (steps := self.steps()) is not None:
            steps.enter(Cause.TRACED_WRONG)
            self.notes.add(f"recorded: {why}")
        else:
            self.warn_once("traced-wrong", f"{why}; collage_fx.compile records such a step")

    def refuse(self, message: str) -> None:
        """Have Python do what Dynamo traces now, where that is recorded.

        Raises SkipFrame then.
        """
        if self.steps() is not None:
            self.notes.add(f"recorded: {message}")
            raise SkipFrame(message)

    def _refuse_part(self) -> None:
        """Record the steps of which Dynamo traces a part that multiplies gradients by a number.

        Other parts would read the gradients as they are. Raises SkipFrame.
        """
        if (steps := self.steps()) is not None:
            steps.enter(Cause.GRADIENTS_APART)
        self.refuse("gradients are multiplied in a part of the step, which others go on from")

    def refuse_each(self, argument: Any, part: Any) -> None:
        """Have a step recorded in which a method is called for one parameter after another.

        Dynamo would make a graph for each.

        Args:
            argument: that of the function which Dynamo traces.
            part: the part of the optimizer that it is.
        """
        code, steps = traced_code(), self.steps()
        first = self.given.setdefault((code, argument), part)
        if first != part and code is not None and steps is not None:
            steps.enter(Cause.EACH_PARAMETER)
            self.refuse(f"{own_name(code.co_name)} would be traced for each parameter by itself")

    def __call__(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile one Dynamo graph; the callable that a Dynamo backend returns."""
        torch_private.require()
        if (steps := self.steps()) is not None:
            steps.look()
        multiplies = multiply_apart(gm)
        if multiplies is None or (multiplies and not self.is_whole(gm)):
            self._refuse_part()
        if self.reads_numbers and reads_numbers(gm):
            self._read_numbers(gm)
        if writes_number(gm):
            self.record_instead(_NUMBER)
        optimizer_hooks.count_graph(recorded=steps is not None)
        self.graphs += 1
        if getattr(logs.compilation(), "frame_compile_id", 0):
            logs.LOG.info("%s: traced again; TORCH_LOGS=recompiles says why", self.subject)
        if _is_broken_off(gm):
            self.breaks.append(_end_of(gm))
        divide_repeated(gm)
        if "denominator" not in self.config.without:
            one_denominator(gm)
        return _Step(self, gm, example_inputs)


_SESSIONS: dict[str, Backend] = {}
"""Configuration -> what it was used for, but for the steps of optimizers."""
_PATTERNS: dict[str, Patterns] = {}
"""Configuration -> its patterns, whoever uses them."""
_OF_OPTIMIZER = WeakIdKeyDictionary()
"""Optimizer -> configuration -> what the backend was asked for by name."""


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
    refuse_for_string(config)
    # Not one for each graph, so that a warning is not repeated at every recompilation.
    optimizer = optimizer_hooks.traced_optimizer()
    sessions = _SESSIONS if optimizer is None else _OF_OPTIMIZER.setdefault(optimizer, {})
    key = repr((config, sorted(inductor.items())))
    if key not in sessions:
        sessions[key] = Backend(config, inductor, shared=optimizer is None)
        # Another part of a step may be traced without its optimizer in sight.
        sessions[key].patterns = _PATTERNS.setdefault(key, sessions[key].patterns)
    return sessions[key](gm, example_inputs)


def refuse_for_string(config: CollageConfig) -> None:
    """Raise OptionError for what the backend string does not do.

    It would take a copy's step, which is checked against float64, for the optimizer's, and do it;
    and it sees no gradients before a step.
    """
    asked = {
        "verify=n": config.verify,
        "clip_grad_norm": config.clip_grad_norm is not None,
        "zero_grads": config.zero_grads,
        "changed": config.changed,
    }
    for name in (name for name, is_asked in asked.items() if is_asked):
        raise OptionError(f"{name} is for collage_fx.compile, which sees whole steps")


class _Step:
    """The callable that Dynamo gets for one of its graphs."""

    def __init__(self, session: Backend, gm: GraphModule, example_inputs: Sequence[Any]) -> None:
        self.session = session
        self.checked = -1, -1
        """`STORE.counts` when every residual was known to this graph."""
        self.error: CollageError | None = None
        """Error that the calls raise: a backend that raises it would be passed over by Dynamo."""
        stand_ins = session.stand_ins if session.is_whole(gm) else None
        self.stand_ins: Callable[[], StandsForOthers | None] = (
            weakref.ref(stand_ins) if stand_ins is not None else lambda: None
        )
        """Weak reference to the `StandsForOthers` of the graph's parameters; None without one."""
        steps = session.steps()
        optimizer = session.optimizer()
        is_step = session.stand_ins is None and session.is_whole(gm)
        self.replaced: Replaced = {}
        """The states that are overwritten in a copy; see `stored_in_place`."""
        sets_data(gm)
        moved: list[int | str] = []
        if steps is not None:
            steps.sources[self] = gm
        if steps is not None and optimizer is not None and is_step:
            gm, self.replaced = with_renewed_states(gm, example_inputs, optimizer)
            gm, moved = written_in_place(gm)
        self.moved = [located(gm, source) for source in moved]
        """Finders, in a call's arguments, of the inputs that get new memory before each."""
        self.gm = gm
        part = session.stand_ins is not stand_ins
        self.waits = 1 if part else 2 if session.begins(gm) else 0
        """The call with which it becomes worth while to compile the graph."""
        self.static = static_inputs(gm)
        self.returns = bool(gm.graph.output_node().all_input_nodes)
        """True if it has results: Dynamo's code goes on with them, and puts them into states."""
        self.forward = _FORWARD_CALLS if session.steps() is None and _is_forward(gm) else 0
        """Number of calls left in which to warn of a mere forward pass; 0 for never."""
        self.symbols = Symbols(gm)
        self.layouts: Layouts | None = None
        """Layouts of the arguments of the first call."""
        self.shares_gradients = _shares_gradients(optimizer or optimizer_hooks.traced_optimizer())
        if optimizer is not None:
            # Dynamo puts its parameters into the graph, and may keep that.
            weakref.finalize(optimizer, gm._buffers.clear)
            weakref.finalize(optimizer, gm._parameters.clear)
        if steps is not None and session.stand_ins is None and session.hands_on(gm):
            steps.record_rest(_end_of(gm))
        recorded = self.waits or (steps is not None and not steps.compiles)
        self.code = _left_out(gm) if recorded else self._compile(gm, example_inputs)
        kinds = {plan.decision.kind for _, plan in self.code.states}
        ends = session.stand_ins is None and not is_step
        if steps is not None and ends and VerdictKind.GRADIENT in kinds:
            steps.record_rest(_end_of(gm))  # a gradient is memory for what others go on with
        never = (
            not is_step
            or steps is None
            or bool(self.replaced)
            or "repeat" in session.config.without
        )
        never |= optimizer is None and any(map(_may_be_state, _made(gm)))
        self.backoff = Backoff(session, _BOUND, never=never)

    def _compile(
        self, gm: GraphModule, inputs: Sequence[Any], args: tuple[Any, ...] | None = None
    ) -> Code:
        """Compile the graph; if that fails, leave it to the recorder where the step has one.

        For the arguments of a call it is so when Dynamo has done with the graph.
        """
        steps = self.session.steps()
        if steps is not None and replaces_memory(gm):
            return _left_out(gm)
        try:
            with steps.recorder.paused() if steps is not None else nullcontext():
                joins = steps is not None and self.session.config.on_unsupported == "join"
                return compile_graph(self.session, gm, inputs, args or (), joins=joins)
        except Exception as error:
            if steps is None or (args is None and isinstance(error, TorchDynamoException)):
                raise  # Dynamo's own ask it to trace again
            if isinstance(error, CollageError):
                self.error = error
            else:
                steps.failures.note(error)
            return _left_out(gm)

    def _again(self, gm: GraphModule, args: tuple[Any, ...], why: str) -> Code:
        """Compile the graph for the tensors of a call, its symbols being what they were."""
        logs.LOG.info("%s: compiled %s", self.session.subject, why)
        with self.symbols.compiling_again(args) as inputs:
            return self._compile(gm, inputs, args)

    @progress.apart
    def __call__(self, *args: Any) -> Any:
        """Run the graph, or record what it does if it cannot be compensated.

        Where parameters in it stand for others, do nothing in place of recording it, and say so in
        their `outcome`. Raises the CollageError that compiling it raised, before anything is
        written.
        """
        self.session.calls += 1
        steps = self.session.steps()
        again = steps.repeat(self, args) if steps is not None else None
        if again is not None:
            self.backoff.held()
            return again
        stand_ins = self.session.stand_ins
        if stand_ins is not None and stand_ins is not self.stand_ins() and steps is not None:
            # A part of a step that Dynamo has not seen whole.
            steps.waited = True
            return steps.recorded(self, args)
        if self.error is not None:
            raise self.error
        if self.layouts is None:
            self._look_at_sharing(args)
        elif self.forward:
            self._count_forward()
        if steps is not None and steps.active and not steps.compiles:
            return steps.recorded(self, args)
        self.layouts = self.layouts or Layouts(self.static, args)
        if steps is None or not steps.active:
            self.code.conclude(args)
            if names := self.code.drops_residual(args):
                self.session.warn_once(
                    "several-graphs",
                    f"{', '.join(names)}: updated by several graphs, of which one has no use for a "
                    "residual and drops it; collage_fx.compile compiles that one again, with it",
                )
            if names := self.code.reads_residual(args):
                lost = "read in a sum with the high word only, by a graph that does not write"
                self.session.note_loss([f"{name}: {lost} it" for name in names])
            self._check(self.layouts, args)
            self.session.patterns.after_graph(self, self.session.warn_once)
            return self.code.run(args)
        steps.recorder.flush_outside()  # what the graph may need
        if self.code.wanted:
            steps.want(find(args) for find in self.code.wanted)
            self.code.wanted = []
        fits = self._fits(self.layouts, args)
        if self._compile_again(self.gm, args, fits=fits):
            fits = self._fits(self.layouts, args)
        if steps.switches:
            self.code.refused |= steps.executors.computes_anew(self.code, args)
        elif self.checked != STORE.counts:  # a parameter may have got one, of which it has a part
            self.code.refused |= STORE.aliases.are_parts(args)
        recorded = self.code.refused or steps.expands(args, writes=bool(self.code.states))
        if recorded or not fits or not self._has_kernels(steps):
            steps.waited |= bool(self.waits) or stand_ins is not None
            if stand_ins is not None and not self.returns:
                # What Dynamo's code does after a graph without results is nothing to a state.
                stand_ins.outcome = Outcome.TO_RECORD
                return ()
            return steps.recorded(self, args)
        self.code.conclude(args)
        self.checked = STORE.counts
        result = self._run(steps, args)
        if stand_ins is not None:
            stand_ins.outcome, stand_ins.code = Outcome.DONE, self.code
            stand_ins.sources, stand_ins.condition = self.symbols.sources, self.symbols.condition
        return result

    def _check(self, layouts: Layouts, args: tuple[Any, ...]) -> None:
        """Raise CollageError where a step would be recorded; see `_fits`."""
        layouts.check(args)
        if not self.code.lies_as_before(args, sized=layouts.sized):
            raise CollageError(
                f"{MOVED}, and torch.compile has not noticed. Nothing was written. Give each "
                "memory of its own, call torch.compiler.reset(), or use collage_fx.compile, "
                "which records such a step"
            )

    def _fits(self, layouts: Layouts, args: tuple[Any, ...]) -> bool:
        """Return True if the arguments are like those that the graph was compiled for."""
        if not (layouts.hold(args) and self.symbols.hold(args)):
            return False
        if not self.code.refused and not self.code.lies_as_before(args, sized=layouts.sized):
            self.session.notes.add(f"recorded: {MOVED}")
            return False
        return True

    def _run(self, steps: Steps, args: tuple[Any, ...]) -> Any:
        """Run the graph; bind it to what it is given, if it is a step that may be done again."""
        if self.moved:
            moved = [find(args) for find in self.moved]
            steps.given_up += give_new_memory(moved, naming(self.session.optimizer))
        if self.replaced:
            given = renewed(args, self.replaced, naming(self.session.optimizer))
            results = with_states(steps.run_graph(self.code, given), self.replaced, given)
            steps.stored(self.replaced, results, args)
            return results
        binds = steps.done_by_graph and self.backoff.is_due() and not self.symbols.assumed
        if not binds or self.moved or is_looked_at() or left_out.is_open():
            return steps.run_graph(self.code, args)
        attributes = [t for find in self.static[1] if (t := find()) is not None]
        tensors = [t for t in (*args, *attributes) if isinstance(t, Tensor)]
        before, noted = list(map(version, tensors)), Noted()
        with looked_at(noted):
            result = steps.run_graph(self.code, args)
        written = [t for t, old in zip(tensors, before, strict=True) if version(t) != old]
        if noted.calls:
            found = args, noted.calls, attributes, written
            bind = functools.partial(BoundGraph, self, self.code, *found)
            with steps.recorder.paused():
                steps.bound = self.backoff.bind(bind)
        return result

    def _count_forward(self) -> None:
        """Warn of a forward pass that runs again and again, while no step is compensated."""
        self.forward -= 1
        if STORE.generation:
            self.forward = 0
        elif not self.forward:
            self.session.warn_once("forward-pass", _FORWARD)

    def _look_at_sharing(self, args: tuple[Any, ...]) -> None:
        """Have a step recorded that shares memory, or a gradient, unknown to Dynamo.

        To Dynamo a NumPy array is another tensor, whose value a write does not change.
        """
        if self.session.scales:
            self._refuse_other_reads(args)
        if shared_between_storages(a for a in args if isinstance(a, Tensor)):
            why = _TWO_STORAGES
        elif self.shares_gradients:
            why = _ONE_GRADIENT
        elif any(isinstance(a, Tensor) and a.is_neg() for a in args):
            why = _NEGATED
        else:
            return
        self.session.record_instead(why)

    def _refuse_other_reads(self, args: tuple[Any, ...]) -> None:
        """Raise UnsupportedError if it takes the memory of a gradient by another tensor."""
        optimizer = self.session.optimizer()
        gradients = gradients_of(optimizer) if optimizer is not None else []
        found = Multiplied()
        for g in gradients:
            found.note(g, g)
        known = {id(t) for g in gradients for t in (g, shard_of(g))}
        for source, a in zip(self.symbols.sources, args, strict=False):
            if isinstance(a, Tensor) and id(a) not in known:
                found.refuse(source, [a], lambda: "a graph of the step")

    def _has_kernels(self, steps: Steps) -> bool:
        """Compile the kernels of the graph; where that fails, have the graph recorded."""
        try:
            with steps.recorder.paused():  # Inductor makes tensors on the way
                self.code.compile_kernels()
        except Exception as error:  # whatever the compiler raises; nothing is written yet
            steps.failures.note(error)
            self.code.refused = True
        return not self.code.refused

    def _compile_again(self, gm: GraphModule, args: tuple[Any, ...], *, fits: bool) -> bool:
        """Compile the graph if that has become worth while, or a state has got a residual since.

        Raises the CollageError that this raises.

        Args:
            gm: the graph as Dynamo made it.
            args: those of a call.
            fits: whether they are like those that it was compiled for.

        Returns:
            whether it was compiled.
        """
        before = self.code
        if self.waits:
            self.waits -= 1
            if not self.waits:
                self.code = self._again(gm, args, "now that it has run before")
        known = STORE.counts == self.checked
        misses = self.code.meets_residual if known else self.code.misses_residual
        if fits and misses(args):
            # Another graph, or a segment, has since given a residual to a state of this graph, or
            # it is given a tensor that has one where others had none.
            self.code = self._again(gm, args, "again, as a state of it has a residual now")
            self.code.refused |= self.code.misses_residual(args)
        if self.error is not None:
            raise self.error
        return self.code is not before


_TWO_STORAGES = (
    "the step has a NumPy array and a tensor on the same memory, which torch.compile does not know"
)
_NEGATED = (
    "a tensor is the negative of its memory, as autograd makes of conjugated complex numbers, "
    "which torch.compile does not know"
)
_BOUND = "a graph is bound to its tensors: repeated behind Dynamo's guards"
_NUMBER = "a float64 tensor without dimensions is written, which torch.compile forgets"
_FORWARD = (
    "the backend 'collage' compiles what autograd differentiates, as a model's forward pass, and "
    "no step, so that nothing is compensated: leave the backend out for the model, and compile the "
    "step of its optimizer, as in collage_fx.compile_(optimizer)"
)
_FORWARD_CALLS = 64
"""A first step may come after the passes of many batches, whose gradients are added up."""
_ONE_GRADIENT = (
    "the gradient of a parameter is that of another one too, or a parameter or state, and "
    "torch.compile takes it for the same in later steps"
)


def _shares_gradients(optimizer: Optimizer | None) -> bool:
    """Return True if a gradient is another part of the optimizer too, which Dynamo would not guard.

    It does not where it calls `_init_group`, of torch.optim's, in the place of tracing it.
    """
    if optimizer is None or init_of_torch(optimizer) is None:
        return False
    gradients = [id(p.grad) for p in params_of(optimizer) if p.grad is not None]
    known = {id(owned.whole) for owned in owned_tensors(optimizer)}
    return len({*gradients} - known) < len(gradients)


def _is_forward(gm: GraphModule) -> bool:
    """Return True if autograd is to differentiate what a graph returns."""
    results = _tensors(gm.graph.output_node().all_input_nodes)
    return torch.is_grad_enabled() and any(t.requires_grad for t in results)


def _left_out(gm: GraphModule) -> Code:
    """Return code for a graph that is not compiled: the graph as it is."""
    return Code(gm, None, [], [], refused=True)


def _tensors(nodes: Iterable[Node]) -> Iterator[Tensor]:
    """Yield Dynamo's example values of nodes, those that are tensors with memory."""
    values = (node.meta.get("example_value") for node in nodes)
    return (v for v in values if isinstance(v, Tensor) and has_memory(v))


def _made(gm: GraphModule) -> list[Tensor]:
    """Return the results of a graph that are not in memory which it was given."""
    given = {storage_key(t) for t in _tensors(gm.graph.find_nodes(op="placeholder"))}
    results = _tensors(gm.graph.output_node().all_input_nodes)
    return [t for t in results if storage_key(t) not in given]


def _may_be_state(made: Tensor) -> bool:
    return made.dtype in LOW_PRECISION and made.dim() > 0


def _is_broken_off(gm: GraphModule) -> bool:
    """Return True if a graph break ends a graph; a graph that is not from Dynamo has none."""
    reason: Any = getattr(gm, "compile_subgraph_reason", None)
    return reason is not None and bool(reason.graph_break)


def _end_of(gm: GraphModule) -> str:
    """Return the reason why a graph ends before its step, and where in the user's code."""
    reason: Any = getattr(gm, "compile_subgraph_reason", None)
    why = str(reason.reason).partition("\n")[0] if _is_broken_off(gm) else "a function by itself"
    stack = getattr(reason, "user_stack", ())
    return f"{why}, {stack[-1].filename}:{stack[-1].lineno}" if stack else why
