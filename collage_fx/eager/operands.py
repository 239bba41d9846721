"""What the operands of an operation are, where some have low words: expansions, joins, forms."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from collage_fx.eager.memory_map import MemoryMap, MemoryRecord
from collage_fx.hooks.dynamo_errors import Failures
from collage_fx.passes.analysis.affine import CURVED, MUCH, bound
from collage_fx.passes.ir.program import LOW_PRECISION, Arithmetic, Settings
from collage_fx.passes.rewrite.interpreter import (
    Call,
    Forms,
    Operation,
    Traced,
    expansion_of,
    supports,
)
from collage_fx.runtime.expansion.eft import WIDER
from collage_fx.runtime.expansion.stochastic import Seeds
from collage_fx.runtime.residuals.memory import has_memory
from collage_fx.runtime.residuals.store import STORE, next_draw, version
from collage_fx.runtime.storage.registry import (
    EXPANSIONS,
    FINEST,
    STORAGES,
    Choice,
    Storage,
    Unnamed,
    compensable_dtypes,
    layout_of,
    whole,
)

aten = torch.ops.aten

Lows: TypeAlias = tuple[Tensor, ...]
"""The residuals of a tensor: its low words."""

Whole: TypeAlias = tuple[Tensor, Lows | None]
"""A high word and its low words, if it has some."""

COPIES = {aten._to_copy.default, aten.clone.default, aten.copy.default}


@dataclass(eq=False)
class Write:
    """What a step does to one tensor that it knows."""

    tensor: Tensor
    record: MemoryRecord
    storage: Storage
    version: int = 0
    """The version of the tensor when the last write was seen; that write may still add one."""
    address: int = 0
    wrote: bool = False
    """Whether the engine wrote the present value."""
    eager: bool = False
    """Whether the engine has written it in this step."""

    def begin(self) -> None:
        """Begin a step."""
        self.version, self.address = version(self.tensor), self.tensor.data_ptr()
        self.wrote = self.eager = False

    @property
    def accounted(self) -> bool:
        """Whether every change of the tensor was seen."""
        return version(self.tensor) - self.version <= self.wrote


class Watcher(Protocol):
    """The side of the supervisor that the engine sees."""

    failures: Failures
    returned: set[int]
    """The ids of what compiled graphs have returned in this step."""

    def warn(self, message: str) -> None:
        """Warn of something, once."""

    def wake(self) -> None:
        """Find the states: called before the first operation of a step that began asleep."""

    def enlist(self) -> None:
        """Take up new states: called when a 16-bit tensor is written that is not known."""

    def not_given(self, tensor: Tensor) -> None:
        """Called before a write to a 16-bit tensor that is none of the states."""

    def prepare(self, write: Write) -> None:
        """Called before the first write to a state in a step."""

    def missing(self, name: str, states: list[Write]) -> None:
        """Called before an operation without a rule on these states."""

    def chained(self, name: str) -> None:
        """Called when a state gets a value that a graph returned."""


Missing: TypeAlias = Callable[[str, "list[Write]"], None]
"""Told of an operation without a rule, before it changes anything, and of the states it is on."""


class Operands:
    """Looks up operands in the map of memory, and does operations on them by the rules."""

    def __init__(
        self,
        memory: MemoryMap,
        writes: dict[MemoryRecord, Write],
        settings: Settings,
        seed: int,
        missing: Missing,
    ) -> None:
        self.memory = memory
        self.writes = writes
        known = settings.storage in EXPANSIONS
        self.arithmetic: Arithmetic = settings.arithmetic if known else "wide"
        self.missing = missing
        self.by_chance = settings.stochastic_rounding
        self.seed = seed
        # By chance only once, where a state is stored.
        self.storages = {
            d: STORAGES[FINEST[d]] if self.by_chance else _working(settings.storage, d)
            for d in compensable_dtypes(settings.storage)
        }
        """dtype that states may be compensated in -> how results on the way are kept; None if the
        states' storage has no such."""
        self.choice = settings.storage

    def keep_all_of(self, storage: str) -> None:
        """Lose nothing of a state that goes on in a storage which nobody has named."""
        if isinstance(self.choice, Unnamed) and storage != self.choice:
            self.arithmetic, self.choice = "wide", "auto"
            self.storages = {d: STORAGES[FINEST[d]] for d in self.storages}

    def split(
        self, x: Tensor, storage: Storage | None, dtype: torch.dtype, write: Write | None = None
    ) -> Whole:
        """Return a wide value as high word and low words; without, if the storage has none.

        With a state that gets it, it is rounded by chance where that is asked for.
        """
        if storage is None or dtype not in storage.residuals:
            return x.to(dtype), None
        x = x.to(WIDER[dtype])
        if self.by_chance and write is not None and storage.split_by_chance is not None:
            residual = STORE.get(write.tensor)
            draw = next_draw([residual] if residual is not None else [])
            (seed,) = Seeds(self.seed, [x.device]).draw(draw)
            hi, *lows = storage.split_by_chance(x, dtype, seed)
        else:
            hi, *lows = storage.split(x, dtype)
        return hi, tuple(lows)

    def kept(
        self,
        hi: Tensor,
        lows: Lows | None,
        storage: Storage | None,
        write: Write | None = None,
    ) -> Whole:
        """Return an expansion in another storage; as it is, if it is in that one already."""
        if lows is None or layout_of(hi, lows) is storage:
            return hi, lows
        return self.split(whole(hi, lows), storage, hi.dtype, write)

    def states(self, tensors: Iterable[Tensor]) -> list[Write]:
        """Return the states among tensors, or from which they were computed as far as is known."""
        found: dict[Write, None] = {}
        for record in filter(None, map(self.memory.find, tensors)):
            if record in self.writes:
                found[self.writes[record]] = None
            found.update(dict.fromkeys(record.forms))
        return list(found)

    def by_rule(self, op: Any, dtype: torch.dtype, args: Any, kwargs: Any) -> Traced:
        """Do a functional operation by its rule; dtype is that of the result."""
        tensors = [a for a in args if isinstance(a, Tensor)]
        shape = torch.broadcast_shapes(*(t.shape for t in tensors))
        out = torch.empty(shape, dtype=dtype, device="meta")
        made: dict[int, Traced] = {}
        operands = tree_map(lambda a: self.operand(a, made, dtype), (args, kwargs))
        storage = self.storages[dtype]
        operation = Operation(dtype, self.arithmetic, storage.name if storage else "mcf2")
        result = operation.run(Call(op, *operands), out)
        for name in operation.without_rule:
            self.missing(name, self.states(tensors_of((args, kwargs))))
        return result

    def read_joined(
        self, func: Any, dtype: torch.dtype, tensors: list[Tensor], args: Any, kwargs: Any
    ) -> Any:
        """Do an operation without a rule on joined values, and split its results."""
        forms = {k: CURVED for t in tensors if (s := self.memory.find(t)) for k in s.forms}
        wide: dict[int, Tensor] = {}
        widened = tree_map(lambda a: self.widened(a, wide), (args, kwargs))
        results = func(*widened[0], **widened[1])
        shapes = {t.shape for t in tensors}
        if any(r.shape in shapes for r in tensors_of(results)):  # and no norm, say, of a state
            self.missing(str(func), self.states(tensors))

        def narrowed(result: Any) -> Any:
            if not isinstance(result, Tensor) or result.dtype not in (WIDER[dtype], dtype):
                return result
            if not has_memory(result):  # a sparse one has no low word beside it
                return result.to(dtype)
            if kwargs.get("dtype") not in (None, dtype):
                return result
            hi, lows = result, None
            if result.dtype != dtype:
                hi, lows = self.split(result, self.storages[dtype], dtype)
            self.memory.add(hi, lows, forms)
            return hi

        return tree_map(narrowed, results)

    def operand(self, x: Any, made: dict[int, Traced], dtype: torch.dtype | None = None) -> Any:
        """Return what stands for x, the same for the same tensor.

        An expansion is one beside results of its own dtype, and its wide value beside others.
        """
        if not isinstance(x, Tensor):
            return x
        if id(x) not in made:
            record = self.memory.find(x)
            lows = record.low(x) if record else None
            dense = x.to_dense() if x.is_sparse else x
            if lows is not None and dtype not in (None, x.dtype):
                hi, lows = whole(dense, lows), None
            else:
                hi, lows = self.kept(dense, lows, self.storages.get(x.dtype))
            made[id(x)] = expansion_of(hi, lows, dict(record.forms) if record else None)
        return made[id(x)]

    def component(self, x: Any, i: int) -> Any:
        """Return component i of a floating tensor, 0 being the high word; else x itself."""
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        storage = self.storages.get(x.dtype)
        record = self.memory.find(x)
        hi, lows = self.kept(x, record.low(x) if record else None, storage)
        if i == 0 or storage is None:
            return hi
        if lows is None:
            return torch.zeros_like(hi, dtype=storage.residuals[x.dtype][i - 1])
        return lows[i - 1]

    def joined(self, x: Any, widest: int = 8) -> Any:
        """Return the value of x with its low word, in the wide dtype; x itself if it has none.

        Also x itself where that dtype has more than `widest` bytes, and no result would have it.
        """
        if isinstance(x, list | tuple):
            return type(x)(self.joined(a, widest) for a in x)
        record = self.memory.find(x) if isinstance(x, Tensor) else None
        lows = record.low(x) if record else None
        return x if lows is None or WIDER[x.dtype].itemsize > widest else whole(x, lows)

    def forms(self, op: Any, tensors: list[Tensor], args: Any, kwargs: Any) -> Forms:
        """Return how the result of a plain operation depends on the states that are followed."""
        records = [s for t in tensors if (s := self.memory.find(t))]
        if not any(s.forms for s in records):
            return {}
        if op in COPIES:
            return dict(records[0].forms)
        if supports(op):
            made: dict[int, Traced] = {}
            operands = tree_map(lambda a: self._meta(a, made), (args, kwargs))
            shape = torch.broadcast_shapes(*(t.shape for t in tensors))
            dtype = result_dtype(tensors)
            out = torch.empty(shape, dtype=dtype, device="meta")
            return Operation(torch.bfloat16, self.arithmetic).run(Call(op, *operands), out).forms
        return {key: CURVED for s in records for key in s.forms}

    def _meta(self, x: Any, made: dict[int, Traced]) -> Any:
        if not isinstance(x, Tensor):
            return x
        if id(x) not in made:
            record = self.memory.find(x)
            made[id(x)] = Traced(x.to("meta"), None, dict(record.forms) if record else None)
        return made[id(x)]

    def expanded(self, tensors: list[Tensor]) -> bool:
        """Tell whether one of these has a low word."""
        return any((s := self.memory.find(t)) and s.lows is not None for t in tensors)

    def whole(self, dtype: torch.dtype, operands: Iterable[Tensor]) -> bool:
        """Tell whether a result of this dtype has the value of an expansion in it, being wide."""
        if dtype in LOW_PRECISION:
            return False
        records = filter(None, map(self.memory.find, operands))
        return any(s.whole or (s.lows is not None and s.dtype != dtype) for s in records)

    def narrows(self, x: Tensor, kwargs: dict[str, Any]) -> bool:
        """Tell whether x, to be converted, is a wide tensor that carries some of a state."""
        to = kwargs.get("dtype")
        wide = to in self.storages and x.dtype not in LOW_PRECISION and x.dtype != to
        return wide and self.memory.find(x) is not None

    def narrowed(self, x: Tensor, kwargs: dict[str, Any]) -> Tensor:
        """Convert such an x as kwargs say, with what the rounding takes away as its low word."""
        record = self.memory.find(x)
        assert record is not None
        hi: Tensor = aten._to_copy.default(x, **kwargs)
        nearest, lows = self.split(x.to(WIDER[hi.dtype]), self.storages[hi.dtype], hi.dtype)
        if lows is not None:
            hi.copy_(nearest)
            lows = tuple(torch.empty_like(hi, dtype=lo.dtype).copy_(lo) for lo in lows)
        self.memory.add(hi, lows, record.forms)
        return hi

    def widened(self, x: Any, wide: dict[int, Tensor]) -> Any:
        """Return x, if states may be of its dtype, in the wide dtype and in memory of its own.

        A number in fp32 stays as it is: the step count of a fused kernel has to be one.
        """
        if not isinstance(x, Tensor) or x.dtype not in self.storages:
            return x
        if x.dtype not in LOW_PRECISION and not x.dim() and not self.expanded([x]):
            return x
        if id(x) not in wide:
            joined = self.joined(x)
            wide[id(x)] = joined.to(WIDER[x.dtype])
        return wide[id(x)]

    def storage_dtype(self, tensors: list[Tensor]) -> torch.dtype | None:
        """Return the dtype of the expansions among tensors; None if there is none, or several."""
        dtypes = {t.dtype for t in tensors if (s := self.memory.find(t)) and s.lows is not None}
        return dtypes.pop() if len(dtypes) == 1 else None


def _working(choice: Choice, dtype: torch.dtype) -> Storage | None:
    """Return how results of a dtype are kept: as all states, or, if these differ, the finest."""
    name = choice if choice in STORAGES else FINEST[dtype]
    storage = STORAGES[str(name)]
    return storage if dtype in storage.residuals else None


def lows_of(result: Traced) -> Lows | None:
    """Return the low words of a result, if it is an expansion."""
    if not isinstance(result.expanded, tuple):
        return None
    return tuple(lo.meta["val"] for lo in result.expanded[1:])


def takes_over(write: Write, forms: Forms) -> bool:
    """Tell whether a state is written with the value of another, or much of it."""
    return write not in forms or any(
        origin is not write and form.carries and (form.b == "nonlinear" or bound(form.a) >= MUCH)
        for origin, form in forms.items()
    )


def tensors_of(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors among nested arguments."""
    return (x for x in tree_leaves(tree) if isinstance(x, Tensor))


def result_dtype(tensors: list[Tensor]) -> torch.dtype:
    """Return the dtype that PyTorch's promotion gives tensors."""
    result = tensors[0]
    dtype = result.dtype
    for other in tensors[1:]:
        dtype = torch.promote_types(dtype, other.dtype) if other.dim() else dtype
    return dtype
