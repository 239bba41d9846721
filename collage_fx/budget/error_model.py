"""Error that storages make, predicted from how values move in single steps.

The relative error of parameters after T steps is |x - x64| / |x64 - x0|, with x64 the parameters of
the same steps in float64: the noise of all roundings by the length of the way. Storing x + d in
units u, rounded up or down by chance, adds the variance u^2 f (1 - f), with f the part of a unit
that |d| / u has beyond whole ones. In a parameter T of these add up. In an average of decay b there
are 1 / (1 - b^2) of them at any time, and the parameters take its relative error on: for as long as
that lasts, (1 + b) / (1 - b) steps, and at most all of the way.
"""

import math
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from collage_fx.runtime.residuals.lost_share import power_of_two
from collage_fx.runtime.storage.registry import is_by_chance, kept

STRAIGHT = 0.3
"""The way of a parameter in so many steps, as a share of what it is if no step goes back. It was
0.12 to 0.63 for SGD, AdamW, Adafactor and Lion on the stream of benchmarks/storages.py."""
PASSED_ON = {False: 0.5, True: 0.9}
"""State is negative somewhere -> the share of its relative error that an update has: half from what
never is, such as a second moment, of which the root counts. Of others it was 1 (SGD) and 0.5 (Lion,
whose updates are made of the gradient beside it) on the same stream."""
_MOST = 1 / 6
"""The average of f (1 - f) for moves of many units."""
_UNKNOWN_DECAY = 0.99


@dataclass
class Moves:
    """Sums over a sample of a state's elements, in some steps: values x that move by d."""

    count: float = 0.0
    moved: float = 0.0
    """|d|."""
    squares: float = 0.0
    """d^2."""
    places: float = 0.0
    """The largest power of two that is not above |x|."""
    places_squares: float = 0.0
    values_squares: float = 0.0
    """x^2."""
    negative: float = 0.0
    """Number of values below zero."""

    def __add__(self, other: "Moves") -> "Moves":
        pairs = zip(self.listed(), other.listed(), strict=True)
        return Moves(*(a + b for a, b in pairs))

    def by_last_places(self, dtype: torch.dtype) -> "Moves":
        """Return the sums for moves of a unit in the last place."""
        eps = torch.finfo(dtype).eps
        moved, squares = eps * self.places, eps**2 * self.places_squares
        return replace(self, moved=moved, squares=squares)

    def at_rate(self, factor: float) -> "Moves":
        """Return the sums of steps with moves that are larger by a factor."""
        return replace(self, moved=self.moved * factor, squares=self.squares * factor**2)

    def times(self, weight: float) -> "Moves":
        """Return the sums of as many steps that were alike."""
        return Moves(*(weight * x for x in self.listed()))

    def listed(self) -> list[float]:
        """Return the sums in the order of the fields."""
        return [getattr(self, f.name) for f in fields(self)]

    @property
    def length(self) -> float:
        """The root of the mean of d^2."""
        return math.sqrt(self.squares / self.count) if self.count else 0.0

    def variance(self, dtype: torch.dtype, storage: str) -> float:
        """Return the mean variance that storing the value once adds."""
        if not self.count:
            return 0.0
        unit = 2 * kept(dtype, storage)
        square = unit * unit * self.places_squares / self.count
        if not is_by_chance(storage, asked=True):
            return square / 12
        share = self.moved / (unit * self.places)
        return square * (min(share * (1 - share), _MOST) if share < 0.5 else _MOST)

    def noise(self, dtype: torch.dtype, storage: str) -> float:
        """Return the length of what storing an update adds to it, relative to the update's own."""
        return math.sqrt(self.variance(dtype, storage)) / self.length if self.length else 0.0


def sums_of(before: Tensor, after: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `Moves` of each row as a row of a matrix.

    Args:
        before: values of some elements of states, a row for each, float64.
        after: the same after a step.
        dtype: of the states.
    """
    known = before.isfinite() & after.isfinite()
    before, after = before.where(known, 0), after.where(known, 0)
    moved = (after - before).abs()
    place = power_of_two(before.abs().clamp(min=torch.finfo(dtype).smallest_normal))
    place = place.where(known, 0)
    columns = (
        *(known.double(), moved, moved.square(), place, place.square()),
        *(before.square(), (before < 0).double()),
    )
    return torch.stack([column.sum(1) for column in columns], 1)


@dataclass(frozen=True)
class Way:
    """The way of a parameter in some steps."""

    steps: int
    moves: Moves
    length: float
    """The root of the mean of (x - x0)^2 after these steps."""


def expected_way(moves: Moves, steps: int) -> Way:
    """Return the way that a parameter will have after some steps, as far as single ones tell.

    On average its elements are by the root of a third of it larger then: those that begin at zero
    have larger units soon. A power of two below |x| is 0.7 |x| on average.
    """
    length = STRAIGHT * steps * moves.length
    if not moves.count:
        return Way(steps, moves, length)
    square = moves.places_squares / moves.count + length**2 / 6
    place = math.hypot(moves.places / moves.count, length / math.sqrt(6))
    grown = replace(moves, places=place * moves.count, places_squares=square * moves.count)
    return Way(steps, grown, length)


def parameter_error(way: Way, dtype: torch.dtype, storage: str) -> float:
    """Return the mean square of the error of a parameter in a storage, not relative to its way.

    Args:
        way: its way.
        dtype: of the parameter.
        storage: of its residual.
    """
    return way.steps * way.moves.variance(dtype, storage)


def state_error(
    way: Way, moves: Moves, dtype: torch.dtype, storage: str, factor: float | None
) -> float:
    """Return the mean square of the error that a state in a storage makes in its parameter.

    The parameter takes on a share of the relative error of a state: see PASSED_ON.

    Args:
        way: that of the parameter.
        moves: those of the state.
        dtype: of the state.
        storage: of its residual.
        factor: its decay; None if that is not known.
    """
    if not moves.values_squares:
        return 0.0
    decay = min(abs(_UNKNOWN_DECAY if factor is None else factor), 1.0)
    steps = way.steps
    square = decay * decay
    kept_errors = steps if square == 1 else (1 - square**steps) / (1 - square)
    relative = moves.variance(dtype, storage) * moves.count / moves.values_squares * kept_errors
    lasts = steps * (1 + decay) / (1 - decay) if decay < 1 else math.inf
    length = min(way.length**2, lasts * way.moves.length**2)
    return PASSED_ON[bool(moves.negative)] ** 2 * min(relative, 1.0) * length
