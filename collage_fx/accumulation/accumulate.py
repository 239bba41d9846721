"""Gradients of several backward passes, summed with residuals: `accumulate`."""

import weakref
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn import Module
from torch.optim import Optimizer

from collage_fx.accumulation.reduction import Reduction, is_replicated
from collage_fx.accumulation.sums import FSDP, Sum
from collage_fx.config import CollageConfig
from collage_fx.errors import SubjectError, UnsupportedError
from collage_fx.optimizer.ownership import params_within
from collage_fx.passes.ir.program import LOW_PRECISION
from collage_fx.runtime.residuals.dtensor import fsdp_modules, is_sharded
from collage_fx.runtime.residuals.residual import Sums
from collage_fx.runtime.storage.registry import STORAGES, chosen
from collage_fx.runtime.storage.state_name import StateName

_ACCUMULATIONS: "weakref.WeakKeyDictionary[Any, Accumulation]" = weakref.WeakKeyDictionary()
"""Module or optimizer -> its sums, which end with it."""
_REDUCTIONS: "weakref.WeakKeyDictionary[Any, Reduction]" = weakref.WeakKeyDictionary()
"""Module in DistributedDataParallel -> its communication hook, of which there can be one."""


class Accumulation:
    """Sums of the gradients of some parameters, as `accumulate` returns them.

    Args:
        subject: as of `accumulate`.
        storage: likewise.

    Examples:
        >>> model = torch.nn.Linear(2, 2, dtype=torch.bfloat16)
        >>> sums = collage_fx.accumulate(model)
        >>> sums.remove()  # gradients are added as PyTorch does it again
    """

    def __init__(self, subject: Module | Optimizer, storage: str) -> None:
        choice, found = CollageConfig(storage=storage).storage, _parameters(subject)
        self.sums: dict[int, Sum] = {}
        """Parameters by their ids -> their sums."""
        self._choice, self._warnings = choice, Sums()
        self._nodes: dict[int, Any] = {}
        """The node of autograd that adds to each gradient, by the id of the parameter. Each has the
        parameter, and is gone if nobody keeps it."""
        self._handles: list[Any] = []
        for name, p in found:
            self._take(name, p)

    def _take(self, name: str, p: Any) -> None:
        """Sum the gradients of a parameter, if they can have residuals."""
        called = StateName("gradient", name)
        kept = chosen(self._choice, called, p.dtype) if p.dtype in LOW_PRECISION else ""
        held = kept and p.dtype in STORAGES[kept].residuals
        if not (p.requires_grad and held) or id(p) in self.sums:
            return
        one = self.sums[id(p)] = Sum(p, called, kept, self._warnings)
        one.hook_again = weakref.WeakMethod(self._hook)
        self._hook(p, one)
        self._handles.append(p.register_post_accumulate_grad_hook(one.after))
        hooks, own = p._post_accumulate_grad_hooks, self._handles[-1].id
        for k in [k for k in hooks if k != own]:  # autograd calls them as they were inserted
            hooks[k] = hooks.pop(k)

    def _hook(self, p: Any, one: Sum) -> None:
        """Have autograd call a sum before it adds to the gradient."""
        node = get_gradient_edge(p).node
        if self._nodes.get(id(p)) is node:
            return
        self._nodes[id(p)] = node
        self._handles.append(node.register_prehook(one.before))

    def reduce(self, module: Any) -> None:
        """Have a module in DistributedDataParallel reduce residuals with the gradients.

        Raises UnsupportedError if it has a communication hook already.
        """
        for one in self.sums.values():
            one.kept = True
        if (reduction := _REDUCTIONS.get(module)) is not None:
            reduction.sums = self.sums
            return
        reduction = Reduction(self.sums, module.process_group)
        try:
            module.register_comm_hook(None, reduction.reduce)
        except RuntimeError as error:
            self.remove()
            raise UnsupportedError(
                "accumulate: DistributedDataParallel has a communication hook already, which does "
                "not reduce residuals: wrap the model anew"
            ) from error
        _REDUCTIONS[module] = reduction

    def remove(self) -> None:
        """Have PyTorch add gradients in their dtype again; residuals are dropped."""
        for handle in self._handles:
            handle.remove()
        for one in self.sums.values():
            one.drop()
        self.sums.clear()
        self._nodes.clear()
        self._handles.clear()


def accumulate(subject: Module | Optimizer, storage: str = "mcf2") -> Accumulation:
    """Sum the gradients of several backward passes with residuals; the training loop stays.

    From now on `loss.backward()` keeps what an addition to `p.grad` rounds away in a residual
    beside that, which the compiled step of an optimizer reads with it: 256 + 1 is 257, in bf16 too.
    The first backward pass after `zero_grad()` makes none. A gradient that others write loses its
    residual, with a warning: clip in the step, `compile_(optimizer, clip_grad_norm=1.0)`.

    Args:
        subject: a module, one in DistributedDataParallel too, whose residuals are reduced with the
            gradients; or an optimizer. Its parameters in bf16, fp16 or fp8 that take gradients now
            get sums with residuals, for as long as it lives.
        storage: that of the residuals, see docs/storages.md.

    Returns:
        The sums, which `remove()` ends. A second call for the same subject ends the first.

    Raises:
        SubjectError: anything else, or no parameter of these dtypes.
        OptionError: a storage that does not exist.
        UnsupportedError: parameters that FSDP has sharded, or other DTensors; a module in
            DistributedDataParallel that has a communication hook; where there are several
            processes, anything else than such a module.

    Examples:
        >>> model = torch.nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
        >>> sums = collage_fx.accumulate(model)
        >>> for x in (256.0, 1.0):
        ...     model(torch.tensor([x], dtype=torch.bfloat16)).backward()
        >>> model.weight.grad, collage_fx.value(model.weight.grad)
        (tensor([[256.]], dtype=torch.bfloat16), tensor([[257.]], dtype=torch.float64))
    """
    new = Accumulation(subject, storage)
    if not new.sums:
        raise SubjectError(
            f"{type(subject).__name__} has no parameter that takes gradients in a dtype of storage "
            f"{storage!r}: accumulate is for parameters in bf16, fp16 or fp8"
        )
    if (before := _ACCUMULATIONS.get(subject)) is not None:
        before.remove()
    _ACCUMULATIONS[subject] = new
    weakref.finalize(subject, new.remove).atexit = False
    if is_replicated(subject):
        new.reduce(subject)
    return new


def _parameters(subject: Any) -> list[tuple[str, Tensor]]:
    """Return the parameters of a module or an optimizer, each with a name."""
    if isinstance(subject, Module):
        found: list[tuple[str, Tensor]] = list(subject.named_parameters())
    elif isinstance(subject, Optimizer):
        found = [(f"parameter {k}", p) for k, p in enumerate(params_within(subject))]
    else:
        raise SubjectError(
            f"accumulate takes a torch.nn.Module or an optimizer, got {type(subject).__name__}"
        )
    flat = any(getattr(p, "_is_flat_param", False) for _, p in found)
    if flat or (isinstance(subject, Module) and fsdp_modules(subject)):
        raise UnsupportedError(FSDP)
    if any(is_sharded(p) for _, p in found):
        raise UnsupportedError(
            "accumulate: parameters are DTensors, whose gradients may be parts of sums over a mesh"
        )
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if several and not is_replicated(subject):
        raise UnsupportedError(
            "accumulate: of several processes pass the module in DistributedDataParallel, which "
            "reduces residuals too. What else reduces gradients would leave other residuals in "
            "each process"
        )
    return found
