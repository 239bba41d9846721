"""Strategies of hypothesis for random optimizer programs."""

from dataclasses import replace
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from moments import TORCH_OPTIM, Lines, averages, one, squares
from odd_lines import held, odd
from programs import Line, Program
from surroundings import surroundings
from updates import BEGIN_COPIES, apply, direction, weights

RATES = (1e-3, 1e-2, 1e-4)
SHAPES = ((4, 3), (17,), (2, 3, 5), ())
SCHEDULES = ("0.9**t", "min(1, t / 4)", "(1 if t < 5 else 0.1)", "(0 if t == 4 else 1)")


def _own(counter: str) -> str:
    """Return where a step counts itself: a function is told."""
    return "" if counter == "function" else counter


@st.composite
def own(
    draw: DrawFn, way: str, tensor_lr: bool, near_one: bool, resumes: bool
) -> tuple[Lines, dict[str, str], str]:
    """The statements of a step, its states and where it counts."""
    counter = draw(st.sampled_from(("", "state", "group", "tensor")))
    counter = counter if way != "function" or not counter else "function"
    states: dict[str, str] = {}
    lines: Lines = []
    g = draw(st.sampled_from(("g", "h"))) if not tensor_lr else "g"
    if g == "h":
        lines += draw(
            st.sampled_from(
                [
                    one("h = g.add(p, alpha=wd)"),
                    one("h = g + wd * p"),
                    one("h = g + wd * p.sign()"),
                    one("h = g / (1 + g.abs())"),
                ]
            )
        )
    gs = "gs" if g == "g" else "NONE"
    if draw(st.booleans()):
        wide = way != "string" and draw(st.integers(0, 4)) == 4
        states["m"] = "torch.zeros_like(p, dtype=F32)" if wide else "torch.zeros_like(p)"
        lines += averages(draw, "m", f"{g}.to(F32)" if wide else g, f"ms {'NONE' if wide else gs}")
    if draw(st.booleans()):
        states["v"] = "torch.zeros_like(p)"
        lines += squares(draw, "v", g, f"vs {gs}")
        if draw(st.integers(0, 4)) == 4:
            states["mx"] = "torch.zeros_like(p)"
            lines += draw(
                st.sampled_from(
                    [
                        one('torch.maximum(st["mx"], st["v"], out=st["mx"])', carried=True),
                        one('st["mx"].copy_(torch.maximum(st["mx"], st["v"]))', carried=True),
                    ]
                )
            )
    if draw(st.booleans()):
        decay = [
            one("p.mul_(1 - lr * wd)", "torch._foreach_mul_(ps, 1 - lr * wd)"),
            one("p -= lr * wd * p"),
            one("p.copy_(p * (1 - lr * wd))", carried=True),
        ]
        if not tensor_lr:
            decay.append(one("p.add_(p, alpha=-lr * wd)"))
        lines += draw(st.sampled_from(decay))
    between, u, us = direction(draw, states, g, counter)
    update: Lines = []
    after: Lines = []
    draws = "F32" not in "".join(states.values())  # where dtypes are those of parameters
    kind = draw(st.sampled_from(("plain", "odd", "held", "odd"))) if way != "string" else "plain"
    if kind == "odd":
        holds = way != "function" and not resumes
        kinds = {"near_one": near_one, "tensor_lr": tensor_lr, "holds": holds}
        more, update, after = odd(draw, u, draws=draws, **kinds)
        between += more
        u, us = ("u", "") if more else (u, us)
    elif kind == "held":
        more, begin = held(draw, u, shares=not resumes, draws=draws)
        between += more
        states |= begin
        u, us = "u", ""
    if draw(st.integers(0, 9)) == 9:
        states["z"] = draw(st.sampled_from(BEGIN_COPIES))
        base = [
            f'st["z"].sub_(lr * {u})\np.copy_(st["z"])',
            f'st["z"].sub_(lr * {u})\np.lerp_(st["z"], 0.1)',
            f'p.lerp_(st["z"], 0.1)\nst["z"].add_({u} * -lr)',
        ]
        return lines + between + one(draw(st.sampled_from(base))), states, _own(counter)
    lines += between + (update or draw(apply(u, us, tensor_lr))) + after
    if draw(st.integers(0, 2)) == 2:
        states["slow"] = draw(st.sampled_from(BEGIN_COPIES))
        lines += weights(draw, counter, swaps=True)
    if draw(st.integers(0, 7)) == 7:
        states["old"] = draw(st.sampled_from(BEGIN_COPIES))
        lines[:0] = one('d = p - st["old"]\nst["old"].copy_(p)', carried=True)
        lines += one("p.add_(d, alpha=0.5)")
    return lines, states, _own(counter)


@st.composite
def options(draw: DrawFn, dtype: str, way: str) -> tuple[tuple[str, Any], ...]:
    """Options of collage_fx."""
    storages: list[Any] = ["mcf2", "mcf3", "ulp8", "auto", "sr", "ulp4"]
    storages += ["remainder16"] if dtype == "bfloat16" else []
    mixed = draw(st.sampled_from(storages)), draw(st.sampled_from(storages))
    storages += [{"param": mixed[0], "*": mixed[1]}] if mixed[0] != mixed[1] else []
    found: dict[str, Any] = {
        "level": draw(st.sampled_from(("auto", "light", "plus", "all"))),
        "arithmetic": draw(st.sampled_from(("eft", "wide"))),
        "storage": draw(st.sampled_from(storages)),
        "multi_tensor": draw(st.sampled_from(("auto", True, False))),
    }
    if found["storage"] in ("mcf2", "ulp8") and draw(st.integers(0, 5)) == 5:
        found |= {"stochastic_rounding": True, "arithmetic": "wide"}
    whole = way in ("compile", "engine", "record", "at once")
    found["changed"] = whole and draw(st.integers(0, 3)) == 3
    if whole and found["arithmetic"] == "wide":
        found["clip_grad_norm"] = draw(st.sampled_from((None, None, 1e-2, 1.0, 1e4)))
        found["zero_grads"] = draw(st.sampled_from((False, False, False, True)))
    defaults = {"arithmetic": "eft", "storage": "auto", "multi_tensor": "auto"}
    defaults |= {"clip_grad_norm": None, "zero_grads": False, "changed": False}
    return tuple((k, v) for k, v in found.items() if defaults.get(k) != v)


@st.composite
def programs(draw: DrawFn, ways: tuple[str, ...] = ("compile", "string", "function")) -> Program:
    """Any program."""
    way = draw(st.sampled_from(ways))
    dtype = draw(st.sampled_from(("bfloat16", "bfloat16", "float16")))
    tensor_lr = way != "function" and draw(st.integers(0, 5)) == 5
    chosen = draw(options(dtype, way))
    # A graph of many parameters that are no class takes seconds to compile.
    many = 3 if ("multi_tensor", False) in chosen else 9
    counts = draw(st.sampled_from((1, 1, 2, many)))
    numbers = [SHAPES[draw(st.integers(0, len(SHAPES) - 1))] for _ in range(min(counts, 3))]
    shapes = tuple(numbers[i % len(numbers)] for i in range(counts))
    if tensor_lr:
        shapes = tuple(s or (1,) for s in shapes)
    torch_optim, lines, states, counter = "", [], {}, ""
    near_one, resumes = draw(st.booleans()), draw(st.integers(0, 5)) == 5
    if way != "function" and draw(st.integers(0, 5)) == 5:
        torch_optim, tensor_lr = draw(st.sampled_from(TORCH_OPTIM)), False
    else:
        lines, states, counter = draw(own(way, tensor_lr, near_one, resumes))
    if counter == "tensor":
        shapes = tuple(s or (1,) for s in shapes)
    n = draw(st.sampled_from((1, 1, 2))) if len(shapes) > 1 and way != "function" else 1
    wd = draw(st.sampled_from((0.1, 0.0, 0.01)))
    rates = tuple((draw(st.sampled_from(RATES)), wd) for _ in range(n))
    by_turns = way != "function" and draw(st.integers(0, 7)) == 7
    # load_state_dict of PyTorch casts states to the parameter's dtype; NAdam has one in fp32.
    kept_dtype = "F32" not in "".join(states.values()) and "NAdam" not in torch_optim
    resumes &= kept_dtype and counter != "tensor"
    program = Program(
        lines=tuple(lines),
        states=tuple(states.items()),
        torch_optim=torch_optim,
        dtype=dtype,
        shapes=shapes,
        rates=rates,
        schedule=draw(st.sampled_from(("", "", *SCHEDULES))),
        tensor_lr=tensor_lr,
        counter=counter,
        listed=draw(st.booleans()),
        in_init=bool(lines) and draw(st.integers(0, 3)) == 3,
        near_one=near_one,
        zero_rows=draw(st.integers(0, 4)) == 4,
        by_turns=by_turns,
        resumed=draw(st.integers(3, 6)) if resumes else 0,
        seed=draw(st.integers(0, 9)),
        way=way,
        options=chosen,
    )
    program = replace(program, **surroundings(draw, program, loads=kept_dtype))
    if program.methods:  # which those who have the wrapper do not call
        program = replace(program, wrapped=False)
    return _with_eps(program)


def _with_eps(program: Program) -> Program:
    """Return a program of which all roots have a number added that their dtypes hold."""
    eps = "1e-3" if "float16" in (program.dtype, *program.dtypes) else "1e-8"
    return replace(
        program,
        lines=tuple(
            Line(
                s.text.replace("EPS", eps),
                "" if "NONE" in s.each else s.each.replace("EPS", eps),
                s.carried,
            )
            for s in program.lines
        ),
        torch_optim=program.torch_optim.replace("EPS", eps),
    )


def drawn(seed: int, count: int, ways: tuple[str, ...]) -> list[Program]:
    """Return some random programs, of each one."""
    found: dict[str, Program] = {}

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(programs(ways))
    def collect(program: Program) -> None:
        found[program.script()] = program

    collect()
    return list(found.values())
