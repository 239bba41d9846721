"""One input of all members of a class: a column of the table that a kernel over them walks."""

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

Column: TypeAlias = Tensor | Sequence[Tensor]
"""A tensor for each member, or one vector with an element for each."""


def addresses(column: Column) -> Sequence[int]:
    """Return where the input of each member begins."""
    if isinstance(column, Tensor):
        first, size = column.data_ptr(), column.element_size()
        return range(first, first + size * column.numel(), size)
    return [t.data_ptr() for t in column]


def device_of(column: Column) -> torch.device:
    """Return the device of the first member's tensor."""
    return column.device if isinstance(column, Tensor) else column[0].device


def select(column: Column, members: list[int]) -> Column:
    """Return the column of some of the members."""
    return [column[m] for m in members]
