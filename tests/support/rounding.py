"""The model of a compensated run: float64 with the roundings that it should have; see `oracle`."""

import contextlib
import re
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from draws import drawn
from programs import Program
from runs import LOW_BITS, SMALLEST, Run, kind_of, module_of, plain, tensors, unwrapped
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map


class Rounding(TorchDispatchMode):
    """Rounds what operations on float64 tensors give to the bits that it would have."""

    def __init__(self, bits: dict[str, int], arithmetic: int, dtypes: set[str], seed: int):
        super().__init__()
        self.bits, self.arithmetic = bits, arithmetic
        narrowest = min(dtypes, key=lambda dtype: LOW_BITS[dtype])
        self.low = LOW_BITS[narrowest]
        self.dtype: torch.dtype = getattr(torch, narrowest)
        self.smallest = max(SMALLEST[dtype] for dtype in dtypes)
        self.states: dict[int, tuple[str, Tensor]] = {}
        self.by_chance: set[str] = set()
        """The kinds of states that are rounded by chance always."""
        self.exact = 0
        self.dithered = bool(seed % 2)
        """True if results and states without residuals are rounded by chance too."""
        self.generator = torch.Generator().manual_seed(seed)

    def keep(self, name: str, x: Any) -> Any:
        """Note that a tensor is a state, and return it."""
        if isinstance(x, Tensor):
            self.states[x.untyped_storage()._cdata] = (name, x.detach())
        return x

    @contextlib.contextmanager
    def exactly(self) -> Iterator[None]:
        """Round nothing but updates of states."""
        self.exact += 1
        yield
        self.exact -= 1

    def _noise(self, x: Tensor) -> Tensor:
        return torch.rand(x.shape, generator=self.generator, dtype=x.dtype) - 0.5

    def rounded(self, x: Tensor, bits: int, noise: bool = False) -> Tensor:
        """Return x rounded to some bits, or after an error of half a unit at random."""
        unit = torch.ldexp(torch.ones_like(x), torch.frexp(x)[1] - bits)
        unit = unit.clamp(min=2.0**self.smallest)
        near = torch.round(x / unit + (self._noise(x) if noise else 0)) * unit
        return torch.where(x.isfinite(), near, x)

    def _updated(self, func: Any, x: Tensor, old: Tensor, scales: bool) -> None:
        """Round what has been written to a tensor."""
        if x.dtype != torch.float64:
            return
        name, _ = self.states.get(x.untyped_storage()._cdata, ("", x))
        bits = self.bits.get(name, self.low)
        if not name:
            if not self.exact:
                x.copy_(self.rounded(x, self._temporary(func, x, [])))
            return
        if bits > self.low and not scales:
            step = (x - old) * (1 + self._noise(x) * 2.0 ** (1 - self.arithmetic))
            x.copy_(torch.where(step.isfinite(), old + step, x))
        noise = bits > self.low or self.dithered or kind_of(name) in self.by_chance
        x.copy_(self.rounded(x, bits, noise=noise))

    def _temporary(self, func: Any, x: Tensor, operands: list[Any]) -> int:
        """Return the bits of a result that is no state; of numbers from numbers, those of fp32."""
        if str(func).split(".")[1] in _UNKNOWN_TO_SLICES:
            return self.low
        given = [a for a in operands if isinstance(a, Tensor)]
        return 24 if given and not any(a.dim() for a in given) and not x.dim() else self.arithmetic

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        written = [
            x
            for i, a in enumerate(func._schema.arguments)
            if a.alias_info is not None and a.alias_info.is_write
            for x in tree_leaves(args[i] if i < len(args) else kwargs.get(a.name))
        ]
        old = [x.clone() for x in written]
        result = drawn(func, args, kwargs, self.dtype)
        if written:
            scales = any(word in str(func) for word in ("mul_", "div_", "zero_", "fill_"))
            scales &= "addc" not in str(func)
            for x, before in zip(written, old, strict=True):
                self._updated(func, x, before, scales)
            return result
        if self.exact or func.is_view or str(func).split(".")[1] in _COPIES:
            return result
        operands = tree_leaves((args, kwargs))

        def one(x: Any) -> Any:
            if isinstance(x, Tensor) and x.dtype == torch.float64:
                return self.rounded(x, self._temporary(func, x, operands), noise=self.dithered)
            return x

        return tree_map(one, result)


_UNKNOWN_TO_SLICES = {"addmm", "bmm", "dot", "index_add", "index_add_", "mm", "mv"}
"""Operations whose results graphs round to the dtype in arithmetic `wide` too, if no states."""
_COPIES = {"clone", "_to_copy", "zeros_like", "empty_like", "full_like", "ones_like", "detach"}


def modelled(program: Program, run: Run, bits: dict[str, int], seed: int) -> dict[str, Tensor]:
    """Run a program in float64 with the roundings that its compensated run should have.

    Args:
        program: the program.
        run: how it was run.
        bits: those of each state, by its name and parameter.
        seed: of the random errors.
    """
    found: dict[str, Tensor] = {}
    # Parameters of another dtype have nothing to do with each other.
    for dtype in sorted({*program.dtypes} or {program.dtype}):
        values = _modelled(program, run, bits, seed, dtype)
        found |= {k: x for k, x in values.items() if program.dtype_of(k) == dtype}
    return found


def _modelled(
    program: Program, run: Run, bits: dict[str, int], seed: int, dtype: str
) -> dict[str, Tensor]:
    """Run it with the roundings of one dtype."""
    options = dict(program.options)
    # What is computed of a state that was cast to LOW has its bits, beside any parameter.
    dtypes = {dtype, program.dtype} if program.casts_low else {dtype}
    low = min(LOW_BITS[dtype] for dtype in dtypes)
    # Graphs where nothing is compensated, as are those of first steps that make states, and what is
    # between a norm and an update compute in the dtype. A sum that enters a state reads roundings,
    # and so does what puts parts together.
    begins_anew = program.resumed or program.by_turns or program.events or program.joins
    rounded = run.joined > 1 or bool(begins_anew) or "norm" in program.statements
    reads = r"st\[.*\.(mean|sum)\(|torch\.cat\("
    rounded = rounded or re.search(reads, program.statements) is not None
    wide = options.get("arithmetic") == "wide" and not rounded
    late = program.way == "string" and not program.in_init
    first = 24 if wide and not run.joined and not late else low
    # The first step knows states by their kind only.
    kinds = {kind_of(name): n for name, n in sorted(bits.items(), key=lambda item: item[1])}
    mode = Rounding(kinds | bits, first, dtypes, seed)
    mode.by_chance = set(map(kind_of, run.by_chance))
    numbers = contextlib.nullcontext() if program.way == "engine" else _traced_numbers()

    def compiled(x: Any) -> Any:
        def states(args: tuple[Any, ...]) -> dict[str, Any]:
            if args:  # a function
                params, rows = args[0], args[2]
            else:
                params = _in_turn(x, program)
                rows = [x.state[p] for p in params]
            pairs = [{"p": p, **row} for p, row in zip(params, rows, strict=True)]
            return {f"{k}{i}": x for i, pair in enumerate(pairs) for k, x in pair.items()}

        def step(*args: Any) -> Any:
            before = states(args)
            places = {name: place_of(mode.keep(name, value)) for name, value in before.items()}
            # A step of which the graph makes the states has these in 16 bits at once.
            makes = late and all(kind_of(name) == "p" for name in before)
            module.EXACT = contextlib.nullcontext() if makes else _Exactly(mode)  # type: ignore[attr-defined]
            with mode:
                result = plain(x)(*args)
            mode.arithmetic = 24 if wide else low
            for name, value in states(args).items():
                if not isinstance(value, Tensor) or kind_of(name) == "k":
                    continue
                if name not in places and late:
                    value.copy_(mode.rounded(value, low))
                elif name in places and places[name] != place_of(value):  # replaced
                    value.data.copy_(mode.rounded(value.detach(), mode.bits.get(name, low)))
            return result

        return step

    with numbers, module_of(program, model=True) as module:
        module.F32 = torch.float64  # type: ignore[attr-defined]
        unwrapped(module)
        module.HIGH = lambda x: mode.rounded(x, low)  # type: ignore[attr-defined]
        module.EVENT = _Between(mode)  # type: ignore[attr-defined]
        module.STATE = (lambda _, x: x) if late else mode.keep  # type: ignore[attr-defined]
        return tensors(module.train(torch.float64, compiled))


@contextlib.contextmanager
def _traced_numbers() -> Iterator[None]:
    """Let torch.optim compute with 0-d fp32 tensors what it computes with floats when not traced.

    A bias correction, 1 - beta**step, of 0.001 is off by 1.3e-8 then: docs/stock-defects.md.
    """
    traced = {"_get_value": lambda x: x, "_stack_if_compiling": torch.stack}
    with contextlib.ExitStack() as stack:
        for name, module in sys.modules.items():
            for function, double in traced.items() if name.startswith("torch.optim.") else ():
                if hasattr(module, function):
                    stack.enter_context(mock.patch.object(module, function, double))
        yield


class _Exactly:
    def __init__(self, mode: Rounding) -> None:
        self.mode = mode

    def __enter__(self) -> None:
        self.mode.exact += 1

    def __exit__(self, *_: object) -> None:
        self.mode.exact -= 1


class _Between:
    """Context for what is done between steps: on whole values."""

    def __init__(self, mode: Rounding) -> None:
        self.mode = mode

    def __enter__(self) -> None:
        self.arithmetic, self.mode.arithmetic = self.mode.arithmetic, 24
        self.mode.__enter__()

    def __exit__(self, *raised: Any) -> None:
        self.mode.__exit__(*raised)
        self.mode.arithmetic = self.arithmetic


def place_of(x: Any) -> int | None:
    """Return which memory a tensor has."""
    return x.untyped_storage()._cdata if isinstance(x, Tensor) else None


def _in_turn(optimizer: Any, program: Program) -> list[Tensor]:
    """Return the parameters of a program, of which the first groups take them in turn, and later
    ones have joined."""
    groups = [group["params"] for group in optimizer.param_groups[program.frozen :]]
    first = len(program.rates)
    count = sum(map(len, groups[:first]))
    params = [groups[i % first][i // first] for i in range(count)]
    return params + [p for group in groups[first:] for p in group]
