"""Optimizers constructed with `fused=True`, whose kernel Dynamo does not trace.

torch.optim's fused kernels do the arithmetic of the same optimizer's other steps, in fp32, rounding
once where they store. So the step is run as if fused were off, which is traced, and computed in
`wide` unless the user says otherwise.
"""

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from collage_fx.config import CollageConfig
from collage_fx.optimizer.discovery import init_of_torch, init_states
from collage_fx.optimizer.ownership import family
from collage_fx.runtime.kernels.left_out import left_out_if

FUSED = (Adam, AdamW, SGD, Adagrad)
"""torch.optim's classes that have a fused kernel; a subclass's step is theirs, or made of it."""
FOUND_INF, GRAD_SCALE = AMP = ("found_inf", "grad_scale")
"""Attributes that torch.amp.GradScaler leaves on an optimizer whose kernel unscales gradients."""
AMP_SCALING = "_step_supports_amp_scaling"
"""Attribute of such an optimizer."""
_TOUCHED = ("fused", "capturable")
SCALE = "_collage_grad_scale"
"""Attribute that has the scale of an optimizer's gradients within a step."""


def is_fused(optimizer: Optimizer) -> bool:
    """Return True if a step of the optimizer, or of one that it wraps, would run a fused kernel."""
    return any(map(has_fused_groups, family(optimizer)))


def has_fused_groups(optimizer: Optimizer) -> bool:
    """Return True if a step of the optimizer itself would run a fused kernel."""
    return any(True for _ in _fused_groups(optimizer))


def _fused_groups(optimizer: Optimizer) -> Iterator[dict[str, Any]]:
    if isinstance(optimizer, FUSED):
        yield from (group for group in optimizer.param_groups if group.get("fused"))


def as_its_kernel(
    config: CollageConfig, options: Iterable[str], optimizer: Optimizer
) -> CollageConfig:
    """Return the configuration, in the arithmetic of the fused kernel where there is one.

    Args:
        config: made of the options.
        options: the names of those that the user gave.
        optimizer: whose step it is for.
    """
    if "arithmetic" in options or not is_fused(optimizer):
        return config
    return dataclasses.replace(config, arithmetic="wide")


def note_of(config: CollageConfig) -> str:
    """Return a report's remark on a fused optimizer, whose step is compiled as an unfused one."""
    how = (
        "in fp32 registers, as the fused kernel does"
        if config.arithmetic == "wide"
        else "in arithmetic 'eft'"
    )
    return f"fused=True: the step is traced as without it, and computed {how}"


@contextmanager
def traceable(optimizer: Optimizer, *, asks: bool, scales: bool = False) -> Iterator[bool]:
    """Let Dynamo trace a step of the optimizer, within this context; groups are restored after it.

    States are made first, as the fused kernel has them: step counts on the parameter's device,
    which a step under `capturable` reads there, without a synchronisation.

    Args:
        optimizer: whose step it is.
        asks: whether to wait for what GradScaler has found, where it is on a device. Otherwise
            kernels look there, and the step ends where something else would write memory.
        scales: whether the step itself multiplies gradients by a number: a GradScaler leaves them
            to it then, be its kernel fused or not.

    Yields:
        Whether the step is to be done; not if GradScaler is known to have found a gradient that is
        not finite.
    """
    wanted = True
    with ExitStack() as restored:
        for one in family(optimizer):
            groups = list(_fused_groups(one))
            if not groups and not (scales and one is optimizer):
                continue
            if groups and isinstance(one, Adam) and init_of_torch(one) is not None:
                init_states(one, groups)
            restored.callback(vars(one).update, {k: vars(one)[k] for k in AMP if k in vars(one)})
            restored.callback(vars(one).pop, SCALE, None)
            found, scale = (vars(one).pop(k, None) for k in AMP)
            if scales and one is optimizer:
                scale = None  # its own number has that in it
            within = one is optimizer and _is_torchs(one)
            if found is not None and within and not asks and found.device.type != "cpu":
                restored.enter_context(left_out_if(found))
            else:
                wanted &= found is None or not found.item()
            if scale is not None and within:
                setattr(one, SCALE, scale)
            elif scale is not None:
                _unscale(groups, scale)
            for group in groups:
                restored.callback(group.update, {k: group[k] for k in _TOUCHED if k in group})
                group["fused"] = None
                if "capturable" in group:  # what only the fused kernel is on a CPU
                    group["capturable"] = all(p.is_cuda or p.is_xpu for p in group["params"])
            if one is not optimizer and AMP_SCALING in vars(one):
                # A GradScaler that is called within the step unscales by itself.
                restored.callback(setattr, one, AMP_SCALING, True)
                setattr(one, AMP_SCALING, False)
        yield wanted


def unscaled(inner: Callable[..., Any], optimizer: Optimizer) -> Callable[..., Any]:
    """Return a step that first divides gradients by their scale, where GradScaler may leave one.

    In `wide` what the step computes with is the quotient in fp32, and what stays in `p.grad` is
    that quotient rounded, as by the fused kernel. In fp16, where gradients are scaled because they
    would be 0, that matters.
    """
    leaves = isinstance(optimizer, FUSED) and getattr(optimizer, AMP_SCALING, False)
    if not (leaves and _is_torchs(optimizer)):
        return inner

    def unscaled_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        scale = getattr(self, SCALE, None)
        # Dynamo looks into a function that it has not been given only if that names torch.
        if torch.is_tensor(scale):
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.grad.div_(scale)
        return inner(self, *args, **kwargs)

    return unscaled_step


def _is_torchs(optimizer: Optimizer) -> bool:
    """Return True if the step of an optimizer's class is torch.optim's, and no subclass's."""
    module = inspect.unwrap(type(optimizer).step).__module__ or ""  # None: made by exec()
    return module.startswith("torch.optim.")


def _unscale(groups: list[dict[str, Any]], scale: Tensor) -> None:
    """Divide gradients by their scale before a step in whose graph that cannot be."""
    with torch.no_grad():
        for p in (p for group in groups for p in group["params"] if p.grad is not None):
            p.grad.div_(scale.to(p.grad.device))
