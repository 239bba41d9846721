"""Captures the functional graph of a step as the backend sees it, and compiles no kernel."""

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, optim
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd.descriptors import BufferAOTInput, ParamAOTInput, PlainAOTInput
from torch._inductor.decomposition import select_decomp_table
from torch.fx import GraphModule, Node
from torch.optim import Optimizer

from collage_fx.compilation.inductor import compile_by
from collage_fx.optimizer.ownership import owner_of, owners_of
from collage_fx.passes.ir.program import (
    Arithmetic,
    Carried,
    Level,
    Program,
    Rewritten,
    Settings,
    StatePlan,
)
from collage_fx.passes.pipeline import PASSES, run_passes
from collage_fx.passes.rewrite.symbolic_scalars import keep_symbols
from collage_fx.runtime.storage.positions import Place, positions
from collage_fx.runtime.storage.state_name import StateName

BF16, FP16 = torch.bfloat16, torch.float16
_KINDS: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (optim.Adadelta, {}),
    (optim.Adagrad, {}),
    (optim.Adam, {"weight_decay": 0.1, "amsgrad": True}),
    (optim.Adamax, {}),
    (optim.AdamW, {}),
    (optim.ASGD, {}),
    (optim.NAdam, {}),
    (optim.RAdam, {}),
    (optim.RMSprop, {"momentum": 0.9, "centered": True}),
    (optim.Rprop, {}),
    (optim.SGD, {"momentum": 0.9, "weight_decay": 0.01, "dampening": 0.1}),
]
_IN_LOOPS = (optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.SGD)
OPTIMIZERS = [
    *((kind, {"foreach": True, **options}) for kind, options in _KINDS),
    *((kind, {"foreach": False, **options}) for kind, options in _KINDS if kind in _IN_LOOPS),
]


def named(value: object) -> str | None:
    """A readable parameter id."""
    if isinstance(value, dict):
        return "-".join(f"{k}={v}" for k, v in value.items()) or "default"
    return getattr(value, "__name__", None)


@dataclass(eq=False)
class Captured:
    """The functional graph of one step, from which any number of programs can be made."""

    step: Callable[..., Any]
    """Step, kept since Dynamo's graph refers weakly to the tensors of an optimizer."""
    dynamo: GraphModule
    functional: GraphModule

    def program(
        self, level: Level = "auto", arithmetic: Arithmetic = "eft", storage: str = "mcf2"
    ) -> Program:
        """Run all passes."""
        return self.of(Settings(level, arithmetic, storage))

    def of(self, settings: Settings) -> Program:
        """Run all passes with these settings."""
        return run_passes(Program(self.functional, settings, self._describe))

    def rewritten(
        self, level: Level = "auto", arithmetic: Arithmetic = "eft", storage: str = "mcf2"
    ) -> Rewritten:
        """Return the only rewritten class of a program."""
        return self.only(Settings(level, arithmetic, storage))

    @functools.cache  # noqa: B019  captures live as long as the tests
    def only(self, settings: Settings) -> Rewritten:
        """Return the only rewritten class of a program that tests share and leave as it is."""
        (only,) = self.of(settings).rewritten
        return only

    def plan(self, level: Level = "auto") -> dict[str, StatePlan]:
        """Run the passes up to the verdicts; return them by the first word of each state's name."""
        program = Program(self.functional, Settings(level), self._describe)
        for run in PASSES:
            run(program)
            if program.plan:
                return verdicts(program)
        return {}

    @functools.cached_property
    def _owners(self) -> dict[int, Any]:
        optimizer = getattr(self.step, "__self__", None)
        return owners_of([optimizer] if isinstance(optimizer, Optimizer) else [])

    def _describe(self, index: int, placeholder: Node) -> Carried:
        """Name a carried state as the backend does: by its optimizer, else by the argument."""
        descriptor, val = placeholder.meta["desc"], placeholder.meta["val"]
        if isinstance(descriptor, PlainAOTInput):
            source = self.dynamo.graph.find_nodes(op="placeholder")[descriptor.idx]
            name = source.name.removeprefix("l_").rstrip("_")
            return _carried(index, name, source.meta["example_value"], False, val)
        if not isinstance(descriptor, ParamAOTInput | BufferAOTInput):
            name = StateName("an input that overlaps others")
            return Carried(index, name, "tensor", False, val)
        tensor = functools.reduce(getattr, descriptor.target.split("."), self.dynamo)
        owned = self._owners.get(id(tensor))
        if owned is None:
            return _carried(index, descriptor.target, tensor, True, val)
        return Carried(index, owned[1].state_name, owned[1].owner, True, val, owned=True)


def _carried(index: int, name: str, tensor: Tensor, static: bool, val: Tensor) -> Carried:
    if owner_of(tensor) == "param":
        return Carried(index, StateName(None, name), "param", static, val)
    return Carried(index, StateName(name), "tensor", static, val)


def capture(
    step: Callable[..., Any], *args: Any, between: Callable[[], Any] | None = None
) -> Captured:
    """Return the graph that `step(*args)` compiles to; it must be one graph.

    Args:
        step: what is called.
        args: with which arguments.
        between: what is done before a second call, whose graph is returned then.
    """
    captured: list[Captured] = []

    def keep(dynamo: GraphModule, functional: GraphModule) -> Callable[[list[Any]], list[None]]:
        captured.append(Captured(step, dynamo, functional))
        outputs: Any = functional.graph.output_node().args[0]

        def run(inputs: list[Any]) -> list[None]:
            inputs.clear()
            return [None] * len(outputs)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def backend(gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        with functorch_config.patch(enable_autograd_cache=False):
            table = keep_symbols(select_decomp_table())
            return compile_by(lambda g, _, **__: keep(gm, g), gm, inputs, table, {})

    torch.compiler.reset()
    with torch.no_grad():
        compiled = torch.compile(step, backend=backend)
        compiled(*args)
        if between is not None:
            between()
            compiled(*args)
    assert len(captured) == 1 + (between is not None), f"{len(captured)} graphs"
    return captured[-1]


@functools.cache
def capture_optimizer(
    kind: type[Optimizer],
    *,
    shapes: Sequence[tuple[int, ...]] = ((4, 3),),
    dtype: torch.dtype = BF16,
    scheduled: bool = False,
    **options: Any,
) -> Captured:
    """Return the graph of an optimizer's second step, where all of its states exist.

    If it is scheduled, that of a step whose learning rate, a float, is another than before.
    """
    generator = torch.Generator().manual_seed(0)
    params = [
        torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes
    ]
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(dtype)
    optimizer = kind(params, **options)
    optimizer.step()
    (group,) = optimizer.param_groups
    between = (lambda: group.update(lr=group["lr"] / 2)) if scheduled else None
    return capture(optimizer.step, between=between)


def text(module: GraphModule | None) -> str:
    """Return one line for each node, `name: dtype = operation(operands)`, with short names."""
    assert module is not None
    names: dict[Node, str] = {}
    counts: Counter[str] = Counter()
    for node in module.graph.nodes:
        names[node] = node.name
        if node.op == "call_function":
            word = node.target.__name__.partition(".")[0]
            names[node] = f"{_WORDS.get(word, word)}{counts[word]}"
            counts[word] += 1
    return "\n".join(_line(node, names) for node in module.graph.nodes)


_WORDS = {"convert_element_type": "cast", "getitem": "item"}
_TYPES = {BF16: "bf16", FP16: "fp16", torch.float32: "fp32", torch.bool: "bool"}


def _line(node: Node, names: dict[Node, str]) -> str:
    operands = [names.get(a) or _TYPES.get(a) or str(a) for a in node.args if a is not None]
    if node.op == "output":
        return f"return {', '.join(names[n] for n in node.args[0])}"  # type: ignore[union-attr, index]
    typed = f"{names[node]}: {_TYPES[node.meta['dtype']]}"
    if node.op == "placeholder":
        return typed
    is_operator = isinstance(node.target, torch._ops.OpOverload)
    target = str(node.target).removesuffix(".default") if is_operator else "getitem"
    return f"{typed} = {target}({', '.join(operands)})"


def operations(module: GraphModule | None) -> list[str]:
    """Return the names of the operations of a graph, in order."""
    assert module is not None
    return [str(n.target) for n in module.graph.nodes if n.op == "call_function"]


def verdicts(program: Program) -> dict[str, StatePlan]:
    """Return the plan by the first word of each state's name: `param`, `exp_avg`, ..."""
    return {s.state_name.kind if s.state_name.parameter else "param": s for s in program.plan}


FIRST = Place((1 << 32) - 500, (1,))
"""A place in a whole tensor, of which positions are counted modulo 2^32."""


def random_inputs(module: GraphModule | None, size: int = 1000) -> list[Tensor]:
    """Return inputs for an expanded or lowered graph: values near one, residuals below an ulp."""
    assert module is not None
    generator = torch.Generator().manual_seed(0)
    inputs = []
    for node in module.graph.find_nodes(op="placeholder"):
        shape = () if node.meta["scalar"] else (size,)
        dtype = node.meta["dtype"]
        value = torch.rand(shape, generator=generator, dtype=torch.float64) + 0.5
        tiny = torch.finfo(dtype).eps / 4 if node.name.endswith("_lo") else 1.0
        value = (value * tiny).to(dtype)
        inputs.append(positions(value, FIRST) if node.name == "position" else value)
    return inputs


def random_bits(module: GraphModule | None, size: int = 1000) -> list[Tensor]:
    """Return inputs for an expanded graph: every bit pattern is equally likely."""
    assert module is not None
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randint(-(2**15), 2**15, () if n.meta["scalar"] else (size,), generator=generator)
        .to(torch.int16)
        .view(n.meta["dtype"])
        if n.meta["dtype"].itemsize == 2
        else torch.rand(() if n.meta["scalar"] else (size,), generator=generator).to(
            n.meta["dtype"]
        )
        for n in module.graph.find_nodes(op="placeholder")
    ]


def mistyped(module: GraphModule | None, inputs: list[Tensor]) -> dict[str, torch.dtype]:
    """Return the nodes whose result, computed eagerly, has another dtype than they claim."""
    assert module is not None
    found: dict[str, torch.dtype] = {}

    class Observer(torch.fx.Interpreter):
        def run_node(self, node: Node) -> Any:
            result = super().run_node(node)
            if isinstance(result, Tensor) and result.dtype != node.meta["dtype"]:
                found[node.name] = result.dtype
            return result

    Observer(module).run(*inputs)
    return found


def differing(a: Tensor, b: Tensor) -> int:
    """Return at how many elements a and b differ; NaN equals NaN."""
    return int((~((a == b) | (a.isnan() & b.isnan()))).sum())
