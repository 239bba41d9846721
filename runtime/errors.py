"""One error class per cause, and the one warning category; public as `collage_fx.errors`.

They live here because every layer raises them and imports point from collage_fx to runtime.
"""

import difflib
import itertools
import re
import warnings
from collections.abc import Callable, Collection, Iterable
from typing import Literal


class CollageError(Exception):
    """Base class of every error that collage_fx raises on purpose.

    Examples:
        >>> try:
        ...     collage_fx.compile_(optimizer, level="most")
        ... except collage_fx.CollageError as error:
        ...     print(type(error).__name__, error)
        OptionError level='most' is not one of 'light', 'plus', 'auto', 'all'
    """


class OptionError(CollageError, ValueError):
    """An option, or a value of one, that does not exist.

    Examples:
        >>> collage_fx.compile_(optimizer, levels="auto")
        Traceback (most recent call last):
            ...
        OptionError: unknown option 'levels', did you mean 'level'? ...
    """


class SubjectError(OptionError, TypeError):
    """Something that is neither an optimizer nor a function that updates tensors.

    Examples:
        >>> collage_fx.compile_(model)
        Traceback (most recent call last):
            ...
        SubjectError: compile_ takes an optimizer, got Linear
    """


class BudgetError(OptionError):
    """A budget that an optimizer's states do not fit in, whatever their storages.

    Examples:
        >>> train(collage_fx.compile_(optimizer, budget=5.0))
        Traceback (most recent call last):
            ...
        BudgetError: budget=5.0: 6 bytes for each element of the parameters is the least that ...
    """


class CheckpointError(CollageError, ValueError):
    """Residuals in a checkpoint that do not fit the optimizer that loads them.

    Examples:
        >>> collage_fx.load_master_weights(model, {"weight": torch.ones(2)})
        Traceback (most recent call last):
            ...
        CheckpointError: the weights do not fit: weight is (64, 64), given (2,)
    """


class ResidualError(CollageError, ValueError):
    """Residuals given for a tensor that cannot have them.

    Examples:
        >>> collage_fx.load_residuals(model.weight, [torch.ones(64, 64)])
        Traceback (most recent call last):
            ...
        ResidualError: ... was given residuals of [torch.float32]; ...
    """


class ComponentError(CollageError, ValueError):
    """An expansion of no, or of more than three, components."""


class StorageError(CollageError, ValueError):
    """A state of a dtype that the storage which was asked for cannot hold.

    Examples:
        >>> weights = {"weight": torch.ones(64, 64)}
        >>> collage_fx.load_master_weights(model.half(), weights, storage="remainder16")
        Traceback (most recent call last):
            ...
        StorageError: storage 'remainder16' cannot hold weight, which is float16; ...
    """


class LegalityError(CollageError, RuntimeError):
    """A graph between two passes breaks its specification: a defect of collage_fx."""


class UnsupportedError(CollageError, NotImplementedError):
    """An operation on a carried path has no rule, and `on_unsupported="error"` was asked for; or a
    step does what PyTorch does not let tensors with residuals do.

    Examples:
        >>> def update(p, g):
        ...     p.copy_(torch.hypot(p, g))
        >>> step = collage_fx.compile(update, arithmetic="eft", on_unsupported="error")
        >>> step(*torch.ones(2, 4).bfloat16())
        Traceback (most recent call last):
            ...
        UnsupportedError: aten.hypot.default has no rule: node hypot, on the path of p; ...
    """


class NonFiniteError(CollageError, RuntimeError):
    """Gradients of which the norm is infinite or a NaN, where `error_if_nonfinite=True`.

    Nothing was written.

    Examples:
        >>> step = collage_fx.compile(optimizer, clip_grad_norm=1.0, error_if_nonfinite=True)
        >>> model.weight.grad = torch.full_like(model.weight, torch.inf)
        >>> step()
        Traceback (most recent call last):
            ...
        NonFiniteError: the norm of the gradients is inf, and error_if_nonfinite=True; ...
    """


class RuleError(CollageError, RuntimeError):
    """The rule of an operation on a carried path failed: a defect of that rule."""


class CaptureError(CollageError, RuntimeError):
    """A CUDA graph is being captured that would not do, when replayed, what the step does."""


class PageError(CollageError, OSError):
    """The page of an explanation cannot be written where it was asked for.

    Examples:
        >>> collage_fx.explain(optimizer).save("/nowhere/step.html")
        Traceback (most recent call last):
            ...
        PageError: the page cannot be written to /nowhere/step.html: No such file or directory
    """


class ScriptError(CollageError, RuntimeError):
    """There is nothing to explain in a script or file, or it cannot be run."""


class TorchVersionError(CollageError, ImportError):
    """This torch lacks a private name that collage_fx needs: which, what for, and the remedy."""


class RoundingsLost(RuntimeError):
    """This torch compiles no code that rounds as it must: steps are interpreted."""


class CollageWarning(UserWarning):
    """Something was not compensated, or a residual was lost: what, where and the remedy.

    Examples:
        >>> warnings.filterwarnings("error", message="collage_fx: .*#residual-cleared")
    """


WarningName = Literal[
    "cast-on-load",
    "checkpoint",
    "coarser-storage",
    "compile-failed",
    "copy-not-compiled",
    "cut-state",
    "data-write",
    "differentiated",
    "forward-pass",
    "gradient-lost",
    "gradient-not-read",
    "gradient-plain",
    "high-word-only",
    "level-leaves",
    "low-word-lost",
    "memory-replaced",
    "monitor-blind",
    "monitor-failed",
    "never-called",
    "new-graphs",
    "no-compiler",
    "no-shared-kernel",
    "not-given",
    "not-torch-compile",
    "nothing-clipped",
    "nothing-compensated",
    "other-operation",
    "overlap",
    "own-state-dict",
    "ownerless",
    "pattern",
    "plain-call",
    "plain-steps",
    "put-in-place",
    "recompile-limit",
    "refused",
    "residual-cleared",
    "residual-dropped",
    "returned",
    "roundings-lost",
    "several-graphs",
    "traced-wrong",
    "unsaved",
    "unseen-write",
    "untested-torch",
    "updates-lost",
    "verify",
]
"""The names of the warnings: those of their entries in docs/warnings.md."""
Warn = Callable[[WarningName, str], None]
_ENTRIES = "docs/warnings.md"


def warn(name: WarningName, message: str, *, stacklevel: int = 1) -> None:
    """Give a warning, with the link to its entry: all of collage_fx go through here.

    Args:
        name: of the warning.
        message: its text, which says what, where and the remedy.
        stacklevel: whose line it shows, as of `warnings.warn`: 1 is the caller's.
    """
    text = f"collage_fx: {message} [{_ENTRIES}#{name}]"
    warnings.warn(text, CollageWarning, stacklevel=stacklevel + 1)


def meant(name: str, known: Iterable[str]) -> str:
    """Return `, did you mean '...'?` for a name that is near a known one; empty if none is."""
    close = difflib.get_close_matches(name, [*known], 1)
    return f", did you mean {close[0]!r}?" if close else ""


def listed(names: Collection[str], most: int = 4) -> str:
    """Return names for a message, of many the first only and how many more there are."""
    shown = ", ".join(itertools.islice(names, most))
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown


OF_COPY = "__copy"
"""Separator of a function's name and a number, in the name of a copy with code of its own."""


def own_name(text: str) -> str:
    """Return a text with the names of functions in the place of those of their copies."""
    return re.sub(rf"{OF_COPY}\d+", "", text)
