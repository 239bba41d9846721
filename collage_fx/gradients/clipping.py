"""Clipping of gradients by their norm, in registers of the step that reads them."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from collage_fx.config import CollageConfig
from collage_fx.gradients.multiplied import FACTOR, MULTIPLIED, Multiplied
from collage_fx.gradients.norm import gradients_of, norm_over
from collage_fx.gradients.scaled_step import multiply
from collage_fx.optimizer.fused import AMP_SCALING, GRAD_SCALE
from collage_fx.optimizer.ownership import all_tensors_of, params_of
from collage_fx.runtime.errors import NonFiniteError, UnsupportedError, Warn
from collage_fx.runtime.residuals.residual import version
from collage_fx.runtime.trees import replace_functions, tree_leaves

_LOOKED_AT = 4
"""Number of steps after which no gradient becomes a state that has been none before."""


class _TakesScale:
    """Flag of an optimizer for a GradScaler: to leave gradients, and their scale, to the step.

    It is true as long as the step of the optimizer is the one that clips.
    """

    def __init__(self, optimizer: Optimizer, clipping: "Clipping") -> None:
        self.optimizer, self.clipping = weakref.ref(optimizer), weakref.ref(clipping)

    def __bool__(self) -> bool:
        optimizer, clipping = self.optimizer(), self.clipping()
        if optimizer is None or clipping is None:
            return False
        step = getattr(vars(optimizer).get("step"), "__func__", None)
        return step is not None and step is clipping.shown()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Return what makes the flag of a copy, whose step is another one."""
        return bool, ()


class Clipping:
    """Number by which the gradients of one optimizer are multiplied in its step.

    That is min(1, most / (norm + 1e-6)), as torch.nn.utils.clip_grad_norm_ has it; the norm is that
    of the gradients divided by the scale of a torch.amp.GradScaler, where this leaves one.
    """

    def __init__(
        self, optimizer: Optimizer, config: CollageConfig, multiplied: Multiplied | None = None
    ) -> None:
        assert config.clip_grad_norm is not None
        self.most: float | Tensor = config.clip_grad_norm
        self.raises = config.error_if_nonfinite
        others = (find() for find in config.clip_over)
        self.norm = norm_over([optimizer, *(one for one in others if one is not None)])
        self.factor = torch.ones(())
        """The number, in fp32: always the same tensor, as compiled steps are bound to it."""
        self.multiplied = multiplied or Multiplied()
        self.shown: Callable[[], Any] = lambda: None
        """Weak reference to the function of which the norm is an attribute."""
        self.scale: Tensor | None = None
        """Scale that a GradScaler has left for the step."""
        self.steps = 0
        self.blind = False
        """True if the last norm was that of no gradients."""
        if not getattr(optimizer, AMP_SCALING, False):
            setattr(optimizer, AMP_SCALING, _TakesScale(optimizer, self))

    def shown_by(self, step: Any) -> None:
        """Have the norm of the last gradients, in fp32, as `grad_norm` of a function."""
        step.grad_norm = None
        self.shown = weakref.ref(step)

    def begin(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Compute the norm of the gradients of now, and of those that a closure will compute.

        Args:
            optimizer: that of the step which begins.
            args: the arguments of the step.
            kwargs: the same by name.

        Returns:
            The arguments, with such closures.

        Raises:
            NonFiniteError: as `update`.
        """
        self.scale = vars(optimizer).get(GRAD_SCALE)
        closures = any(map(callable, tree_leaves((args, kwargs))))
        self.update(optimizer, raises=self.raises and not closures)
        find = weakref.ref(optimizer)

        def clipped(closure: Callable[..., Any]) -> Callable[..., Any]:
            def computed(*args: Any, **kwargs: Any) -> Any:
                result = closure(*args, **kwargs)
                if (alive := find()) is not None:
                    self.update(alive, raises=self.raises)
                return result

            return computed

        return replace_functions((args, kwargs), callable, clipped)

    @torch.no_grad()
    def update(self, optimizer: Optimizer, *, raises: bool = False) -> None:
        """Compute the norm, and the number, of the gradients of now.

        Args:
            optimizer: the one whose step it is.
            raises: whether to wait for the norm.

        Raises:
            NonFiniteError: it is waited for, and infinite or a NaN.
        """
        with torch.inference_mode(False):
            gradients = gradients_of(optimizer)
            self.blind = not gradients
            norm = self.norm.sum_of_squares(optimizer, gradients).sqrt().to(torch.float32)
            scale = None if self.scale is None else self.scale.to(norm.device, norm.dtype)
            norm = norm if scale is None else norm / scale
            if self.factor.device != norm.device:
                self.factor = self.factor.to(norm.device)
            torch.clamp(self.most / (norm + 1e-6), max=1.0, out=self.factor)
            if scale is not None:
                self.factor.div_(scale)
            if (step := self.shown()) is not None:
                step.grad_norm = norm  # another tensor in each step
        if raises and not torch.isfinite(norm):
            raise NonFiniteError(
                f"the norm of the gradients is {norm.item()}, and error_if_nonfinite=True: nothing "
                "was written"
            )

    @contextmanager
    def within(self, optimizer: Optimizer) -> Iterator[None]:
        """Have the step of the optimizer multiply gradients by the number, within this context."""
        own = vars(optimizer)
        own[FACTOR], own[MULTIPLIED] = self.factor, self.multiplied
        try:
            yield
        finally:
            del own[FACTOR], own[MULTIPLIED]
            self.multiplied.storages.clear()

    @contextmanager
    def watched(self, optimizer: Optimizer, warn: Warn) -> Iterator[None]:
        """Look at gradients and parameters around a step, within this context.

        Args:
            optimizer: whose step it is.
            warn: is told where parameters were written and there was no gradient to clip.

        Raises:
            UnsupportedError: a gradient itself, not a copy of it, has become a state.
        """
        params = params_of(optimizer) if self.blind else []
        before = list(map(version, params))
        yield
        if self.blind and before != list(map(version, params)):
            name = type(optimizer).__name__
            warn(
                "nothing-clipped",
                f"clip_grad_norm: the step of {name} writes parameters, of which none has a "
                "gradient in p.grad, so that nothing is clipped: clip what it computes with itself",
            )
        self.steps += 1
        if self.steps <= _LOOKED_AT:
            self._refuse_kept(optimizer)

    def _refuse_kept(self, optimizer: Optimizer) -> None:
        gradients = {*map(id, gradients_of(optimizer))}
        for owned in all_tensors_of(optimizer):
            if id(owned.tensor) in gradients:
                raise UnsupportedError(
                    f"clip_grad_norm: the step keeps p.grad itself as {owned.name}, which the next "
                    "step would read unclipped: keep a copy, p.grad.clone(), or pass record=True. "
                    "This step was done"
                )


def clip(optimizer: Optimizer, config: CollageConfig) -> None:
    """Clip the gradients of an optimizer in place, if that is asked for, as its step would."""
    if config.clip_grad_norm is not None:
        clipping = Clipping(optimizer, config)
        clipping.update(optimizer)
        with clipping.within(optimizer):
            multiply(optimizer)
