"""Steps of an optimizer with a budget: what they do is looked at, and a plan is made and kept."""

import math
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.compiler import disable
from torch.optim import Optimizer

from collage_fx.budget.error_model import Moves, Way, expected_way
from collage_fx.budget.plan import States, agreed, any_over, carry_out, states_within
from collage_fx.budget.prediction import PLANNED, Prediction
from collage_fx.budget.samples import (
    Sample,
    moves_between,
    moves_by_last_places,
    parameters_in,
    samples,
    states_of,
)
from collage_fx.dynamo.backend import Backend
from collage_fx.optimizer.checkpoints.history import history_of
from collage_fx.optimizer.ownership import groups_of, owned_parameters, params_of
from collage_fx.record.steps import Steps
from collage_fx.runtime.kernels.triton_launch import is_capturing
from collage_fx.runtime.residuals.dtensor import is_sharded
from collage_fx.runtime.residuals.store import STORE
from collage_fx.step.small_updates import is_number

EVERY = 10
"""Steps from one look to the next, until storages are decided on."""
HORIZON = 2000
"""Number of steps after which the error is to be least."""


class BudgetedSteps:
    """Observer of an optimizer's steps, which decides on the storages of its states.

    Steps are looked at at ever larger intervals once there is a plan, for what `explain` predicts.
    """

    def __init__(self, session: Backend, steps: Steps, begin_anew: Callable[[], object]) -> None:
        """Look at nothing yet.

        Args:
            session: of the optimizer, with the budget among its options.
            steps: runs the steps.
            begin_anew: has representatives of the parameters chosen anew.
        """
        assert session.config.budget is not None
        self.budget = session.config.budget
        self.steps = steps
        self.begin_anew = begin_anew
        session.budgeted = weakref.ref(self)
        self.known: dict[str, Any] = {}
        """The entry of the optimizer's history: another one after a load."""
        self.generation = -1
        """The generation of the store when residuals were last seen to fit in."""
        self._begin()

    def _begin(self) -> None:
        """Have seen nothing yet."""
        self.moves: dict[str, Moves] = {}
        """Name of a state -> its moves since the first look."""
        self.start: list[Sample] = []
        """The values before that step, from which the ways of parameters count."""
        self.looked: tuple[int, int] = 0, 0
        """The number of steps before the first look, and at the last one."""
        self.lengths: dict[str, float] = {}
        """Name of a parameter -> its way from there to the last look: root of the mean square."""

    def due(self, optimizer: Optimizer) -> bool:
        """Count a step; return whether it is one to look at."""
        known = self._known(optimizer)
        known["steps"] += 1
        n = known["steps"]
        if n <= 2 or n % _interval(n) == 0:
            return True
        # States that were made since may be too many; processes that share some look together.
        return self.generation != STORE.generation and not _is_shared(optimizer)

    @disable  # where the whole training step is compiled
    def step(
        self, run: Callable[..., Any], optimizer: Optimizer, /, *args: Any, **kwargs: Any
    ) -> Any:
        """Do a step of the optimizer, look at what it does, and plan if it is time to.

        Raises:
            BudgetError: the states do not fit in the budget, whatever their storages.
        """
        # A CUDA graph that is being captured writes nothing yet, and nothing of it can be read.
        if is_capturing():
            return run(optimizer, *args, **kwargs)
        n, known = self.known["steps"], self.known
        with torch.no_grad():
            if n > 1:
                self._fit(optimizer)
            if n > 2 and n % _interval(n):
                self.generation = STORE.generation
                return run(optimizer, *args, **kwargs)
            before = samples(states_of(optimizer))
        result = run(optimizer, *args, **kwargs)
        with torch.no_grad():
            after = samples(states_of(optimizer))
            found = agreed(optimizer, moves_between(before, after))
            if n == 1:  # what has made states is not compiled yet, as a rule
                self._plan(optimizer, found, after)
            elif n > 2:  # averages have only begun in the second
                self._note(optimizer, found, before, after)
            if not known["planned"] and n >= PLANNED:
                self._plan(optimizer, self._seen(), after)
                known |= {"planned": True, "moves": {}}
        self.generation = STORE.generation
        return result

    def _fit(self, optimizer: Optimizer) -> None:
        """Plan anew if states that were made since take more than there is.

        Raises BudgetError if they do in any storages.
        """
        states = self._states(optimizer, {})
        states.check(self.budget, self.steps.subject)
        if any_over(optimizer, states):
            self._plan(optimizer, self._seen() or self.moves, samples(states_of(optimizer)))

    def _seen(self) -> dict[str, Moves]:
        """Return the moves of the states until there is a plan."""
        return {name: Moves(*sums) for name, sums in self.known["moves"].items()}

    def _note(
        self,
        optimizer: Optimizer,
        found: dict[str, Moves],
        before: list[Sample],
        after: list[Sample],
    ) -> None:
        """Add the moves of a step to those before."""
        known, n = self.known, self.known["steps"]
        if not self.start:
            self.start, self.looked = parameters_in(before), (n - 1, n)
        self.looked = self.looked[0], n
        way = moves_between(self.start, after)
        self.lengths = {name: moves.length for name, moves in way.items()}
        rates = rates_to_come(optimizer)
        for name, moves in found.items():
            many = moves.times(_interval(n))
            self.moves[name] = self.moves.get(name, Moves()) + many
            if not known["planned"]:
                many = many.at_rate(rates.get(name, 1.0))
                known["moves"][name] = (Moves(*known["moves"].get(name, ())) + many).listed()

    def _plan(self, optimizer: Optimizer, moves: dict[str, Moves], after: list[Sample]) -> None:
        """Have the states in the storages of the least error, unless none are small enough.

        What has not moved yet is taken for what moves by units in the last place.
        """
        moved = {name: one for name, one in moves.items() if one.squares}
        assumed = agreed(optimizer, moves_by_last_places(after))
        states = self._states(optimizer, assumed | moved)
        if states.fit:
            params = states.parameters().items()
            carry_out(states.choose({i: expected_way(p.moves, HORIZON) for i, p in params}))
            self.begin_anew()

    def _known(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return what checkpoints keep: the number of steps, and moves until there is a plan.

        What was seen for another budget does not count.
        """
        history = history_of(optimizer)
        if history.budget is None or history.budget.get("budget") != self.budget:
            start = {"steps": 0, "planned": False, "moves": {}}
            history.budget = {"budget": self.budget, **start}
        if history.budget is not self.known:
            self.known = history.budget
            self._begin()
        return self.known

    def _states(
        self, optimizer: Optimizer, moves: dict[str, Moves], *, alone: bool = False
    ) -> States:
        return states_within(optimizer, self.budget, moves, self.steps.service.served, alone=alone)

    def prediction(self, optimizer: Optimizer) -> Prediction:
        """Return the storages of now with the errors that they make, in this process."""
        known = self._known(optimizer)
        states = self._states(optimizer, self.moves, alone=True)
        first, last = self.looked
        params = states.parameters().items()
        lengths = {i: self.lengths.get(p.owned.name, 0.0) for i, p in params}
        ways = {i: Way(last - first, p.moves, lengths[i]) for i, p in params}
        return Prediction(
            self.budget,
            states.per_element(self.budget),
            known["planned"],
            known["steps"],
            last - first,
            states.predicted(ways),
        )


def rates_to_come(optimizer: Optimizer) -> dict[str, float]:
    """Return by name by how much the moves of parameters will be larger at the largest rate.

    A group whose rate warms up has the largest one beside it, as PyTorch's schedulers leave it.
    """
    found = {}
    for owned in owned_parameters(optimizer):
        group = groups_of(optimizer)[owned.group]
        rate, *others = (group.get(key) for key in ("lr", "initial_lr", "max_lr"))
        if is_number(rate) and rate > 0:
            known = [float(other) for other in others if is_number(other)]
            found[owned.name] = max([float(rate), *known]) / float(rate)
    return found


def _interval(n: int) -> int:
    """Return the steps from one look to the next: four as often as the run is twice as long."""
    if n <= PLANNED:
        return EVERY
    return max(PLANNED * 2 ** int(math.log2((n - 1) / PLANNED)) // 4, 1)


def _is_shared(optimizer: Optimizer) -> bool:
    """Return True if other processes have shards of an optimizer's parameters."""
    return any(map(is_sharded, params_of(optimizer)))
