"""Random numbers in float64 that are those of a dtype of 16 bits."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only


def drawn(func: Any, args: Any, kwargs: dict[str, Any], low: torch.dtype) -> Any:
    """Do an operation; one that draws numbers for float64 draws those that a lower dtype has."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return func(*args, **kwargs)

    def narrow(x: Tensor) -> Tensor:
        return x.to(low) if x.dtype == torch.float64 else x

    result = func(*tree_map_only(Tensor, narrow, args), **tree_map_only(Tensor, narrow, kwargs))
    if func._schema.is_mutable:
        return args[0].copy_(result)
    wide = any(isinstance(x, Tensor) and x.dtype == torch.float64 for x in args)
    return result.double() if wide and "dtype" not in kwargs else result


class Drawn(TorchDispatchMode):
    """Does so with all that happens within."""

    def __init__(self, low: torch.dtype) -> None:
        super().__init__()
        self.low = low

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return drawn(func, args, kwargs or {}, self.low)
