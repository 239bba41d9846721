"""From the carried states of a compiled graph to their residuals, at each call."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from collage_fx.compilation.session import Session
from collage_fx.hooks import optimizer_hooks
from collage_fx.optimizer import checkpoint
from collage_fx.optimizer.ownership import Owned, family, owners_of
from collage_fx.passes.ir.program import Carried, StatePlan
from collage_fx.runtime.errors import CollageError
from collage_fx.runtime.expansion.stochastic import Seeds
from collage_fx.runtime.residuals.store import STORE, Residual, clear_stale, next_draw

Locate: TypeAlias = Callable[[tuple[Any, ...]], Tensor | None]
"""How to find a tensor from the arguments of a call."""


class Static:
    """Finds a tensor whose identity Dynamo guards, without keeping it alive."""

    def __init__(self, tensor: Tensor) -> None:
        self.reference = weakref.ref(tensor)

    def __call__(self, args: tuple[Any, ...]) -> Tensor | None:
        """Return the tensor, whatever the arguments of the call."""
        return self.reference()


class Residuals:
    """Finds the residuals of a graph's carried states at each call.

    Before the call of the compiled function and not within it: AOTAutograd counts up the versions
    of some mutated inputs before it runs the graph.
    """

    def __init__(
        self,
        session: Session,
        carried: list[Carried],
        locate: list[Locate],
        others: list[Locate],
        plan: list[StatePlan],
    ) -> None:
        self.session = session
        self.carried = carried
        self.locate = locate
        self.others = others
        """How to find the 16-bit states that this graph writes without compensation."""
        self.plan = {state.index: state for state in plan}
        self.known: list[tuple[weakref.ref[Tensor], Residual]] = []
        """The tensors of the last call and their residuals."""
        self.generation = -1
        """That of the store in the last call."""
        self.current: list[tuple[Tensor, Residual]] = []
        self.replaced: list[tuple[Tensor, Residual]] = []

    def gather(self, args: tuple[Any, ...]) -> None:
        """Find the residuals for this call and make sure that each belongs to its tensor."""
        tensors = [tensor for f in self.locate if (tensor := f(args)) is not None]
        if not self._same(tensors):
            found = [STORE.get(tensor) for tensor in tensors]
            new = not self.known or any(r is None for r in found)
            ownerless = self._introduce(tensors) if new else []
            self.known = [
                (weakref.ref(tensor), STORE.ensure(tensor, self._storage(c), c.name, residual))
                for tensor, c, residual in zip(tensors, self.carried, found, strict=True)
            ]
            for tensor in ownerless:
                STORE.share_by_memory(tensor)
            self.generation = STORE.generation
        self.current = [(t, residual) for t, (_, residual) in zip(tensors, self.known, strict=True)]
        clear_stale(self.current)
        written = [tensor for f in self.others if (tensor := f(args)) is not None]
        self.replaced = [(t, r) for t in written if (r := STORE.get(t)) is not None]

    def _storage(self, carried: Carried) -> str:
        return self.plan[carried.index].storage

    def _same(self, tensors: list[Tensor]) -> bool:
        """Tell whether these are the tensors of the last call, with the residuals of then.

        Their shapes are the same too: Dynamo guards them.
        """
        return self.generation == STORE.generation and all(
            reference() is tensor
            for (reference, _), tensor in zip(self.known, tensors, strict=True)
        )

    def bind(self, inner: Any, devices: Sequence[torch.device]) -> Callable[[list[Any]], Any]:
        """Return a boxed callable that appends residuals and seeds to the inputs of inner.

        Args:
            inner: a boxed callable.
            devices: those on which it takes a seed.
        """
        seeds: list[Seeds] = []

        def run(args: list[Any]) -> Any:
            full = [*args, *(c for _, residual in self.current for c in residual.components)]
            if devices:
                if not seeds:  # now, and not under the fake mode of compiling
                    seeds.append(Seeds(self.session.config.seed, devices))
                full += seeds[0].draw(next_draw(residual for _, residual in self.current))
            args.clear()
            return inner(full)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def settle(self) -> None:
        """Record, after the step, that the residuals belong to what was written."""
        for tensor, residual in self.replaced:
            # A value taken over from another tensor: what the old one had beside it is gone too.
            residual.clear()
            residual.settle(tensor)
        self.keep()

    def keep(self) -> None:
        """Record that nothing was written, whatever versions AOTAutograd has counted up."""
        for tensor, residual in self.current:
            residual.settle(tensor)
        self.current = self.replaced = []

    def _introduce(self, tensors: list[Tensor]) -> list[Tensor]:
        """Attach the optimizers of tensors that are seen for the first time; return the others."""
        optimizer = self.session.optimizer()
        owners = owners_of(
            family(optimizer) if optimizer is not None else optimizer_hooks.optimizers()
        )
        found: list[tuple[Optimizer, Owned]] = []
        ownerless: dict[str, Tensor] = {}
        for tensor, c in zip(tensors, self.carried, strict=True):
            if id(tensor) in owners:
                found.append(owners[id(tensor)])
                # Known only now, for a state that Dynamo passes as an argument.
                c.name = self.plan[c.index].name = found[-1][1].name
            elif STORE.get(tensor) is None:
                ownerless[c.name] = tensor
        for owner, _ in found:
            checkpoint.attach(owner)
        if ownerless and not self.session.named:
            self.session.warn_once(
                f"{', '.join(ownerless)} belong to no torch.optim.Optimizer, so no state_dict() "
                "holds their residuals. Save collage_fx.residuals(tensor) beside each tensor and "
                "give them back with collage_fx.load_residuals(tensor, components); "
                "collage_fx.compile(function) instead of the backend string silences this"
            )
        return list(ownerless.values())


@dataclass
class Code:
    """A compiled graph with what it does to the carried states."""

    function: Callable[..., Any]
    residuals: Residuals | None
    states: list[tuple[Locate, StatePlan]]
    """The carried states of 16 bits: how to find each, and its verdict."""
    reads: list[tuple[Locate, str]]
    """How to find the states that the graph reads, and of which it knows the high word only, with
    their names."""
    refused: bool
    """Whether a state that needs a residual cannot have one in this graph."""

    def run(self, args: tuple[Any, ...]) -> Any:
        """Run the graph with its residuals."""
        if self.residuals is None:
            return self.function(*args)
        self.residuals.gather(args)
        try:
            result = self.function(*args)
        except CollageError:
            self.residuals.keep()
            raise
        self.residuals.settle()
        return result

    def written(self, args: tuple[Any, ...]) -> list[tuple[Tensor, StatePlan]]:
        """Return the tensors of 16 bits that a call writes."""
        return [(t, plan) for find, plan in self.states if (t := find(args)) is not None]

    def reads_residual(self, args: tuple[Any, ...]) -> list[str]:
        """Return the names of states that it reads with a low word that the graph would need."""
        found = [(find(args), name) for find, name in self.reads]
        return [name for t, name in found if t is not None and STORE.get(t) is not None]

    def drops_residual(self, args: tuple[Any, ...]) -> list[str]:
        """Return the names of states that have a residual which this graph does not know of."""
        return [
            plan.name
            for tensor, plan in self.written(args)
            if not plan.compensated and not plan.replaced and STORE.get(tensor) is not None
        ]
