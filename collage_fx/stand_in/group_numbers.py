"""Numbers of parameter groups that a graph takes, read anew for each of its calls.

A rate that changes is an input of the graph, and so is one that is an element of a tuple, such as
`betas`. Dynamo may have guarded the values of such numbers (`if momentum != 0`): where these guards
do not hold, the step is done in full.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from collage_fx.hooks.symbolic_numbers import GroupNumber


class Condition(NamedTuple):
    """Guards of the values of numbers, behind which a graph holds."""

    sources: tuple[str, ...]
    """Dynamo's names for the numbers."""
    holds: Callable[..., bool]
    """Function of the numbers."""


ALWAYS = Condition((), lambda: True)


class GroupNumbers:
    """Floats of an optimizer's parameter groups that a graph takes, in its order."""

    def __init__(self, places: Sequence[GroupNumber], condition: Condition, groups: Any) -> None:
        """Begin with the values of now, of which the condition holds.

        Args:
            places: of the numbers.
            condition: of them and other numbers of groups.
            groups: the parameter groups of the optimizer.
        """
        self.places, self.condition = list(places), condition
        named = map(GroupNumber.named, condition.sources)
        self._guarded = [place for place in named if place is not None]
        self.taken: dict[tuple[int, str], set[int | None]] = {}
        """The group and the key of each number -> its position, or several, if that has a tuple."""
        for group, key, at in places:
            self.taken.setdefault((group, key), set()).add(at)
        tuples = [at for at, taken in self.taken.items() if None not in taken]
        self._rest = {at: self.rest(at, GroupNumber(*at).of(groups)) for at in tuples}

    def rest(self, at: tuple[int, str], value: Any) -> Any:
        """Return what is no input of a value that is one, or has one in it; None of a float."""
        if type(value) is not tuple:
            return None
        return tuple([None if i in self.taken[at] else x for i, x in enumerate(value)])

    def read(self, groups: Any) -> list[float] | None:
        """Return the numbers of now; None if the graph is not for them, or for what is beside them
        in a tuple."""
        if not (self.places or self._guarded):
            return []
        found = [place.of(groups) for place in self.places]
        if not all([type(x) is float and math.isfinite(x) for x in found]):
            return None
        for at, rest in self._rest.items():
            if repr(self.rest(at, GroupNumber(*at).of(groups))) != repr(rest):
                return None
        guarded = [place.of(groups) for place in self._guarded]
        return found if self.condition.holds(*guarded) else None


def numbers_taken(
    optimizer: Any,
    sources: Sequence[str],
    condition: Condition | None,
    args: tuple[Any, ...],
    taken: Iterable[Any],
) -> tuple[list[int], GroupNumbers]:
    """Return the numbers that a graph takes, behind the ids of the tensors that Dynamo made them.

    Args:
        optimizer: whose groups have them.
        sources: Dynamo's names for the arguments of the graph.
        condition: on the numbers; None if the graph may hold for those of one call only. It takes
            none of them then, nor if the condition is on what is in no group.
        args: the arguments.
        taken: those, and whatever else, of which they are asked for.
    """
    groups = optimizer.param_groups
    if condition is None or not all(map(GroupNumber.named, condition.sources)):
        return [], GroupNumbers([], ALWAYS, groups)
    named = {id(t): GroupNumber.named(name) for t, name in zip(args, sources, strict=False)}
    wanted = {*map(id, taken)}
    found = {
        number: place
        for number, place in named.items()
        if number in wanted and place is not None and _may_change(place, groups)
    }
    return list(found), GroupNumbers([*found.values()], condition, groups)


def _may_change(place: GroupNumber, groups: Any) -> bool:
    """Return True if a place has a float, which is replaced when it changes."""
    whole = type(groups[place.group].get(place.key)) is tuple
    return type(place.of(groups)) is float and (place.at is None or whole)
