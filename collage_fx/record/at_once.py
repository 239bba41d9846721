"""Operations that are not recorded, but done when they are called, on whole values."""

import contextlib
import functools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from collage_fx.passes.ir.graph_memory import draws
from collage_fx.passes.rewrite.op_schema import COLLECTIVE, TURNS, by_name, is_foreach, received
from collage_fx.passes.rewrite.wider import on_wider
from collage_fx.record.notes import Notes
from collage_fx.record.numbers_read import NumbersRead
from collage_fx.runtime.residuals.memory import has_memory
from collage_fx.runtime.trees import tree_leaves, tree_map_only
from collage_fx.segments.low_words import LowWords
from collage_fx.segments.memory import Input
from collage_fx.segments.operations import Operation
from collage_fx.segments.trie import line_of_code, on_one_line

SHARE = 0.1
"""Least share of a step's time for an operation to be named in the report."""
_TAKERS = torch.ops.higher_order
_LOOPS = {
    *(_TAKERS.associative_scan, _TAKERS.map_impl),
    *(_TAKERS.while_loop, _TAKERS.while_loop_stack_output),
}
"""Operators that take functions, and whose kernel for any device is a loop in Python."""
_Join: TypeAlias = Callable[[Tensor], Tensor]
"""Returns the whole value of an operand."""
_ITEM = torch.ops.aten._local_scalar_dense.default
_DISTRIBUTIONS = frozenset(
    {
        *("bernoulli", "binomial", "cauchy", "exponential", "geometric", "log_normal", "normal"),
        *("multinomial", "poisson", "random", "uniform", "_standard_gamma", "_sample_dirichlet"),
    }
)
"""Random operations whose operands are parameters of a distribution, or written; others, such as
dropout, change values."""


@dataclass(eq=False)
class AtOnce:
    """Executor of operations that are done when called, all that they need being there."""

    words: LowWords
    notes: Notes
    """Notes of the step, which learn of random bits."""
    numbers: NumbersRead
    """Numbers that the step reads."""

    def do(self, func: Any, operation: Operation, args: Any, kwargs: Any) -> Any:
        """Do an operation, with what low words its operands have; return what it makes."""
        if self.words.multiplied.storages and operation.kind not in ("view", "metadata"):
            written = {id(t) for t in tensors_in(operation.written_of(args, kwargs), {})}
            read = [t for t in tensors_in(args, kwargs) if id(t) not in written]
            self.words.multiplied.refuse(func, read, lambda: on_one_line(line_of_code()))
        result = self._done(func, operation, args, kwargs)
        if func is _ITEM:
            self.numbers.note(result, args[0])
        return result

    def _done(self, func: Any, operation: Operation, args: Any, kwargs: Any) -> Any:
        if getattr(func, "namespace", "") in COLLECTIVE:
            return self._communicate(func, args, kwargs)
        if func in TURNS or torch.Tag.inplace_view in getattr(func, "tags", ()):
            return self._turn(func, args, kwargs)
        if func is _ITEM and has_memory(args[0]) and self.words.around(args[0]) is None:
            known = self.words.known(args[0])
            return func(self.words.joined(self.words.input(args[0])) if known else args[0])
        strided = filter(has_memory, tensors_in(args, kwargs))
        if not any(map(self._has_words, strided)):
            result = func(*args, **kwargs)
            return self.born(func, result) if operation.made_at_once else result
        return self._joined(func, operation, args, kwargs)

    def _has_words(self, t: Tensor) -> bool:
        """Return True if a tensor has low words, is a state, or a part of one."""
        words = self.words
        return words.known(t) or bool(words.states_in(t)) or words.around(t) is not None

    def born(self, func: Any, result: Any) -> Any:
        """Note the results of an operation that was done at once; return them."""
        random = draws(func)
        for t in tree_leaves(result):
            if isinstance(t, Tensor) and has_memory(t):
                storage = t.untyped_storage()
                if random and not t.is_floating_point():
                    self.notes.random[storage._cdata] = StorageWeakRef(storage)
                else:
                    self.words.born(t)
        return result

    def _joined(self, func: Any, operation: Operation, args: Any, kwargs: Any) -> Any:
        """Do an operation on whole values, and split what it makes and writes."""
        wide: dict[int, tuple[Tensor, Input | None]] = {}
        """Operand -> its whole value, and the memory that it goes back to."""
        joined = functools.partial(self._join, wide)
        given = tree_map_only(Tensor, joined, (args, kwargs))
        given = tree_map_only(torch.dtype, lambda d: self.words.wide.get(d, d), given)
        if draws(func) and by_name(func, args, kwargs).get("dropout_p", 1) != 0:
            result = self._drawn(func, operation, args, kwargs, joined)
        else:
            result = self._tried(func, operation, args, kwargs, given, wide)
        for t in filter(has_memory, tensors_in(operation.written_of(args, kwargs), {})):
            if id(t) in wide:
                value, memory = wide[id(t)]
                assert memory is not None
                state = memory.pieces[0].owned.tensor if memory.pieces else None
                self.words.store(memory, wide[id(state)][0] if id(state) in wide else value)
        back = {id(wide[id(t)][0]): t for t in tensors_in(args, kwargs) if id(t) in wide}

        def narrowed(t: Tensor, *operands: Any) -> Tensor:
            if id(t) in back:
                return back[id(t)]
            dtype = _dtype_in_step(t.dtype, tensors_in(operands, {}), kwargs, self.words.wide)
            if dtype is t.dtype or dtype not in self.words.wide or not has_memory(t):
                return t.to(dtype)
            hi = torch.empty_like(t, dtype=dtype)
            self.words.keep(hi, t)
            return hi

        if isinstance(result, list) and is_foreach(func):
            rows = [a for a in args if isinstance(a, list | tuple) and len(a) == len(result)]
            return [narrowed(*items) for items in zip(result, *rows, strict=True)]
        return tree_map_only(Tensor, lambda t: narrowed(t, *args, *kwargs.values()), result)

    def _drawn(self, func: Any, operation: Operation, args: Any, kwargs: Any, joined: _Join) -> Any:
        """Draw random numbers as eager PyTorch does: in the dtypes of the step, from high words.

        In wider ones other numbers would come, and the generator would go elsewhere. What is drawn
        is all of a value, but for a normal distribution's mean: that is added as a whole.
        """
        wide = self.words.wide
        if func._opname.removesuffix("_") not in _DISTRIBUTIONS:
            self._say_lost(args, kwargs)
        mean = args[0] if func._opname == "normal" else None
        if not isinstance(mean, Tensor) or mean.dtype not in wide:
            return self._on_high_words(func, operation, args, kwargs, joined)
        whole_mean, args = joined(mean), (torch.zeros_like(mean), *args[1:])
        made = self._on_high_words(func, operation, args, kwargs, joined)
        result = whole_mean + made.to(whole_mean.dtype)
        return joined(made).copy_(result) if "out" in kwargs else result

    def _on_high_words(
        self, func: Any, operation: Operation, args: Any, kwargs: Any, joined: _Join
    ) -> Any:
        """Do an operation as eager PyTorch does; what it writes has no low words then."""
        written = tensors_in(operation.written_of(args, kwargs), {})
        whole = [(t, joined(t)) for t in written if t.dtype in self.words.wide]  # as it was
        result = func(*args, **kwargs)
        for t, value in whole:
            value.copy_(t)
        given = set(map(id, tensors_in(args, kwargs)))
        self.born(func, [t for t in tree_leaves(result) if id(t) not in given])
        return result

    def _tried(
        self,
        func: Any,
        operation: Operation,
        args: Any,
        kwargs: Any,
        given: Any,
        wide: dict[int, Any],
    ) -> Any:
        """Do an operation on whole values, or, where it takes no wide ones, on high words.

        Nothing is written by what fails: whole values are copies, and others are restored.
        """
        written = tensors_in(operation.written_of(args, kwargs), {})
        others = [(t, t.clone()) for t in written if id(t) not in wide and has_memory(t)]
        try:
            first = args[0] if args else None
            return on_wider(func, getattr(first, "dtype", None))(*given[0], **given[1])
        except Exception:  # an error of the step's own comes again
            for t, before in others:
                t.copy_(before)
        wide.clear()
        joined = functools.partial(self._join, wide)
        result = self._on_high_words(func, operation, args, kwargs, joined)
        self._say_lost(args, kwargs)
        return result

    def _say_lost(self, args: Any, kwargs: Any) -> None:
        """Warn of states among an operation's operands that count with their high words only."""
        for t in filter(has_memory, tensors_in(args, kwargs)):
            self.words.say_lost(t)

    def _join(self, wide: dict[int, Any], t: Tensor) -> Tensor:
        """Return the whole value of an operand, the same each time.

        No closure calls itself here: it would hold the values until garbage is collected.
        """
        if t.dtype not in self.words.wide:
            return t
        if id(t) not in wide:
            wide[id(t)] = self._whole(t, wide)
        value: Tensor = wide[id(t)][0]
        return value

    def _whole(self, t: Tensor, wide: dict[int, Any]) -> tuple[Tensor, Input | None]:
        """Return the whole value of an operand; for a part of a state, that part of its value."""
        if not has_memory(t):
            return t.to(self.words.wide[t.dtype]), None
        owner = self.words.around(t)
        if owner is None:
            given = self.words.input(t)
            return self.words.joined(given), given
        state = owner.tensor
        value = self._join(wide, state)
        offset = t.storage_offset() - state.storage_offset()
        return value.as_strided(t.size(), t.stride(), offset), wide[id(state)][1]

    def _communicate(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Let a collective operation have the tensors themselves, not knowing of low words."""
        if func.namespace != "c10d" and func._opname != "wait_tensor":  # it returns the result
            for t in filter(has_memory, tensors_in(args, kwargs)):
                self.words.say_lost(t)  # what is made of it may replace a state
        result = func(*args, **kwargs)
        for t in tree_leaves(received(func, args, kwargs)):
            if isinstance(t, Tensor) and has_memory(t):
                self.words.overwritten(t)
        return result

    def _turn(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Change shape or strides of a tensor in place, and of its low words with it."""
        if func._opname.startswith("resize"):  # which low words have not
            self.words.overwritten(args[0])
        residual = self.words.exact(args[0]) if func in TURNS else None
        words = residual.words(args[0]) if residual is not None else ()
        result = func(*args, **kwargs)
        for word in words:
            func(word, *args[1:], **kwargs)
        if residual is not None:
            residual.hold(words)
            residual.shape, residual.stride = args[0].shape, args[0].stride()
        return result


def in_python(func: Any) -> Callable[..., Any] | None:
    """Return a function of Python that does the operations of one that takes functions."""
    if func is _TAKERS.cond:
        return lambda predicate, yes, no, operands: (yes if predicate else no)(*operands)
    if func is _TAKERS.scan:
        return _scan
    kernels = func.py_kernels.items() if func in _LOOPS else ()
    return next((f for key, f in kernels if key.name == "CompositeExplicitAutograd"), None)


def _scan(step: Any, init: Sequence[Any], xs: Sequence[Tensor], more: Sequence[Any]) -> Any:
    """Return what `torch.ops.higher_order.scan` does: a carry, and the results of each row."""
    carry, made = list(init), []
    for row in zip(*(x.unbind() for x in xs), strict=True):
        found = step(*carry, *row, *more)
        carry = found[: len(init)]
        made.append(found[len(init) :])
    results = zip(*made, strict=True)
    return (*carry, *(None if ys[0] is None else torch.stack(ys) for ys in results))


def _dtype_in_step(
    dtype: torch.dtype,
    operands: Sequence[Tensor],
    kwargs: Any,
    wide: dict[torch.dtype, torch.dtype],
) -> torch.dtype:
    """Return the dtype that a result has in the step, by PyTorch's promotion of its operands.

    Args:
        dtype: that of the result made of wide operands.
        operands: those of the step.
        kwargs: the operation may be asked for a dtype by name.
        wide: dtype -> the wide one.
    """
    floats = [t for t in operands if t.is_floating_point()]
    if all(wide.get(t.dtype) is not dtype for t in floats):
        return dtype
    if isinstance(asked := kwargs.get("dtype"), torch.dtype):
        return asked
    found = {t.dtype for t in floats if t.dim()} or {t.dtype for t in floats}
    return functools.reduce(torch.promote_types, found)


def tensors_in(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors among the arguments of an operation, in nested lists too."""
    found = []
    for a in (*args, *kwargs.values()):
        if isinstance(a, Tensor):
            found.append(a)
        elif isinstance(a, (list, tuple)):
            found += tensors_in(a, {})
    return found


@dataclass(eq=False)
class Unrecorded:
    """Clock of operations that are done at once, on the host, over all calls of a step."""

    seconds: defaultdict[Any, float] = field(default_factory=lambda: defaultdict(float))
    """Operation -> its time in the step that runs, or in the last one."""
    step_seconds: float = 0.0
    """Duration of the last step, closures included."""
    places: dict[Any, str] = field(default_factory=dict)
    """Operation -> the line of code that called it first."""

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Time a step, and forget the one before."""
        self.seconds.clear()
        start = time.perf_counter()
        try:
            yield
        finally:
            self.step_seconds = time.perf_counter() - start

    def timed(self, func: Any, do: Callable[[], Any]) -> Any:
        """Do an operation, and return what it makes."""
        if func not in self.places:
            self.places[func] = on_one_line(line_of_code())
        start = time.perf_counter()
        try:
            return do()
        finally:
            self.seconds[func] += time.perf_counter() - start

    def notes(self) -> list[str]:
        """Name those that took more than a tenth of the last step, the dearest first."""
        least = SHARE * self.step_seconds
        dear = [(seconds, func) for func, seconds in self.seconds.items() if seconds > least]
        return [
            f"{func} cannot be recorded: it is done when it is called, on whole values, and took "
            f"{seconds / self.step_seconds:.0%} of the last step's time. It is called first at "
            f"{self.places[func]}"
            for seconds, func in sorted(dear, key=lambda one: -one[0])
        ]
