"""Random optimizer programs, as the source text of a script that anyone can run.

A `Program` is data: a few statements of a step, and how it is called and compiled. `script` is its
text, with a function `train` that the tests run as it stands: what is printed is what was run.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from textwrap import indent
from typing import Any

from program_helpers import helpers_of


@dataclass(frozen=True)
class Line:
    """One statement of a step, for one parameter."""

    text: str
    each: str = ""
    """The same for lists of all parameters of a group (ps, gs, ms, ...); "" if it has none."""
    carried: bool = False
    """Whether what it computes is on the way of a state from its old value to its new one, though
    it updates nothing in place: it holds the state's precision, as the state does."""


@dataclass(frozen=True)
class Program:
    """An optimizer, the tensors and numbers that it is given, and how it is compiled."""

    lines: tuple[Line, ...] = ()
    states: tuple[tuple[str, str], ...] = ()
    """For each state of a parameter its name, and an expression for what it begins with."""
    torch_optim: str = ""
    """An optimizer of torch.optim in place of the lines: `AdamW(GROUPS, betas=(0.9, 0.99))`."""
    dtype: str = "bfloat16"
    shapes: tuple[tuple[int, ...], ...] = ((4, 3),)
    rates: tuple[tuple[float, float], ...] = ((1e-3, 0.0),)
    """Rate and weight decay of each group; parameters go to the groups in turn."""
    schedule: str = ""
    """An expression for the factor of the rates in step t."""
    tensor_lr: bool = False
    counter: str = ""
    """`state`, `group` or `tensor`: where the step counts its calls, as k."""
    listed: bool = False
    """Whether the step is of _foreach_ operations on lists, where all statements have such."""
    in_init: bool = False
    """Whether states are made with the optimizer, and not in its first step."""
    near_one: bool = True
    """Whether parameters are about 1 in size, or about 0.05."""
    zero_rows: bool = False
    """Whether some elements have gradients of zero in every step."""
    by_turns: bool = False
    """Whether a parameter has no gradient in every third step."""
    resumed: int = 0
    """The step before which the run is saved and resumed; 0 for never."""
    steps: int = 10
    seed: int = 0
    way: str = "compile"
    """`compile`, `string`, `engine` (the eager one alone) or `function`."""
    options: tuple[tuple[str, Any], ...] = field(default=(("level", "auto"),))

    def script(self, *, model: bool = False) -> str:
        """Return the text of a script that runs the program.

        Args:
            model: whether states and statements that hold more precision than the dtype are marked
                by `STATE(...)` and `with EXACT`, for `rounding.modelled`.
        """
        step = _function(self, model) if self.way == "function" else _optimizer(self, model)
        train = _train_function if self.way == "function" else _train_optimizer
        head = _HEAD.format(dtype=self.dtype) + helpers_of(line.text for line in self.lines)
        return head + step + train(self, model) + _tail(self)

    @property
    def lists(self) -> bool:
        """Whether the step is of operations on lists."""
        able = self.way != "function" and self.counter in ("", "group") and bool(self.lines)
        return self.listed and able and all(line.each for line in self.lines)


_HEAD = """\
import copy

import torch

import collage_fx

LOW, F32 = torch.{dtype}, torch.float32


"""


def _body(program: Program, model: bool) -> list[str]:
    """Return the statements for one parameter, or of lists for all of a group."""
    found = []
    for line in program.lines:
        text = line.each if program.lists else line.text
        if line.carried and model:
            text = "with EXACT:\n" + indent(text, "    ")
        found += text.split("\n")
    return found


def _begin(program: Program, model: bool) -> str:
    kept = [(name, f'STATE("{name}", {begin})') for name, begin in program.states]
    pairs = kept if model else list(program.states)
    if program.way != "function":
        kinds = {"state": [("k", "0")], "tensor": [("k", "torch.tensor(0.0, dtype=F32)")]}
        pairs += kinds.get(program.counter, [])
    return "{" + ", ".join(f'"{name}": {begin}' for name, begin in pairs) + "}"


def _lines(depth: int, lines: Iterable[str]) -> str:
    return "".join(f"{4 * depth * ' '}{line}\n" if line else "\n" for line in lines)


def _optimizer(program: Program, model: bool) -> str:
    """Return the class of the optimizer; "" for those of torch.optim."""
    if program.torch_optim:
        return ""
    begin, text = _begin(program, model), ""
    text += _lines(0, ["class Opt(torch.optim.Optimizer):"])
    text += _lines(1, ["def __init__(self, groups):"])
    text += _lines(2, ['super().__init__(groups, {"k": 0})'])
    if program.in_init and begin != "{}":
        text += _lines(2, ["for group in self.param_groups:"])
        text += _lines(3, ['for p in group["params"]:', f"    self.state[p] |= {begin}"])
    text += _lines(1, ["", "@torch.no_grad()", "def step(self):"])
    text += _lines(2, ["for group in self.param_groups:"])
    text += _lines(3, ['lr, wd = group["lr"], group["wd"]'])
    if program.counter == "group":
        text += _lines(3, ['group["k"] += 1', 'k = group["k"]'])
    text += _of_lists(program, begin) if program.lists else _of_each(program, begin)
    return text + _lines(3 if program.lists else 4, _body(program, model)) + "\n\n"


def _of_each(program: Program, begin: str) -> str:
    text = _lines(3, ['for p in group["params"]:'])
    if program.by_turns:
        text += _lines(4, ["if p.grad is None:", "    continue"])
    text += _lines(4, ["g, st = p.grad, self.state[p]"])
    if begin != "{}" and not program.in_init:
        text += _lines(4, ["if not st:", f"    st |= {begin}"])
    if program.counter in ("state", "tensor"):
        text += _lines(4, ['st["k"] += 1', 'k = st["k"]'])
    return text


def _of_lists(program: Program, begin: str) -> str:
    condition = " if p.grad is not None" if program.by_turns else ""
    text = _lines(3, [f'ps = [p for p in group["params"]{condition}]'])
    if program.by_turns:
        text += _lines(3, ["if not ps:", "    continue"])
    if begin != "{}" and not program.in_init:
        text += _lines(3, ["for p in ps:", "    if not self.state[p]:"])
        text += _lines(3, [f"        self.state[p] |= {begin}"])
    text += _lines(3, ["gs = [p.grad for p in ps]"])
    return text + _lines(
        3, [f'{name}s = [self.state[p]["{name}"] for p in ps]' for name, _ in program.states]
    )


def _function(program: Program, model: bool) -> str:
    text = _lines(0, ["def step(params, grads, states, lr, wd, k):"])
    text += _lines(1, ["for p, g, st in zip(params, grads, states):"])
    return text + _lines(2, _body(program, model)) + "\n\n"


def _groups(program: Program) -> str:
    found, n = [], len(program.rates)
    for i, (lr, wd) in enumerate(program.rates):
        chosen = "params" if n == 1 else f"params[{i}::{n}]"
        rate = f"torch.tensor({lr}, dtype=F32)" if program.tensor_lr else lr
        decay = f', "{"weight_decay" if program.torch_optim else "wd"}": {wd}'
        if program.torch_optim and not wd:
            decay = ""
        found.append(f'{{"params": {chosen}, "lr": {rate}{decay}}}')
    return f"[{', '.join(found)}]"


def _start(program: Program) -> str:
    spread = "1 + 0.25 * x" if program.near_one else "0.05 * x"
    text = _lines(0, [f"SHAPES = {list(program.shapes)}", "", ""])
    if program.way != "function":
        kind = program.torch_optim and f"torch.optim.{program.torch_optim}"
        made = (kind or "Opt(GROUPS)").replace("GROUPS", _groups(program))
        text += _lines(0, ["def optimizer(params):", f"    return {made}", "", ""])
    text += _lines(0, ["def train(dtype, compiled):"])
    text += _lines(1, [f"gen = torch.Generator().manual_seed({program.seed})"])
    text += _lines(1, ["drift = [torch.randn(s, generator=gen) for s in SHAPES]"])
    text += _lines(1, [f"params = [({spread}).to(LOW).to(dtype) for x in drift]"])
    return text


_OPTIMIZED = ["opt = optimizer(params)", "step = compiled(opt)"]
_RESULTS = [
    'found = {f"p{i}": p for i, p in enumerate(params)}',
    'return found | {f"{k}{i}": x for i, st in enumerate(states) for k, x in st.items()}',
]
_GIVEN_BACK = [
    "for a, b in zip(old, [x for p, st in zip(params, states) for x in (p, *st.values())]):",
    "    if isinstance(a, torch.Tensor) and collage_fx.residuals(a):",
    "        collage_fx.load_residuals(b, collage_fx.residuals(a), draws=collage_fx.draws(a))",
]


def _train_optimizer(program: Program, model: bool) -> str:
    text = _start(program)
    text += _lines(1, ["params = [p.requires_grad_() for p in params]", *_OPTIMIZED])
    text += _lines(1, [f"for t in range({program.steps}):"])
    if program.resumed and not model:
        text += _lines(2, [f"if t == {program.resumed}:"])
        if program.way == "string":
            text += _lines(3, ["old = [x for p in params for x in (p, *opt.state[p].values())]"])
        text += _lines(3, ["saved = copy.deepcopy(opt.state_dict())"])
        text += _lines(3, ["params = [p.detach().clone().requires_grad_() for p in params]"])
        text += _lines(3, [*_OPTIMIZED, "opt.load_state_dict(saved)"])
        if program.way == "string":
            text += _lines(3, ["states = [opt.state[p] for p in params]", *_GIVEN_BACK])
    text += _lines(2, ["for i, p in enumerate(params):"])
    text += _lines(3, _gradient(program, "p.grad"))
    if program.by_turns:
        text += _lines(3, ["if (t + i) % 3 == 2:", "    p.grad = None"])
    if program.schedule:
        rates = ", ".join(str(lr) for lr, _ in program.rates)
        text += _lines(2, [f"for group, lr in zip(opt.param_groups, ({rates},)):"])
        fill = 'group["lr"].fill_(' if program.tensor_lr else 'group["lr"] = ('
        text += _lines(3, [f"{fill}lr * {program.schedule})"])
    text += _lines(2, ["step()"])
    return text + _lines(1, ["states = [opt.state[p] for p in params]", *_RESULTS])


def _gradient(program: Program, name: str) -> list[str]:
    scale = 0.5 if program.dtype == "float16" else 0.1
    lines = [
        f"x = {scale} * (torch.randn(SHAPES[i], generator=gen) + drift[i])",
        f"{name} = x.to(LOW).to(dtype)",
    ]
    return [*lines, f"{name}.view(-1)[::3] = 0"] if program.zero_rows else lines


def _train_function(program: Program, model: bool) -> str:
    lr, wd = program.rates[0]
    text = _start(program)
    text += _lines(1, [f"states = [{_begin(program, model)} for p in params]"])
    text += _lines(1, ["call = compiled(step)", f"for t in range({program.steps}):"])
    if program.resumed and not model:
        text += _lines(2, [f"if t == {program.resumed}:"])
        text += _lines(
            3,
            [
                "old = [x for p, st in zip(params, states) for x in (p, *st.values())]",
                "params = [p.clone() for p in params]",
                "states = [{k: v.clone() for k, v in st.items()} for st in states]",
                *_GIVEN_BACK,
            ],
        )
    text += _lines(2, ["grads = []", "for i, p in enumerate(params):"])
    text += _lines(3, [*_gradient(program, "g"), "grads.append(g)"])
    rate = f"{lr} * {program.schedule}" if program.schedule else str(lr)
    text += _lines(2, [f"call(params, grads, states, {rate}, {wd}, t + 1)"])
    return text + _lines(1, _RESULTS)


def _tail(program: Program) -> str:
    call = "collage_fx.compile(x, **OPTIONS)"
    if program.way == "string":
        call = 'torch.compile(x.step, backend="collage", options=OPTIONS)'
    if program.way in ("record", "at once"):
        call = f"collage_fx.compile(x, record={program.way == 'record'}, **OPTIONS)"
    stance = ["    torch.compiler.set_stance('force_eager')"] if program.way == "engine" else []
    return _lines(
        0,
        [
            "",
            "",
            f"OPTIONS = {dict(program.options)}",
            'if __name__ == "__main__":',
            *stance,
            "    low = train(LOW, lambda x: getattr(x, 'step', x))",
            f"    ours = train(LOW, lambda x: {call})",
            "    F32 = torch.float64",
            "    exact = train(F32, lambda x: getattr(x, 'step', x))",
            "    for name, x in exact.items():",
            "        if isinstance(x, torch.Tensor):",
            "            error = (collage_fx.value(ours[name]) - x).norm()",
            "            print(name, float(error), 'plain:', float((low[name] - x).norm()))",
        ],
    )
