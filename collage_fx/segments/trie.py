"""Trie of recorded steps: operations are paths in it, so that none is inferred or hashed twice."""

import re
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from torch import Tensor

if TYPE_CHECKING:
    from collage_fx.segments.segment import Segment

Layout: TypeAlias = tuple[Any, ...]
"""dtype, size, stride and offset of a tensor."""
Meta: TypeAlias = tuple[Any, ...]
"""size, stride, dtype and device of a tensor that an operation makes."""


class Value:
    """A tensor of a segment, by its number."""

    __slots__ = ("at",)

    def __init__(self, at: int) -> None:
        self.at = at


class Number(Value):
    """A Python float of a segment, by its number."""

    __slots__ = ()


class Constant(NamedTuple):
    """A Python bool or int, which must not be taken for an equal number of another type."""

    type: type
    value: Any


@dataclass(eq=False)
class Place:
    """A place in the trie: the line that leads there, what it makes, and what follows."""

    line: Any = None
    """An operation, its arguments and those by name; or "input", layout, device, ..."""
    made: list[Meta] = field(default_factory=list)
    many: bool = False
    """True if the operation returns a list."""
    writes: list[Value] = field(default_factory=list)
    """The operands that it writes."""
    next: dict[Any, "Place"] = field(default_factory=dict)
    segments: dict[Any, "Segment"] = field(default_factory=dict)
    """Numbers of the results that are still in use at the end -> the segment that ends here."""
    where: str = ""
    """The line of code that did this first, as FX keeps it of a node."""
    at_once: bool = False
    """True if what it makes cannot be inferred, so that it is not noted."""
    effect: Any = None
    """`Effect` of the Dynamo graph that the line stands for; None for one operation."""


def line_of_code() -> str:
    """Return the line of code that has called, beyond PyTorch's and this package's own."""
    for frame, line in traceback.walk_stack(sys._getframe(1)):
        module = frame.f_globals.get("__name__", "")
        own = module.partition(".")[0] in ("torch", "collage_fx")
        if not own or module.startswith("torch.optim."):
            at = traceback.FrameSummary(frame.f_code.co_filename, line, frame.f_code.co_name)
            return "".join(traceback.format_list([at]))
    return ""


def on_one_line(where: str) -> str:
    """Return the line of `line_of_code` as `file:line: code`."""
    place, _, code = where.strip().partition("\n")
    return re.sub(r'^File "(.*)", line (\d+), in .*$', r"\1:\2", place) + f": {code.strip()}"


def layout_of(t: Tensor) -> Layout:
    """Return the key that tells a view of a storage from others of it."""
    return t.dtype, t.size(), t.stride(), t.storage_offset()


def meta_of(t: Tensor) -> Meta:
    """Return the size, stride, dtype and device by which a tensor like t is made."""
    return tuple(t.size()), t.stride(), t.dtype, t.device


def leaves(spec: Any) -> Iterator[Any]:
    """Yield the parts of the arguments of a line."""
    if type(spec) is tuple:
        for one in spec:
            yield from leaves(one)
    else:
        yield spec
