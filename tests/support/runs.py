"""Runs of random programs: eager in any dtype, and by collage_fx, with what became of them."""

import contextlib
import functools
import linecache
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from draws import Drawn
from interpreter import without_compiler
from programs import WIDE_CAST, Program
from replicas import bits
from torch import Tensor
from torch._inductor import config as inductor_config
from torch.distributed.tensor import DTensor

import collage_fx
from collage_fx.dynamo import backend
from collage_fx.errors import CollageError, CollageWarning
from collage_fx.hooks.traces import Traces
from collage_fx.runtime.residuals.dtensor import shard_of
from collage_fx.runtime.residuals.store import STORE

LOW_BITS = {"bfloat16": 8, "float16": 11, "float32": 24}
KEPT = {
    "bfloat16": {"mcf2": 17, "ulp8": 16, "remainder16": 24, "mcf3": 24},
    "float16": {"mcf2": 23, "ulp8": 19, "mcf3": 24},
    "float32": {"double_single": 48, "plain": 24},
}
"""The bits of a state in each storage, as the README says."""
BY_CHANCE = {"bfloat16": {"sr": 8, "ulp4": 12}, "float16": {"sr": 11, "ulp4": 15}}
"""The same of those that are rounded by chance, asked for or not."""
SMALLEST = {"bfloat16": -133, "float16": -24, "float32": -149}
"""The exponent of the smallest number of the dtype."""


@contextlib.contextmanager
def module_of(program: Program, **kind: bool) -> Iterator[types.ModuleType]:
    """Run the script of a program as a module that can be imported, as Dynamo wants it."""
    text = program.script(**kind)
    module = types.ModuleType(f"program_{abs(hash(text))}")
    module.__file__ = f"<{module.__name__}>"
    linecache.cache[module.__file__] = (len(text), None, text.splitlines(True), module.__file__)
    sys.modules[module.__name__] = module
    try:
        exec(compile(text, module.__file__, "exec"), module.__dict__)
        yield module
    finally:
        del sys.modules[module.__name__], linecache.cache[module.__file__]


def plain(x: Any) -> Callable[..., Any]:
    """Return the step of an optimizer, or a function, as it is."""
    return getattr(x, "step", x)


def tensors(found: dict[str, Any]) -> dict[str, Tensor]:
    """Return the tensors among what a script has trained, without the numbers."""
    return {k: full(x.detach()) for k, x in found.items() if isinstance(x, Tensor)}


def full(x: Tensor) -> Tensor:
    """Return the plain tensor of a subclass, of a DTensor with the rows of all processes."""
    whole: Tensor = x.full_tensor() if isinstance(x, DTensor) else x.as_subclass(Tensor)
    return whole


def eager(program: Program, dtype: torch.dtype) -> dict[str, Tensor]:
    """Run a program in eager PyTorch: in a 16-bit dtype, in fp32, or all of it in float64."""
    with contextlib.ExitStack() as stack:
        module = stack.enter_context(module_of(program))
        if dtype == torch.float64:
            module.F32 = torch.float64  # type: ignore[attr-defined]
            unwrapped(module)
            if program.draws:
                stack.enter_context(Drawn(getattr(torch, program.dtype)))
        found = tensors(module.train(dtype, plain))
    low = [k for k, x in found.items() if x.dtype in (torch.bfloat16, torch.float16)]
    assert dtype != torch.float64 or not low, f"rounded in float64 too: {', '.join(low)}"
    return {k: x.double() for k, x in found.items()}


def unwrapped(module: types.ModuleType) -> None:
    """Let a script wrap no tensors in a class with a dispatch of its own."""
    module.Boxed = lambda x: x  # type: ignore[attr-defined]


@dataclass
class Run:
    """Values, warnings and reports of a compensated run."""

    values: dict[str, Tensor] = field(default_factory=dict)
    high: dict[str, Tensor] = field(default_factory=dict)
    bits: dict[str, int] = field(default_factory=dict)
    """Number of bits of each state, by its name and parameter."""
    compensated: set[str] = field(default_factory=set)
    by_chance: set[str] = field(default_factory=set)
    """The states without residuals that are rounded by chance."""
    warned: list[str] = field(default_factory=list)
    error: CollageError | None = None
    graphs: int = 0
    numbers: bool = False
    """True if a graph was compiled again, or late, that takes numbers which change."""
    joined: int = 0
    """Number of steps in which a state was written on whole values."""
    report: str = ""
    behind: list[str] = field(default_factory=list)
    """Parameters of which a replica that is sent what has changed did not have the bits."""


def way_of(program: Program) -> Callable[[Any], Callable[..., Any]]:
    """Return what the program is compiled by."""
    options = dict(program.options)
    if program.way == "string":
        return lambda x: torch.compile(x.step, backend="collage", options=options)
    record = {"record": True, "at once": False}.get(program.way, "auto")
    return lambda x: collage_fx.compile(x, record=record, **options)


def compensated(program: Program, *, interpreted: bool = True) -> Run:
    """Run a program by collage_fx."""
    run, low = Run(), getattr(torch, program.dtype)
    steps: list[Any] = []

    def compiled(x: Any) -> Any:
        steps.append(way_of(program)(x))
        if dict(program.options).get("changed"):
            return followed(steps[-1], x, run.behind)
        return steps[-1]

    torch.compiler.reset()
    # What the backend string has said once for some options it does not say again.
    backend._SESSIONS.clear()
    Traces.warned.clear()
    stance = "force_eager" if program.way == "engine" else "default"
    with contextlib.ExitStack() as stack:
        module = stack.enter_context(module_of(program))
        compiler = without_compiler() if interpreted else contextlib.nullcontext([])
        graphs = stack.enter_context(compiler)
        again = stack.enter_context(_compiled_again())
        caught = stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always", CollageWarning)
        stack.enter_context(torch.compiler.set_stance(stance))
        # Random numbers as eager PyTorch draws them.
        stack.enter_context(inductor_config.patch(fallback_random=True))
        try:
            found = module.train(low, compiled)
        except CollageError as error:
            run.error, found = error, {}
        run.warned = [str(w.message) for w in caught if issubclass(w.category, CollageWarning)]
        run.graphs, run.numbers = len(graphs), any(again)
        if steps and program.way != "string":
            run.report, run.joined = reported(steps[-1])
    for name, x in found.items():
        if not isinstance(x, Tensor):
            continue
        whole, high = collage_fx.value(x), x.detach().double()
        run.values[name], run.high[name] = full(whole), full(high)
        run.bits[name] = LOW_BITS[str(x.dtype).removeprefix("torch.")]
        if any(event == WIDE_CAST for _, event in program.events) and kind_of(name) == "m":
            run.bits[name] = LOW_BITS[program.dtype_of(name)]  # until it was cast
            continue
        residual = STORE.get(shard_of(x))
        if residual is None:
            continue
        dtype, storage = program.dtype_of(name), residual.storage
        if storage in BY_CHANCE.get(dtype, ()):
            run.by_chance.add(name)
            run.bits[name] = BY_CHANCE[dtype][storage]
        elif collage_fx.residuals(x):
            run.bits[name] = KEPT[dtype][storage]
        if collage_fx.residuals(x):
            run.compensated.add(name)
    torch.compiler.reset()
    return run


class _Holder(torch.nn.Module):
    """Has tensors as its parameters, of whatever class they are."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self.tensors = tensors

    def named_parameters(self, *_: Any, **__: Any) -> Any:
        """Return them by their numbers, each once."""
        return {id(t): (str(i), t) for i, t in enumerate(self.tensors)}.values()


def followed(step: Callable[..., Any], optimizer: Any, behind: list[str]) -> Callable[..., Any]:
    """Return a step after which copies of the parameters are sent what has changed.

    Args:
        step: a compiled one that notes changes.
        optimizer: whose step it is.
        behind: where parameters are noted of which a copy has other bits then.
    """
    copies = {id(p): bits(p).clone() for group in optimizer.param_groups for p in group["params"]}
    count = 0

    @functools.wraps(step)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        result = step(*args, **kwargs)
        params = [p for group in optimizer.param_groups for p in group["params"]]
        changes = collage_fx.take_changes(_Holder(params))
        for name, p in _Holder(params).named_parameters():
            now = bits(p)
            copy = copies.get(id(p))
            if copy is None or copy.shape != now.shape or copy.dtype != now.dtype:
                copy = copies[id(p)] = ~now
            if name in changes:
                copy[changes[name][0]] = bits(changes[name][1])
            if not torch.equal(copy, now):
                behind.append(f"parameter {name} has other bits than its replica in step {count}")
                copy.copy_(now)
        return result

    return call


@contextlib.contextmanager
def _compiled_again() -> Iterator[list[bool]]:
    """Yield, of each graph that is compiled for a call after the one that it was traced with,
    whether it takes numbers."""
    original, found = backend.compile_graph, []

    def spy(session: Any, gm: Any, inputs: Any, args: tuple[Any, ...] = (), **options: Any) -> Any:
        if args:
            found.append(any(not isinstance(a, Tensor) for a in args))
        return original(session, gm, inputs, args, **options)

    backend.compile_graph = spy
    try:
        yield found
    finally:
        backend.compile_graph = original


def reported(step: Any) -> tuple[str, int]:
    """Return the report of a compiled step, and in how many steps it wrote whole values."""
    report = collage_fx.report(step)
    return str(report), max((s.joined for s in report.states), default=0)


def kind_of(name: str) -> str:
    """Return the name of a state without the number of its parameter."""
    return name.rstrip("0123456789")
