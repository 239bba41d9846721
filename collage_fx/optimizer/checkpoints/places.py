"""Residuals by the places of states, for tensors that replace others between steps."""

from collections.abc import Mapping
from typing import Any, TypeAlias

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary, WeakIdRef

from collage_fx.optimizer.ownership import owned_tensors
from collage_fx.optimizer.parameter_names import naming
from collage_fx.runtime.residuals.residual import ANOTHER, Residual, warn_of_cleared
from collage_fx.runtime.residuals.store import STORE

Places: TypeAlias = dict[tuple[int, int, str], tuple[WeakIdRef, Residual]]
"""Place of a state -> its tensor when a step ended, which is not kept alive, and its residual."""
_PLACES = WeakIdKeyDictionary()


def note_places(optimizer: Optimizer) -> None:
    """Note the residual of the state at each place, at the end of a step or of a load."""
    found = list(owned_tensors(optimizer))
    pairs = zip(found, STORE.of([o.tensor for o in found]), strict=True)
    places: Places = {o.place: (WeakIdRef(o.tensor), r) for o, r in pairs if r is not None}
    _PLACES[optimizer] = places


def renew_places(optimizer: Optimizer, new: Mapping[int, Tensor]) -> None:
    """Note the residuals of tensors that have taken the places of others, by the ids of these."""
    places: Places = _PLACES.get(optimizer, {})
    for place, (before, _) in list(places.items()):
        if (t := new.get(hash(before))) is None:
            continue
        if (residual := STORE.get(t)) is None:
            del places[place]
        else:
            places[place] = WeakIdRef(t), residual


def hand_on(optimizer: Optimizer) -> None:
    """Give tensors that have taken the places of states since then the residuals of these.

    As by offloading, by `state[key] = state[key].clone()` or by a new Parameter. Their values
    decide, see `ResidualStore.hand_on`.
    """
    places: Places = _PLACES.get(optimizer, {})
    found = [o for o in owned_tensors(optimizer) if o.place in places] if places else []
    own = STORE.of([o.tensor for o in found])
    new = [o for o, mine in zip(found, own, strict=True) if mine is None and not o.tensor.is_meta]
    used: set[Any] = {id(r) for r in own}
    others: list[str] = []
    for owned in new:
        reference, residual = places[owned.place]
        before = reference()
        # Of a tensor that is still there the residual was dropped on purpose.
        if id(residual) not in used and before is not owned.tensor:
            fits = STORE.hand_on(before, owned.tensor, residual)
            others += [] if fits or not residual.has_content() else [owned.name]
    if new:
        note_places(optimizer)
    if others:
        warn_of_cleared(list(map(naming(lambda: optimizer), others)), ANOTHER)
