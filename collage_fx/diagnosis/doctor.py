"""`doctor`: measure the updates that optimizers which use nothing of collage_fx lose."""

import sys
import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Self

import torch
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.weak import WeakIdKeyDictionary

from collage_fx.diagnosis.finding import Finding
from collage_fx.diagnosis.judgement import finding_of
from collage_fx.diagnosis.looks import Clock, Looker
from collage_fx.errors import SubjectError
from collage_fx.optimizer.ownership import STAND_IN
from collage_fx.optimizer.parameter_names import largest_owner, names_of
from collage_fx.step.subject import innermost


class Doctor:
    """Measurement of steps until it is stopped, or left as a context manager; `doctor` makes it.

    It changes no bit of the run: it draws no random number and calls no other process. A step that
    torch.compile runs is not looked at.

    Examples:
        >>> with collage_fx.doctor(optimizer) as doctor:
        ...     train(optimizer)
        >>> doctor.finding()
        <Finding: losing, 1 kinds of parameters>
    """

    def __init__(self, model: Module | None = None, *, everyone: bool = False) -> None:
        """Begin to look.

        Args:
            model: which has the parameters, if that is known.
            everyone: whether all optimizers that take a step are looked at.
        """
        self.lookers: list[Looker] = []
        self._clock, self._everyone = Clock(), everyone
        self._model = model
        self._models: list[weakref.ref[Module]] = []
        self._of = WeakIdKeyDictionary()
        self._hooks = [
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        ]

    def see(self, optimizer: Optimizer) -> None:
        """Look at the steps of an optimizer from now on."""
        self._of[optimizer] = looker = Looker(optimizer, self._names, self._clock)
        self.lookers.append(looker)

    def finding(self) -> Finding:
        """Return the finding so far."""
        return finding_of(self.lookers, list(_advice()))

    def stop(self) -> None:
        """Look no more; what was found stays."""
        for hook in self._hooks:
            hook.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        # Nothing of it is in the graph of a step that torch.compile traces.
        if not torch.compiler.is_compiling():
            self._look_before(optimizer, args, kwargs)

    def _look_before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._everyone and optimizer not in self._of and not hasattr(optimizer, STAND_IN):
            self.see(optimizer)
        if (looker := self._of.get(optimizer)) is not None:
            looker.before(args, kwargs)

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling() and (looker := self._of.get(optimizer)) is not None:
            looker.after()

    def _names(self, optimizer: Optimizer) -> dict[str, str]:
        """Return names of parameters by position: in the model, if one has all of them."""
        if self._model is not None:
            return names_of(optimizer, self._model)
        for model in filter(None, (ref() for ref in self._models)):
            with suppress(SubjectError):  # of another optimizer
                return names_of(optimizer, model)
        if (owner := largest_owner(optimizer)) is not None:
            self._models.append(weakref.ref(owner))
        return names_of(optimizer, owner)


def doctor(optimizer: Optimizer, model: Module | None = None) -> Doctor:
    """Look at the steps of an optimizer that is not compiled, and say what they lose.

    Args:
        optimizer: of any class and dtype, or what wraps one and has it as its `optimizer`. Nothing
            of it is changed.
        model: the module whose names the parameters have; else those of the largest module of the
            process that has all of them.

    Returns:
        A Doctor: `finding()` says what was found, `stop()` or leaving it as a context manager ends
        it. The first four steps are looked at and then ever fewer, at most 1,024 elements of each
        tensor, in at most 2% of the time of a run.

    Raises:
        SubjectError: anything that is no optimizer; a model that has not all of its parameters.

    Examples:
        >>> doctor = collage_fx.doctor(optimizer)
        >>> train(optimizer)
        >>> doctor.stop()
        >>> doctor.finding().losing
        True
    """
    inner = innermost(optimizer)
    if not isinstance(inner, Optimizer):
        raise SubjectError(f"doctor takes an optimizer, got {type(optimizer).__name__}")
    if model is not None:
        names_of(inner, model)
    found = Doctor(model)
    found.see(inner)
    return found


def _advice() -> Iterator[str]:
    """Yield the lines to add to a script that loses updates."""
    yield "Add one line after the optimizer is made, and before the first step:"
    yield "    collage_fx.compile_(optimizer)"
    if "transformers.trainer" in sys.modules:
        yield "or give a Trainer callbacks=[collage_fx.compile_callback()]"
