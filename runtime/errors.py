"""One error class per cause, and the one warning category; public as `collage_fx.errors`.

They live here because every layer raises them and imports point from collage_fx to runtime.
"""

import itertools
import re
from collections.abc import Collection


class CollageError(Exception):
    """Base class of every error that collage_fx raises on purpose."""


class OptionError(CollageError, ValueError):
    """An option, or a value of one, that does not exist."""


class SubjectError(OptionError, TypeError):
    """Something that is neither an optimizer nor a function that updates tensors."""


class CheckpointError(CollageError, ValueError):
    """Residuals in a checkpoint that do not fit the optimizer that loads them."""


class ResidualError(CollageError, ValueError):
    """Residuals given for a tensor that cannot have them."""


class ComponentError(CollageError, ValueError):
    """An expansion of no, or of more than three, components."""


class StorageError(CollageError, ValueError):
    """A state of a dtype that the storage which was asked for cannot hold."""


class LegalityError(CollageError, RuntimeError):
    """A graph between two passes breaks its specification: a defect of collage_fx."""


class UnsupportedError(CollageError, NotImplementedError):
    """An operation on a carried path has no rule, and `on_unsupported="error"` was asked for; or a
    step does what PyTorch does not let tensors with residuals do."""


class RuleError(CollageError, RuntimeError):
    """The rule of an operation on a carried path failed: a defect of that rule."""


class CaptureError(CollageError, RuntimeError):
    """A CUDA graph is being captured that would not do, when replayed, what the step does."""


class PageError(CollageError, OSError):
    """The page of an explanation cannot be written where it was asked for."""


class ScriptError(CollageError, RuntimeError):
    """There is nothing to explain in a script or file, or it cannot be run."""


class TorchVersionError(CollageError, ImportError):
    """This torch lacks a private name that collage_fx needs: which, what for, and the remedy."""


class RoundingsLost(RuntimeError):
    """This torch compiles no code that rounds as it must: steps are interpreted."""


class CollageWarning(UserWarning):
    """Something was not compensated, or a residual was lost: what, where and the remedy."""


def listed(names: Collection[str], most: int = 4) -> str:
    """Return names for a message, of many the first only and how many more there are."""
    shown = ", ".join(itertools.islice(names, most))
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown


OF_COPY = "__copy"
"""Between the name of a function and a number, in that of a copy with code of its own."""


def own_name(text: str) -> str:
    """Return a text with the names of functions in the place of those of their copies."""
    return re.sub(rf"{OF_COPY}\d+", "", text)
