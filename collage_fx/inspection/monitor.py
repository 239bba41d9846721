"""Telemetry of an optimizer's updates: what 16 bits lose, and what their residuals keep.

In every n-th step each update as it was stored is held against the exact one: what the compiled
graph of the step makes in float64 of the same inputs, or, where no graph shows it, what a float64
copy of the optimizer makes.
"""

import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from collage_fx.diagnosis.stats import UpdateStats
from collage_fx.errors import OptionError, SubjectError
from collage_fx.inspection.update_stats import (
    GraphUpdates,
    Measurement,
    stats_of,
)
from collage_fx.optimizer.ownership import Owned, owned_tensors
from collage_fx.optimizer.parameter_names import names_of, renamed_state
from collage_fx.optimizer.plain_steps import watch_monitored
from collage_fx.optimizer.state_table import preformatted, table
from collage_fx.passes.ir.program import LOW_PRECISION
from collage_fx.runtime.errors import warn
from collage_fx.runtime.storage.state_name import StateName
from collage_fx.step.first_steps import exact_step, in_float64
from collage_fx.step.subject import innermost, step_made_here
from collage_fx.step.watches import Watch, add_watch, remove_watch

KEPT = 1000
"""Number of measurements that a monitor keeps, if they are of no more states than that."""


class Monitor(Watch):
    """Monitor of every n-th step of an optimizer; `monitor` makes it.

    Examples:
        >>> found = collage_fx.monitor(collage_fx.compile_(optimizer), every=2)
        >>> train(optimizer)
        >>> found.steps, [measurement.step for measurement in found.history]
        (4, [2, 4])
        >>> found.remove()
    """

    def __init__(self, optimizer: Optimizer, every: int, to: Any, model: Module | None) -> None:
        super().__init__(optimizer)
        self.every = every
        self.steps = 0
        """The steps that it has seen."""
        self.history: list[Measurement] = []
        """The last measurements, the newest last."""
        self.problem = ""
        """Reason why the last step that was due could not be measured."""
        self._write = _writer(to)
        self._names = names_of(optimizer, model)
        self._said: set[str] = set()
        # Weakly, as the optimizer: `WATCHES` would keep that alive.
        self._plain: Callable[[], Any] = lambda: None
        """Weak reference to the function that was put in the place of a plain step."""
        self._active = self._within = False
        self._by_graphs = False
        """True if graphs have shown all of the last step that was measured."""

    @property
    def latest(self) -> Measurement | None:
        """The last of `history`; None before the first."""
        return self.history[-1] if self.history else None

    def __repr__(self) -> str:
        """Return the last measurement as a table of the kinds of states."""
        found = self.latest
        if found is None:
            why = f"; {self.problem}" if self.problem else ""
            return f"collage_fx monitor: nothing measured in {self.steps} steps{why}"
        rows = [("state", "lost", "lost_plain", "edq", "edq_plain", "noise")]
        for kind, s in found.kinds().items():
            shares = f"{s.lost:.1%}", f"{s.lost_plain:.1%}", f"{s.edq:.3f}", f"{s.edq_plain:.3f}"
            rows.append((kind, *shares, f"{s.noise:.1e}"))
        return "\n".join([f"collage_fx monitor: step {found.step}", "", *table(rows)])

    def _repr_html_(self) -> str:
        return preformatted(self)

    def attach(self) -> None:
        """Look at the steps from now on, those that are compiled and plain ones."""
        optimizer = self._optimizer()
        assert optimizer is not None, "whoever attaches it has the optimizer"
        self._active = True
        add_watch(optimizer, self.measured)
        watch_monitored(optimizer, seen=False)
        if step_made_here(optimizer, "_collage") is not None:
            return
        step = optimizer.step

        @torch.compiler.disable
        @functools.wraps(step)
        def watched(self_: Optimizer, *args: Any, **kwargs: Any) -> Any:
            return self.measured(self_, step, args, kwargs)

        watched._replaced = step
        self._plain = weakref.ref(watched)
        optimizer.step = types.MethodType(watched, optimizer)  # type: ignore[method-assign]

    def remove(self) -> None:
        """Look at no more steps; what was measured stays."""
        self._active = False
        optimizer = self._optimizer()
        if optimizer is None:
            return
        remove_watch(optimizer, self.measured)
        watch_monitored(optimizer, seen=True)
        # A scheduler or another monitor may have put something around it, which stays.
        ours: Any = self._plain()
        if ours is not None and getattr(vars(optimizer).get("step"), "__func__", None) is ours:
            optimizer.step = vars(ours)["_replaced"]  # type: ignore[method-assign]

    @torch.compiler.disable
    def measured(
        self, optimizer: Optimizer, run: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Do a step, and measure it if it is due."""
        if self._within or not self._active:  # a compiled step within a plain one, say
            return run(*args, **kwargs)
        self._within = True
        try:
            if not self.steps:
                watch_monitored(optimizer, seen=True)
            self.steps += 1
            if self.steps % self.every == 0:
                return self._measured(optimizer, run, args, kwargs)
            if (self.steps + 1) % self.every == 0 and not self._by_graphs:
                graphs = GraphUpdates(_states(optimizer), measure=False)
                result = graphs.run(run, args, kwargs)
                self._by_graphs = graphs.complete
                return result
            return run(*args, **kwargs)
        finally:
            self._within = False

    def _measured(
        self, optimizer: Optimizer, run: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        copy = None if self._by_graphs else _Copy(optimizer, args, kwargs)
        if copy is not None:
            args, kwargs = copy.args, copy.kwargs
        graphs = GraphUpdates(_states(optimizer))
        result = graphs.run(run, args, kwargs)
        try:
            self.problem = self._note(optimizer, graphs, copy)
        except Exception as error:  # of a logger, say: no reason to end a training
            self.problem = f"{type(error).__name__}: {error}"
        if self.problem and self.problem not in self._said:
            self._said.add(self.problem)
            message = f"the monitor cannot measure the updates: {self.problem}"
            warn("monitor-failed", message, stacklevel=4)
        return result

    def _note(self, optimizer: Optimizer, graphs: GraphUpdates, copy: "_Copy | None") -> str:
        """Note a step's updates of the states; return the fault in that, or nothing."""
        states = _states(optimizer)
        if not states:
            return "none of its states is in 16 bits"
        if graphs.complete or (copy is None and graphs.unchanged):
            found = graphs.found
            for o in graphs.states.values():
                if o.state_name not in found:  # a parameter without a gradient, say
                    value = in_float64(o.tensor)
                    found[o.state_name] = stats_of(o.tensor, value, o.tensor, value, value)
            self._by_graphs = True
        elif copy is None:
            self._by_graphs = False
            missed = ", ".join(sorted(map(str, graphs.missed))[:3])
            why = f"graphs have not shown all that was written to {missed}; {graphs.problem}"
            return why.removesuffix("; ")
        elif isinstance(copy.exact, str):
            return f"{copy.exact}; {graphs.problem}".removesuffix("; ")
        else:
            found = copy.stats(states)
        self._keep(optimizer, found)
        return ""

    def _keep(self, optimizer: Optimizer, found: dict[StateName, UpdateStats]) -> None:
        """Keep a measurement, and hand it over."""
        params = {name.parameter for name in found if name.is_param}
        if self._names and not self._names.keys() >= params:
            self._names = names_of(optimizer)  # parameters were added
        states = {renamed_state(name, self._names): stats for name, stats in found.items()}
        most = max(10, min(KEPT, KEPT * KEPT // len(states)))
        self.history = [*self.history[1 - most :], Measurement(self.steps, states)]
        self._write(self.history[-1])


class _Copy:
    """A copy of an optimizer in float64 takes the step too, where graphs do not show all of it."""

    def __init__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Take the step before the optimizer does.

        Args:
            optimizer: whose step it is.
            args: the arguments of the step. A closure is evaluated, and its gradients are those of
                the step from here on; `args` and `kwargs` have what is to be given in its place.
            kwargs: the same by name.
        """
        closure = args[0] if args else kwargs.get("closure")
        self.args, self.kwargs, loss = args, kwargs, None
        if len(args) + len(kwargs) == 1 and callable(closure):
            known = _Evaluated(closure)
            self.args, self.kwargs, loss = (known,), {}, known.loss_alone
        self.exact: dict[str, Tensor] | str
        """The values of the states after it, or why they cannot be known."""
        self.before: dict[str, tuple[Tensor, Tensor]] = {}
        """State -> its high word, and its value with the residual."""
        try:
            self.exact = exact_step(optimizer, () if loss else args, kwargs, loss)
            if not isinstance(self.exact, str):
                states = _states(optimizer)
                self.before = {o.name: (o.tensor.clone(), in_float64(o.tensor)) for o in states}
        except Exception as error:  # memory for copies, say: no reason to end a training
            self.exact = f"{type(error).__name__}: {error}"

    def stats(self, states: list[Owned]) -> dict[StateName, UpdateStats]:
        """Return the statistics of the states, after the optimizer has taken the step."""
        assert not isinstance(self.exact, str)
        return {
            o.state_name: stats_of(*before, o.tensor, in_float64(o.tensor), self.exact[o.name])
            for o in states
            if o.name in self.exact and (before := self.before.get(o.name)) is not None
        }


class _Evaluated:
    """A closure that has been called: the first to ask is given what it returned then."""

    def __init__(self, closure: Callable[[], Any]) -> None:
        self.closure = closure
        with torch.enable_grad():
            self.losses = [closure()]
        self.asked = False

    def __call__(self) -> Any:
        """Return the loss, of a new evaluation if this is not the first call."""
        return self.losses.pop() if self.losses else self.closure()

    def loss_alone(self) -> Any:
        """Return the loss to a copy of the optimizer, once: it cannot evaluate the model anew."""
        if self.asked:
            raise RuntimeError("the step evaluates its closure more than once")
        self.asked = True
        return self.losses[0]


def monitor(
    optimizer: Optimizer, every: int = 100, *, to: Any = None, model: Module | None = None
) -> Monitor:
    """Measure what every n-th step of an optimizer loses, compensated or plain.

    Args:
        optimizer: one whose step `collage_fx.compile` has made, or any other, to see what it loses
            without.
        every: in which steps. In those what the step overwrites is copied for that time; where
            graphs do not show all of the step, a copy of the optimizer in float64 takes it too,
            with 8 bytes for each element of parameters, gradients and states, and as much again
            for the states.
        to: what is given each measurement: a function of a dict of scalars and the step; a
            `SummaryWriter` of TensorBoard; a run of Weights & Biases.
        model: the module whose names the parameters have, as of `explain`.

    Returns:
        A Monitor: `history` has the measurements, each by kind of state, layer and state; `latest`
        is the last of them; `remove()` ends it. Of sharded parameters each process measures its
        shard. In the first step, which makes the states, it measures parameters only. Of steps that
        graphs do not show, those that evaluate a closure more than once, draw random numbers or
        have hooks are not measured; a warning says so.

    Raises:
        OptionError: `every` is not a positive integer, or `to` is none of these.
        SubjectError: no optimizer; a `model` that has not its parameters.

    Examples:
        >>> found = collage_fx.monitor(collage_fx.compile_(optimizer), every=4)
        >>> train(optimizer)
        >>> parameters = found.latest["kinds"]["parameter"]
        >>> parameters["lost"] < parameters["lost_plain"]
        True
    """
    inner = innermost(optimizer)
    if not isinstance(inner, Optimizer):
        raise SubjectError(f"monitor takes an optimizer, got {type(optimizer).__name__}")
    check_every(every)
    made = Monitor(inner, every, to, model)
    made.attach()
    return made


def check_every(every: Any) -> None:
    """Raise OptionError unless this is a number of steps."""
    if type(every) is not int or every < 1:
        raise OptionError(f"every={every!r}: a number of steps, 1 or more")


def _writer(to: Any) -> Callable[[Measurement], None]:
    """Return the function that hands a measurement over."""
    if to is None:
        return lambda found: None
    if hasattr(to, "add_scalar"):  # TensorBoard

        def write(found: Measurement) -> None:
            for name, x in found.scalars().items():
                to.add_scalar(name, x, found.step)

        return write
    if hasattr(to, "log") and not callable(to):  # Weights & Biases
        return lambda found: to.log({**found.scalars(), "collage/step": found.step})
    if callable(to):
        return lambda found: to(found.scalars(), found.step)
    raise OptionError(
        f"to={type(to).__name__}: a function of scalars and step, a SummaryWriter or a wandb run"
    )


def _states(optimizer: Optimizer) -> list[Owned]:
    """Return the 16-bit states and parameters that have elements."""
    tensors = owned_tensors(optimizer)
    return [o for o in tensors if o.tensor.dtype in LOW_PRECISION and o.tensor.numel()]
