"""Sessions: the options and compiled graphs of each user of the backend."""

import dataclasses
import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor
from torch.fx import GraphModule
from torch.optim import Optimizer

from collage_fx.config import CollageConfig
from collage_fx.gradients.scaled_step import with_gradients
from collage_fx.hooks import optimizer_hooks
from collage_fx.hooks.traces import traced_code, watch_traces
from collage_fx.optimizer.fused import unscaled
from collage_fx.optimizer.ownership import family
from collage_fx.optimizer.storage_patterns import Patterns
from collage_fx.passes.codegen.multi_tensor_kernel import unreachable
from collage_fx.passes.dedup.deduplicate import Narrow
from collage_fx.passes.ir.program import Program, Settings, Unlike
from collage_fx.runtime import logs
from collage_fx.runtime.errors import WarningName, warn
from collage_fx.runtime.residuals.store import STORE
from collage_fx.runtime.storage.registry import is_by_chance, named_in
from collage_fx.runtime.torch_versions import warn_if_untested

if TYPE_CHECKING:
    from collage_fx.compilation.graph_inputs import Inputs


class Outcome(enum.Enum):
    """Result of a step of which Dynamo sees some of the parameters."""

    PARTS = enum.auto()
    """No graph of all of it has run: what Dynamo has seen is done, for those parameters only."""
    DONE = enum.auto()
    """All parameters are updated."""
    TO_RECORD = enum.auto()
    """Nothing is done: the step has to be recorded."""


class StandsForOthers(Protocol):
    """Parameters that are traced in place of all; `stand_in.stand_ins` has them."""

    whole: frozenset[CodeType]
    """The code of the step that is traced for them."""
    outcome: Outcome
    """Result of the last step."""
    code: Any
    """The `side_inputs.Code` that has done so."""
    sources: list[str]
    """Sources of the graph's arguments."""
    condition: Callable[[], Any]
    """Returns the `stand_in.group_numbers.Condition` of its numbers; None if none is known."""
    unlike: Unlike | None
    """Reason why the traced parameters do not stand for the others, once one has been found."""
    pooled: bool
    """True if optimizers that are alike will use the graph, so that few parameters are many."""

    def whole_graph(self, inputs: "Inputs", settings: Settings) -> Narrow | Unlike:
        """Return a graph of the few parameters as the narrow graph of all, or why it is not."""


class StepRunner(Protocol):
    """Protocol of `record.steps.Steps`, which runs the steps of an optimizer or function."""

    waited: bool
    """True if a graph was recorded in this step that will be compiled in the next."""

    @property
    def plain(self) -> bool:
        """True if no state is of a dtype with low words."""
        raise NotImplementedError


@dataclass
class Compiled:
    """One graph that the backend compiled, for `explain` and for reports."""

    program: Program
    source_code: str = ""


@dataclass(eq=False)
class Session:
    """Options, warnings and compiled graphs of one optimizer or function that uses the backend."""

    config: CollageConfig
    inductor: dict[str, Any] = field(default_factory=dict)
    optimizer: Callable[[], Optimizer | None] = lambda: None
    """A weak reference to the optimizer, where `collage_fx.compile` was given one."""
    named: bool = False
    """True if the user knows that residuals of ownerless tensors are theirs to save."""
    compiled: list[Compiled] = field(default_factory=list)
    keep: bool = False
    """True if `compiled` is filled in; programs are large."""
    steps: Callable[[], StepRunner | None] = lambda: None
    """A weak reference to what watches the steps, where `collage_fx.compile` made the step: it
    does what is not compiled. It holds the tensors, which Dynamo's cache must not keep alive."""
    stand_ins: StandsForOthers | None = None
    """Traced parameters and those they stand for, while a step is traced in parts."""
    graphs: int = 0
    """Number of graphs that have been compiled."""
    calls: int = 0
    """Number of calls of graphs of this session, compensated or not."""
    returns_alike: bool = False
    """True if a graph of a function, which writes no state, returns what new states may be."""
    shared: bool = False
    """True if the session is for all functions that are compiled with one configuration."""
    said: set[tuple[str, CodeType | None]] = field(default_factory=set)
    """The warnings, each with the function it was about, where there are several."""
    budgeted: Callable[[], Any] = lambda: None
    """A weak reference to the `BudgetedSteps` of the optimizer, where it has a budget."""
    factor: Callable[[], Tensor | None] = lambda: None
    """Function that finds the 0-d tensor by which gradients are multiplied in the steps; None where
    they are not."""
    notes: set[str] = field(default_factory=set)
    """Remarks that a report has beside the warnings."""
    breaks: list[str] = field(default_factory=list)
    """Reasons and places, in the user's code, of graph breaks within a step."""
    patterns: Patterns = field(init=False)

    def __post_init__(self) -> None:
        self.patterns = Patterns(self.config.storage, self.config.states)
        warn_if_untested()
        logs.register()
        watch_traces()

    @property
    def subject(self) -> str:
        """Name of what is compiled now, such as `the step of AdamW`."""
        optimizer = self.optimizer() or optimizer_hooks.traced_optimizer()
        if optimizer is not None:
            return f"the step of {type(optimizer).__name__}"
        return optimizer_hooks.traced_function() or "a function"

    def rounds_by_chance(self, states: Iterable[Tensor]) -> bool:
        """Return True if a step with these states may round some of them by chance."""
        held = (r.storage for r in STORE.of(list(states)) if r is not None)
        names = (*named_in(self.config.storage), *held)
        return self.config.stochastic_rounding or any(map(is_by_chance, names))

    @property
    def deduplicates(self) -> bool:
        """True if one member of a class may be compiled for all: a kernel runs over all of them."""
        return bool(self.config.multi_tensor) and "deduplicate" not in self.config.without

    @property
    def scales(self) -> bool:
        """True if the steps multiply gradients by a number before they read them."""
        return self.config.clip_grad_norm is not None

    def with_gradients(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return a step that does to gradients what the user asks for, and a GradScaler."""
        optimizer, zeros = self.optimizer(), self.config.zero_grads
        if optimizer is not None and not self.scales:
            step = unscaled(step, optimizer)
        return with_gradients(step, zeros=zeros) if zeros or self.scales else step

    def shared_numbers(self) -> list[Tensor]:
        """Return the 0-d tensors, none of its optimizer's, that all parameters are updated with."""
        return [t for t in (self.factor(),) if t is not None]

    @property
    def divides(self) -> bool:
        """True if what a graph does over and over may be compiled once for all."""
        return "deduplicate" not in self.config.without

    @property
    def settings(self) -> CollageConfig:
        """The configuration of the graph that is compiled now."""
        pooled = self.stand_ins is not None and self.stand_ins.pooled
        return dataclasses.replace(self.config, multi_tensor=True) if pooled else self.config

    def optimizers(self) -> list[Optimizer]:
        """Return the optimizers whose states may be in a graph, the innermost first."""
        optimizer = self.optimizer()
        return family(optimizer) if optimizer is not None else optimizer_hooks.optimizers()

    @property
    def warned(self) -> set[str]:
        """The warnings given."""
        return {message for message, _ in self.said}

    def warn_once(self, name: WarningName, message: str) -> None:
        """Warn unless this session has said the same before, of the same function."""
        of_code = traced_code() if self.shared else None
        if (key := (message, of_code)) not in self.said:
            self.said.add(key)
            warn(name, message, stacklevel=2)

    def warn_ownerless(self, names: Sequence[str]) -> None:
        """Warn of states that no optimizer has, unless the user knows that they are theirs."""
        if names and not self.named:
            self.warn_once(
                "ownerless",
                f"{', '.join(dict.fromkeys(names))} belong to no torch.optim.Optimizer, so no "
                "state_dict() holds their residuals. Save collage_fx.residuals(tensor) beside each "
                "tensor and give them back with collage_fx.load_residuals(tensor, components); "
                + (
                    "collage_fx.compile(function) instead of the backend string silences this"
                    if self.optimizer() is None
                    else "or keep the tensors in the optimizer's state"
                ),
            )

    def __call__(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile one Dynamo graph: `dynamo.backend.Backend` does."""
        raise NotImplementedError

    def note(self, program: Program) -> Compiled:
        """Note a graph that was compiled; report why its classes cannot share a kernel."""
        for reason in {unreachable(s.val.device) for s in program.carried} - {""}:
            if program.settings.multi_tensor and program.result is not None:
                self.warn_once(
                    "no-shared-kernel",
                    f"{reason}; Inductor compiles one for each, where it has a backend",
                )
        self.patterns.see_graph(program)
        compiled = Compiled(program)
        if self.keep:
            self.compiled.append(compiled)
        return compiled

    def note_loss(self, lost: list[str]) -> None:
        """Report the values that a graph does not hand over whole, for which it is recorded."""
        if self.steps() is not None:
            self.notes.update(f"recorded, not compiled as traced: {one}" for one in lost)
        else:
            self.warn_once(
                "low-word-lost", f"{'; '.join(lost)}; collage_fx.compile records that part"
            )
