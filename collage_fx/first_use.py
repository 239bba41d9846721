"""Compilation of an optimizer that compiles its own step, at its first use."""

import functools
import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch.optim import Optimizer

from collage_fx.classes import FIRST_USE, OPTIONS

METHODS = ("step", "state_dict", "load_state_dict")
"""The methods whose first call compiles the step: checkpoints are to hold, and take, residuals."""


def begin(optimizer: Optimizer, given: dict[str, Any]) -> None:
    """Have the first use of an optimizer compile its step.

    Args:
        optimizer: of a class made here, or derived from one.
        given: the options that it was given itself.
    """
    before = vars(optimizer).get(FIRST_USE)
    known = before.given if before is not None else {}
    vars(optimizer)[FIRST_USE] = first_use = FirstUse(optimizer, {**known, **given})
    for name in METHODS:
        vars(optimizer)[name] = first_use.method(name)
    if {**getattr(type(optimizer), OPTIONS), **first_use.given}.get("changed"):
        from collage_fx.changes.noted import begin_noting

        begin_noting(optimizer)


class FirstUse:
    """Compilation of an optimizer's step when one of its methods is first called."""

    def __init__(self, optimizer: Optimizer, given: dict[str, Any]) -> None:
        self.optimizer = weakref.ref(optimizer)
        self.given = given
        self.made: dict[str, Callable[..., Any]] | None = None
        self.before: dict[str, MethodType] = {}
        """Method name -> its stand-in until then."""

    def method(self, name: str) -> MethodType:
        """Return the stand-in of a method, which calls the compiled one from the first use on."""
        optimizer = self._alive()

        @functools.wraps(getattr(type(optimizer), name))
        def first(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
            from collage_fx.api import methods_of  # the compiler, which takes seconds to import

            return methods_of(self)[name](*args, **kwargs)

        # Schedulers wrap a step to see that it was called; the compiled step tells them itself.
        first._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        self.before[name] = MethodType(first, optimizer)
        return self.before[name]

    def methods(self) -> dict[str, Callable[..., Any]]:
        """Return the methods as they are with a compiled step, which is made if there is none."""
        if self.made is None:
            self.made = self._compile()
        return self.made

    def _compile(self) -> dict[str, Callable[..., Any]]:
        from collage_fx.api import compile_own

        optimizer = self._alive()
        options = {**getattr(type(optimizer), OPTIONS), **self.given}
        held = vars(optimizer)
        found = {name: held.pop(name) for name in METHODS if name in held}
        try:
            held["step"] = compile_own(optimizer, **options)
            made = {name: getattr(optimizer, name) for name in METHODS}
        except BaseException:
            held.update(found)
            raise
        # What somebody has put around a method, a scheduler say, stays.
        held.update((n, f) for n, f in found.items() if f is not self.before[n])
        return made

    def _alive(self) -> Optimizer:
        optimizer = self.optimizer()
        assert optimizer is not None, "a method outlived its optimizer"
        return optimizer
