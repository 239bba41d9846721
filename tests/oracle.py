"""What a random program should give: float64, and how far from it its arithmetic may lead.

The bound on the error of a compensated run is a *model* of it: the same program in float64, where
each result of an operation is rounded to as many bits as collage_fx says that it has there:

- a state, at each update in place, to those of its storage, or of its dtype if it has no residual;
- what an update adds to it, to those of the arithmetic (8 of bf16 in `eft`, 24 in `wide`);
- every other result likewise; but not what stands on the way of a state from its old value to its
  new one (`programs.Line.carried`), which holds the precision of the state.

So no update is lost in the model, a quotient of small differences is as bad there as it must be,
and the run may be FACTOR times as far from float64 as the worst of a few models that differ by
random errors of half a unit. The norms of tensors are compared, or medians where a program has
jumps (a sign that turns over). Rounding to nearest has a bias where updates are below half a unit
of a state without a residual: the model has it too, since it rounds such states as they are.
"""

import contextlib
import linecache
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from interpreter import without_compiler
from programs import Program
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import collage_fx
from collage_fx import backend
from collage_fx.errors import CollageError, CollageWarning
from collage_fx.runtime.residuals import STORE

FACTOR = 6.0
MODELS = 4
LOW_BITS = {"bfloat16": 8, "float16": 11}
KEPT = {
    "bfloat16": {"mcf2": 17, "ulp8": 16, "remainder16": 24, "mcf3": 24},
    "float16": {"mcf2": 23, "ulp8": 19, "mcf3": 24},
}
"""The bits of a state in each storage, as the README says."""
SMALLEST = {"bfloat16": -133, "float16": -24}
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


def _tensors(found: dict[str, Any]) -> dict[str, Tensor]:
    return {k: x.detach() for k, x in found.items() if isinstance(x, Tensor)}


def eager(program: Program, dtype: torch.dtype) -> dict[str, Tensor]:
    """Run a program in eager PyTorch: in a 16-bit dtype, in fp32, or all of it in float64."""
    with module_of(program) as module:
        if dtype == torch.float64:
            module.F32 = torch.float64  # type: ignore[attr-defined]
        return {k: x.double() for k, x in _tensors(module.train(dtype, plain)).items()}


@dataclass
class Run:
    """What a compensated run gave."""

    values: dict[str, Tensor] = field(default_factory=dict)
    high: dict[str, Tensor] = field(default_factory=dict)
    bits: dict[str, int] = field(default_factory=dict)
    """How many bits each state has, by its name and parameter."""
    compensated: set[str] = field(default_factory=set)
    warned: list[str] = field(default_factory=list)
    error: CollageError | None = None
    graphs: int = 0
    numbers: bool = False
    """Whether a graph was compiled again, or late, that takes numbers which change."""
    eager: int = 0
    """In how many steps the eager engine had a part."""
    report: str = ""


def way_of(program: Program) -> Callable[[Any], Callable[..., Any]]:
    """Return what the program is compiled by."""
    options = dict(program.options)
    if program.way == "string":
        return lambda x: torch.compile(x.step, backend="collage", options=options)
    return lambda x: collage_fx.compile(x, **options)


def compensated(program: Program, *, interpreted: bool = True) -> Run:
    """Run a program by collage_fx."""
    run, low = Run(), getattr(torch, program.dtype)
    steps: list[Any] = []

    def compiled(x: Any) -> Any:
        steps.append(way_of(program)(x))
        return steps[-1]

    torch.compiler.reset()
    stance = "force_eager" if program.way == "engine" else "default"
    with contextlib.ExitStack() as stack:
        module = stack.enter_context(module_of(program))
        compiler = without_compiler() if interpreted else contextlib.nullcontext([])
        graphs = stack.enter_context(compiler)
        again = stack.enter_context(_compiled_again())
        caught = stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always", CollageWarning)
        stack.enter_context(torch.compiler.set_stance(stance))
        try:
            found = _tensors_themselves(module.train(low, compiled))
        except CollageError as error:
            run.error, found = error, {}
        run.warned = [str(w.message) for w in caught if issubclass(w.category, CollageWarning)]
        run.graphs, run.numbers = len(graphs), any(again)
        if steps and program.way != "string":
            run.report, run.eager = reported(steps[-1])
    for name, x in found.items():
        run.values[name], run.high[name] = collage_fx.value(x), x.detach().double()
        run.bits[name] = 24 if x.dtype == torch.float32 else LOW_BITS[program.dtype]
        residual = STORE.get(x)
        if residual is not None and collage_fx.residuals(x):
            run.bits[name] = KEPT[program.dtype][residual.storage]
            run.compensated.add(name)
    torch.compiler.reset()
    return run


@contextlib.contextmanager
def _compiled_again() -> Iterator[list[bool]]:
    """Yield, of each graph that is compiled for a call after the one that it was traced with,
    whether it takes numbers."""
    original, found = backend.compile_graph, []

    def spy(session: Any, gm: Any, inputs: Any, args: tuple[Any, ...] = ()) -> Any:
        if args:
            found.append(any(not isinstance(a, Tensor) for a in args))
        return original(session, gm, inputs, args)

    backend.compile_graph = spy
    try:
        yield found
    finally:
        backend.compile_graph = original


def reported(step: Any) -> tuple[str, int]:
    """Return the report of a compiled step, and in how many steps the eager engine had a part."""
    report = collage_fx.report(step)
    return str(report), max((s.eager for s in report.states), default=0)


def _tensors_themselves(found: dict[str, Any]) -> dict[str, Tensor]:
    return {k: x for k, x in found.items() if isinstance(x, Tensor)}


class Rounding(TorchDispatchMode):
    """Rounds what operations on float64 tensors give to the bits that it would have."""

    def __init__(self, bits: dict[str, int], arithmetic: int, low: int, smallest: int, seed: int):
        super().__init__()
        self.bits, self.arithmetic, self.low, self.smallest = bits, arithmetic, low, smallest
        self.states: dict[int, tuple[str, Tensor]] = {}
        self.exact = 0
        self.dithered = bool(seed % 2)
        """Whether states without residuals are rounded by chance too."""
        self.generator = torch.Generator().manual_seed(seed)

    def keep(self, name: str, x: Any) -> Any:
        """Note that a tensor is a state, and return it."""
        if isinstance(x, Tensor):
            self.states[x.untyped_storage()._cdata] = (name, x)
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

    def _updated(self, x: Tensor, old: Tensor, scales: bool) -> None:
        """Round what has been written to a tensor."""
        if x.dtype != torch.float64:
            return
        name, _ = self.states.get(x.untyped_storage()._cdata, ("", x))
        bits = self.bits.get(name, self.low)
        if not name:
            if not self.exact:
                x.copy_(self.rounded(x, self._temporary(x, [])))
            return
        if bits > self.low and not scales:
            step = (x - old) * (1 + self._noise(x) * 2.0 ** (1 - self.arithmetic))
            x.copy_(torch.where(step.isfinite(), old + step, x))
        x.copy_(self.rounded(x, bits, noise=bits > self.low or self.dithered))

    def _temporary(self, x: Tensor, operands: list[Any]) -> int:
        """Return the bits of a result that is no state; of numbers from numbers, those of fp32."""
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
        result = func(*args, **kwargs)
        if written:
            scales = any(word in str(func) for word in ("mul_", "div_", "zero_", "fill_"))
            scales &= "addc" not in str(func)
            for x, before in zip(written, old, strict=True):
                self._updated(x, before, scales)
            return result
        if self.exact or func.is_view or str(func).split(".")[1] in _COPIES:
            return result
        operands = tree_leaves((args, kwargs))

        def one(x: Any) -> Any:
            if isinstance(x, Tensor) and x.dtype == torch.float64:
                return self.rounded(x, self._temporary(x, operands))
            return x

        return tree_map(one, result)


_COPIES = {"clone", "_to_copy", "zeros_like", "empty_like", "full_like", "ones_like", "detach"}


def modelled(program: Program, run: Run, bits: dict[str, int], seed: int) -> dict[str, Tensor]:
    """Run a program in float64 with the roundings that its compensated run should have.

    Args:
        program: the program.
        run: how it was run.
        bits: those of each state, by its name and parameter.
        seed: of the random errors.
    """
    options, low = dict(program.options), LOW_BITS[program.dtype]
    # The eager engine, which often does the first step, computes updates in the dtype.
    wide = options.get("arithmetic") == "wide" and run.eager <= (not program.resumed)
    # The first step knows states by their kind only.
    kinds = {kind_of(name): n for name, n in sorted(bits.items(), key=lambda item: item[1])}
    mode = Rounding(
        kinds | bits, 24 if wide and not run.eager else low, low, SMALLEST[program.dtype], seed
    )
    late = program.way == "string" and not program.in_init

    def compiled(x: Any) -> Any:
        def states(args: tuple[Any, ...]) -> dict[str, Any]:
            if args:  # a function
                params, rows = args[0], args[2]
            else:
                params = _in_turn(x)
                rows = [x.state[p] for p in params]
            pairs = [{"p": p, **row} for p, row in zip(params, rows, strict=True)]
            return {f"{k}{i}": x for i, pair in enumerate(pairs) for k, x in pair.items()}

        def step(*args: Any) -> Any:
            before = states(args)
            for name, value in before.items():
                mode.keep(name, value)
            with mode:
                result = plain(x)(*args)
            mode.arithmetic = 24 if wide else low
            for name, value in states(args).items() if late else ():
                if name not in before and isinstance(value, Tensor) and kind_of(name) != "k":
                    value.copy_(mode.rounded(value, low))
            return result

        return step

    with module_of(program, model=True) as module:
        module.F32 = torch.float64  # type: ignore[attr-defined]
        module.EXACT = _Exactly(mode)  # type: ignore[attr-defined]
        module.STATE = (lambda _, x: x) if late else mode.keep  # type: ignore[attr-defined]
        return _tensors(module.train(torch.float64, compiled))


def _in_turn(optimizer: Any) -> list[Tensor]:
    """Return the parameters of an optimizer whose groups take them in turn, in their order."""
    groups = [group["params"] for group in optimizer.param_groups]
    count = sum(map(len, groups))
    return [groups[i % len(groups)][i // len(groups)] for i in range(count)]


def kind_of(name: str) -> str:
    """Return the name of a state without the number of its parameter."""
    return name.rstrip("0123456789")


class _Exactly:
    def __init__(self, mode: Rounding) -> None:
        self.mode = mode

    def __enter__(self) -> None:
        self.mode.exact += 1

    def __exit__(self, *_: object) -> None:
        self.mode.exact -= 1


EXCUSES = {
    "not compensated": "not compensated",
    "ran without compensation": "recompile limit",
    "no use for a residual": "updated by several graphs",
    "collage_fx.compile leaves that to its eager engine": "handed on without its low word",
    "part of a differentiated computation": "differentiated",
    "was cleared": "residual cleared",
}
"""A part of a warning that says that something is not compensated -> its short name."""
JUMPS = ("sign(", "clamp", "Rprop", "Adamax")
FLOOR = 4.0
"""In units of the last place of a state: what its error may be at any rate."""


@dataclass
class Verdict:
    """The comparison of a compensated run with float64."""

    program: Program
    run: Run
    failures: list[str] = field(default_factory=list)
    excuse: str = ""
    """What collage_fx says itself, where it says that something is not compensated."""
    worst: float = 0.0
    """The largest error, as a part of what is allowed."""
    lost: float = 0.0
    """The largest error of plain 16-bit training, as a part of what is allowed."""


def judge(program: Program, *, interpreted: bool = True) -> Verdict:
    """Run a program by collage_fx, and say where it is further from float64 than it may be."""
    run = compensated(program, interpreted=interpreted)
    verdict = Verdict(program, run)
    if run.error is not None:
        verdict.excuse = type(run.error).__name__
        return verdict
    for part, name in EXCUSES.items():
        if any(part in message for message in run.warned):
            verdict.excuse = name
            return verdict
    exact, low = eager(program, torch.float64), eager(program, getattr(torch, program.dtype))
    allowed = limits(program, run, exact)
    if any("none of them loses updates" in message for message in run.warned):
        verdict.failures += untrue(program, run, exact)
    for name, x in exact.items():
        ours, theirs = run.values[name], low[name]
        bad = ~ours.isfinite() & x.isfinite() & theirs.isfinite()
        if bad.any():
            verdict.failures.append(f"{name}: {int(bad.sum())} elements are not finite")
        elif x.isfinite().all() and run.high[name].isfinite().all():
            found, most = size(program, ours - x), allowed[name]
            if found > most:
                verdict.failures.append(
                    f"{name}: error {found:.2e}, allowed {most:.2e}, plain "
                    f"{size(program, theirs - x):.2e}, {run.bits[name]} bits"
                )
            verdict.worst = max(verdict.worst, found / most)
            verdict.lost = max(verdict.lost, size(program, theirs - x) / most)
    return verdict


def untrue(program: Program, run: Run, exact: dict[str, Tensor]) -> list[str]:
    """Return the states that hardly move, though a warning says that none loses updates."""
    first = eager(replace(program, steps=1), torch.float64)
    found = []
    for name, x in exact.items():
        moved, missing = size(program, x - first[name]), size(program, run.values[name] - x)
        if run.bits[name] == LOW_BITS[program.dtype] and missing > 0.5 * moved > 0:
            found.append(f"{name}: lost {missing:.2e} of {moved:.2e}, though none is said to lose")
    return found


def size(program: Program, x: Tensor) -> float:
    """Return the norm of an error; of programs with jumps, the median times the root of the count.

    A jump is an error of some elements that says nothing.
    """
    text = program.torch_optim + "".join(line.text for line in program.lines)
    if any(word in text for word in JUMPS):
        return float(x.abs().flatten().median() * x.numel() ** 0.5)
    return float(x.norm())


def limits(program: Program, run: Run, exact: dict[str, Tensor]) -> dict[str, float]:
    """Return how large the error of each state may be.

    A parameter may be off by what its residual does not hold, whether it has one or not. So may
    any other state without one, where the level leaves that to what is lost; but for a few units of
    its last place, of which rounding to nearest averages out.
    """
    low, light = LOW_BITS[program.dtype], dict(program.options)["level"] == "light"
    least = min(KEPT[program.dtype].values())
    parameters = {k: max(n, least) if kind_of(k) == "p" else n for k, n in run.bits.items()}
    whole = {k: max(n, least) for k, n in run.bits.items()}

    def errors(bits: dict[str, int]) -> dict[str, float]:
        models = [modelled(program, run, bits, seed) for seed in range(MODELS)]
        return {k: max(size(program, m[k] - x) for m in models) for k, x in exact.items()}

    as_said = errors(parameters)
    at_best = as_said if light or whole == parameters else errors(whole)
    found = {}
    for name, x in exact.items():
        plain_state = run.bits[name] == low and kind_of(name) != "p"
        most = (at_best if plain_state else as_said)[name]
        bits = low if plain_state else parameters[name]
        unit = max(float(x.norm()) * 2.0**-bits, 2.0 ** SMALLEST[program.dtype])
        # The model rounds nothing of what is no state of 16 bits: it may lose a unit in each step.
        once = name in run.compensated or run.bits[name] == low
        found[name] = FACTOR * most + FLOOR * unit * (1 if once else program.steps)
    return found
