"""The compiled step of an optimizer or a function, as `collage_fx.compile` returns it."""

import functools
import inspect
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.compiler import disable
from torch.nn import Parameter
from torch.optim import Optimizer

from collage_fx.changes.noted import NotedChanges, begin_noting
from collage_fx.changes.sharded import ShardedWrites
from collage_fx.dynamo.backend import Backend
from collage_fx.errors import CollageError, OptionError
from collage_fx.gradients.clipping import Clipping
from collage_fx.gradients.norm import resolve_gradients
from collage_fx.gradients.scaled_step import zero_gradients
from collage_fx.hooks import distributed_state_dicts, nested_compile
from collage_fx.hooks.dynamo_settings import FIRST, many_graphs, no_full_collection
from collage_fx.hooks.optimizer_hooks import has_foreign_hooks
from collage_fx.hooks.step_substitution import apart, beneath_hooks, codes, put_beneath_hooks
from collage_fx.hooks.symbolic_numbers import symbolic_numbers
from collage_fx.optimizer import plain_steps
from collage_fx.optimizer.discovery import FunctionStates, OptimizerStates
from collage_fx.optimizer.fused import is_fused, note_of, traceable
from collage_fx.optimizer.ownership import (
    Owned,
    argument_tensors,
    family,
    params_of,
    params_within,
    tensors_of_callable,
)
from collage_fx.optimizer.served import Report, put_in_place
from collage_fx.optimizer.state_table import sort_key
from collage_fx.passes.ir.program import LOW_PRECISION
from collage_fx.record.mode import Cause
from collage_fx.record.service import written_between_steps
from collage_fx.record.steps import Steps
from collage_fx.runtime import progress, torch_private
from collage_fx.runtime.torch_private import _disable_current_modes
from collage_fx.runtime.trees import replace_functions, tree_leaves
from collage_fx.stand_in.steps import StandInSteps
from collage_fx.step.first_steps import StepCheck
from collage_fx.step.other_methods import serve_methods
from collage_fx.step.recompile_guard import RecompileGuard
from collage_fx.step.small_updates import SmallUpdates
from collage_fx.step.subject import name_of, step_made_here
from collage_fx.step.watches import watched

TRACING = "Dynamo traces"
_PART = "within a step of another it is a part of that step, which has its own options"


class Look(Protocol):
    """Observer of some of an optimizer's steps."""

    def due(self, optimizer: Optimizer) -> bool:
        """Count a step; return whether it is one to look at."""

    def step(
        self, run: Callable[..., Any], optimizer: Optimizer, /, *args: Any, **kwargs: Any
    ) -> Any:
        """Do a step of the optimizer by `run`, and look at what it does."""


Looks: TypeAlias = Callable[[Backend, Steps, Callable[[], object]], Look]
"""Function that makes an observer, of a session, what runs its steps, and a function that has
representatives of the parameters chosen anew."""


def compile_optimizer(
    optimizer: Optimizer, session: Backend, *, hooked: bool = True, look: Looks | None = None
) -> Callable[..., Any]:
    """Return a method bound to the optimizer that runs its class's step compiled.

    Args:
        optimizer: whose step it is.
        session: compiles it.
        hooked: whether the hooks of the optimizer are called in it.
        look: makes one more observer of the steps.
    """
    own = CompiledStep(optimizer, session, hooked=hooked, look=look)

    @functools.wraps(type(optimizer).step)
    def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        return own.call(self, args, kwargs)

    step._collage = session  # type: ignore[attr-defined]
    # It does what schedulers wrap a step in a function for, before they are made too.
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    step._report = functools.partial(_report, own.steps, session)  # type: ignore[attr-defined]
    if own.clipping is not None:
        own.clipping.shown_by(step)
    return types.MethodType(step, optimizer)


class CompiledStep:
    """The step of one optimizer: repeated, compiled, recorded, checked, or within another."""

    def __init__(
        self, optimizer: Optimizer, session: Backend, *, hooked: bool, look: Looks | None
    ) -> None:
        # The class's own step: optimizer.step may be wrapped by a scheduler, or be ours already.
        config = session.config
        own = put_beneath_hooks(type(optimizer).step, session.with_gradients)
        self.plain = types.MethodType(own if hooked else beneath_hooks(own), optimizer)
        self.session = session
        self.optimizer = reference = weakref.ref(optimizer)
        states = OptimizerStates(lambda: _alive(reference))
        self.steps = Steps(session, states, f"the step of {type(optimizer).__name__}")
        session.notes.update(config.of_gradients())
        self.clipping: Clipping | None = None
        if session.scales:
            self.clipping = clipping = Clipping(optimizer, config, self.steps.words.multiplied)
            clipping.multiplied.flush = self.steps.recorder.flush_outside
            clipping.multiplied.renew = functools.partial(_renew, clipping, reference)
            session.factor = lambda: clipping.factor
        self.steps.sharded = ShardedWrites.of(optimizer)
        self.noted: NotedChanges | None = None
        if config.changed:
            found = weakref.ref(self.steps)
            begin_noting(optimizer, lambda: getattr(found(), "sharded", None))
            self.noted = self.steps.changes = NotedChanges(optimizer)
        few = StandInSteps(lambda: _alive(reference), session)
        self.run = TracedCall(self.plain, session, self.steps, few)
        self.check = StepCheck(self.steps, session, session.config.verify)
        self.repeat, self.prepare_repeat = disable(few.repeat), disable(few.prepare_repeat)
        self.looks: list[Look] = [SmallUpdates(session)]
        if look is not None:
            self.looks.append(look(session, self.steps, few.begin_anew))
        serve_methods(optimizer, self.steps)

    def call(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do a step, with all that watches steps of this process."""
        if nested_compile.within_step():
            if self.clipping is not None:
                raise OptionError(f"clip_grad_norm: {_PART}; give it to that one")
            self.session.notes.add(_PART)
            plain_steps.called(family(optimizer))
            return self._unfused(True, self.plain, *args, **kwargs)
        if not self.steps.steps:
            plain_steps.called(family(optimizer))
            distributed_state_dicts.know_residuals()
        sharded = self.steps.sharded
        if sharded is None:
            return self._clipped(optimizer, args, kwargs)
        sharded.count(optimizer)
        try:
            return self._clipped(optimizer, args, kwargs)
        finally:
            sharded.note(optimizer)

    def _clipped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if self.clipping is None:
            return self._looked_at(optimizer, args, kwargs)
        return self._with_norm(self.clipping, optimizer, args, kwargs)

    @disable  # where the whole training step is compiled
    def _with_norm(self, clipping: Clipping, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        args, kwargs = clipping.begin(optimizer, args, kwargs)
        with clipping.within(optimizer), clipping.watched(optimizer, self.session.warn_once):
            return self._looked_at(optimizer, args, kwargs)

    def _looked_at(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Do a step by way of all that looks at it."""
        do: Callable[..., Any] = self._take if self.noted is None else self._take_noted
        for look in self.looks:
            if look.due(optimizer):
                do = functools.partial(look.step, do)
        return watched(optimizer, functools.partial(do, optimizer))(*args, **kwargs)

    def _take(self, optimizer: Optimizer, /, *args: Any, **kwargs: Any) -> Any:
        """Repeat the last step, or do one in full."""
        repeated, called, result = self.repeat(args, kwargs)
        if called:
            self._in_full()
        elif not repeated:
            result = self._in_full(*args, **kwargs)
        optimizer._opt_called = True  # type: ignore[attr-defined]  # what schedulers look at
        return result

    def _take_noted(self, optimizer: Optimizer, /, *args: Any, **kwargs: Any) -> Any:
        assert self.noted is not None
        if not self.noted.copies:
            return self._take(optimizer, *args, **kwargs)
        with self.noted.repeated():
            return self._take(optimizer, *args, **kwargs)

    def _in_full(self, *args: Any, **kwargs: Any) -> Any:
        asks = self.check.wanted or not self.steps.quiet
        resolve_gradients(params_within(_alive(self.optimizer)))
        done = functools.partial(self._unfused, asks, self.run)
        if self.check.wanted:
            result = self.check.step(_alive(self.optimizer), done, args, kwargs)
        else:
            result = done(*args, **kwargs)
        self.prepare_repeat(self.steps, wanted=not self.check.wanted)
        return result

    def _unfused(self, asks: bool, run: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Do a step by other kernels than torch's fused ones, which nothing can be put into."""
        fused = is_fused(optimizer := _alive(self.optimizer))
        scales, config = self.session.scales, self.session.config
        if not (fused or scales):
            return run(*args, **kwargs)
        if fused:
            self.session.notes.add(note_of(config))
        asks |= config.zero_grads  # which kernels that look there would not write
        with traceable(optimizer, asks=asks, scales=scales) as wanted:
            if wanted:
                return run(*args, **kwargs)
        if config.zero_grads:
            zero_gradients(optimizer)
        return None


def _renew(clipping: Clipping, find: Callable[[], Optimizer | None]) -> None:
    """Compute the norm anew beneath hooks, which may have written gradients."""
    if has_foreign_hooks(optimizer := _alive(find)):
        with _disable_current_modes():
            clipping.update(optimizer, raises=clipping.raises)


def compile_function(function: Callable[..., Any], session: Backend) -> Callable[..., Any]:
    """Return the function compiled, and recorded where Dynamo does not trace it."""
    if session.config.verify:
        raise OptionError("verify=n checks the steps of optimizers, not calls of functions")
    if session.config.budget is not None:
        raise OptionError("budget= is for the states of an optimizer, not calls of functions")
    if session.config.changed:
        raise OptionError("changed=True is for the parameters of an optimizer, not calls")
    if session.scales or session.config.zero_grads:
        name = "clip_grad_norm" if session.scales else "zero_grads"
        raise OptionError(f"{name} is for the gradients of an optimizer, not calls of functions")
    put: list[weakref.ref[Tensor]] = []
    arguments, subject = _Arguments(function), name_of(function)
    states = FunctionStates(arguments.tensors)
    steps = Steps(session, states, subject)
    run = TracedCall(function, session, steps)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if nested_compile.within_step():
            session.notes.add(_PART)
            return function(*args, **kwargs)
        arguments.begin(args, kwargs)
        old = {id(x) for x in (r() for r in put) if x is not None}
        given = arguments.tensors() if old else []
        if again := [o.name for o in given if id(o.tensor) in old]:
            steps.warn("put-in-place", put_in_place(again))
        try:
            return run(*args, **kwargs)
        finally:
            new = () if steps.was_repeated else _put_in((args, kwargs), arguments.tensors())
            put[:] = map(weakref.ref, new)
            arguments.end()

    call._report = functools.partial(_report, steps, session)  # type: ignore[attr-defined]
    return call


class _Arguments:
    """The tensors among the arguments of a function, and among the values that it refers to."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.names = function, _argument_names(function)
        self.given: tuple[Any, ...] = (), {}
        self.found: list[Owned] | None = []

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin a call with these arguments; a repeated one does not look for tensors."""
        self.given, self.found = (args, kwargs), None

    def tensors(self) -> list[Owned]:
        """Return the tensors as they were when they were first asked for in this call."""
        if self.found is None:
            given = argument_tensors(self.names, *self.given)
            self.found = [*given, *tensors_of_callable(self.function)]
        return self.found

    def end(self) -> None:
        """Let go of the tensors."""
        self.given, self.found = ((), {}), []


def _put_in(given: Any, before: list[Owned]) -> Iterator[Tensor]:
    """Yield the tensors that a function has put into lists and dicts that it was given."""
    known = {id(owned.tensor) for owned in before}
    for x in tree_leaves(given):
        if isinstance(x, Tensor) and x.dtype in LOW_PRECISION and x.dim() and id(x) not in known:
            yield x


def _argument_names(function: Callable[..., Any]) -> list[str]:
    """Return the names of the positional arguments, as far as they have any."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


class TracedCall:
    """Call of a step or function, compiled as far as Dynamo traces it, the rest being recorded."""

    def __init__(
        self,
        plain: Callable[..., Any],
        session: Backend,
        steps: Steps,
        few: StandInSteps | None = None,
    ) -> None:
        """Compile nothing yet.

        Args:
            plain: a step, or a function.
            session: compiles it.
            steps: runs it.
            few: does the steps of an optimizer of which Dynamo need not see all.
        """
        self.plain, self.session, self.steps, self.few = plain, session, steps, few
        own = apart(plain)
        self.compiled = torch.compile(own, backend=session)
        session.steps, session.whole = weakref.ref(steps), codes(own)
        session.reads_numbers = "numbers" not in session.config.without
        if not torch_private.traces():
            steps.enter(Cause.NO_TRACING)
        self.guard = RecompileGuard(session, steps)
        self.is_closure = _is_function if few is None else callable

    @disable  # where the whole training step is compiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Do the step, or call the function."""
        torch_private.require()
        try:
            return self._call(args, kwargs)
        except Exception as error:
            torch_private.explain(error)
            raise

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        steps, session = self.steps, self.session
        steps.go_on()
        changes = session.scales or session.config.zero_grads
        if changes and steps.traces and not self._reaches_all(args, kwargs):
            steps.enter(Cause.GRADIENTS_APART)
        early = self.guard.calls < FIRST
        compiles = no_full_collection() if early else nullcontext()
        with compiles, self.guard.watch() as calm:
            begins = calm and session.begins_untraced()
            by_dynamo = calm and not begins
            with (
                progress.work(self._doing, TRACING if by_dynamo else None)
                if early
                else nullcontext(),
                steps.step(traced=by_dynamo, once=begins),
                many_graphs(),
                steps.failures.caught(reads_numbers=session.reads_numbers),
                symbolic_numbers(session.optimizer()),
                nested_compile.step_of(session, compiled=by_dynamo),
            ):
                args, kwargs = replace_functions((args, kwargs), self.is_closure, self._excepted)
                result = self._traced(args, kwargs) if by_dynamo else self.plain(*args, **kwargs)
                if self.few is None and not steps.was_repeated:
                    steps.see_results(result)
            if self.few is None and not steps.was_repeated:
                steps.see_written()
            return result

    def _reaches_all(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return True if all gradients are there, in the optimizer's groups, when a step begins.

        Hooks of the user's own may write them.
        """
        optimizer = _alive(self.session.optimizer)
        if self.session.scales and has_foreign_hooks(optimizer):
            return False
        before = self.few is not None and self.few.tries  # a closure is called before the step then
        closures = self.session.scales and not before
        if closures and any(map(callable, tree_leaves((args, kwargs)))):
            return False
        params = [{*map(id, params_of(one))} for one in family(optimizer)]
        return set().union(*params) == params[0]

    def _traced(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.few is not None and self.few.tries:
            return self.few.step(self.compiled, args, kwargs)
        return self.compiled(*args, **kwargs)

    def _excepted(self, closure: Callable[..., Any]) -> Callable[..., Any]:
        """Return a closure that is no part of the step: it runs the model, eagerly or as the user
        compiled it."""
        recorder, failures = self.steps.recorder, self.steps.failures
        called = disable(recorder.suspended(progress.apart(closure), failures))

        # Dynamo guards no disabled function, and would call None as one in the step after.
        def guarded(*args: Any, **kwargs: Any) -> Any:
            return called(*args, **kwargs)

        return guarded

    def _doing(self) -> str:
        optimizer = self.session.optimizer()
        count = len(params_of(optimizer)) if optimizer else 0
        return f"compiling {self.steps.subject}" + (f" ({count} parameters)" if count else "")


def _is_function(argument: Any) -> bool:
    """Return True if an argument is a function, and no model or other object that can be called."""
    if type(argument) in _NO_FUNCTION:  # as thousands are, and the rest takes microseconds
        return False
    return inspect.isroutine(argument) or isinstance(argument, functools.partial)


_NO_FUNCTION = frozenset({Tensor, Parameter, float, int, bool, str, type(None)})


def _alive(reference: Callable[[], Optimizer | None]) -> Optimizer:
    optimizer = reference()
    assert optimizer is not None, "the step outlived its optimizer"
    return optimizer


def report_of(step: Any) -> Report:
    """Return the report of a step made here.

    Raises CollageError for any other.
    """
    made = step_made_here(step, "_report")
    if made is None and isinstance(step, Optimizer) and plain_steps.has_compiled(step):
        raise CollageError(
            f"collage_fx.compile has made a step for this {type(step).__name__}, which is not its "
            "step: pass what compile returned, or put a step in its place by "
            "collage_fx.compile_(optimizer)"
        )
    if made is None:
        called = f"the step of this {type(step).__name__}" if isinstance(step, Optimizer) else step
        raise CollageError(
            f"{called} was not made by collage_fx.compile, which keeps the record: call what that "
            "returns, or give an optimizer such a step by collage_fx.compile_"
        )
    return made._report()


def optimizer_of(step: Any) -> Optimizer | None:
    """Return the optimizer whose step it is, if `report_of` has a report of it; None if none."""
    session = session_of(step)
    return session.optimizer() if session is not None else None


def session_of(step: Any) -> Backend | None:
    """Return the session of an optimizer's step; None if it was not made here."""
    session = getattr(step_made_here(step, "_collage"), "_collage", None)
    return session if isinstance(session, Backend) else None


def _report(steps: Steps, session: Backend) -> Report:
    steps.service.count_repeats()
    written = (s for s in steps.service.served.values() if s.steps and not s.is_gradient)
    return Report(
        steps.subject,
        sorted(written, key=lambda s: sort_key(s.state_name)),
        [
            *sorted(session.warned | session.notes),
            *(steps.changes.notes() if steps.changes is not None else ()),
            *torch_private.left_out(),
            *steps.executors.outside_graphs(),
            *steps.recorder.unrecorded.notes(),
            *written_between_steps(steps.states.find()),
        ],
        steps.steps,
    )
