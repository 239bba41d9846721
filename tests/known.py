"""Defects that are known: a narrow switch for each, and a small program that fails for it.

Delete both entries of a defect when it is mended; `test_known_defects` fails until that is done.
"""

from collections.abc import Callable

from programs import Line, Program
from runs import Run

_ZERO = ("min(1, t / 4)", "(0 if t == 4 else 1)")


def _lr_zero(program: Program, _: Run) -> bool:
    return bool(program.torch_optim and program.zero_rows and program.schedule in _ZERO)


def _frozen(_: Program, run: Run) -> bool:
    return run.numbers


def _one_value(program: Program, _: Run) -> bool:
    mixed = isinstance(dict(program.options).get("storage"), dict)
    return mixed and bool({"slow", "old", "z", "mx"} & dict(program.states).keys())


def _read(program: Program, _: Run) -> bool:
    return any("else:" in line.text for line in program.lines)


def _light(program: Program, _: Run) -> bool:
    light = dict(program.options)["level"] == "light"
    takes = any(f'p.copy_(st["{s}"])' in line.text for line in program.lines for s in ("slow", "z"))
    return light and (program.way == "function" or takes)


KNOWN: dict[str, Callable[[Program, Run], bool]] = {
    "17.1: lr = 0 makes NaN of elements that never had a gradient": _lr_zero,
    "17.2: numbers are frozen in a graph that is compiled again": _frozen,
    "17.3: one value stored to states of different storages": _one_value,
    "17.5: a graph reads the high word of a state through a product": _read,
    "17.7: level light does not see what takes the place of a parameter": _light,
}
"""The defect -> whether a run, with what it was seen to do, may have it; then it does not count."""

_SLOW = 'x = 0.5 * st["slow"] + 0.5 * p\nst["slow"].copy_(x)\np.copy_(x)'
CASES: dict[str, Program] = {
    "17.1: lr = 0 makes NaN of elements that never had a gradient": Program(
        torch_optim="AdamW(GROUPS)", zero_rows=True, schedule="min(1, t / 4)"
    ),
    "17.2: numbers are frozen in a graph that is compiled again": Program(
        lines=(
            Line("h = g + wd * p"),
            Line('st["v"].mul_(0.999).addcmul_(h, h, value=0.001)'),
            Line('u = h / ((st["v"] / (1 - 0.999**k)).sqrt() + 1e-8)'),
            Line("p.sub_(u, alpha=lr)"),
        ),
        states=(("v", "torch.zeros_like(p)"),),
        counter="state",
        rates=((1e-2, 0.1),),
    ),
    "17.3: one value stored to states of different storages": Program(
        lines=(Line("p.sub_(g, alpha=lr)"), Line(_SLOW, carried=True)),
        states=(("slow", "p.detach().clone()"),),
        options=(("level", "auto"), ("storage", {"param": "mcf2", "*": "ulp8"})),
    ),
    "17.5: a graph reads the high word of a state through a product": Program(
        lines=(
            Line("p.sub_(g, alpha=lr)"),
            Line(
                'if k % 2:\n    st["slow"].lerp_(p, 0.1)\n'
                'else:\n    p.mul_(0.8).add_(st["slow"], alpha=0.2)'
            ),
        ),
        states=(("slow", "p.detach().clone()"),),
        counter="group",
        in_init=True,
        way="string",
        rates=((1e-2, 0.0),),
        options=(("level", "auto"), ("arithmetic", "wide")),
    ),
    "17.7: level light does not see what takes the place of a parameter": Program(
        lines=(Line("p.mul_(1 - lr * wd)"),),
        way="function",
        rates=((1e-2, 0.1),),
        options=(("level", "light"),),
    ),
}
"""The defect -> a program that fails for it."""

MENDED: dict[str, Program] = {
    "a 0-d gradient is an operand of lerp_ in the eager engine": Program(
        lines=(Line('st["m"].lerp_(g, 0.01)'), Line('p.sub_(st["m"], alpha=lr)')),
        states=(("m", "torch.zeros_like(p)"),),
        shapes=((),),
        options=(("level", "auto"), ("storage", "auto")),
    ),
}
"""Programs that once failed, and hold."""


def known(program: Program, run: Run) -> str:
    """Return the first defect that a run may have; "" for none."""
    return next((name for name, has in KNOWN.items() if has(program, run)), "")
