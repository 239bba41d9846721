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

from collage_fx import nested
from collage_fx.dither import Dither
from collage_fx.operands import (
    COPIES,
    Lows,
    Operands,
    Watcher,
    Write,
    result_dtype,
    takes_over,
    tensors_of,
)
from collage_fx.passes.eager import Forms, Traced, supports
from collage_fx.passes.forms import CURVED, Form
from collage_fx.passes.overloads import (
    TURNS,
    computes,
    each,
    functional,
    is_foreach,
    overwrites,
    written,
)
from collage_fx.passes.program import LOW_PRECISION, Arithmetic, value_of
from collage_fx.passes.rules.structural import STRUCTURE
from collage_fx.runtime.eft import WIDER
from collage_fx.runtime.residuals import version
from collage_fx.runtime.storage import STORAGES, Choice, Storage, layout_of
from collage_fx.runtime.storage import whole as join_whole
from collage_fx.shadows import Shadow, Shadows, has_memory

aten = torch.ops.aten

_DECAYS = {
    "exp_avgs": "beta1",
    "exp_avg_sqs": "beta2",
    "momentum_buffer_list": "momentum",
    "state_sums": "",
}
"""Arguments of PyTorch's fused kernels that are averages -> the argument that they decay by."""


class Engine(TorchDispatchMode):
    """Does the operations of a step on expansions where an operand has a residual.

    The supervisor tells it by `know` which states there are.
    """

    def __init__(self, arithmetic: Arithmetic, storage: Choice, supervisor: Watcher) -> None:
        super().__init__()
        self.supervisor = supervisor
        self.shadows = Shadows()
        self.writes: dict[Shadow, Write] = {}
        self.operands = Operands(self.shadows, self.writes, arithmetic, storage, supervisor.missing)
        self.dither = Dither()
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
        shadow = self.shadows.add(tensor, None, {})
        write = Write(tensor, shadow, STORAGES[storage])
        write.begin()
        self.writes[shadow] = write
        return write

    def forget(self) -> None:
        """Drop everything known of the step that is over."""
        self.shadows.clear()
        self.writes.clear()
        self.dither.clear()

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
            with _pop_mode_temporarily(), nested.outside(), apart:
                return closure()

        return run

    # Dispatch.

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
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
        names = written(func)
        if names:
            return self._write(func, names, args, kwargs)
        if not any(self.shadows.find(t) for t in tensors_of((args, kwargs))):
            result = func(*args, **kwargs)
            self.dither.follow(func, args, result, self.shadows)
            return result
        op = functional(func)
        if is_foreach(func) and op is not None:
            return [self._read(one, one, a, k) for one, a, k in each(op, args, kwargs)]
        result = self._read(func, op, args, kwargs)
        self.dither.follow(func, args, result, self.shadows)
        return result

    def _turn(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Change shape or strides of a tensor in place, and of its low word with it."""
        shadow = self.shadows.find(args[0])
        write = self.writes.get(shadow) if shadow is not None else None
        if shadow is None or write is None or write.tensor is not args[0] or func not in TURNS:
            result = func(*args, **kwargs)
            if write is not None:
                write.version = version(write.tensor)
            return result
        self._enlist(args[0])
        lows = shadow.lows
        result = func(*args, **kwargs)
        for lo in lows or ():
            func(lo, *args[1:], **kwargs)
        self.shadows.turn(shadow, args[0])
        write.version = version(write.tensor)
        return result

    def _undithered(self, x: Tensor) -> Tensor:
        """Return x, or what it was before the step rounded it by chance."""
        undone = self.dither.undone(x)
        if undone is None:
            return x
        self.shadows.add(undone[0], None, undone[1]).whole = True
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
        if not any(self.shadows.find(t) for t in tensors_of((args, kwargs))):
            for target in tensors_of(targets):
                self.dither.before_write(target, self.shadows)
            result = func(*args, **kwargs)
            for target in tensors_of(targets):
                self.dither.follow(func, (args, kwargs), target, self.shadows)
            return result
        op = functional(func)
        by_rule = supports(op) or op is aten.copy.default or overwrites(func)
        sparse = any(t.layout != torch.strided for t in tensors_of((args, kwargs)))
        if len(targets) > 1 or not by_rule or sparse:
            return self._together(func, targets, args, kwargs)
        target = next(iter(targets.values()))
        if is_foreach(func):
            for one, single, more in each(op, args, kwargs):
                self._write_one(func, one, single[0], single, more)
            return None
        if "out" in targets:
            more = {k: v for k, v in kwargs.items() if k != "out"}
            self._write_one(func, op, target, args, more, out=True)
        else:
            self._write_one(func, op, target, args, kwargs)
        return target

    def _enlist(self, targets: Any) -> None:
        """Prepare the states among targets; a 16-bit tensor that is not known may be a new one."""
        for tensor in tensors_of(targets):
            if tensor.dtype in LOW_PRECISION and self.shadows.find(tensor) not in self.writes:
                self.supervisor.enlist()
                break
        for tensor in tensors_of(targets):
            write = self.writes.get(self.shadows.find(tensor))  # type: ignore[arg-type]
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
        wider = any(t.dtype in WIDER.values() and t.dim() for t in tensors) or func in COPIES
        result = func(*(tree_map(self.operands.joined, args) if wider else args), **kwargs)
        if isinstance(result, Tensor) and result.is_floating_point() and has_memory(result):
            forms = self.operands.forms(op, tensors, args, kwargs)
            whole = self.operands.whole(result.dtype, tensors)
            if forms or whole:
                self.shadows.add(result, None, forms).whole = whole
        return result

    def _keep(self, result: Traced, operands: Sequence[Tensor]) -> Tensor:
        """Return the tensor of a result, with a shadow where there is something to know."""
        hi: Any = result.meta["val"]
        lows = _lows(result)
        if any(hi is t for t in operands):
            hi, lows = hi.clone(), None if lows is None else tuple(lo.clone() for lo in lows)
        if lows is not None or result.forms:
            self.shadows.add(hi, lows, result.forms)
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
            self.shadows.add(hi, lows, forms).whole = whole
        return hi

    # Writing.

    def _write_one(
        self, func: Any, op: Any, dest: Tensor, args: Any, kwargs: Any, *, out: bool = False
    ) -> None:
        """Do one operation and put its result, high and low word, where it belongs."""
        shadow = self.shadows.find(dest)
        tensors = list(tensors_of((args, kwargs)))
        if overwrites(func):
            self._call(func, op, dest, args, kwargs, out)
            self._wrote(dest, shadow, None, {})
        elif op is aten.copy.default:
            self._copy(dest, shadow, args[1])
        elif not self._holds(dest) or not self.operands.expanded([dest, *tensors]):
            forms = self.operands.forms(op, tensors, args, kwargs)
            whole = self.operands.whole(dest.dtype, tensors)
            self._call(func, op, dest, tree_map(self._joined_unless(dest), args), kwargs, out)
            self._wrote(dest, shadow, None, forms, whole=whole)
        else:
            self._assign(dest, shadow, self.operands.by_rule(op, dest.dtype, args, kwargs))

    def _joined_unless(self, dest: Tensor) -> Callable[[Any], Any]:
        """Return what gives operands their low words where dest is wide enough to hold them."""
        if dest.dtype in LOW_PRECISION and self._holds(dest):
            return lambda x: x
        return self.operands.joined

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

    def _assign(self, dest: Tensor, shadow: Shadow | None, result: Traced) -> None:
        storage = self._storage(dest, shadow)
        hi, lows = self.operands.kept(value_of(result), _lows(result), storage)
        dest.copy_(hi)
        self._wrote(dest, shadow, lows, result.forms)

    def _storage(self, dest: Tensor, shadow: Shadow | None) -> Storage | None:
        """Return how the low words of dest are kept, or are to be."""
        write = self.writes.get(shadow) if shadow else None
        if write is not None:
            return write.storage
        held = shadow.low(dest) if shadow else None
        return self.operands.storages.get(dest.dtype) if held is None else layout_of(dest, held)

    def _copy(self, dest: Tensor, shadow: Shadow | None, source: Any) -> None:
        """dest.copy_(source), low word and all."""
        if not isinstance(source, Tensor):
            dest.fill_(source)
            return self._wrote(dest, shadow, None, {})
        if dest.dtype == torch.bfloat16:
            source = self._undithered(source)
        if id(source) in self.supervisor.returned and shadow in self.writes:
            self.supervisor.chained("a state")
        theirs = self.shadows.find(source)
        whole = self.operands.whole(dest.dtype, [source])
        lows = theirs.low(source) if theirs else None
        forms = dict(theirs.forms) if theirs else {}
        held = shadow is not None and shadow.lows is not None
        storage = self._storage(dest, shadow)
        if lows is not None and source.dtype != dest.dtype:
            source, lows = join_whole(source, lows), None
        if held and source.is_floating_point() and source.dtype not in LOW_PRECISION:
            source, lows = self.operands.split(source, storage, dest.dtype)
        else:
            source, lows = self.operands.kept(source, lows, storage)
        dest.copy_(source)
        lows = None if lows is None else tuple(lo.expand_as(dest) for lo in lows)
        self._wrote(dest, shadow, lows, forms, whole=whole)

    def _together(self, func: Any, targets: dict[str, Any], args: Any, kwargs: Any) -> Any:
        """Do an operation without a rule on joined values, and split what it wrote.

        PyTorch's fused optimizer kernels are such: they compute in fp32 themselves.
        """
        before = list(tensors_of((args, kwargs)))
        if not self.operands.expanded(list(tensors_of(targets))):
            result = func(*args, **kwargs)
            for name, tree in targets.items():
                for tensor in tensors_of(tree):
                    forms = self._unknown(before, tensor, name, kwargs)
                    self._wrote(tensor, self.shadows.find(tensor), None, forms)
            return result
        if "_fused_" not in func._schema.name:
            self.supervisor.missing(str(func), self.operands.states(tensors_of(targets)))
        wide: dict[int, Tensor] = {}
        swapped = tree_map(lambda a: self.operands.widened(a, wide), (args, kwargs))
        result = func(*swapped[0], **swapped[1])
        for name, tree in targets.items():
            for tensor in tensors_of(tree):
                forms = self._unknown(before, tensor, name, kwargs)
                lows = None
                if id(tensor) in wide:
                    storage = self._storage(tensor, self.shadows.find(tensor))
                    hi, lows = self.operands.split(wide[id(tensor)], storage, tensor.dtype)
                    tensor.copy_(hi)
                self._wrote(tensor, self.shadows.find(tensor), lows, forms)
        written = {id(w): t for t in before if (w := wide.get(id(t))) is not None}
        return tree_map(lambda r: written.get(id(r), r), result)

    def _unknown(self, operands: list[Tensor], tensor: Tensor, name: str, kwargs: Any) -> Forms:
        """Return the forms of what an operation without a rule wrote to an argument."""
        forms = {k: CURVED for t in operands if (s := self.shadows.find(t)) for k in s.forms}
        shadow = self.shadows.find(tensor)
        write = self.writes.get(shadow) if shadow else None
        if write in forms and name in _DECAYS:
            return {write: Form(float(kwargs.get(_DECAYS[name], 1.0)), "free")}
        return forms

    def _wrote(
        self,
        dest: Tensor,
        shadow: Shadow | None,
        lows: Lows | None,
        forms: Forms,
        *,
        whole: bool = False,
    ) -> None:
        """Store the low words of a tensor that was just written, and note the write."""
        write = self.writes.get(shadow) if shadow else None
        if shadow is None:
            if not ((lows is not None or forms or whole) and has_memory(dest)):
                return
            shadow = self.shadows.add_around(dest)
        held = shadow.low(dest)
        if held is None and lows is not None and (write is None or takes_over(write, forms)):
            held = shadow.begin_low(tuple(lo.dtype for lo in lows)).low(dest)
        for i, low in enumerate(held or ()):
            low.zero_() if lows is None else low.copy_(lows[i])
        if write is not None:
            write.version = version(write.tensor)
        shadow.whole = whole or (shadow.whole and not shadow.same(dest))
        if not shadow.same(dest):
            forms = {**shadow.forms, **dict.fromkeys(forms, CURVED)}
            forms = {k: Form(f.a, "nonlinear") for k, f in forms.items()}
        shadow.forms = forms


def _lows(result: Traced) -> Lows | None:
    """Return the low words of a result, if it is an expansion."""
    if not isinstance(result.expanded, tuple):
        return None
    return tuple(lo.meta["val"] for lo in result.expanded[1:])


def _keeps(func: Any, args: Any, kwargs: Any) -> bool:
    """Tell whether func is a copy in the same dtype."""
    return func is aten.clone.default or (
        func is aten._to_copy.default and kwargs.get("dtype") in (None, args[0].dtype)
    )
