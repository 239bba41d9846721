"""Attributes that mark the classes made by `collage_fx.compensated`, and their optimizers."""

from typing import Any

from torch.optim import Optimizer

from collage_fx.errors import SubjectError

ORIGINAL = "_collage_original"
"""Attribute of such a class: the class that it was derived from."""
OPTIONS = "_collage_options"
"""Attribute of such a class: the options of its steps."""
FIRST_USE = "_collage_first_use"
"""Attribute of such an optimizer: its `FirstUse`; no copy has that of the original."""


def class_of(optimizer: Optimizer) -> type[Optimizer]:
    """Return the class whose step an optimizer takes: of one that was made here the original.

    A class that the user derives from one made here is its own.
    """
    kind = type(optimizer)
    original: type[Optimizer] = vars(kind).get(ORIGINAL, kind)
    return original


def own_step(given: Any) -> Any:
    """Return the step that an object of such a class compiles for itself; None for any other.

    What has its attributes, as the wrapper that Lightning puts around optimizers, has its step.
    """
    first_use = getattr(given, "__dict__", {}).get(FIRST_USE)
    return None if first_use is None else first_use.methods()["step"]


def refuse_compensated(optimizer: Optimizer) -> None:
    """Raise SubjectError for an optimizer that compiles its own step."""
    if (original := getattr(type(optimizer), ORIGINAL, None)) is not None:
        name = original.__name__
        raise SubjectError(
            f"{type(optimizer).__name__} is of a class that collage_fx has made, and compiles its "
            "step itself, at its first use: leave collage_fx.compile out, and give the options to "
            f"the class, as in collage_fx.compensated({name}, storage='remainder16')"
        )
