"""The sum of the gradients of one parameter, with a residual, and the hooks of autograd on it."""

import weakref
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from threading import Lock, get_ident
from typing import Any

import torch
from torch import Tensor

from collage_fx.accumulation.addition import add
from collage_fx.passes.ir.program import LOW_PRECISION
from collage_fx.runtime.residuals.memory import address, has_memory
from collage_fx.runtime.residuals.residual import Residual, Sums, version
from collage_fx.runtime.residuals.store import STORE
from collage_fx.runtime.storage.registry import STORAGES
from collage_fx.runtime.storage.state_name import StateName
from collage_fx.runtime.torch_private import _disable_current_modes, _len_torch_dispatch_stack

WAIT = 30
"""Seconds for which a thread waits for another one that adds to the same gradient."""
FSDP = (
    "accumulate: FSDP2 adds to gradients outside of autograd, where no residual can follow. Reduce "
    "once for all micro-batches, by set_requires_gradient_sync, with "
    "MixedPrecisionPolicy(reduce_dtype=torch.float32)"
)


class Sum:
    """The sum of the gradients of one parameter.

    Before autograd adds a gradient to `p.grad`, the sum is taken out of there. What autograd leaves
    in its place is the gradient of one backward pass, which is added with the residual.
    """

    def __init__(self, p: Tensor, name: StateName, storage: str, sums: Sums) -> None:
        self.param: weakref.ref[Any] = weakref.ref(p)
        self.name, self.storage, self.sums = name, storage, sums
        self.aside: Tensor | None = None
        """The sum while autograd stores a gradient in its place."""
        self.lock, self.thread = Lock(), 0
        """Held between the two hooks, by this thread."""
        self.kept = False
        """True if the residual is needed when `p.grad` is another tensor, as DDP's bucket."""
        self.last: Residual | None = None
        """The residual of the last sum that a backward pass has added to, if it is kept."""
        self.has_residual = False
        """True if the last sum had one."""
        self.draws = zlib.crc32(name.parameter.encode())
        """The number of roundings by chance, from one on that others do not begin with."""
        self.trained = 0, -1
        """The address and the version of the parameter when the sum began."""
        self.asked = False
        """True from the first hook to the second."""
        self.hook_again: Callable[[], Callable[[Tensor, Sum], None] | None] = lambda: None
        """A weak reference to what puts the first hook on the node that autograd has by now."""

    def before(self, gradients: tuple[Tensor | None, ...]) -> None:
        """Take the sum out of `p.grad`, where autograd is about to add a gradient."""
        p, fresh = self.param(), gradients[0]
        if p is None or fresh is None:
            return
        self._enter()
        self.asked, self.last = True, None
        given = p.grad.resolve_neg() if p.grad is not None and p.grad.is_neg() else p.grad
        if given is None:
            self._look_back((address(p), version(p)))
        elif why := _obstacle(fresh, given, self.storage):
            self.sums.warn_once(
                "gradient-plain",
                f"the {self.name} is added to in its own dtype, as PyTorch does, since {why}. Said "
                "once for all parameters",
            )
        elif given.dtype in STORAGES[self.storage].residuals:  # and not that of a model in fp32
            self.aside, p.grad = given, None

    def _enter(self) -> None:
        """Have other threads wait, until `after`, that add to the same gradient.

        A sum that this thread has taken out before is of a backward pass that has failed: it is
        gone. So is one that another thread does not give back.
        """
        me = get_ident()
        if self.thread != me:
            self.lock.acquire(timeout=WAIT)
            self.thread = me
        if self.aside is not None:
            self.aside = None
            self.sums.warn_once(
                "gradient-lost",
                "a backward pass has failed where it added to the gradient of "
                f"{self.name.parameter}: the sum is gone. Call optimizer.zero_grad() after the "
                "error, and begin the sums anew",
            )

    def _leave(self) -> None:
        if self.thread == get_ident():
            self.thread = 0
            self.lock.release()

    def after(self, p: Tensor) -> None:
        """Put the sum back into `p.grad`, with the gradient that is there added to it."""
        try:
            self._put_back(p)
        finally:
            self._leave()

    def _put_back(self, p: Tensor) -> None:
        total, fresh, self.aside = self.aside, p.grad, None
        asked, self.asked = self.asked, False
        if not asked and (again := self.hook_again()) is not None:
            again(p, self)  # a change of its dtype, say, has given it another node
        if fresh is None:
            return
        if total is None:
            if asked and _is_part(fresh):  # of one gradient of several parameters, say
                p.grad = fresh.clone()
            return
        p.grad = total
        with torch.no_grad(), _without_modes():
            residual = self._residual(total)
            add(total, residual, fresh)
        self.draws, self.has_residual = residual.draws, True
        self.last = residual if self.kept else None

    def _residual(self, total: Tensor) -> Residual:
        """Return the residual that belongs to the present value of the sum."""
        residual = STORE.get(total)
        if residual is None or not residual.fits(total) or residual.storage != self.storage:
            residual = self._adopt(total)
        STORE.clear_stale([(total, residual)])
        return residual

    def _adopt(self, total: Tensor) -> Residual:
        residual = STORE.adopt(total, None, self.storage, self.name, self.sums)
        residual.draws = self.draws
        return residual

    def _look_back(self, trained: tuple[int, int]) -> None:
        """Warn if the parameter was trained since the last sum began, and nobody reads sums."""
        moved = trained[0] != self.trained[0]
        if self.has_residual and not (self.sums.read or moved or trained == self.trained):
            self.sums.warn_once(
                "gradient-not-read",
                f"the {self.name} had a residual, and whatever has updated the parameter has not "
                "read it: it took the sum as rounded to its dtype. Compile the step, by "
                "collage_fx.compile_(optimizer). Said once for all parameters",
            )
        self.trained, self.has_residual = trained, False

    def take(self, total: Tensor, lows: tuple[Tensor, ...]) -> None:
        """Have the residual of a sum that others have written be these low words."""
        residual = self._adopt(total)
        residual.hold(lows)
        residual.settle(total)

    def drop(self) -> None:
        """Have no residual any more."""
        p = self.param()
        grad = None if p is None else p.grad
        residual = None if grad is None else STORE.get(grad)
        if grad is not None and residual is not None and residual.sums is self.sums:
            STORE.drop(grad)
        self.last = None


def _without_modes() -> AbstractContextManager[None]:
    """Return a context without modes of dispatch: leaving none takes as long as some additions."""
    return _disable_current_modes() if _len_torch_dispatch_stack() else nullcontext()


def _is_part(tensor: Tensor) -> bool:
    """Return True if a dense tensor lies in memory that has more in it."""
    return has_memory(tensor) and tensor.untyped_storage().nbytes() != tensor.nbytes


def _obstacle(fresh: Tensor, total: Tensor, storage: str) -> str:
    """Return the reason why a gradient cannot be added to a sum with a residual; empty if none."""
    if fresh.layout != torch.strided or not has_memory(total):
        return "it is sparse"
    if fresh.requires_grad or total.requires_grad:
        return "it is differentiated, by create_graph=True"
    if total.dtype in LOW_PRECISION and total.dtype not in STORAGES[storage].residuals:
        return f"storage {storage!r} holds no {total.dtype}"
    if _is_part(total):
        return "p.grad is a part of other memory, which is written without it, as of a flat buffer"
    return ""
