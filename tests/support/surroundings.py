"""Surroundings of the steps of random programs: between them, and in memory and gradients."""

from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from programs import LOW_CAST, WIDE_CAST, Program

_CHANNELS = (2, 3, 2, 2)
LOADS = (
    "opt.load_state_dict(opt.state_dict())",
    "opt.load_state_dict(copy.deepcopy(opt.state_dict()))",
    "file = io.BytesIO()\ntorch.save(opt.state_dict(), file)\nfile.seek(0)\n"
    "opt.load_state_dict(torch.load(file))",
    "params, opt = copy.deepcopy((params, opt))\nstep = compiled(opt)",
    "params, opt = pickle.loads(pickle.dumps((params, opt)))\nstep = compiled(opt)",
)
"""Everything goes on with what was saved."""
_READS = (
    "copy.deepcopy(opt)",
    "pickle.dumps(opt)",
    "copy.deepcopy(opt.state_dict())",
    "[p.tolist() for p in params]",
    "opt.zero_grad(set_to_none=False)",
    "step = compiled(opt)",
)
"""Nothing changes."""
RESTORED = (
    "with torch.no_grad():\n    for p in params:\n        old = p.clone()\n        p.add_(0.25)\n"
    "        p.copy_(old)",
    "with torch.no_grad():\n    for p in params:\n        p.clamp_(-float('inf'), float('inf'))",
    "for p in params:\n    p.data = p.data.clone()",
    "for st in opt.state.values():\n    for k, x in st.items():\n"
    "        st[k] = x.clone() if type(x) is torch.Tensor else x",
)
"""Values are what they were, though others have written them or they are in other memory."""
EVALUATION = "opt.eval()\nopt.train()"
_METHODS = """\
@torch.no_grad()
def eval(self):
    self._between({there})

@torch.no_grad()
def train(self):
    self._between({back})

def _between(self, weight):
    for group in self.param_groups:
        for p in group["params"]:
            s = self.state[p].get("{name}")
            if s is not None:
                {body}"""
_SWAPS = (
    (0.5, -1.0, "p.lerp_(s, weight)"),
    (0.2, -0.25, "p.add_(s - p, alpha=weight)"),
    (0.2, -0.25, "p.data.lerp_(s, weight)"),
    (1, 1, "x = p.clone(); p.copy_(s); s.copy_(x)"),
)
"""The weights of the two methods, and what both do."""


def surroundings(draw: DrawFn, program: Program, *, loads: bool) -> dict[str, Any]:
    """Return fields of a program that say what is around its steps.

    Args:
        draw: of hypothesis.
        program: without them.
        loads: whether its states have the dtypes that a state dict is loaded in.
    """
    kinds = [dtypes, layout, gradients, infinite]
    if program.way != "function":
        kinds += [joins, *([] if program.resumed else [events]), cut, wrapped]
    found: dict[str, Any] = {}
    for kind in draw(st.lists(st.sampled_from(kinds), max_size=2, unique=True)):
        found |= kind(draw, program, loads) if kind is events else kind(draw, program)
    return found


def dtypes(draw: DrawFn, program: Program) -> dict[str, Any]:
    """Parameters of several dtypes."""
    apart = dict(program.options).get("storage") in ("auto", "mcf2", "mcf3", "ulp8", None)
    if len(program.shapes) < 2 or not apart or program.draws or "shared" in program.statements:
        return {}
    others = draw(st.sampled_from((("float32",), ("float16",), ("float16", "float32"))))
    chosen = (program.dtype, *(d for d in others if d != program.dtype))
    return {"dtypes": chosen} if len(chosen) > 1 else {}


def layout(draw: DrawFn, program: Program) -> dict[str, Any]:
    """Parameters that are laid out in memory in another way than most."""
    how = draw(st.sampled_from(("transposed", "sliced", "channels_last")))
    if how == "channels_last":
        return {"layout": how, "shapes": (_CHANNELS, *program.shapes[1:])}
    return {"layout": how}


def gradients(draw: DrawFn, program: Program) -> dict[str, Any]:
    """Gradients in other memory, or of other classes."""
    kinds = ["transposed", "sliced", "Named", "Boxed"]
    kinds[:0] = ["kept"] if program.way != "function" else []
    return {"gradients": draw(st.sampled_from(kinds))}


def wrapped(draw: DrawFn, program: Program) -> dict[str, Any]:
    """A wrapper around the optimizer, a group that is frozen before the others, or both."""
    around, before = draw(st.sampled_from(((True, True), (True, False), (False, True))))
    return {"wrapped": around, "frozen": before}


def infinite(draw: DrawFn, program: Program) -> dict[str, Any]:
    """Gradients with elements that are infinite, or no numbers."""
    return {"infinite": draw(st.sampled_from(("inf", "-inf", "nan")))}


def cut(draw: DrawFn, program: Program) -> dict[str, Any]:
    """A method for each parameter that Dynamo does not trace with the step."""
    return {"cut": bool(program.lines)}


def joins(draw: DrawFn, program: Program) -> dict[str, Any]:
    """A parameter that joins later."""
    able = len(program.shapes) > 1 and not (program.in_init or program.resumed)
    return {"joins": draw(st.integers(1, 5))} if able and not program.tensor_lr else {}


def events(draw: DrawFn, program: Program, loads: bool) -> dict[str, Any]:
    """Draw what happens between two steps."""
    kinds, states = [_READS], dict(program.states)
    # Of two that share a state one has the low words of the clones.
    kinds.append(RESTORED[: 3 if "shared(" in str(states) else 4])
    if loads and program.counter != "tensor" and "Boxed" not in program.statements:
        kinds.append(LOADS)
    if (
        "m" in states
        and not program.draws
        and not any("lerp" in line.text for line in program.lines)
    ):
        kinds.append((LOW_CAST if "F32" in states["m"] else WIDE_CAST,))
    swapped = next((name for name in ("slow", "z") if name in states), "")
    if swapped and program.way != "string":
        kinds.append((EVALUATION,))
    drawn = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=2, unique=True))
    chosen = [draw(st.sampled_from(texts)) for texts in drawn]
    found: dict[str, Any] = {"events": tuple((draw(st.integers(2, 7)), text) for text in chosen)}
    if EVALUATION in chosen:
        found["methods"] = methods(swapped, *draw(st.sampled_from(_SWAPS)))
    return found


def methods(name: str, there: float, back: float, body: str) -> str:
    """Return two methods that write parameters: the one undoes the other.

    Args:
        name: of the state that both move a parameter to, or from.
        there: the weight of the first.
        back: that of the second.
        body: the statements of both, for a parameter p, a state s and a weight.
    """
    return _METHODS.format(name=name, there=there, back=back, body=body)
