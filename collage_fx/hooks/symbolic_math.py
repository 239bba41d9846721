"""math.pow of a symbolic step count, which Dynamo would evaluate for each count."""

import math
import threading

import torch

_pow = math.pow


def _traceable_pow(x: float, y: float, /) -> float:
    """math.pow, which Dynamo evaluates for each step count that a bias correction raises to."""
    if not torch.compiler.is_compiling() or isinstance(x, torch.Tensor):  # which it makes a float
        return _pow(x, y)
    return 1.0 * x**y


class symbolic_math:
    """Let Dynamo trace math.pow of a symbolic step count, as it does the operator `**`.

    Counted, since several threads may step at once.
    """

    _lock = threading.Lock()
    _users = 0

    def __enter__(self) -> None:
        with self._lock:
            symbolic_math._users += 1
            math.pow = _traceable_pow  # type: ignore[assignment]

    def __exit__(self, *_: object) -> None:
        with self._lock:
            symbolic_math._users -= 1
            if not symbolic_math._users:
                math.pow = _pow
