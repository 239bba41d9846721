"""Clipping of gradients by their norm, in registers of the step that reads them."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from collage_fx.config import CollageConfig
from collage_fx.gradients.norm import norm_over
from collage_fx.gradients.scaled_step import FACTOR, MULTIPLIED, Multiplied, multiply
from collage_fx.optimizer.fused import AMP_SCALING, GRAD_SCALE
from collage_fx.runtime.errors import NonFiniteError
from collage_fx.runtime.trees import replace_functions


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
        # A GradScaler leaves its scale then, in place of dividing gradients by it.
        setattr(optimizer, AMP_SCALING, True)

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
        self.update(optimizer)
        find = weakref.ref(optimizer)

        def clipped(closure: Callable[..., Any]) -> Callable[..., Any]:
            def computed(*args: Any, **kwargs: Any) -> Any:
                result = closure(*args, **kwargs)
                if (alive := find()) is not None:
                    self.update(alive)
                return result

            return computed

        return replace_functions((args, kwargs), callable, clipped)

    @torch.no_grad()
    def update(self, optimizer: Optimizer) -> None:
        """Compute the norm, and the number, of the gradients of now.

        Raises:
            NonFiniteError: the norm is infinite or a NaN, and the user wants an error then.
        """
        with torch.inference_mode(False):
            norm = self.norm.sum_of_squares(optimizer).sqrt().to(torch.float32)
            scale = vars(optimizer).get(GRAD_SCALE)
            scale = None if scale is None else scale.to(norm.device, norm.dtype)
            norm = norm if scale is None else norm / scale
            if self.factor.device != norm.device:
                self.factor = self.factor.to(norm.device)
            torch.clamp(self.most / (norm + 1e-6), max=1.0, out=self.factor)
            if scale is not None:
                self.factor.div_(scale)
            if (step := self.shown()) is not None:
                step.grad_norm = norm  # another tensor in each step
        if self.raises and not torch.isfinite(norm):
            raise NonFiniteError(
                f"the norm of the gradients is {norm.item()}, and error_if_nonfinite=True: nothing "
                "was written"
            )

    @contextmanager
    def within(self, optimizer: Optimizer) -> Iterator[None]:
        """Have the step of the optimizer multiply gradients by the number, within this context."""
        own = vars(optimizer)
        scale = {GRAD_SCALE: own.pop(GRAD_SCALE)} if GRAD_SCALE in own else {}
        own[FACTOR], own[MULTIPLIED] = self.factor, self.multiplied
        try:
            yield
        finally:
            own.update(scale)
            del own[FACTOR], own[MULTIPLIED]
            self.multiplied.storages.clear()


def clip(optimizer: Optimizer, config: CollageConfig) -> None:
    """Clip the gradients of an optimizer in place, if that is asked for, as its step would."""
    if config.clip_grad_norm is not None:
        clipping = Clipping(optimizer, config)
        clipping.update(optimizer)
        with clipping.within(optimizer):
            multiply(optimizer)
