"""The residual of one tensor, and whether it still belongs to it."""

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import InitVar, dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from collage_fx.runtime.errors import WarningName, listed, warn
from collage_fx.runtime.residuals import checks
from collage_fx.runtime.residuals.checks import Checks
from collage_fx.runtime.residuals.checksum import bits_of, same_bits
from collage_fx.runtime.residuals.memory import address
from collage_fx.runtime.storage.components import zeros
from collage_fx.runtime.storage.registry import STORAGES, Storage, value_in_float64
from collage_fx.runtime.storage.state_name import StateName
from collage_fx.runtime.torch_private import _disable_current_modes

if TYPE_CHECKING:
    from collage_fx.runtime.residuals.changes import Changes

ANOTHER = "a tensor of another shape or dtype has taken its place"
_CHANGED = "the tensor has another shape, dtype or device by now"
_OUTSIDE = "it was written from outside the compiled step"
_IN_TIME = (
    "To keep a residual, write the tensor before the first step or load weights and optimizer from "
    "one checkpoint."
)
_IN_STEP = (
    "Clip or unscale gradients in the step, by collage_fx.compile_(optimizer, clip_grad_norm=...)."
)
_FROM_NOW_ON = (
    "From now on a copy of its bits is kept, as large as itself, so that elements which such a "
    "write leaves as they are, or restores, keep theirs."
)
Expected = Callable[..., bool]
"""(tensor, *words) -> whether they are as they were saved together."""


def version(tensor: Tensor) -> int:
    """Return the version counter of tensor, -1 if it has none."""
    try:
        return tensor._version
    except RuntimeError:
        # An inference tensor counts no versions; writes from outside to one go unnoticed.
        return -1


@dataclass(eq=False)
class Sums:
    """Sums of gradients that have residuals, all of one model."""

    refilled: bool = False
    """True if others were seen to write one of them, and that was said."""
    read: bool = False
    """True if a compiled step has read one of them with its residual."""
    said: set[WarningName] = field(default_factory=set)
    """The other warnings that were given."""

    def warn_once(self, name: WarningName, message: str) -> None:
        """Give a warning, unless one of this name was given."""
        if name not in self.said:
            self.said.add(name)
            warn(name, message)


@dataclass(eq=False, repr=False, slots=True)
class Residual:
    """The residual components of one tensor, and what the tensor was when they were last valid.

    It never refers to its tensor, which is the weak key it is stored under.
    """

    tensor: InitVar[Tensor]
    storage: str
    name: StateName
    lows: InitVar[tuple[Tensor, ...] | None] = None
    components: tuple[Tensor, ...] = field(init=False)
    """Components that were given, or zeros."""
    draws: int = 0
    """Number of roundings by chance of the last word; each takes another seed."""
    expected: Expected | None = None
    """Expectation of both at the next step, if the residual is from a checkpoint."""
    lent: tuple[int, ...] = ()
    """The versions of the components when a state dict was given them, until the next step."""
    provisional: bool = False
    """True if the tensor was made with it, and nobody knows yet if its updates need one."""
    found: bool = False
    """True if a step has found the tensor by a write, and no later one found it as it was then."""
    shared: bool = False
    """True if no optimizer has the tensor, and later tensors on its memory have the residual too:
    see `ResidualStore.share_by_memory`."""
    renewed: bool | None = False
    """True if each call has another tensor on the memory, as `p.data` is, of which versions say
    nothing; None until the second one."""
    refilled: bool = False
    """True if others were seen to write the tensor, and that was said."""
    checks: Checks | None = None
    """Checks of the tensor's words as of the last settling of the residual, until bits are kept."""
    kept: Tensor | None = None
    """The bits of the tensor when the residual was last settled, from the first write from outside
    on: they tell which elements a later one changes."""
    sums: "Sums | None" = None
    """The sums that the tensor is one of, if it is a gradient: of use until it is zero or None."""
    lost: int | Tensor = 0
    """The elements of which later writes have cleared a residual; on the device of the tensor, so
    that nobody waits for it."""
    changes: "Changes | None" = None
    """The changes of the tensor, once a kernel notes them."""
    address: int = field(init=False)
    shape: torch.Size = field(init=False)
    stride: tuple[int, ...] = field(init=False)
    """The strides of the tensor when the residual was last settled or laid out: from others its
    elements would be read in another order, in memory that has not changed."""
    packed: bool = field(init=False)
    """True if components are not laid out as the tensor, but bytes for two elements each."""
    _versions: "array[int]" = field(init=False)
    _slot: int = field(default=0, init=False)
    _dtype: torch.dtype = field(init=False)

    def __post_init__(self, tensor: Tensor, lows: tuple[Tensor, ...] | None) -> None:
        self.components = zeros(tensor, self.storage) if lows is None else lows
        self._versions = array("q", [-1])
        self._dtype, self.shape = tensor.dtype, tensor.shape
        self.packed = self._kind.packed
        self.settle(tensor)

    @classmethod
    def of_none(cls, tensor: Tensor, storage: str, name: StateName) -> "Residual":
        """Return a residual of zeros that nobody keeps, for a gradient that has none."""
        return cls(tensor, storage, name, sums=Sums())

    @property
    def _kind(self) -> Storage:
        return STORAGES[self.storage]

    @property
    def of_gradient(self) -> bool:
        """True if the tensor is a gradient."""
        return self.sums is not None

    @property
    def lasts_briefly(self) -> bool:
        """True if others fill the tensor anew: no copy of its bits is kept then."""
        return self.shared or self.of_gradient

    @property
    def version(self) -> int:
        """The version counter of the tensor when the residual was last settled."""
        return self._versions[self._slot]

    def settle(self, tensor: Tensor) -> None:
        """Record that the residual belongs to the present value of tensor."""
        settle([(tensor, self)])

    def lend(self) -> None:
        """Note that a state dict has the components: who is given it may write them, as DCP."""
        self.lent = tuple(map(version, self.components))

    def clear(self) -> None:
        """Set every component to zero."""
        self.expected = None
        with torch.no_grad(), _disable_current_modes():  # a recorder would do it later
            for component in self.components:
                component.zero_()

    def keep(self, tensor: Tensor) -> None:
        """Have a write from outside clear no more than the elements of tensor that it changes."""
        with torch.no_grad(), _disable_current_modes():
            bits = bits_of(tensor)
            if self.kept is None or self.kept.shape != bits.shape:
                self.kept = torch.empty_like(bits)
                # Who settles it without Python does not know of the bits: it is to begin anew.
                keep_versions([self], array("q", [0]))
                self.checks = None
            self.kept.copy_(bits)

    def new_checks(self, tensor: Tensor) -> Checks | None:
        """Return checks for the words of tensor; None where there can be none."""
        return Checks.of(tensor) if self.components and not self.of_gradient else None

    def clear_changed(self, tensor: Tensor) -> Tensor:
        """Clear the elements that a write from outside may have changed; return how many had any.

        They are known by the bits that are kept, or by the checks of chunks of elements.
        """
        with torch.no_grad(), _disable_current_modes():
            changed = self._changed(tensor)
            lost, words = torch.zeros_like(changed), self.words(tensor)
            for word in map(bits_of, words):
                lost |= changed & (word != 0)
                word.masked_fill_(changed, 0)
            self.hold(words)
            return lost.sum()

    def words(
        self, tensor: Tensor, components: tuple[Tensor, ...] | None = None
    ) -> tuple[Tensor, ...]:
        """Return the components, or these, in the shape of tensor; copies of packed ones."""
        found = self.components if components is None else components
        return self._kind.words(tensor, found) if self.packed else found

    def hold(self, components: Sequence[Tensor]) -> None:
        """Have the values of components: as memory holds them, or what `words` has returned."""
        given = tuple(components)
        if self.packed and any(c.dtype != torch.uint8 for c in given):
            given = self._kind.stored(given)
        for mine, theirs in zip(self.components, given, strict=True):
            if theirs is not mine:
                mine.copy_(theirs)

    def _changed(self, tensor: Tensor) -> Tensor:
        """Return the mask of bits of tensor that are not those that are kept, or may be others."""
        with torch.no_grad(), _disable_current_modes():
            if self.kept is not None:
                return bits_of(tensor) != self.kept
            assert self.checks is not None
            return self.checks.changed(tensor)

    def present(self, tensor: Tensor) -> tuple[Tensor, ...] | None:
        """Return the components that belong to the present value of tensor, None if none do.

        Copies where a write from outside has changed some elements, which have none.
        """
        if self.is_present(tensor):
            return self.components
        if self.expected is not None or not self.knows_elements(tensor):
            return None
        changed = self._changed(tensor)
        if bool(changed.all()):
            return None
        words = self.words(tensor)
        return self._kind.stored([bits_of(w).masked_fill(changed, 0).view(w.dtype) for w in words])

    def has_content(self) -> bool:
        """Return True if any component is not zero."""
        return any(bool(component.any()) for component in self.components)

    def begin_anew(self, tensor: Tensor) -> None:
        """Be as if tensor had just been rounded to its dtype: without content and draws."""
        self.clear()
        self.draws = 0
        self.settle(tensor)

    def fits(self, tensor: Tensor) -> bool:
        """Return True if tensor can have these components."""
        return fit([(tensor, self)])

    def is_shaped_as(self, tensor: Tensor) -> bool:
        """Return True if tensor is of the residual's shape and dtype, and has data."""
        same = tensor.shape == self.shape and tensor.dtype is self._dtype
        return same and not tensor.is_meta

    def lay_out(self, tensor: Tensor) -> None:
        """Have the strides that tensor has got since, and be of no present value.

        Only a write from outside, which versions do not show, gives a tensor other strides.
        """
        new = zeros(tensor, self.storage)
        self.components = tuple(n.copy_(c) for n, c in zip(new, self.components, strict=True))
        self.stride = tensor.stride()
        self.forget_tensor()

    def forget_tensor(self) -> None:
        """Be of no tensor that anybody has seen: the value decides at the next step."""
        self.changes = None
        self._versions[self._slot] = -2

    def bring_to(self, device: torch.device) -> None:
        """Have the components, and what is known of the tensor, on a device."""
        if self.components and self.components[0].device != device:
            self.components = tuple(c.to(device) for c in self.components)
            self.checks, self.kept = None, None if self.kept is None else self.kept.to(device)

    def whole(self, tensor: Tensor, components: tuple[Tensor, ...] | None = None) -> Tensor:
        """Return the value of tensor and its components, or these, in float64."""
        found = self.components if components is None else components
        return value_in_float64(self.storage, tensor.detach(), found)

    def belongs(self, tensor: Tensor) -> bool:
        """Return True if tensor is as it was when the residual was last settled.

        Its layout is not looked at here, for each state in each step: see `ResidualStore.follow`.
        """
        same = self._versions[self._slot] == version(tensor) and self.address == address(tensor)
        return same and not (self.lent and self._written_by_borrower())

    def is_present(self, tensor: Tensor) -> bool:
        """Return True if it is of tensor's present value; one of a checkpoint is looked at.

        One without components is of any.
        """
        if not self.components:
            return True
        if not self.fits(tensor):
            return False
        if self.expected is None:
            if tensor.stride() == self.stride and self.belongs(tensor):
                return True
            return self.knows_elements(tensor) and not bool(self._changed(tensor).any())
        # It stays what it is: the values that it was saved with may be loaded after it.
        return self.expected(tensor, *self.words(tensor))

    def knows_elements(self, tensor: Tensor) -> bool:
        """Return True if it is known which elements of tensor have changed since it was settled."""
        known = self.kept is not None or (self.checks is not None and self.checks.fit(tensor))
        known = known and not self.lasts_briefly and not self._written_by_borrower()
        return known and self.fits(tensor)

    def _written_by_borrower(self) -> bool:
        """Return True if a state dict's holder has written the components that it was given."""
        return bool(self.lent) and self.lent != tuple(map(version, self.components))

    def stale(self, tensor: Tensor) -> str:
        """Return the reason why the residual, not settled on tensor's present value, is not of it.

        One without content may be of any value: then the answer is empty.
        """
        if self.expected is not None:
            by_bits = self.renewed or version(tensor) < 0
            self.expected = None
            return (
                _OUTSIDE if by_bits else "it and its residual are not as they were saved together"
            )
        if self._written_by_borrower():
            return "it was written from outside, as by a checkpoint that was not loaded to its end"
        return _OUTSIDE if self.has_content() else ""

    def load(self, tensor: Tensor, components: Sequence[Tensor], expected: Expected | None) -> None:
        """Take over components; what the tensor is to fulfil is checked at the next step."""
        self.hold(components)
        self.expected = expected
        self.settle(tensor)


def fit(pairs: Iterable[tuple[Tensor, Residual]]) -> bool:
    """Return True if each tensor can have the components of its residual."""
    for tensor, residual in pairs:
        if tensor.dtype is not residual._dtype or tensor.shape != residual.shape:
            return False
        device = tensor.device
        for c in residual.components:
            if c.device != device:
                return False
    return True


def settle(pairs: Sequence[tuple[Tensor, Residual]]) -> None:
    """Record that residuals belong to the present values of their tensors."""
    try:
        versions = [t._version for t, _ in pairs]
    except RuntimeError:
        versions = [version(t) for t, _ in pairs]
    noted: list[tuple[int, Checks]] = []
    for (tensor, residual), number in zip(pairs, versions, strict=True):
        if residual.changes is not None and not residual.belongs(tensor):
            residual.changes.written(tensor)
        residual._versions[residual._slot] = number
        stride = tensor.stride()
        residual.address, residual.lent, residual.stride = address(tensor), (), stride
        found = residual.checks  # and not found.fit(tensor): for each state in each step
        if residual.kept is not None:
            residual.keep(tensor)
        elif found is None or found.stride != stride or found.shape != tensor.shape:
            found = residual.checks = residual.new_checks(tensor)
        if found is not None and residual.address:
            noted.append((residual.address, found))
    checks.note(noted)


def memory_of(residuals: Sequence[Residual]) -> list[Tensor]:
    """Return the memory that kernels write beside tensors: components, and bits of changes."""
    bits = [
        r.changes.bits for r in residuals if r.changes is not None and r.changes.bits is not None
    ]
    return [*[c for r in residuals for c in r.components], *bits]


def settle_at_end(pairs: Sequence[tuple[Tensor, Residual]]) -> None:
    """Settle at the end of a call, by the bits of tensors whose versions tell nothing."""
    settle(pairs)
    for tensor, residual in pairs:
        if residual.renewed is not False or residual.version < 0:
            residual.expected = same_bits(tensor)
            residual.renewed = bool(residual.renewed)


def keep_versions(residuals: Iterable[Residual], versions: "array[int]") -> None:
    """Have the versions of residuals kept there, by whoever settles all of them at once.

    Who did so before, and will not see later versions, finds one there that no tensor has.
    """
    for slot, residual in enumerate(residuals):
        before, at = residual._versions, residual._slot
        versions[slot], before[at] = before[at], -2
        residual._versions, residual._slot = versions, slot


def clear_stale(
    pairs: Iterable[tuple[Tensor, Residual]], named: Callable[[str], str] = str
) -> None:
    """Clear every residual that no longer belongs to its tensor, with one warning for all.

    Who does not know that each is laid out as its tensor calls `ResidualStore.clear_stale`.

    A write that leaves the checks of a tensor as they were, where it has any, has restored it. From
    the first other one on its bits are kept, and a later one clears no more than the elements that
    it changes, without a warning. Not so of an argument of a function that is filled anew for each
    call, which is named once.

    Args:
        pairs: tensors with their residuals.
        named: returns what to call a tensor, of the name that its residual has.
    """
    cleared, partly = dict[tuple[str, str], list[str]](), dict[str, int]()
    unsure = [
        (t, r) for t, r in pairs if r.components and (r.expected is not None or not r.belongs(t))
    ]
    all_fit, refilled = fit(unsure), list[Residual | Sums]()
    held: dict[int, Expected] = {}
    """Expectations that were met, by the ids of residuals: a residual may stand in several pairs,
    with tied weights or with two tensors on one memory."""
    for tensor, residual in unsure:
        expected, then = residual.expected or held.get(id(residual)), _IN_TIME
        # `words` of each state after a load is a call too many.
        words = residual.words(tensor) if residual.packed and expected else residual.components
        if not all_fit and not fit([(tensor, residual)]):  # `ensure` replaces it
            why = _CHANGED if residual.has_content() else ""
        elif expected is not None and expected(tensor, *words):
            why, residual.expected, held[id(residual)] = "", None, expected
        elif expected is None and residual.kept is None and residual.is_present(tensor):
            why = ""
        elif (expected is None or residual.renewed) and residual.knows_elements(tensor):
            residual.expected = None
            first, found, why = residual.kept is None, residual.clear_changed(tensor), ""
            if first:
                residual.keep(tensor)
                partly |= {str(residual.name): int(found)} if found else {}
            else:
                residual.lost += found
        elif residual.of_gradient and _is_zero(tensor):
            residual.clear()
            why = ""
        else:
            why = residual.stale(tensor)
            # An argument of a function is another value in each call, whatever bits are the same.
            if residual.of_gradient:
                then = _IN_STEP
            elif expected is None and not residual.shared and version(tensor) >= 0:
                residual.keep(tensor)
                then = _FROM_NOW_ON
        if why:
            residual.clear()
            told = residual.sums or residual
            if not (residual.lasts_briefly and told.refilled):
                cleared.setdefault((why, then), []).append(str(residual.name))
            refilled.append(told)
    for told in refilled:
        told.refilled = True
    settle(unsure if all_fit else [pair for pair in unsure if fit([pair])])
    if partly:
        where = f" in {sum(partly.values()):,} elements, in or near those that have changed"
        warn_of_cleared(list(map(named, partly)), _OUTSIDE, _FROM_NOW_ON, where)
    for (why, then), names in cleared.items():
        warn_of_cleared(list(map(named, names)), why, then)


def _is_zero(tensor: Tensor) -> bool:
    with torch.no_grad(), _disable_current_modes():
        return not bool(tensor.any())


def warn_of_cleared(names: list[str], why: str, then: str = _IN_TIME, where: str = "") -> None:
    """Warn that residuals were cleared.

    Args:
        names: of the tensors.
        why: they were.
        then: what can be done, or will be.
        where: if not in all elements.
    """
    warn(
        "residual-cleared",
        f"the residual of {listed(names)} was cleared{where}, because {why}. "
        f"The step goes on from the stored value. {then}",
        stacklevel=3,
    )


def next_draw(residuals: Iterable[Residual]) -> int:
    """Count one more stochastic rounding for residuals; return which it is, for all of them."""
    found = list(residuals)
    draw = max((residual.draws for residual in found), default=0)
    for residual in found:
        residual.draws = draw + 1
    return draw
