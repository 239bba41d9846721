"""The changes of a model's parameters since somebody last asked: `take_changes`."""

import torch
from torch import Tensor
from torch.compiler import disable
from torch.nn import Module

from collage_fx.changes.noted import noted_parameters
from collage_fx.errors import OptionError, SubjectError
from collage_fx.runtime.errors import listed
from collage_fx.runtime.residuals.changes import changes_of, note_changes
from collage_fx.runtime.residuals.dtensor import shard_of
from collage_fx.runtime.residuals.store import STORE
from collage_fx.runtime.torch_private import _disable_current_modes


def take_changes(model: Module) -> dict[str, tuple[Tensor, Tensor]]:
    """Return what has changed of the parameters of a model since the last call, or since `compile`.

    Bits are compared, not values: -0.0 is not 0.0. Elements that were written, and are what they
    were, may be among these. The next call returns what changes from now on.

    Args:
        model: whose parameters optimizers train that were compiled with `changed=True`.

    Returns:
        Name of a parameter -> places and values of its elements that have changed. Places are
        int64 and ascending, of the flat parameter in the order of rows, or of the shard that this
        process has of it; values are of its dtype, copies, on its device. Parameters without
        changes are left out, and so are those without gradients that no such optimizer has; tied
        ones come once.

    Raises:
        SubjectError: anything that is no module.
        OptionError: parameters that take gradients and that no such optimizer has.

    Examples:
        >>> model = torch.nn.Linear(2, 2, bias=False, dtype=torch.bfloat16)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        >>> optimizer = collage_fx.compile_(optimizer, changed=True)
        >>> model.weight.grad = torch.tensor([[0, 0], [1, 0]], dtype=torch.bfloat16)
        >>> optimizer.step()
        >>> changes = collage_fx.take_changes(model)
        >>> {name: places for name, (places, values) in changes.items()}
        {'weight': tensor([2])}
    """
    if not isinstance(model, Module):
        raise SubjectError(f"take_changes takes a torch.nn.Module, got {type(model).__name__}")
    return _taken(model)


@disable  # where the whole training step is compiled
def _taken(model: Module) -> dict[str, tuple[Tensor, Tensor]]:
    noted = noted_parameters()
    params = dict(model.named_parameters())
    shards = {name: shard_of(p) for name, p in params.items()}
    # Those of an optimizer that is gone have what it has changed.
    found = {name: changes_of(t) for name, t in shards.items()}
    wanted = {n for n, p in params.items() if found[n] is not None or id(p) in noted}
    missing = [n for n, p in params.items() if n not in wanted and p.requires_grad]
    if missing:
        raise OptionError(
            f"the changes of {listed(missing)} are not noted: no optimizer that was compiled with "
            "changed=True has them. Compile the one that does so, or freeze them by "
            "requires_grad_(False)"
        )
    taken = {}
    with torch.no_grad(), _disable_current_modes():
        for name, tensor in shards.items():
            if name in wanted:
                changes = found[name] or note_changes(tensor, whole=True)
                places = changes.take(tensor, STORE.get(tensor))
                if len(places):
                    taken[name] = places, tensor.detach().reshape(-1)[places]
    return taken
