"""A step that multiplies gradients by a number before it reads them, or leaves zeros there.

Dynamo traces the product with the step, so that kernels multiply in registers. Where Python does
the step, to be recorded, each gradient is replaced by the product for as long as the step takes.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from collage_fx.gradients.multiplied import FACTOR, MULTIPLIED, Multiplied
from collage_fx.gradients.norm import gradients_of
from collage_fx.optimizer.ownership import params_within
from collage_fx.runtime.residuals.residual import version


def with_gradients(step: Callable[..., Any], *, zeros: bool) -> Callable[..., Any]:
    """Return a step that multiplies gradients by `FACTOR`, where its optimizer has one.

    Args:
        step: the function of an optimizer's class, or one put around it.
        zeros: whether gradients are zero after it.
    """

    @functools.wraps(step)
    def step_with_gradients(self: Any, *args: Any, **kwargs: Any) -> Any:
        factor = getattr(self, FACTOR, None)
        if not torch.compiler.is_dynamo_compiling():
            return _in_python(step, self, args, kwargs, zeros=zeros)
        # Dynamo looks into a function that it has not been given only if that names torch.
        if torch.is_tensor(factor):
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.grad.mul_(factor)
        result = step(self, *args, **kwargs)
        if zeros:
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.grad.zero_()
        return result

    return step_with_gradients


@torch.compiler.disable(recursive=False)  # what is beneath may be traced
def _in_python(
    step: Callable[..., Any], optimizer: Any, args: Any, kwargs: dict[str, Any], *, zeros: bool
) -> Any:
    factor = getattr(optimizer, FACTOR, None)
    if factor is None:
        result = step(optimizer, *args, **kwargs)
    else:
        products = _Products(optimizer, factor)
        args = map(products.around, args)
        kwargs = {name: products.around(value) for name, value in kwargs.items()}
        products.put()
        try:
            result = step(optimizer, *args, **kwargs)
        finally:
            products.take_back()
            products.end()
    if zeros:
        zero_gradients(optimizer)
    return result


@torch.no_grad()
def zero_gradients(optimizer: Optimizer) -> None:
    """Overwrite the gradients of an optimizer with zeros."""
    for g in gradients_of(optimizer):
        g.zero_()


class _Products:
    """The gradients of an optimizer multiplied by a number, in the places of the gradients."""

    def __init__(self, optimizer: Optimizer, factor: Tensor) -> None:
        self.params = {id(p): p for p in params_within(optimizer)}.values()
        self.factor = factor
        self.multiplied: Multiplied = vars(optimizer)[MULTIPLIED]
        self.made: dict[int, tuple[Tensor, Tensor, int]] = {}
        """Gradient, by its id, with the product and the version of that."""

    @torch.compiler.disable
    @torch.no_grad()
    def put(self) -> None:
        """Put the products in the places of gradients."""
        self.multiplied.flush()  # what a hook has read or written
        self.multiplied.renew()
        for p in self.params:
            if (g := p.grad) is None:
                continue
            if id(g) not in self.made:
                factor = self.factor.to(g.device)
                self.multiplied.note(g, factor)
                product = _product(g, factor)
                self.made[id(g)] = g, product, version(product)
            p.grad = self.made[id(g)][1]

    @torch.compiler.disable
    @torch.no_grad()
    def take_back(self) -> None:
        """Put the gradients back; what was written to a product is written to its gradient."""
        gradients = {id(product): g for g, product, _ in self.made.values()}
        for p in self.params:
            if (g := gradients.get(id(p.grad))) is not None:
                p.grad = g
        for g, product, before in self.made.values():
            if version(product) != before:
                g.copy_(product)
        self.made.clear()

    @torch.compiler.disable
    def end(self) -> None:
        """Have done what the step has read; what comes after it reads gradients as they are."""
        self.multiplied.flush()
        self.multiplied.storages.clear()

    def around(self, argument: Any) -> Any:
        """Return an argument of the step; a closure, which computes gradients, with them back."""
        if not callable(argument):
            return argument

        def computing(*args: Any, **kwargs: Any) -> Any:
            self.take_back()
            result = argument(*args, **kwargs)
            self.put()
            return result

        return computing


@torch.no_grad()
def multiply(optimizer: Optimizer) -> None:
    """Multiply the gradients of an optimizer by `FACTOR`, in place, if it has one."""
    if (factor := vars(optimizer).get(FACTOR)) is not None:
        for g in {id(g): g for g in gradients_of(optimizer)}.values():
            g.mul_(factor.to(g.device))


def _product(gradient: Any, factor: Any) -> Any:
    """Return the product, in the dtype of the gradient: that of two 0-d tensors would be wider."""
    if gradient.dim():
        return torch.mul(gradient, factor)
    return torch.mul(gradient.unsqueeze(0), factor).squeeze(0)
