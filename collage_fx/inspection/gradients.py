"""`record_gradients`: the gradients of the last steps, to replay them."""

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from collage_fx.errors import OptionError, SubjectError
from collage_fx.optimizer.ownership import params_of
from collage_fx.step.subject import innermost, step_made_here
from collage_fx.step.watches import Watch, add_watch, remove_watch

Gradients = list[Tensor | None]
"""One for each parameter, in the order of the groups."""


def gradients_of(optimizer: Optimizer) -> Gradients:
    """Return copies of the gradients of now."""
    return [None if p.grad is None else p.grad.detach().clone() for p in params_of(optimizer)]


class GradientRecorder(Watch):
    """Recorder of copies of the gradients that the last steps of an optimizer got.

    Use it as a context manager, or call `remove` when enough has been recorded; what was recorded
    stays. It takes the memory of the gradients `last` times.

    Examples:
        >>> with collage_fx.record_gradients(collage_fx.compile_(optimizer)) as recorder:
        ...     train(optimizer, steps=2)
        >>> len(recorder), recorder.steps[0][0].shape
        (2, torch.Size([64, 64]))
    """

    def __init__(self, optimizer: Optimizer, last: int) -> None:
        super().__init__(optimizer)
        self._steps: deque[Gradients] = deque(maxlen=last)
        self._hook: Any = None

    def attach(self) -> None:
        """Look at each step from now on."""
        optimizer = self._optimizer()
        assert optimizer is not None, "whoever attaches it has the optimizer"
        if step_made_here(optimizer, "_collage") is None:
            self._hook = optimizer.register_step_pre_hook(self._before)
        else:  # which would trace a hook
            add_watch(optimizer, self._watch)

    @property
    def steps(self) -> list[Gradients]:
        """The recorded gradients, the oldest first."""
        return list(self._steps)

    def __len__(self) -> int:
        return len(self._steps)

    def remove(self) -> None:
        """Record no more."""
        optimizer = self._optimizer()
        if self._hook is not None:
            self._hook.remove()
        elif optimizer is not None:
            remove_watch(optimizer, self._watch)

    def _watch(self, optimizer: Optimizer, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self.note()
        return run(*args, **kwargs)

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        # Where a step is being traced, what it notes would be no gradients but parts of the graph.
        if not torch.compiler.is_compiling() and optimizer is self._optimizer():
            self.note()

    def note(self) -> None:
        """Copy the gradients of now, if there are any."""
        optimizer = self._optimizer()
        found = gradients_of(optimizer) if optimizer is not None else []
        if any(g is not None for g in found):
            self._steps.append(found)


def record_gradients(optimizer: Optimizer, last: int = 8) -> GradientRecorder:
    """Keep copies of the gradients of the last steps, for `explain(optimizer, replay=...)`.

    Args:
        optimizer: whose steps are looked at, where `optimizer.step` is called; or what wraps one
            and has it as its `optimizer`. Compile its step first.
        last: of how many steps; each takes the memory of the gradients once.

    Raises:
        OptionError: `last` is less than 1.
        SubjectError: anything that is no optimizer.

    Examples:
        >>> with collage_fx.record_gradients(collage_fx.compile_(optimizer), last=2) as recorder:
        ...     train(optimizer)
        >>> explanation = collage_fx.explain(optimizer, replay=recorder)
        >>> len(recorder)
        2
    """
    inner = innermost(optimizer)
    if not isinstance(inner, Optimizer):
        raise SubjectError(f"record_gradients takes an optimizer, got {type(optimizer).__name__}")
    if last < 1:
        raise OptionError(f"last={last}: at least one step has to be kept")
    recorder = GradientRecorder(inner, last)
    recorder.attach()
    return recorder
