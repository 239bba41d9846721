"""Sums of gradients reduced over processes with their residuals, by a hook of DDP."""

import sys
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from collage_fx.accumulation.sums import Sum
from collage_fx.runtime.expansion.eft import WIDER
from collage_fx.runtime.residuals.residual import Residual
from collage_fx.runtime.residuals.store import STORE
from collage_fx.runtime.storage.registry import join_in, split_into
from collage_fx.runtime.torch_private import _disable_current_modes


def is_replicated(subject: Any) -> bool:
    """Return True for a module in DistributedDataParallel."""
    module = sys.modules.get("torch.nn.parallel.distributed")
    return module is not None and isinstance(subject, module.DistributedDataParallel)


class Reduction:
    """The mean of whole sums over processes, in fp32: all have the same words after it."""

    def __init__(self, sums: Mapping[int, Sum], group: Any) -> None:
        self.sums, self.group = sums, group
        self.reduced: list[tuple[Tensor, Sum, tuple[Tensor, ...]]] = []
        """Parameters, their sums, and the low words of these, until DDP has written the rest."""

    def reduce(self, state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Reduce the gradients that DDP has copied into a bucket, as its communication hook."""
        buffer = bucket.buffer()
        pairs = list(zip(bucket.parameters(), bucket.gradients(), strict=True))
        with torch.no_grad(), _disable_current_modes():
            whole = buffer.to(WIDER.get(buffer.dtype, buffer.dtype))
            for p, part in pairs:
                if (residual := self._residual(p)) is not None:
                    words = part, *residual.components
                    _like(part, whole, buffer).copy_(join_in(whole.dtype, residual.storage, *words))
            whole /= self.group.size()
        if not self.reduced:
            Variable._execution_engine.queue_callback(self._finish_later)
        work = dist.all_reduce(whole, group=self.group, async_op=True)

        def split(future: torch.futures.Future[Any]) -> Tensor:
            value = future.value()[0]
            with torch.no_grad():
                for p, part in pairs:
                    self._split(p, part, _like(part, value, buffer))
            return buffer

        return work.get_future().then(split)

    def _residual(self, p: Tensor) -> Residual | None:
        """Return the residual of a gradient, which DDP may have put into the bucket itself."""
        one = self.sums.get(id(p))
        if (grad := p.grad) is None:
            return None
        if one is not None and one.last is not None:
            return one.last
        found = STORE.get(grad)
        return found if found is not None and found.is_present(grad) else None

    def _split(self, p: Tensor, part: Tensor, value: Tensor) -> None:
        one = self.sums.get(id(p))
        if one is None:
            part.copy_(value)
            return
        high, *lows = split_into(one.storage, value, part.dtype)
        part.copy_(high)
        self.reduced.append((p, one, tuple(lows)))

    def _finish_later(self) -> None:
        """Wait for what ends the backward pass of DDP, which comes behind."""
        Variable._execution_engine.queue_callback(self._finish)

    def _finish(self) -> None:
        """Give the gradients that DDP has written their low words."""
        found, self.reduced = self.reduced, []
        for one in self.sums.values():
            one.last = None
        with torch.no_grad(), _disable_current_modes():
            for p, one, lows in found:
                if p.grad is not None:
                    one.take(p.grad, lows)


def _like(part: Tensor, whole: Tensor, buffer: Tensor) -> Tensor:
    """Return the part of a tensor that is where another one is in a buffer of its size."""
    at = part.storage_offset() - buffer.storage_offset()
    return whole.as_strided(part.size(), part.stride(), at)
