"""Numbers that a recorded step has read, and the low words of tensors that it makes of them."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from collage_fx.runtime.residuals.memory import has_memory
from collage_fx.runtime.torch_private import _disable_current_modes
from collage_fx.segments.low_words import LowWords


@dataclass(eq=False)
class NumbersRead:
    """Floats that a step has read of whole values.

    A 16-bit tensor that it makes of one gets the rest as low words, as a value on the way does. So
    it meets the value that was read as in plain PyTorch, where both are of 16 bits. A float that
    was not read is rounded as PyTorch does.
    """

    words: LowWords
    seen: set[float] = field(default_factory=set)
    """The significands of these: x, -x and 2 * x have one."""

    def note(self, number: Any, t: Tensor) -> None:
        """Note a number, or a nested list of them, that was read of a tensor."""
        if t.dtype in self.words.wide or self.words.has_made(t):
            self.seen.update(_significand(x) for x in _leaves(number) if isinstance(x, float))

    def keep(self, made: Any, data: Any) -> None:
        """Give a tensor that was made of numbers, and of tensors in lists, its low words.

        What is made of a tensor or an array, dispatch sees.
        """
        if self.words.plain or made.dtype not in self.words.wide:
            return
        plain = type(made) is Tensor and has_memory(made)  # and no stand-in for one
        if not plain or not isinstance(data, int | float | Sequence):
            return
        numbers = [float(x) for x in _leaves(data) if isinstance(x, int | float)]
        read = [_significand(x) in self.seen for x in numbers]
        if not any(read) or len(read) != made.numel():
            return
        with torch.no_grad(), _disable_current_modes():
            t, on = made.detach(), made.device
            whole = torch.tensor(numbers, dtype=torch.float64, device=on).view(t.shape)
            of_read = torch.tensor(read, device=on).view(t.shape)
            whole = torch.where(of_read, whole, t.double())
            self.words.keep(t, whole.to(self.words.wide[t.dtype]))


def _leaves(data: Any) -> Iterator[Any]:
    """Yield the numbers of nested sequences; those of tensors are read."""
    if hasattr(data, "tolist"):
        data = data.tolist()
    if isinstance(data, Sequence) and not isinstance(data, str):
        for x in data:
            yield from _leaves(x)
    else:
        yield data


def _significand(x: float) -> float:
    return abs(math.frexp(x)[0])
