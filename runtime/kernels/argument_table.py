"""One input of all members of a class: a column of the table that a kernel over them walks."""

from array import array
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from collage_fx.runtime.errors import CollageError
from collage_fx.runtime.residuals.memory import address

Column: TypeAlias = "Tensor | Sequence[Tensor] | array[int]"
"""A tensor for each member, one vector with an element for each, or for each the position of its
first element, which stands where others have an address."""


class Runner(Protocol):
    """Protocol of what updates the members of a class: a compiled kernel, and how it is called."""

    def run(self, columns: Sequence[Column], sizes: Sequence[int]) -> None:
        """Update all members.

        Args:
            columns: for each input the tensors of all members, or one vector with an element for
                each member. Tensors that are not 0-d lie densely in memory, on one device.
            sizes: the elements of each member, at least one.
        """


def addresses(column: Column) -> Sequence[int]:
    """Return the address of each member's input, or the position that it begins at."""
    if isinstance(column, array):
        return column
    if isinstance(column, Tensor):
        first, size = address(column), column.element_size()
        return range(first, first + size * column.numel(), size)
    return list(map(address, column))


def device_of(column: Column) -> torch.device:
    """Return the device of the first member's tensor."""
    assert not isinstance(column, array)
    return column.device if isinstance(column, Tensor) else column[0].device


def some_of(column: Column, members: Sequence[int]) -> Column:
    """Return the inputs of some members."""
    if isinstance(column, array):
        return array("q", [column[m] for m in members])
    return [column[m] for m in members]


def check_sizes(sizes: Iterable[list[int]]) -> None:
    """Raise CollageError unless all tensors of each member have as many elements.

    Dynamo guards the identity of an optimizer's parameters and not their shapes.

    Args:
        sizes: for each input that is not 0-d, the elements of all members' tensors.
    """
    first: list[int] | None = None
    for found in sizes:
        first = found if first is None else first
        if found != first:
            pair = next(p for p in zip(first, found, strict=True) if p[0] != p[1])
            raise CollageError(
                f"a parameter of {pair[0]} elements has a gradient, state or residual of "
                f"{pair[1]}: it was given another shape since its step was compiled; give it new "
                "states, or a new optimizer. Nothing was written"
            )
