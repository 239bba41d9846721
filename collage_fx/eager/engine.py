"""The eager engine: compensation for what a step does outside compiled graphs.

A TorchDispatchMode around the step sees every operation on a known state before it happens, and
does it by the rules and the arithmetic of the compiled graphs, one operation at a time. Compiled
graphs run under it untouched.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode_temporarily
from torch.utils._pytree import tree_map

from collage_fx.eager.inplace import Writer
from collage_fx.eager.memory_map import MemoryMap, MemoryRecord
from collage_fx.eager.operands import (
    COPIES,
    Operands,
    Watcher,
    Write,
    lows_of,
    result_dtype,
    tensors_of,
)
from collage_fx.eager.user_rounding import UserRounding
from collage_fx.hooks import nested_compile
from collage_fx.passes.analysis.affine import CURVED
from collage_fx.passes.ir.program import Settings
from collage_fx.passes.rewrite.interpreter import Traced, supports
from collage_fx.passes.rewrite.op_schema import (
    COLLECTIVE,
    TURNS,
    computes,
    each,
    functional,
    is_foreach,
    overwrites,
    received,
    written,
)
from collage_fx.passes.rules.structural import STRUCTURE
from collage_fx.runtime.residuals.dtensor import any_sharded
from collage_fx.runtime.residuals.memory import has_memory
from collage_fx.runtime.residuals.store import version
from collage_fx.runtime.storage.registry import STORAGES

aten = torch.ops.aten


class Engine(TorchDispatchMode):
    """Does the operations of a step on expansions where an operand has a residual.

    The supervisor tells it by `know` which states there are.
    """

    def __init__(self, settings: Settings, seed: int, supervisor: Watcher) -> None:
        super().__init__()
        self.supervisor = supervisor
        self.memory = MemoryMap()
        self.writes: dict[MemoryRecord, Write] = {}
        self.operands = Operands(self.memory, self.writes, settings, seed, supervisor.missing)
        self.user_rounding = UserRounding()
        self.writer = Writer(self.memory, self.writes, self.operands, supervisor, self._undithered)
        self.paused = False
        self.asleep = False
        """Whether the states are not known yet in this step; the first operation wakes it up."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let Dynamo compile under this mode."""
        return True

    # What the session tells the engine.

    def know(self, tensor: Tensor, storage: str) -> Write:
        """Take up a carried state that is kept in this storage."""
        self.operands.keep_all_of(storage)
        record = self.memory.add(tensor, None, {})
        write = Write(tensor, record, STORAGES[storage])
        write.begin()
        self.writes[record] = write
        return write

    def forget(self) -> None:
        """Drop everything known of the step that is over."""
        self.memory.clear()
        self.writes.clear()
        self.user_rounding.clear()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Let operations pass, as within a compiled graph."""
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before

    def suspended(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return closure run as if this mode were not there: it computes gradients."""

        def run() -> Any:
            apart = self.supervisor.failures.raised()
            with _pop_mode_temporarily(), nested_compile.outside(), apart:
                return closure()

        return run

    # Dispatch.

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if any_sharded(types):
            return NotImplemented  # it comes again, for the shards
        if self.paused or not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        if func.is_view and func not in TURNS:
            return func(*args, **kwargs)
        if self.asleep:
            self.supervisor.wake()
        if torch.Tag.inplace_view in func.tags:
            return self._turn(func, args, kwargs)
        if func is aten._to_copy.default and kwargs.get("dtype") is torch.bfloat16:
            args = (self._undithered(args[0]), *args[1:])
        if func.namespace in COLLECTIVE:
            return self._communicate(func, args, kwargs)
        names = written(func)
        if names:
            return self._write(func, names, args, kwargs)
        if not any(self.memory.find(t) for t in tensors_of((args, kwargs))):
            result = func(*args, **kwargs)
            self.user_rounding.follow(func, args, result, self.memory)
            return result
        op = functional(func)
        if is_foreach(func) and op is not None:
            return [self._read(one, one, a, k) for one, a, k in each(op, args, kwargs)]
        result = self._read(func, op, args, kwargs)
        self.user_rounding.follow(func, args, result, self.memory)
        return result

    def _turn(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Change shape or strides of a tensor in place, and of its low word with it."""
        record = self.memory.find(args[0])
        write = self.writes.get(record) if record is not None else None
        if record is None or write is None or write.tensor is not args[0] or func not in TURNS:
            result = func(*args, **kwargs)
            if write is not None:
                write.version = version(write.tensor)
            return result
        self._enlist(args[0])
        lows = record.lows
        result = func(*args, **kwargs)
        for lo in lows or ():
            func(lo, *args[1:], **kwargs)
        self.memory.turn(record, args[0])
        write.version = version(write.tensor)
        return result

    def _undithered(self, x: Tensor) -> Tensor:
        """Return x, or what it was before the step rounded it by chance."""
        undone = self.user_rounding.undone(x)
        if undone is None:
            return x
        self.memory.add(undone[0], None, undone[1]).whole = True
        return undone[0]

    def _write(self, func: Any, names: tuple[str, ...], args: Any, kwargs: Any) -> Any:
        """Do an operation that writes: by its rule, or on joined values if it has none."""
        arguments = [a.name for a in func._schema.arguments]
        targets = {
            name: kwargs[name] if name in kwargs else args[arguments.index(name)]
            for name in names
            if name in kwargs or arguments.index(name) < len(args)
        }
        self._enlist(targets)
        if not any(self.memory.find(t) for t in tensors_of((args, kwargs))):
            for target in tensors_of(targets):
                self.user_rounding.before_write(target, self.memory)
            result = func(*args, **kwargs)
            for target in tensors_of(targets):
                self.user_rounding.follow(func, (args, kwargs), target, self.memory)
            return result
        op = functional(func)
        by_rule = supports(op) or op is aten.copy.default or overwrites(func)
        sparse = any(t.layout != torch.strided for t in tensors_of((args, kwargs)))
        if len(targets) > 1 or not by_rule or sparse:
            return self.writer.together(func, targets, args, kwargs)
        target = next(iter(targets.values()))
        if is_foreach(func):
            for one, single, more in each(op, args, kwargs):
                self.writer.one(func, one, single[0], single, more)
            return None
        if "out" in targets:
            more = {k: v for k, v in kwargs.items() if k != "out"}
            self.writer.one(func, op, target, args, more, out=True)
        else:
            self.writer.one(func, op, target, args, kwargs)
        return target

    def _communicate(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Let a collective operation have the tensors themselves, not knowing of low words.

        It may be asynchronous: what it receives is written, in the very memory, after it returns.
        """
        targets = list(tensors_of(received(func, args, kwargs)))
        operands = list(tensors_of((args, kwargs)))
        traced = func.namespace != "c10d" and "wait_tensor" not in func._opname
        self.writer.loses_low(operands if traced else targets)
        self._enlist(targets)
        result = func(*args, **kwargs)
        for target in targets:
            self.writer.received(target)
        forms = {k: CURVED for t in operands if (s := self.memory.find(t)) for k in s.forms}
        if traced and forms and not targets:
            for one in tensors_of(result):
                self.memory.add(one, None, forms)
        return result

    def _enlist(self, targets: Any) -> None:
        """Prepare the states among targets; a 16-bit tensor that is not known may be a new one."""
        for tensor in tensors_of(targets):
            known = self.memory.find(tensor) in self.writes
            if tensor.dtype in self.operands.storages and not known:
                self.supervisor.enlist()
                if self.memory.find(tensor) not in self.writes:
                    self.supervisor.not_given(tensor)
                break
        for tensor in tensors_of(targets):
            write = self.writes.get(self.memory.find(tensor))  # type: ignore[arg-type]
            if write is not None and not write.wrote:
                self.supervisor.prepare(write)
                write.wrote = write.eager = True

    # Reading: results that follow from expansions.

    def _read(self, func: Any, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = list(tensors_of((args, kwargs)))
        dtype = self.operands.storage_dtype(tensors)
        one_dtype = len({t.dtype for t in tensors if t.is_floating_point()}) == 1
        if one_dtype and (op in STRUCTURE or _keeps(func, args, kwargs)):
            return self._structural(func, args, kwargs)
        by_rule = dtype is not None and supports(op) and func not in COPIES
        if by_rule and result_dtype(tensors) == dtype:
            return self._keep(self.operands.by_rule(op, dtype, args, kwargs), tensors)
        if dtype is not None and one_dtype and not supports(op) and computes(func):
            return self.operands.read_joined(func, dtype, tensors, args, kwargs)
        if func is aten._to_copy.default and self.operands.narrows(args[0], kwargs):
            return self.operands.narrowed(args[0], kwargs)
        sizes = [t.itemsize for t in tensors if t.is_floating_point() and t.dim()]
        widest = 8 if func in COPIES else max(sizes, default=0)
        joined = tree_map(partial(self.operands.joined, widest=widest), args)
        result = func(*joined, **kwargs)
        if isinstance(result, Tensor) and result.is_floating_point() and has_memory(result):
            forms = self.operands.forms(op, tensors, args, kwargs)
            # What zeros_like makes in fp32 has nothing of the value.
            whole = computes(func) and self.operands.whole(result.dtype, tensors)
            if forms or whole:
                self.memory.add(result, None, forms).whole = whole
        return result

    def _keep(self, result: Traced, operands: Sequence[Tensor]) -> Tensor:
        """Return the tensor of a result, with a record where there is something to know."""
        hi: Any = result.meta["val"]
        lows = lows_of(result)
        if any(hi is t for t in operands):
            hi, lows = hi.clone(), None if lows is None else tuple(lo.clone() for lo in lows)
        if lows is not None or result.forms:
            self.memory.add(hi, lows, result.forms)
        return hi

    def _structural(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        """Do an operation that only moves elements, to high and low words alike."""
        made: dict[int, Traced] = {}
        operands = [self.operands.operand(t, made) for t in tensors_of(args)]
        expanded = next((o.expanded for o in operands if isinstance(o.expanded, tuple)), ())
        parts = [partial(self.operands.component, i=i) for i in range(len(expanded) or 1)]
        hi, *rest = (func(*tree_map(part, args), **kwargs) for part in parts)
        lows = tuple(rest) or None
        forms = {k: f for o in operands for k, f in o.forms.items()}
        if len(operands) > 1:
            forms = dict.fromkeys(forms, CURVED)
        whole = self.operands.whole(hi.dtype, tensors_of(args))
        if lows is not None or forms or whole:
            self.memory.add(hi, lows, forms).whole = whole
        return hi


def _keeps(func: Any, args: Any, kwargs: Any) -> bool:
    """Tell whether func is a copy in the same dtype."""
    return func is aten.clone.default or (
        func is aten._to_copy.default and kwargs.get("dtype") in (None, args[0].dtype)
    )
