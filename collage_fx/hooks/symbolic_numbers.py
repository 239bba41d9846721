"""math.pow of a symbolic step count, which Dynamo would evaluate for each count."""

import math

import torch

from collage_fx.hooks.counted import Counted

_pow = math.pow


def _traceable_pow(x: float, y: float, /) -> float:
    """math.pow, which Dynamo evaluates for each step count that a bias correction raises to."""
    if not torch.compiler.is_compiling() or isinstance(x, torch.Tensor):  # which it makes a float
        return _pow(x, y)
    return 1.0 * x**y


def _replace() -> None:
    math.pow = _traceable_pow  # type: ignore[assignment]


def _restore() -> None:
    math.pow = _pow


symbolic_math = Counted(_replace, _restore).used
"""Let Dynamo trace math.pow of a symbolic step count, within, as it does the operator `**`."""
