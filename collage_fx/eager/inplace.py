"""Operations that write, in the eager engine: where the result goes, high and low words."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from collage_fx.eager.memory_map import MemoryMap, MemoryRecord
from collage_fx.eager.operands import (
    Lows,
    Operands,
    Watcher,
    Write,
    lows_of,
    takes_over,
    tensors_of,
)
from collage_fx.passes.analysis.affine import CURVED, Form
from collage_fx.passes.ir.program import LOW_PRECISION, value_of
from collage_fx.passes.rewrite.interpreter import Forms, Traced
from collage_fx.passes.rewrite.op_schema import is_foreach, overwrites
from collage_fx.runtime.residuals.memory import has_memory
from collage_fx.runtime.residuals.store import STORE, version
from collage_fx.runtime.storage.registry import Storage, layout_of
from collage_fx.runtime.storage.registry import whole as join_whole

aten = torch.ops.aten

_DECAYS = {
    "exp_avgs": "beta1",
    "exp_avg_sqs": "beta2",
    "momentum_buffer_list": "momentum",
    "state_sums": "",
}
"""Arguments of PyTorch's fused kernels that are averages -> the argument that they decay by."""


@dataclass
class Writer:
    """Does operations that write, on expansions where an operand has low words."""

    memory: MemoryMap
    writes: dict[MemoryRecord, Write]
    operands: Operands
    supervisor: Watcher
    undithered: Callable[[Tensor], Tensor]
    """Gives what a tensor was before the step rounded it by chance."""

    def one(
        self, func: Any, op: Any, dest: Tensor, args: Any, kwargs: Any, *, out: bool = False
    ) -> None:
        """Do one operation and put its result, high and low word, where it belongs."""
        record = self.memory.find(dest)
        tensors = list(tensors_of((args, kwargs)))
        if overwrites(func):
            self._call(func, op, dest, args, kwargs, out)
            self._wrote(dest, record, None, {})
        elif op is aten.copy.default:
            self._copy(dest, record, args[1])
        elif not self._holds(dest) or not self.operands.expanded([dest, *tensors]):
            forms = self.operands.forms(op, tensors, args, kwargs)
            whole = self.operands.whole(dest.dtype, tensors)
            self._call(func, op, dest, tree_map(self._joined_unless(dest), args), kwargs, out)
            self._wrote(dest, record, None, forms, whole=whole)
        else:
            self._assign(dest, record, self.operands.by_rule(op, dest.dtype, args, kwargs))

    def _joined_unless(self, dest: Tensor) -> Callable[[Any], Any]:
        """Return what gives operands their low words where dest is wide enough to hold them."""
        if self._holds(dest):
            return lambda x: x
        return lambda x: self.operands.joined(x, dest.itemsize)

    def _holds(self, dest: Tensor) -> bool:
        """Tell whether dest can have low words."""
        return self.operands.storages.get(dest.dtype) is not None

    def _call(self, func: Any, op: Any, dest: Tensor, args: Any, kwargs: Any, out: bool) -> None:
        """Do the operation itself; of a _foreach operation one tensor's share."""
        if out:
            func(*args, out=dest, **kwargs)
        elif not is_foreach(func):
            func(*args, **kwargs)
        elif op is None:
            dest.zero_()
        else:
            dest.copy_(op(*args, **kwargs))

    def _assign(self, dest: Tensor, record: MemoryRecord | None, result: Traced) -> None:
        home = self._home(dest, record)
        hi, lows = self.operands.kept(value_of(result), lows_of(result), *home)
        dest.copy_(hi)
        self._wrote(dest, record, lows, result.forms)

    def _home(
        self, dest: Tensor, record: MemoryRecord | None
    ) -> tuple[Storage | None, Write | None]:
        """Return how the low words of dest are kept, or are to be, and the state that it is."""
        write = self.writes.get(record) if record else None
        if write is not None:
            return write.storage, write
        held = record.low(dest) if record else None
        storage = self.operands.storages.get(dest.dtype)
        return (storage if held is None else layout_of(dest, held)), None

    def _copy(self, dest: Tensor, record: MemoryRecord | None, source: Any) -> None:
        """dest.copy_(source), low word and all."""
        if not isinstance(source, Tensor):
            dest.fill_(source)
            return self._wrote(dest, record, None, {})
        if dest.dtype == torch.bfloat16:
            source = self.undithered(source)
        if id(source) in self.supervisor.returned and record in self.writes:
            self.supervisor.chained("a state")
        theirs = self.memory.find(source)
        whole = self.operands.whole(dest.dtype, [source])
        lows = theirs.low(source) if theirs else None
        forms = dict(theirs.forms) if theirs else {}
        held = record is not None and record.lows is not None
        storage, write = self._home(dest, record)
        if lows is not None and source.dtype != dest.dtype:
            source, lows = join_whole(source, lows), None
        wider = source.dtype != dest.dtype and source.dtype not in LOW_PRECISION
        if held and source.is_floating_point() and wider:
            source, lows = self.operands.split(source, storage, dest.dtype, write)
        else:
            source, lows = self.operands.kept(source, lows, storage, write)
        dest.copy_(source)
        lows = None if lows is None else tuple(lo.expand_as(dest) for lo in lows)
        self._wrote(dest, record, lows, forms, whole=whole)

    def together(self, func: Any, targets: dict[str, Any], args: Any, kwargs: Any) -> Any:
        """Do an operation without a rule on joined values, and split what it wrote.

        PyTorch's fused optimizer kernels are such: they compute in fp32 themselves.
        """
        before = list(tensors_of((args, kwargs)))
        if not self.operands.expanded(list(tensors_of(targets))):
            result = func(*args, **kwargs)
            for name, tree in targets.items():
                for tensor in tensors_of(tree):
                    forms = self._unknown(before, tensor, name, kwargs)
                    self._wrote(tensor, self.memory.find(tensor), None, forms)
            return result
        if "_fused_" not in func._schema.name:
            self.supervisor.missing(str(func), self.operands.states(tensors_of(targets)))
        wide: dict[int, Tensor] = {}
        swapped = tree_map(lambda a: self.operands.widened(a, wide), (args, kwargs))
        result = func(*swapped[0], **swapped[1])
        for name, tree in targets.items():
            for tensor in tensors_of(tree):
                forms = self._unknown(before, tensor, name, kwargs)
                record, lows = self.memory.find(tensor), None
                if id(tensor) in wide:
                    storage, write = self._home(tensor, record)
                    hi, lows = self.operands.split(wide[id(tensor)], storage, tensor.dtype, write)
                    tensor.copy_(hi)
                self._wrote(tensor, record, lows, forms)
        written = {id(w): t for t in before if (w := wide.get(id(t))) is not None}
        return tree_map(lambda r: written.get(id(r), r), result)

    def loses_low(self, tensors: list[Tensor]) -> None:
        """Warn if one of these, about to be exchanged with other processes, has a low word."""
        for record in filter(None, map(self.memory.find, tensors)):
            write = self.writes.get(record)
            written = write is not None and (write.wrote or STORE.get(write.tensor) is not None)
            if written or (write is None and record.lows is not None):
                self.supervisor.warn(
                    "the step gets states that it has computed from other processes, by a "
                    "collective operation that carries their high words: their residuals begin "
                    "anew each time"
                )

    def received(self, dest: Tensor) -> None:
        """Note that a tensor got its value, the high word, from other processes."""
        self._wrote(dest, self.memory.find(dest), None, {})

    def _unknown(self, operands: list[Tensor], tensor: Tensor, name: str, kwargs: Any) -> Forms:
        """Return the forms of what an operation without a rule wrote to an argument."""
        forms = {k: CURVED for t in operands if (s := self.memory.find(t)) for k in s.forms}
        record = self.memory.find(tensor)
        write = self.writes.get(record) if record else None
        if write in forms and name in _DECAYS:
            return {write: Form(float(kwargs.get(_DECAYS[name], 1.0)), "free")}
        return forms

    def _wrote(
        self,
        dest: Tensor,
        record: MemoryRecord | None,
        lows: Lows | None,
        forms: Forms,
        *,
        whole: bool = False,
    ) -> None:
        """Store the low words of a tensor that was just written, and note the write."""
        write = self.writes.get(record) if record else None
        if record is None:
            if not ((lows is not None or forms or whole) and has_memory(dest)):
                return
            record = self.memory.add_around(dest)
        held = record.low(dest)
        if held is None and lows is not None and (write is None or takes_over(write, forms)):
            held = record.begin_low(tuple(lo.dtype for lo in lows)).low(dest)
        for i, low in enumerate(held or ()):
            low.zero_() if lows is None else low.copy_(lows[i])
        if write is not None:
            write.version = version(write.tensor)
        record.whole = whole or (record.whole and not record.same(dest))
        if not record.same(dest):
            forms = {**record.forms, **dict.fromkeys(forms, CURVED)}
            forms = {k: Form(f.a, "nonlinear") for k, f in forms.items()}
        record.forms = forms
