"""Storages: their layouts, the states that each can hold, and the choice of one for a state."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from collage_fx.runtime.errors import StorageError
from collage_fx.runtime.expansion.eft import FP8, LOW_PRECISION, WIDER
from collage_fx.runtime.expansion.stochastic import Seeds
from collage_fx.runtime.storage import nibbles
from collage_fx.runtime.storage.layouts import (
    Components,
    added,
    join,
    join_alone,
    join_exact,
    join_remainder16,
    join_ulp8,
    round_alone,
    round_ulp4,
    round_ulp8,
    split,
    split3,
    split_alone,
    split_by_chance,
    split_exact,
    split_remainder16,
    split_ulp4,
    split_ulp8,
)
from collage_fx.runtime.storage.positions import Place, positions
from collage_fx.runtime.storage.state_name import StateName


@dataclass(frozen=True)
class Storage:
    """A layout of an expansion: hi, of the state's own dtype, and its residuals."""

    name: str
    residuals: dict[torch.dtype, tuple[torch.dtype, ...]]
    """dtype of a state that it can hold -> those of its residuals, of the state's shape each; in
    memory those that are packed are bytes: see `stored`."""
    precision: dict[torch.dtype, int]
    """dtype -> the significant bits of the whole, for numbers far from the ends of its range."""
    join: Callable[..., Tensor]
    """(hi, *residuals) -> the value in `WIDER[hi.dtype]`."""
    split: Callable[[Tensor, torch.dtype], Components]
    """(a value of the wide dtype, dtype of hi) -> (hi, *residuals). In all layouts residuals of
    zero stand for hi itself."""
    split_by_chance: Callable[..., Components] | None = None
    """`split` with a seed, an int32 of 31 bits, and the positions of elements, int32: the last word
    is rounded up or down by chance, which is right on average. None where nothing is left to
    round."""
    by_chance: bool = False
    """True if each store is rounded by chance, asked for or not."""
    packed: bool = False
    """True if the residual, int8, has four bits, of which memory holds two elements to a byte."""

    def residual_bytes(self, tensor: Tensor) -> int:
        """Return the bytes that the residuals of tensor take."""
        (size,), own = self.shape_in_memory((tensor.numel(),)), self.in_memory(tensor.dtype)
        return sum(r.itemsize for r in own) * size

    def in_memory(self, dtype: torch.dtype) -> tuple[torch.dtype, ...]:
        """Return the dtypes of the residuals of a state of a dtype as memory holds them."""
        return (torch.uint8,) if self.packed else self.residuals[dtype]

    def shape_in_memory(self, shape: Sequence[int]) -> Sequence[int]:
        """Return the shape that the residuals of a state of a shape have in memory."""
        return (nibbles.size_of(math.prod(shape)),) if self.packed else shape

    def stored(self, lows: Sequence[Tensor]) -> Components:
        """Return residuals of the state's shape as memory holds them."""
        return tuple(map(nibbles.packed, lows)) if self.packed else tuple(lows)

    def words(self, hi: Tensor, residuals: Sequence[Tensor]) -> Components:
        """Return residuals, as memory holds them or in the shape of hi, in the latter."""
        if not self.packed:
            return tuple(residuals)
        return tuple(nibbles.unpacked(r, hi) if r.dtype == torch.uint8 else r for r in residuals)

    def draw(self, x: Tensor, dtype: torch.dtype, seed: Tensor, place: Place | None) -> Components:
        """Return `split_by_chance` of a value as memory holds it.

        Args:
            x: of the wide dtype.
            dtype: of hi.
            seed: int32, 0-d, 31 bits.
            place: that of x in the whole tensor, if it is a shard.
        """
        assert self.split_by_chance is not None
        hi, *lows = self.split_by_chance(x, dtype, seed, positions(x, place))
        return hi, *self.stored(lows)

    @property
    def alone(self) -> bool:
        """True if there are no residuals: the state itself is rounded by chance."""
        return not any(self.residuals.values())


_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32
_E4M3, _E5M2 = FP8

STORAGES = {
    s.name: s
    for s in (
        Storage(
            "mcf2",
            {d: (d,) for d in LOW_PRECISION},
            {_BF16: 17, _FP16: 23, _E4M3: 9, _E5M2: 7},
            join,
            split,
            split_by_chance,
        ),
        Storage(
            "mcf3",
            {d: (d, d) for d in LOW_PRECISION},
            {_BF16: 24, _FP16: 24, _E4M3: 14, _E5M2: 11},
            join,
            split3,
        ),
        Storage(
            "remainder16", {_BF16: (torch.int16,)}, {_BF16: 24}, join_remainder16, split_remainder16
        ),
        Storage(
            "ulp8",
            {_BF16: (torch.int8,), _FP16: (torch.int8,)},
            {_BF16: 16, _FP16: 19},
            join_ulp8,
            split_ulp8,
            round_ulp8,
        ),
        Storage(
            "ulp4",
            {_BF16: (torch.int8,), _FP16: (torch.int8,)},
            {_BF16: 12, _FP16: 15},
            join_ulp8,
            split_ulp4,
            round_ulp4,
            by_chance=True,
            packed=True,
        ),
        Storage("double_single", {_FP32: (_FP32,)}, {_FP32: 49}, join, split),
        Storage(
            "sr",
            {d: () for d in LOW_PRECISION},
            {_BF16: 8, _FP16: 11, _E4M3: 4, _E5M2: 3},
            join_alone,
            split_alone,
            round_alone,
            by_chance=True,
        ),
    )
}
"""name -> storage. `mcf2` is the paper's: hi and lo in one dtype, about 2p + 1 bits. `remainder16`
is that of Transformer Engine and apex, `ulp8` as large as FlashOptim's, `ulp4` the upper half of
its bits, rounded by chance. `double_single` is mcf2 of fp32 under the name that it has there, so
that fp32 states are left alone unless it is asked for. `sr` is plain stochastic rounding."""

TRANSIENT = {
    wide: Storage(
        f"exact in {str(wide).removeprefix('torch.')}",
        {d: (wide,) for d in (_BF16, _FP16, _FP32) if d.itemsize < wide.itemsize},
        {},
        join_exact,
        split_exact,
    )
    for wide in (_FP32, torch.float64)
}
"""wide dtype -> the layout of values that live for a part of a step: all of the wide value, in
residuals of that dtype. Compilers vectorize it, which they do not all do with int16."""

_LAYOUTS = {**STORAGES, **{s.name: s for s in TRANSIENT.values()}}

EXPANSIONS = {"mcf2": 2, "mcf3": 3}
"""Storage -> of how many floats of the state's own dtype it is the sum; for these, and no others,
there is arithmetic `eft`."""

ALIASES = {"fp32": "remainder16", "bf16x2": "mcf2"}
"""Other names of storages, which say what a bf16 state is with its residual."""

Choice = str | tuple[tuple[str, str], ...]
"""A storage, `auto`, or pairs of a pattern for names of states and one of these."""


class Unnamed(str):
    """The storage of states without residuals where none is named; others go on in their own."""

    def __repr__(self) -> str:
        return f"{super().__repr__()} (by default)"


class Initial(tuple[tuple[str, str], ...]):
    """Patterns with the storages that states begin in: those with residuals go on in their own."""


DEFAULT = Unnamed("auto")
AUTO = {_BF16: "remainder16", **dict.fromkeys((_FP16, *FP8), "mcf2")}
"""dtype -> what keeps most of a state for as many bytes again; fp32 states stay as they are."""
FINEST = {_BF16: "remainder16", **dict.fromkeys((_FP16, *FP8), "mcf3"), _FP32: "double_single"}
"""dtype -> what keeps most of a state."""


def chosen(choice: Choice, name: StateName, dtype: torch.dtype, *, scalar: bool = False) -> str:
    """Return the storage for a state; empty for one that is left as it is.

    That is `auto` for one that no pattern fits. Patterns, as in fnmatch, are for the kind of the
    state (`param`, `exp_avg_sq`) or its name. For a state of low precision it may be one that
    cannot hold it: see `check_compensable`. Such a storage leaves states of other dtypes alone.

    Args:
        choice: what the user asks for.
        name: of the state.
        dtype: of the state.
        scalar: whether it is 0-d. A number in fp32 is mostly a count of steps, exact up to 2^24,
            and is left alone unless it is a parameter or a pattern other than `*` fits it.
    """
    pattern = "*"
    if not isinstance(choice, str):
        fitting = (c for c in choice if fits(c[0], name))
        pattern, choice = next(fitting, ("*", "auto"))
    storage = AUTO.get(dtype, "") if choice == "auto" else str(choice)
    if dtype in LOW_PRECISION:
        return storage
    held = storage in STORAGES and dtype in STORAGES[storage].residuals
    counts = scalar and not name.is_param and pattern == "*"
    return storage if held and not counts else ""


def named_in(choice: Choice) -> list[str]:
    """Return the names in a choice, of storages or `auto`."""
    return [choice] if isinstance(choice, str) else [name for _, name in choice]


def is_alone(storage: str) -> bool:
    """Return True if a name is that of a storage without residuals; "" and `auto` are of none."""
    return storage in STORAGES and STORAGES[storage].alone


def is_by_chance(storage: str, *, asked: bool = False) -> bool:
    """Return True if a name is that of a storage that is rounded by chance, where that is asked for
    or in any case."""
    kind = STORAGES.get(storage)
    return kind is not None and (kind.by_chance or (asked and kind.split_by_chance is not None))


def fits(pattern: str, name: StateName) -> bool:
    """Return True if a pattern, as in fnmatch, is one for a state by its kind or its name."""
    return fnmatchcase(name.kind, pattern) or fnmatchcase(str(name), pattern)


def compensable_dtypes(choice: Choice) -> tuple[torch.dtype, ...]:
    """Return the dtypes of states that may get residuals: fp32 where a storage for it is named."""
    known = [STORAGES[name] for name in named_in(choice) if name in STORAGES]
    held = {d: None for storage in known for d in storage.residuals}
    return (*LOW_PRECISION, *(d for d in held if d not in LOW_PRECISION))


def transforms(dtype: torch.dtype, storage: str) -> bool:
    """Return True if there are error-free transformations for expansions that are so laid out."""
    return storage in EXPANSIONS and dtype not in FP8


def join_in(dtype: torch.dtype, storage: str, hi: Tensor, *lows: Tensor) -> Tensor:
    """Return the value of an expansion in a dtype, the wide one of hi or float64.

    The words of an error-free transformation may be further apart than fp32 holds; in float64 their
    sum is rounded at 2^-53.
    """
    if dtype is WIDER[hi.dtype] or not transforms(hi.dtype, storage):
        kind = _LAYOUTS[storage]
        return kind.join(hi, *kind.words(hi, lows)).to(dtype)
    return added(dtype, hi, *lows)


def split_into(storage: str, x: Tensor, dtype: torch.dtype) -> Components:
    """Return what memory holds of x, in the wide dtype or float64: hi of dtype, and residuals."""
    if storage in STORAGES and not transforms(dtype, storage):
        x = x.to(WIDER[dtype])
    hi, *lows = _LAYOUTS[storage].split(x, dtype)
    return hi, *_LAYOUTS[storage].stored(lows)


def split_by_chance_into(
    storage: str, x: Tensor, dtype: torch.dtype, place: Place | None, seed: int, draw: int = 0
) -> Components:
    """Return what memory holds of a value in a storage that is rounded by chance.

    Args:
        storage: its name.
        x: fp32.
        dtype: of low precision, one that the storage can hold.
        place: that of x in the whole tensor, if it is a shard.
        seed: of the rounding, with the number of the draw.
        draw: that number.
    """
    (key,) = Seeds(seed, [x.device]).draw(draw)
    return STORAGES[storage].draw(x, dtype, key, place)


def rounds_residuals(storage: str, dtype: torch.dtype) -> bool:
    """Return True if a storage holds a value x as RN(x) and RN(x - RN(x)), both of dtype."""
    return _LAYOUTS[storage].split is split and dtype not in FP8


def kept(dtype: torch.dtype, storage: str = "") -> float:
    """Return the smallest change, relative to a state, that a storage does not round away.

    That is half a unit in the last place of the whole: 2^-8 for plain bf16 (no storage), 2^-24 for
    remainder16. Smaller ones are lost, or count as one, as it happens.
    """
    return 2.0 ** -STORAGES[storage].precision[dtype] if storage else torch.finfo(dtype).eps / 2


def refusal(dtype: torch.dtype, storage: str, name: str) -> str:
    """Return the reason why a storage cannot hold a state of this dtype and name, or nothing."""
    if dtype in STORAGES[storage].residuals:
        return ""
    others = [repr(s.name) for s in STORAGES.values() if dtype in s.residuals]
    return (
        f"storage {storage!r} cannot hold {name}, which is {str(dtype).removeprefix('torch.')};"
        f" {', '.join(others) or 'no storage'} can"
    )


def check_compensable(dtype: torch.dtype, storage: str, name: str) -> None:
    """Raise StorageError unless a storage can hold the state of this dtype and name."""
    if why := refusal(dtype, storage, name):
        raise StorageError(why)


def value_in_float64(storage: str, hi: Tensor, components: Sequence[Tensor]) -> Tensor:
    """Return the value of a tensor and of the components of its residual.

    Args:
        storage: how they are laid out; "" if there are none.
        hi: the tensor.
        components: as memory holds them, or of its shape each.
    """
    if components and (hi.dtype in FP8 or any(c.dtype != hi.dtype for c in components)):
        return join_in(torch.float64, storage, hi, *components)
    return functools.reduce(torch.add, components, hi.to(torch.float64, copy=True))
