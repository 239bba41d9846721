"""A float64 optimizer beside another one, on the same gradients, and how far the two are apart.

x are the whole values of the weights (residuals included) that the other one has, x64 those that
the shadow has, x0 those at the common start; sums are over all elements of a seed:

    error       |x - x64| / |x64 - x0| after the last step
    cumulative  <x - x0, x64 - x0> / |x64 - x0|^2 there: 1 if nothing is lost on the way
    single      <d_hat, d> / |d|^2, the mean over steps, with d the step that the shadow took and
                d_hat the one that was stored: the EDQ of the Collage paper, arXiv 2405.03637, as
                benchmarks/storages.py has it
    lost        share of the elements with d != 0 whose stored value did not change, likewise

`single` and `lost` are measured in every EVERY-th step.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim import Optimizer

EVERY = 20


def rows(tensors: list[Tensor], seeds: int, *, apart: bool) -> Tensor:
    """Return the values of each seed as a row, float64 (seeds, elements).

    Args:
        tensors: one for each weight, with a leading dimension of seeds; if they are `apart`, one
            for each weight and seed, those of a weight side by side.
        seeds: number of seeds.
        apart: see `tensors`.
    """
    if apart:
        each = (torch.cat([t.flatten() for t in tensors[s::seeds]]) for s in range(seeds))
        return torch.stack(list(each)).double()
    return torch.cat([t.reshape(seeds, -1) for t in tensors], 1).double()


class Shadow:
    """A float64 copy of an optimizer, which takes the gradients of another one."""

    def __init__(
        self,
        start: list[Tensor],
        make: Callable[[list[Tensor]], Optimizer],
        seeds: int,
        *,
        apart: bool = False,
    ) -> None:
        """Begin at a start.

        Args:
            start: values of the weights, as `rows` takes them.
            make: function that returns the optimizer of float64 parameters.
            seeds: number of seeds.
            apart: as `rows` takes it.
        """
        self.params = [w.double().clone().requires_grad_() for w in start]
        self.optimizer = make(self.params)
        self._seeds, self._apart, self._taken = seeds, apart, 0
        self._start, self._meant = self._now(), torch.empty(0)
        self._single: list[Tensor] = []
        self._lost: list[Tensor] = []

    @property
    def measures(self) -> bool:
        """True if the next step is one that is measured."""
        return self._taken % EVERY == EVERY - 1

    def step(self, gradients: list[Tensor], lr: float) -> None:
        """Take a step on gradients of any dtype."""
        before = self._now() if self.measures else None
        for p, gradient in zip(self.params, gradients, strict=True):
            p.grad = gradient.double()
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self._taken += 1
        if before is not None:
            self._meant = self._now() - before

    def compare(self, made: Tensor) -> None:
        """Measure the last step, which was one to measure.

        Args:
            made: change of the other's values in it, (seeds, elements).
        """
        meant = self._meant
        self._single.append((made * meant).sum(1) / meant.square().sum(1))
        self._lost.append(((meant != 0) & (made == 0)).sum(1) / (meant != 0).sum(1))

    def found(self, stored: Tensor) -> dict[str, list[float]]:
        """Return the numbers of each seed, name -> (seeds,); `stored` are the other's values."""
        meant, made = self._now() - self._start, stored - self._start
        way = meant.square().sum(1)
        numbers = {
            "error": ((made - meant).square().sum(1) / way).sqrt(),
            "cumulative": (made * meant).sum(1) / way,
        }
        if self._single:
            numbers["single"] = torch.stack(self._single).mean(0)
            numbers["lost"] = torch.stack(self._lost).double().mean(0)
        return {name: values.tolist() for name, values in numbers.items()}

    def _now(self) -> Tensor:
        return rows([p.detach() for p in self.params], self._seeds, apart=self._apart)
