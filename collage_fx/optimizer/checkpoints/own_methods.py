"""Support for classes of optimizers whose state_dict() or load_state_dict() goes through states.

Such a class asks for each entry of a state dict what PyTorch has made of it, or gives states
another form when they are saved. So our entries stay until its load_state_dict() is through, and
those of states that its state_dict() does not give are left out.
"""

import inspect
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from collage_fx.optimizer.checkpoints.saved_residuals import is_entry, tensor_of
from collage_fx.optimizer.ownership import PARAM, tensors_in

_WITHIN = WeakIdKeyDictionary()
"""The optimizers whose class is in its own load_state_dict()."""


class OwnMethod:
    """A method that the class of an optimizer overrides, with a function that is called after it.

    It is an attribute of the optimizer; a copy of the optimizer has one of its own.
    """

    def __init__(self, optimizer: Optimizer, name: str, then: Callable[..., None]) -> None:
        self.optimizer = weakref.ref(optimizer)
        self.name = name
        self.then = then
        """Function that is called with the optimizer and the result."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Do the method, and what comes after it."""
        optimizer = self.optimizer()
        assert optimizer is not None, "a method outlived its optimizer"
        _WITHIN[optimizer] = self.name
        try:
            result = getattr(type(optimizer), self.name)(optimizer, *args, **kwargs)
        finally:
            _WITHIN.pop(optimizer, None)
        self.then(optimizer, result)
        return result

    def __reduce__(self) -> Any:
        """Return constructor and arguments of a copy's method."""
        return OwnMethod, (self.optimizer(), self.name, self.then)


def serve(optimizer: Optimizer, name: str, then: Callable[..., None]) -> None:
    """Call a function after a method of an optimizer, if its class has one of its own.

    Args:
        optimizer: any.
        name: state_dict or load_state_dict.
        then: called with the optimizer and the result.
    """
    own = getattr(type(optimizer), name)
    if own is not getattr(Optimizer, name) and name not in vars(optimizer):
        vars(optimizer)[name] = OwnMethod(optimizer, name, then)


def loads_itself(optimizer: Optimizer) -> bool:
    """Return True if the class of an optimizer is in its own load_state_dict()."""
    return _WITHIN.get(optimizer) == "load_state_dict"


def replaces_state_dict(optimizer: Optimizer) -> bool:
    """Return True if state_dict() of a class does not call that of torch.optim.Optimizer."""
    code: Any = getattr(inspect.unwrap(type(optimizer).state_dict), "__code__", None)
    if type(optimizer).state_dict is Optimizer.state_dict or code is None:
        return False
    return "__class__" not in code.co_freevars and "state_dict" not in code.co_names


def drop_orphans(state_dict: Any) -> Iterator[str]:
    """Remove the entries of states that a state dict does not give; yield the keys of these.

    Args:
        state_dict: of a class of its own, and so perhaps of another form than PyTorch's.
    """
    states = state_dict.get("state") if isinstance(state_dict, dict) else None
    for state in states.values() if isinstance(states, dict) else ():
        if not isinstance(state, dict):
            continue
        known = {PARAM, *(key for key, _ in tensors_in(state))}
        orphans = {k: tensor_of(k) for k in state if is_entry(k) and tensor_of(k) not in known}
        for entry in orphans:
            del state[entry]
        yield from dict.fromkeys(orphans.values())
