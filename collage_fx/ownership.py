"""Which optimizer a tensor belongs to, and what it is called there."""

import gc
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from collage_fx.passes.program import Owner

PARAM = "<param>"
"""The key of a parameter itself among the carried states of that parameter."""


@dataclass(frozen=True)
class Owned:
    """One tensor of an optimizer."""

    tensor: Tensor
    group: int
    param: int
    """Position among all parameters, as in the optimizer's state_dict()."""
    key: str
    """PARAM, or the path of a state such as `exp_avg` or `history.0`."""
    name: str

    @property
    def owner(self) -> Owner:
        """Whether the tensor is a parameter or a state."""
        return "param" if self.key == PARAM else "state"


def owned_tensors(optimizer: Optimizer) -> Iterator[Owned]:
    """Yield every parameter of the optimizer and every tensor of its per-parameter states."""
    index = 0
    for g, group in enumerate(optimizer.param_groups):
        for p, param in enumerate(group["params"]):
            name = f"param_groups[{g}].params[{p}]"
            yield Owned(param, g, index, PARAM, name)
            for key, tensor in tensors_in(optimizer.state.get(param, {})):
                yield Owned(tensor, g, index, key, f"{key} of {name}")
            index += 1


def state_count(optimizer: Optimizer) -> int:
    """Return a number that changes when the optimizer makes a state."""
    return sum(len(state) for state in optimizer.state.values() if isinstance(state, dict))


def tensors_in(tree: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield (dotted path, tensor) for each tensor in nested dicts and sequences."""
    if isinstance(tree, Tensor):
        yield path, tree
    elif isinstance(tree, dict):
        for key, value in tree.items():
            yield from tensors_in(value, f"{path}.{key}" if path else str(key))
    elif isinstance(tree, list | tuple):
        for i, value in enumerate(tree):
            yield from tensors_in(value, f"{path}.{i}" if path else str(i))


def live_optimizers() -> list[Optimizer]:
    """Return every optimizer of this process.

    PyTorch keeps no list of them, and the optimizer whose step is being compiled is not handed to a
    backend; the garbage collector knows all of them.
    """
    # type() and not isinstance(): proxies run code of their own when asked for their __class__.
    return [o for o in gc.get_objects() if issubclass(type(o), Optimizer)]


def owners_of(optimizers: Iterable[Optimizer]) -> dict[int, tuple[Optimizer, Owned]]:
    """Return id(tensor) -> its optimizer and place, of two optimizers the first."""
    found: dict[int, tuple[Optimizer, Owned]] = {}
    for optimizer in optimizers:
        for owned in owned_tensors(optimizer):
            found.setdefault(id(owned.tensor), (optimizer, owned))
    return found
