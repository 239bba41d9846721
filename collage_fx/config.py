"""The user's configuration: frozen and validated."""

import math
import re
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from torch import Tensor
from torch.optim import Optimizer

from collage_fx.passes.ir.program import OPTIONAL, Arithmetic, Level, OnUnsupported, Settings
from collage_fx.runtime.errors import OptionError, meant
from collage_fx.runtime.storage.registry import (
    ALIASES,
    DEFAULT,
    STORAGES,
    Choice,
    Initial,
    Unnamed,
    is_by_chance,
)

_ALLOWED: dict[str, tuple[Any, ...]] = {
    "level": get_args(Level),
    "arithmetic": get_args(Arithmetic),
    "on_unsupported": get_args(OnUnsupported),
    "multi_tensor": (True, False, "auto"),
    "stochastic_rounding": (True, False),
    "record": (True, False, "auto"),
    "error_if_nonfinite": (True, False),
    "zero_grads": (True, False),
    "changed": (True, False),
}


def _choice(storage: Any) -> Choice:
    """Return a choice of storages as it is kept: a name, or pairs of pattern and name."""
    known = ("auto", *STORAGES, *ALIASES)
    listed = storage.items() if isinstance(storage, Mapping) else storage
    if isinstance(storage, str):
        listed = [("*", storage)]
    elif not isinstance(listed, Iterable):
        raise OptionError(f"storage={storage!r} is neither a name nor patterns with names")
    pairs = tuple(tuple(pair) if isinstance(pair, Iterable) else (pair,) for pair in listed)
    for pair in pairs:
        if len(pair) != 2 or not isinstance(pair[0], str) or pair[1] not in known:
            name = pair[-1] if pair and isinstance(pair[-1], str) else ""
            what = (
                ""
                if isinstance(storage, str)
                else f": {pair!r} is no pattern for states with a storage"
            )
            raise OptionError(
                f"storage={storage!r}{what}{meant(name, known) or ';'} there are "
                f"{', '.join(map(repr, known))}"
            )
    if isinstance(storage, str):
        return ALIASES.get(storage, storage)
    return tuple((pattern, ALIASES.get(name, name)) for pattern, name in pairs)


def _references(optimizers: Any) -> tuple[weakref.ref[Optimizer], ...]:
    """Return weak references to optimizers, which may be such references already."""
    given = (optimizers,) if isinstance(optimizers, Optimizer) else optimizers
    found = tuple(given) if isinstance(given, Iterable) else (given,)
    alive = [one() if isinstance(one, weakref.ref) else one for one in found]
    if not all(isinstance(one, Optimizer | None) for one in alive) or given is None:
        raise OptionError(f"clip_over={optimizers!r} is not a sequence of optimizers")
    return tuple(weakref.ref(one) for one in alive if one is not None)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _names(option: str, value: Any) -> tuple[str, ...]:
    names = (value,) if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not all(isinstance(n, str) for n in names):
        raise OptionError(f"{option}={value!r} is not a sequence of names or patterns")
    return tuple(names)


_UNITS = {
    f"{prefix}{i}B": (1024 if i else 1000) ** power
    for power, prefix in enumerate(("k", "M", "G", "T"), 1)
    for i in ("", "i")
} | {"B": 1, "KB": 1000, "KiB": 1024}


def checked_budget(budget: Any) -> float | str:
    """Return a budget as it was given.

    Raises:
        OptionError: it is no number above zero, nor a text such as `40GiB`.
    """
    if isinstance(budget, str) and total_bytes(budget) > 0:
        return budget
    if _is_number(budget) and 0 < budget < math.inf:
        return float(budget)
    raise OptionError(
        f"budget={budget!r} is neither bytes for each element of the parameters, such as 9.0, nor "
        "bytes of this process, such as '40GiB'"
    )


def total_bytes(budget: str) -> float:
    """Return the bytes of a text such as `40GiB`; zero if it is none."""
    found = re.fullmatch(r"\s*(\d+\.?\d*)\s*([A-Za-z]*)\s*", budget)
    return float(found[1]) * _UNITS.get(found[2], 0) if found else 0.0


@dataclass(frozen=True)
class CollageConfig(Settings):
    """Options of `compile`, and of the functions and classes that take the same.

    Raises:
        OptionError: a value that does not exist, or two that exclude each other.

    Examples:
        >>> config = collage_fx.CollageConfig(level="plus", storage="mcf2")
        >>> config.arithmetic
        'eft'
    """

    level: Level = "auto"
    """The states that get residuals: `auto` parameters, and what the analysis finds critical;
    `light` parameters, and what a parameter is computed anew from (`p.copy_(z)`, `p.lerp_(z, 0.9)`;
    where another graph does that, from when that graph is compiled); `plus` also states whose decay
    is up to 16 u from 1 (`auto`: 8 u); `all` every 16-bit state that carries a value on."""
    arithmetic: Arithmetic = None  # type: ignore[assignment]  # it is one when this is made
    """`wide`, the default: the step in fp32 registers, split once at the store. `eft`, the default
    where storage `mcf2` or `mcf3` is named: each operation on the carried path in the state's own
    dtype with its error caught, as in the Collage paper."""
    storage: Choice = DEFAULT
    """The layout of an expansion in memory. `auto` is the default; a state with a residual (master
    weights, a checkpoint) keeps the storage of that residual then. `auto`: the most precise storage
    of as many bytes again, `remainder16` for bf16, `mcf2` for fp16 and fp8. `remainder16`: bf16 and
    the int16 that fp32 has beyond, exactly fp32 in four bytes; `fp32` is another name of it.
    `mcf2`, the paper's, or `bf16x2`: hi and lo in the state's dtype, 17 bits in bf16; the default
    with `arithmetic="eft"` and with `stochastic_rounding=True`. `ulp8`: 8 more bits in an int8.
    `ulp4`: 4 more bits, two elements to a byte, rounded up or down by chance.
    `sr`: no residual; the step is computed in fp32 and each store rounded up or down by chance,
    which keeps small updates on average. `mcf3`: two residuals in the state's dtype.
    `double_single`: hi and lo in fp32, for states of fp32, which are left alone unless it is named.
    Others than `mcf2` and `mcf3` are for arithmetic `wide`, which they imply, as fp8 states do. A
    dict gives each state its own, by patterns (as in fnmatch) for its kind (`param`, `exp_avg_sq`)
    or its name, in order: {"param": "remainder16", "*": "ulp8"}; `auto` for what no pattern fits.
    States of different storages that are updated together are in arithmetic `wide` too."""
    on_unsupported: OnUnsupported = "join"
    """Treatment of an operation on a carried path that has no rule in `eft`: `join` applies it in
    fp32 to the joined value, splits its result, and `explain` lists it; `error` raises
    UnsupportedError, which names operation, state and source line, and nothing is changed."""
    states: tuple[str, ...] = ()
    """Patterns (as in fnmatch) of names of states that may be compensated although no optimizer
    owns them: buffers of modules, and other tensors that a compiled train step updates beside an
    optimizer's states. Names are those that `explain` shows."""
    multi_tensor: bool | Literal["auto"] = "auto"
    """One kernel for a class of parameters (those whose updates are alike but for shapes), run over
    all of them in one call of C++ on a CPU, in one launch of a Triton kernel on a GPU, rather than
    a kernel for each; `auto` on a CPU for any number of them, on a GPU from 8 on."""

    stochastic_rounding: bool = False
    """True to round the last residual of a state up or down by chance, so that updates too
    small for its storage are kept on average, down to the 2^-24 of a value that fp32 keeps, in
    which they are computed; for storages `mcf2` and `ulp8` (`ulp4` and `sr` are so by themselves),
    with arithmetic `wide`, which it implies: `eft` beside it is an error."""
    without: tuple[str, ...] = field(default=(), kw_only=True)
    """Passes that are left out, by name, to find out which one does something: `denominator`,
    `deduplicate`, `escape`, `join`, `moves`, `numbers`, `reductions`, `repeat`, `share`. The page
    on debugging says what each rules out."""
    seed: int = 0
    """Seed of stochastic rounding. Checkpoints hold the number of draws, so that a resumed run
    draws the same."""
    verify: int = 0
    """Number of first steps of an optimizer that are also done as Python does them, on a copy in
    float64, and compared. A compiled graph that fails is named and left to the recorder, its
    step undone. 0 by default, for what the copy takes: 8 bytes for each
    element of parameters, gradients and states. With `collage_fx.compile` of an optimizer only."""

    record: bool | Literal["auto"] = "auto"
    """Treatment of the operations of a step that Dynamo does not trace: see docs/recording.md.
    `"auto"` records them, and the whole of a step in which they write states; `True` records every
    step whole, and Dynamo is not asked; `False` does each operation at once, for what reads the
    data of tensors behind PyTorch's back. With `collage_fx.compile` only."""

    budget: float | str | None = field(default=None, kw_only=True)
    """Bytes for each element of the parameters that they, their states and residuals may take,
    gradients apart, such as 9.0; or the bytes of this process, such as "40GiB". The storage of each
    state of each parameter is then chosen for the least error of the parameters, from how values
    move in the first hundred steps; residuals are rounded by chance. For `storage="auto"`, with
    `collage_fx.compile` of an optimizer only."""

    clip_grad_norm: float | Tensor | None = field(default=None, kw_only=True)
    """Largest norm that the gradients of a step may have, a number or a 0-d tensor that may change:
    in the step they are multiplied by min(1, clip_grad_norm / (norm + 1e-6)), in registers, and
    left in memory as they are. `optimizer.step.grad_norm` is the norm. With `collage_fx.compile` of
    an optimizer only."""
    clip_over: Sequence[Callable[[], Optimizer | None]] = field(
        default=(), kw_only=True, repr=False, compare=False
    )
    """Optimizers whose gradients count in the norm, beside those of the optimizer itself; kept as
    weak references."""
    error_if_nonfinite: bool = field(default=False, kw_only=True)
    """True to wait for the norm, and raise NonFiniteError where it is infinite or a NaN, before
    anything is written. Otherwise the step does what it does with such gradients."""

    zero_grads: bool = field(default=False, kw_only=True)
    """True to overwrite gradients with zeros in the step, where they have just been read, in place
    of `optimizer.zero_grad()`. They are not None then: a parameter that gets no gradient in the
    next backward pass is updated with zeros, so that weight decay and momentum move it. With
    `collage_fx.compile` of an optimizer only."""

    changed: bool = field(default=False, kw_only=True)
    """True to note which elements of parameters steps change, for `collage_fx.take_changes(model)`:
    kernels set a bit for each, an eighth of a byte in memory. With `collage_fx.compile` of an
    optimizer only."""

    def __post_init__(self) -> None:
        self._check_clipping()
        if self.budget is not None:
            self._set_budget()
        if self.stochastic_rounding and self.arithmetic == "eft":
            raise OptionError(
                "stochastic_rounding=True with arithmetic='eft', which rounds each operation to "
                "nearest; leave arithmetic out, or pass arithmetic='wide'"
            )
        self._set_storage()
        for name, allowed in _ALLOWED.items():
            value = getattr(self, name)
            if value not in allowed:
                names = [a for a in allowed if isinstance(a, str)]
                hint = meant(value, names) if isinstance(value, str) else ""
                raise OptionError(
                    f"{name}={value!r} is not one of {', '.join(map(repr, allowed))}{hint}"
                )
        super().__post_init__()
        for name in ("states", "without"):
            object.__setattr__(self, name, _names(name, getattr(self, name)))
        if unknown := set(self.without) - set(OPTIONAL):
            known = ", ".join(map(repr, OPTIONAL))
            raise OptionError(f"without={sorted(unknown)!r}: only {known} can be left out")
        for name in ("seed", "verify"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise OptionError(f"{name}={value!r} is not an integer")
        if self.verify < 0:
            raise OptionError(f"verify={self.verify!r} is no number of steps")
        one = isinstance(self.storage, str) and self.storage in STORAGES
        if self.stochastic_rounding and one and not self.rounds_by_chance(str(self.storage)):
            can = ", ".join(repr(s.name) for s in STORAGES.values() if s.split_by_chance)
            raise OptionError(
                f"stochastic_rounding=True with storage={self.storage!r}, which holds what is "
                f"computed as it is and rounds nothing; it is for {can}"
            )

    def _check_clipping(self) -> None:
        """Raise OptionError for a norm, or optimizers, that there are none of."""
        most = self.clip_grad_norm
        if isinstance(most, Tensor):
            good = not most.dim() and most.is_floating_point()
        else:
            good = most is None or (_is_number(most) and most >= 0)
        if not good:
            raise OptionError(
                f"clip_grad_norm={most!r} is neither a number from 0 on nor a 0-d tensor of one"
            )
        object.__setattr__(self, "clip_over", _references(self.clip_over))
        over = bool(self.clip_over)
        if most is None and (over or self.error_if_nonfinite):
            name = "clip_over" if over else "error_if_nonfinite"
            raise OptionError(f"{name} is for clip_grad_norm, which is not given")

    def _set_budget(self) -> None:
        """Have all states begin in storage `sr`, and what decides on storages set for a budget."""
        object.__setattr__(self, "budget", checked_budget(self.budget))
        free = {"storage": ("auto",), "level": ("auto", "all"), "arithmetic": (None, "wide")}
        for name, allowed in free.items():
            value = getattr(self, name)
            if value not in allowed and not isinstance(value, Initial):
                raise OptionError(
                    f"{name}={value!r} beside budget={self.budget!r}, which chooses the storage of "
                    "each state and computes in arithmetic 'wide'; leave one of them out"
                )
        initial = self.storage if isinstance(self.storage, Initial) else Initial((("*", "sr"),))
        object.__setattr__(self, "storage", initial)
        object.__setattr__(self, "level", "all")
        object.__setattr__(self, "arithmetic", "wide")
        object.__setattr__(self, "stochastic_rounding", True)

    def _set_storage(self) -> None:
        """Choose the storage, and the arithmetic that goes with it, where they are not given."""
        given = self.storage
        if isinstance(given, Initial):
            return
        if isinstance(given, Unnamed):
            paper = self.arithmetic == "eft" or self.stochastic_rounding
            given = Unnamed("mcf2") if paper else DEFAULT
        object.__setattr__(self, "storage", _choice(given))
        if self.arithmetic is None:
            arithmetic = "wide" if self.stochastic_rounding else "eft"
            object.__setattr__(self, "arithmetic", arithmetic)

    def of_gradients(self) -> list[str]:
        """Say what a step does to gradients beside reading them."""
        most, others = self.clip_grad_norm, len(self.clip_over)
        value = "a tensor" if isinstance(most, Tensor) else most
        over = f", and those of {others} optimizers in clip_over in the norm" if others else ""
        said = []
        if most is not None:
            said.append(f"gradients are clipped as they are read: clip_grad_norm={value}{over}")
        if self.zero_grads:
            said.append("gradients are overwritten with zeros as they are read: zero_grads=True")
        return said

    def rounds_by_chance(self, storage: str) -> bool:
        """Return True if the last word of a storage is rounded by chance."""
        return is_by_chance(storage, asked=self.stochastic_rounding)
