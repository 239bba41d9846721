"""The residual store: which tensor has which residual, and whether it still belongs to it."""

import warnings
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import InitVar, dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from collage_fx.runtime.errors import CollageWarning, listed
from collage_fx.runtime.expansion.eft import WIDER
from collage_fx.runtime.residuals.components import check_components, storage_of, zeros
from collage_fx.runtime.residuals.memory import address, is_laid_out_as, tensor_on
from collage_fx.runtime.storage.registry import (
    STORAGES,
    check_compensable,
    value_in_float64,
)
from collage_fx.runtime.storage.state_name import StateName

Expected = Callable[..., bool]
"""(tensor, *components) -> whether they are as they were saved together."""


def version(tensor: Tensor) -> int:
    """Return the version counter of tensor, -1 if it has none."""
    try:
        return tensor._version
    except RuntimeError:
        # An inference tensor counts no versions; writes from outside to one go unnoticed.
        return -1


@dataclass(eq=False, repr=False, slots=True)
class Residual:
    """The residual components of one tensor, and what the tensor was when they were last valid.

    It never refers to its tensor, which is the weak key it is stored under.
    """

    tensor: InitVar[Tensor]
    storage: str
    name: StateName
    components: tuple[Tensor, ...] = field(init=False)
    draws: int = 0
    """How often the last component was rounded by chance; each time takes another seed."""
    expected: Expected | None = None
    """What is to hold of both at the next step, if the residual is from a checkpoint."""
    ensured: Any = None
    """For whom, as what and when a recorded step found that it is what its state is to have."""
    lent: tuple[int, ...] = ()
    """The versions of the components when a state dict was given them, until the next step."""
    provisional: bool = False
    """Whether the tensor was made with it, and nobody knows yet if its updates need one."""
    found: bool = False
    """Whether a step has found the tensor by a write, and no later one found it as it was then."""
    address: int = field(init=False)
    _versions: "array[int]" = field(init=False)
    _slot: int = field(default=0, init=False)
    _dtype: torch.dtype = field(init=False)

    def __post_init__(self, tensor: Tensor) -> None:
        self.components = zeros(tensor, self.storage)
        self._versions = array("q", [-1])
        self._dtype = tensor.dtype
        self.settle(tensor)

    @property
    def version(self) -> int:
        """The version counter of the tensor when the residual was last settled."""
        return self._versions[self._slot]

    def keep_version(self, versions: "array[int]", slot: int) -> None:
        """Have the version kept there, by whoever settles many residuals at once.

        Who did so before, and will not see later versions, finds one there that no tensor has.
        """
        versions[slot] = self.version
        self._versions[self._slot] = -2
        self._versions, self._slot = versions, slot

    def settle(self, tensor: Tensor) -> None:
        """Record that the residual belongs to the present value of tensor."""
        self._versions[self._slot] = version(tensor)
        self.address = address(tensor)
        self.lent = ()

    def lend(self) -> None:
        """Note that a state dict has the components: who is given it may write them, as DCP."""
        self.lent = tuple(map(version, self.components))

    def clear(self) -> None:
        """Set every component to zero."""
        self.expected = None
        for component in self.components:
            component.zero_()

    def has_content(self) -> bool:
        """Tell whether any component is not zero."""
        return any(bool(component.any()) for component in self.components)

    def begin_anew(self, tensor: Tensor) -> None:
        """Be as if tensor had just been rounded to its dtype: without content and draws."""
        self.clear()
        self.draws = 0
        self.settle(tensor)

    def fits(self, tensor: Tensor) -> bool:
        """Tell whether tensor can have these components."""
        dtypes = STORAGES[self.storage].residuals.get(tensor.dtype, ())
        shape, device = tensor.shape, tensor.device
        for c, dtype in zip(self.components, dtypes, strict=False):
            if c.dtype is not dtype or c.shape != shape or c.device != device:
                return False
        return len(dtypes) == len(self.components) and tensor.dtype is self._dtype

    def lay_out(self, tensor: Tensor) -> None:
        """Have the strides that tensor has got since, and be of no present value.

        Only a write from outside, which versions do not show, gives a tensor other strides.
        """
        new = zeros(tensor, self.storage)
        self.components = tuple(n.copy_(c) for n, c in zip(new, self.components, strict=True))
        self._versions[self._slot] = -2

    def whole(self, tensor: Tensor) -> Tensor:
        """Return the value of tensor and its components, in float64."""
        return value_in_float64(self.storage, tensor.detach(), self.components)

    def belongs(self, tensor: Tensor) -> bool:
        """Tell whether tensor is as it was when the residual was last settled."""
        same = self._versions[self._slot] == version(tensor) and self.address == address(tensor)
        return same and not (self.lent and self._written_by_borrower())

    def is_present(self, tensor: Tensor) -> bool:
        """Tell whether it is of the present value of tensor; one of a checkpoint is looked at."""
        if self.expected is None:
            return self.belongs(tensor)
        # It stays what it is: the values that it was saved with may be loaded after it.
        return self.expected(tensor, *self.components)

    def _written_by_borrower(self) -> bool:
        """Tell whether who was lent the components has written them."""
        return bool(self.lent) and self.lent != tuple(map(version, self.components))

    def stale(self, tensor: Tensor) -> str:
        """Say why the residual does not belong to the present value of tensor; empty if it does.

        A residual without content belongs to any value, and is settled on the present one.
        """
        why = ""
        if self.expected is None and self.belongs(tensor):
            return why
        if not self.fits(tensor):  # nor will it: `ensure` replaces it
            changed = "the tensor has another shape, dtype or device by now"
            return changed if self.has_content() else why
        if self.expected is not None:
            if not self.expected(tensor, *self.components):
                why = "it and its residual are not as they were saved together"
            self.expected = None
        elif self._written_by_borrower():
            why = "it was written from outside, as by a checkpoint that was not loaded to its end"
        elif self.has_content():
            why = "it was written from outside the compiled step"
        self.settle(tensor)
        return why

    def load(self, tensor: Tensor, components: Sequence[Tensor], expected: Expected | None) -> None:
        """Take over components; what the tensor is to fulfil is checked at the next step."""
        for mine, theirs in zip(self.components, components, strict=True):
            mine.copy_(theirs)
        self.expected = expected
        self.settle(tensor)


def clear_stale(
    pairs: Iterable[tuple[Tensor, Residual]], named: Callable[[str], str] = str
) -> None:
    """Clear every residual that no longer belongs to its tensor, with one warning for all.

    Args:
        pairs: tensors with their residuals.
        named: returns what to call a tensor, of the name that its residual has.
    """
    cleared: dict[str, list[str]] = {}
    for tensor, residual in pairs:
        why = residual.stale(tensor)
        if why:
            residual.clear()
            cleared.setdefault(why, []).append(str(residual.name))
    for why, names in cleared.items():
        warn_of_cleared(list(map(named, names)), why)


def warn_of_cleared(names: list[str], why: str) -> None:
    """Warn that the residuals of these were cleared."""
    warnings.warn(
        f"collage_fx: the residual of {listed(names)} was cleared, because {why}. The step goes on "
        "from the stored value. To keep a residual, write the tensor before the first step or "
        "load weights and optimizer from one checkpoint.",
        CollageWarning,
        stacklevel=3,
    )


def next_draw(residuals: Iterable[Residual]) -> int:
    """Count one more stochastic rounding for residuals; return which it is, for all of them."""
    found = list(residuals)
    draw = max((residual.draws for residual in found), default=0)
    for residual in found:
        residual.draws = draw + 1
    return draw


class ResidualStore:
    """Residuals by identity of their tensors; an entry goes when its tensor does."""

    def __init__(self) -> None:
        self._residuals: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._of_memory: dict[tuple[Any, ...], Residual] = {}
        """For tensors that are made anew at each call, as `p.data` is: storage and layout."""
        self._coarser: set[tuple[str, str]] = set()
        self.generation = 0
        """How often a tensor was given a residual, or other components, or what `get` says changed
        in another way: who remembers answers of the store asks anew then."""

    def lend(self, residuals: Iterable[Residual]) -> None:
        """Have the next step see whether who was given residuals has written them."""
        for residual in residuals:
            residual.lend()
        self.generation += 1

    def get(self, tensor: Tensor) -> Residual | None:
        """Return the residual of tensor, or of another one that is the same piece of memory."""
        residual: Residual | None = self._residuals.get(tensor)
        if residual is None and self._of_memory and tensor.layout == torch.strided:
            residual = self._of_memory.get(_memory(tensor))
            if residual is not None:
                # Its version counter may be a new one, which tells nothing of what happened before.
                self._residuals[tensor] = residual
                residual.settle(tensor)
        return residual

    def follow(self, tensor: Tensor, residual: Residual) -> None:
        """Have a residual laid out as its tensor is by now: kernels walk over both."""
        strides = tensor.stride()
        for component in residual.components:
            if component.stride() != strides and not is_laid_out_as(component, tensor):
                residual.lay_out(tensor)
                self.generation += 1
                return

    def share_by_memory(self, tensor: Tensor) -> None:
        """Let later tensors on the same memory have the residual of this one."""
        if self._of_memory.get(_memory(tensor)) is self._residuals[tensor]:
            return
        for key in [key for key in self._of_memory if key[0].expired()]:
            del self._of_memory[key]
        self._of_memory[_memory(tensor)] = self._residuals[tensor]
        self.generation += 1

    @property
    def finds_by_memory(self) -> bool:
        """Whether a tensor may get the residual of another one, which counts no generation."""
        return bool(self._of_memory)

    def ensure(
        self, tensor: Tensor, storage: str, name: StateName, found: Residual | None = None
    ) -> Residual:
        """Return the residual of tensor, made of zeros if there was none of this shape yet.

        One of another storage is converted. `found` is what `get` has returned, if that was asked.
        """
        residual = found or self.get(tensor)
        if residual is not None and not residual.fits(tensor):
            if residual.has_content():
                warn_of_cleared([str(name)], "the tensor has another shape, dtype or device by now")
            residual = None
        if residual is None:
            return self.adopt(tensor, None, storage, name)
        self.follow(tensor, residual)
        if residual.storage != storage:
            self._warn_coarser(residual, storage, tensor.dtype)
            return self.convert(tensor, storage)
        return residual

    def _warn_coarser(self, residual: Residual, storage: str, dtype: torch.dtype) -> None:
        """Warn, once for each pair of storages, that a residual goes into one that keeps less."""
        pair = residual.storage, storage
        old, new = (STORAGES[name].precision[dtype] for name in pair)
        if new < old and pair not in self._coarser and not residual.provisional:
            self._coarser.add(pair)
            warnings.warn(
                f"collage_fx: the residual of {residual.name} was kept in storage {pair[0]!r} and "
                f"goes on in {pair[1]!r}, which keeps {new} bits instead of {old}: that is what "
                f"this step was compiled with. Compile it with storage={pair[0]!r} to keep them; "
                "two optimizers of one parameter need one storage",
                CollageWarning,
                stacklevel=2,
            )

    @contextmanager
    def unheard(self) -> Iterator[None]:
        """Within, warnings that are given once do not count: of copies, which nobody trains."""
        before = set(self._coarser)
        try:
            yield
        finally:
            self._coarser = before

    def adopt(
        self, tensor: Tensor, lows: tuple[Tensor, ...] | None, storage: str, name: StateName
    ) -> Residual:
        """Make lows, or zeros, the residual of tensor, themselves and not copies.

        Lows are in the storage that their dtypes say; zeros are made for this one.
        """
        storage = storage if lows is None else storage_of(tensor, lows, str(name))
        old: Residual | None = self._residuals.get(tensor)
        residual = self._residuals[tensor] = Residual(tensor, storage, name)
        if old is not None:
            residual.draws, residual.provisional = old.draws, old.provisional
        self.generation += 1
        if lows is not None:
            residual.components = lows
        return residual

    def drop(self, tensor: Tensor) -> None:
        """Forget the residual of tensor."""
        residual = self._residuals.pop(tensor)
        for key in [key for key, r in self._of_memory.items() if r is residual]:
            del self._of_memory[key]
        self.generation += 1

    def convert(self, tensor: Tensor, storage: str) -> Residual:
        """Lay out the whole value of tensor, which has a residual, in another storage.

        The high word changes where the storages round it differently.
        """
        old = self._residuals[tensor]
        check_compensable(tensor.dtype, storage, str(old.name))
        clear_stale([(tensor, old)])
        with torch.no_grad(), _disable_current_modes():
            return self.assign(tensor, old.whole(tensor), storage, old.name)

    def assign(self, tensor: Tensor, value: Tensor, storage: str, name: StateName) -> Residual:
        """Write value, of a wider dtype than tensor, into tensor and its residual."""
        wide = value.to(WIDER[tensor.dtype])
        hi, *lows = STORAGES[storage].split(wide, tensor.dtype)
        tensor.data.copy_(hi)  # the supervisor counts writes to tensor itself
        residual = self.adopt(tensor, None, storage, name)
        for component, lo in zip(residual.components, lows, strict=True):
            component.copy_(lo)
        return residual

    def load(
        self,
        tensor: Tensor,
        components: Sequence[Tensor],
        *,
        storage: str,
        name: StateName,
        expected: Expected | None = None,
        draws: int | None = None,
    ) -> None:
        """Give tensor these residual components, copied; and a count of draws, if that is known.

        Raises ResidualError if the storage does not exist or components do not fit it and tensor.
        """
        check_components(tensor, components, storage, str(name))
        residual = self.get(tensor)
        if residual is None or residual.storage != storage or not residual.fits(tensor):
            residual = self.adopt(tensor, None, storage, name)
        residual.load(tensor, components, expected)
        self.generation += 1
        residual.draws = residual.draws if draws is None else draws

    def by_memory(self) -> Iterator[tuple[Tensor, Residual]]:
        """Yield new tensors on the memory that later tensors may share, with its residuals."""
        for (storage, offset, size, stride, dtype), residual in list(self._of_memory.items()):
            if not storage.expired():
                yield tensor_on(storage, dtype, size, stride, offset), residual

    def __iter__(self) -> Iterator[tuple[Tensor, Residual]]:
        return iter(list(self._residuals.items()))


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    storage = StorageWeakRef(tensor.untyped_storage())
    return storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


STORE = ResidualStore()
"""The residuals of this process."""
