"""The text of a random program's step: of an optimizer's class, or of a function."""

from collections.abc import Iterable
from textwrap import indent
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from programs import Program


def _body(program: "Program", model: bool) -> list[str]:
    """Return the statements for one parameter, or of lists for all of a group."""
    found = []
    for line in program.lines:
        text = line.each if program.lists else line.text
        if line.carried and model:
            text = "with EXACT:\n" + indent(text, "    ")
        found += text.split("\n")
    return found


def begin_of(program: "Program", model: bool) -> str:
    kept = [(name, f'STATE("{name}", {begin})') for name, begin in program.states]
    pairs = kept if model else list(program.states)
    if program.way != "function":
        kinds = {"state": [("k", "0")], "tensor": [("k", "torch.tensor(0.0, dtype=F32)")]}
        pairs += kinds.get(program.counter, [])
    return "{" + ", ".join(f'"{name}": {begin}' for name, begin in pairs) + "}"


def lines_of(depth: int, lines: Iterable[str]) -> str:
    return "".join(f"{4 * depth * ' '}{line}\n" if line else "\n" for line in lines)


def optimizer_text(program: "Program", model: bool) -> str:
    """Return the class of the optimizer; "" for those of torch.optim."""
    if program.torch_optim:
        return ""
    begin, text = begin_of(program, model), ""
    text += lines_of(0, ["class Opt(torch.optim.Optimizer):"])
    text += lines_of(1, ["def __init__(self, groups):"])
    text += lines_of(2, ['super().__init__(groups, {"k": 0})'])
    if program.in_init and begin != "{}":
        text += lines_of(2, ["for group in self.param_groups:"])
        text += lines_of(3, ['for p in group["params"]:', f"    self.state[p] |= {begin}"])
    text += lines_of(1, ["", "@torch.no_grad()", "def step(self):"])
    text += lines_of(2, ["for group in self.param_groups:"])
    text += lines_of(3, ['lr, wd = group["lr"], group["wd"]'])
    if program.counter == "group":
        text += lines_of(3, ['group["k"] += 1', 'k = group["k"]'])
    text += _of_lists(program, begin) if program.lists else _of_each(program, begin)
    depth = 3 if program.lists else 2 if program.cut else 4
    text += lines_of(depth, _body(program, model))
    if program.methods:
        text += "\n" + lines_of(1, program.methods.split("\n"))
    return text + "\n\n"


def _of_each(program: "Program", begin: str) -> str:
    text = lines_of(3, ['for p in group["params"]:'])
    if program.by_turns or program.frozen:
        text += lines_of(4, ["if p.grad is None:", "    continue"])
    depth = 4
    if program.cut:
        given = "p, lr, wd" + (", k" if program.counter == "group" else "")
        text += lines_of(4, [f"self.update({given})"])
        text += lines_of(1, ["", f"def update(self, {given}):"])
        text += lines_of(2, ["torch._dynamo.graph_break()"])
        depth = 2
    text += lines_of(depth, ["g, st = p.grad, self.state[p]"])
    if begin != "{}" and not program.in_init:
        text += lines_of(depth, ["if not st:", f"    st |= {begin}"])
    if program.counter in ("state", "tensor"):
        text += lines_of(depth, ['st["k"] += 1', 'k = st["k"]'])
    return text


def _of_lists(program: "Program", begin: str) -> str:
    some = program.by_turns or program.frozen
    condition = " if p.grad is not None" if some else ""
    text = lines_of(3, [f'ps = [p for p in group["params"]{condition}]'])
    if some:
        text += lines_of(3, ["if not ps:", "    continue"])
    if begin != "{}" and not program.in_init:
        text += lines_of(3, ["for p in ps:", "    if not self.state[p]:"])
        text += lines_of(3, [f"        self.state[p] |= {begin}"])
    text += lines_of(3, ["gs = [p.grad for p in ps]"])
    return text + lines_of(
        3, [f'{name}s = [self.state[p]["{name}"] for p in ps]' for name, _ in program.states]
    )


def function_text(program: "Program", model: bool) -> str:
    text = lines_of(0, ["def step(params, grads, states, lr, wd, k):"])
    text += lines_of(1, ["for p, g, st in zip(params, grads, states):"])
    return text + lines_of(2, _body(program, model)) + "\n\n"
