"""set_optimizer_state_dict() of a flattened state dict, which would drop the residuals in it.

`torch.distributed.checkpoint.state_dict` looks a flattened state dict up for the keys that the
optimizer has in its states and groups, and ours are never among these.
"""

import functools
import sys
from typing import Any

from torch.optim import Optimizer

from collage_fx.optimizer.checkpoints.saved_residuals import PREFIX
from collage_fx.optimizer.checkpoints.state_dicts import ENTRY

_MODULE = "torch.distributed.checkpoint.state_dict"
_FUNCTION = "_unflatten_optim_state_dict"


def keep_residuals() -> None:
    """Have the residuals in a flattened state dict loaded. Idempotent.

    To be called where an optimizer is given to this package and where it takes its first step: the
    module is not imported for it, which would take a second.
    """
    module = sys.modules.get(_MODULE)
    plain = getattr(module, _FUNCTION, None)
    if plain is not None and not hasattr(plain, "_collage"):
        unflatten = functools.partial(_unflatten, plain)
        unflatten._collage = True  # type: ignore[attr-defined]
        setattr(module, _FUNCTION, unflatten)


def _unflatten(plain: Any, optim: Optimizer, state_dict: dict[str, Any], info: Any) -> Any:
    found = plain(optim, state_dict, info)
    states = found["state"]
    for key, value in state_dict.items():
        owner, ours, rest = key.partition(f".{PREFIX}")
        if ours and (name := owner.removeprefix("state.")) in states:
            states[name][PREFIX + rest] = value
    for group in found["param_groups"]:
        entry = f"param_groups.{group['params'][0]}.{ENTRY}"
        if entry in state_dict:
            group[ENTRY] = state_dict[entry]
    return found
