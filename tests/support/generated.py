"""Strategies of hypothesis for random optimizer programs."""

from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from moments import TORCH_OPTIM, Lines, averages, one, squares
from odd_lines import odd
from programs import Line, Program

RATES = (1e-3, 1e-2, 1e-4)
SHAPES = ((4, 3), (17,), (2, 3, 5), ())
SCHEDULES = ("0.9**t", "min(1, t / 4)", "(1 if t < 5 else 0.1)", "(0 if t == 4 else 1)")


@st.composite
def apply(draw: DrawFn, u: str, us: str, tensor_lr: bool) -> Lines:
    """The update of p by lr times u, which is a name or a call."""
    forms = [
        one(f"p.sub_(lr * {u})"),
        one(f"p -= lr * {u}"),
        one(f"p.add_({u} * -lr)"),
        one(f"p.copy_(p - lr * {u})", carried=True),
        one(f"z = p - lr * {u}\np.copy_(z)", carried=True),
        one(f"z = p.clone()\nz.sub_(lr * {u})\np.copy_(z)", carried=True),
        one(f"p.copy_(torch.where(g.isfinite(), p - lr * {u}, p))", carried=True),
        one(f"p.lerp_(p - {u}, lr)" if not tensor_lr else f"p.sub_({u} * lr)"),
    ]
    if not tensor_lr:
        forms[:0] = [
            one(f"p.sub_({u}, alpha=lr)", f"torch._foreach_sub_(ps, {us}, alpha=lr)" if us else ""),
            one(
                f"p.add_({u}, alpha=-lr)", f"torch._foreach_add_(ps, {us}, alpha=-lr)" if us else ""
            ),
            one(f"torch._foreach_add_([p], [{u}], alpha=-lr)"),
        ]
    return draw(st.sampled_from(forms))


def _direction(
    draw: DrawFn, states: dict[str, str], g: str, counter: str
) -> tuple[Lines, str, str]:
    """Return the statements that compute the update, its name, and that of the lists of it."""
    eps = "EPS"
    m = draw(st.sampled_from(['st["m"]', g] if "m" in states else [g]))
    ms = {'st["m"]': "ms", "g": "gs"}.get(m, "")
    if "v" not in states:
        forms: list[tuple[Lines, str, str]] = [
            ([], m, ms),
            (one(f"u = {m}.sign()"), "u", ""),
            (one(f"u = {g} + 0.9 * {m}"), "u", ""),
            (one(f"u = {m} / ({m}.norm() + 1e-3)"), "u", ""),
            (one(f"u = {m} * (p.norm() / ({m}.norm() + 1e-3))"), "u", ""),
            (one(f"u = {m}.clamp(-0.1, 0.1)"), "u", ""),
        ]
        if counter:
            forms.append(
                (
                    one(
                        f"u = {m} / (1 - 0.9**k)",
                        f"us = torch._foreach_div({ms}, 1 - 0.9**k)" if ms else "",
                    ),
                    "u",
                    "us",
                )
            )
            forms.append((one(f"u = {m} / k"), "u", ""))
        return draw(st.sampled_from(forms))
    root = f'(st["v"].sqrt() + {eps})'
    listed = f"ds = torch._foreach_sqrt(vs)\ntorch._foreach_add_(ds, {eps})\n"
    listed += f"us = torch._foreach_div({ms}, ds)"
    forms = [
        (one(f"u = {m} / {root}", listed if ms else ""), "u", "us"),
        (one(f'u = {m}.div(st["v"].sqrt().add_({eps}))'), "u", ""),
        (one(f'u = {m} * (st["v"] + {eps}).rsqrt()'), "u", ""),
        (one(f"u = {m} / {root}\nu = u / (u.norm() + 1)"), "u", ""),
        (one(f'd = st["v"].sqrt()\nd += {eps}\nu = {m} / d'), "u", ""),
    ]
    if counter:
        forms += [
            (
                one(f'u = ({m} / (1 - 0.9**k)) / ((st["v"] / (1 - 0.999**k)).sqrt() + {eps})'),
                "u",
                "",
            ),
            (
                one(f'u = {m} / (1 - 0.9**k) / (st["v"].sqrt() / (1 - 0.999**k) ** 0.5 + {eps})'),
                "u",
                "",
            ),
        ]
    return draw(st.sampled_from(forms))


BEGIN_COPIES = (
    "p.detach().clone()",
    "torch.clone(p).detach()",
    "torch.zeros_like(p).copy_(p)",
    "torch.empty_like(p).copy_(p)",
    "p.detach().to(p.dtype, copy=True)",
    "p.new_empty(p.shape).copy_(p)",
)


def _weights(draw: DrawFn, counter: str, swaps: bool) -> Lines:
    """Statements about a slow copy of the parameter."""
    a = draw(st.sampled_from((0.1, 0.01, 0.5)))
    s = 'st["slow"]'
    forms = [
        one(f"{s}.lerp_(p, {a})", f"torch._foreach_lerp_(slows, ps, {a})"),
        one(f"{s}.mul_({1 - a}).add_(p, alpha={a})"),
        one(f"{s}.add_(p - {s}, alpha={a})"),
        one(f"{s}.add_((p - {s}) * {a})"),
        one(f"{s}.copy_({1 - a} * {s} + {a} * p)", carried=True),
        one(f"{s}.lerp_(p, {a})\np.copy_({s})"),
        one(f"{s}.add_(p - {s}, alpha={a})\np.lerp_({s}, 0.5)"),
        one(f"x = {1 - a} * {s} + {a} * p\n{s}.copy_(x)\np.copy_(x)", carried=True),
    ]
    if swaps:
        forms.append(one(f"x = p.clone()\np.copy_({s})\n{s}.copy_(x)", carried=True))
    if counter in ("state", "group"):
        forms.append(one(f"if k % 3 == 0:\n    {s}.lerp_(p, {a})\n    p.copy_({s})"))
        forms.append(
            one(f"if k % 2:\n    {s}.lerp_(p, {a})\nelse:\n    p.mul_(0.8).add_({s}, alpha=0.2)")
        )
        forms.append(one(f"if k % 2:\n    {s}.lerp_(p, {a})\nelse:\n    p.lerp_({s}, 0.2)"))
        forms.append(one(f"if k % 3 == 0:\n    {s}.add_(p - {s}, alpha={a})\n    p.copy_({s})"))
    return draw(st.sampled_from(forms))


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
    between, u, us = _direction(draw, states, g, counter)
    update: Lines = []
    after: Lines = []
    if way != "string" and draw(st.integers(0, 2)) == 2:
        holds = way != "function" and not resumes
        kinds = {"near_one": near_one, "tensor_lr": tensor_lr, "holds": holds}
        more, update, after = odd(draw, u, **kinds)
        between += more
        u, us = ("u", "") if more else (u, us)
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
        lines += _weights(draw, counter, swaps=True)
    if draw(st.integers(0, 7)) == 7:
        states["old"] = draw(st.sampled_from(BEGIN_COPIES))
        lines[:0] = one('d = p - st["old"]\nst["old"].copy_(p)', carried=True)
        lines += one("p.add_(d, alpha=0.5)")
    return lines, states, _own(counter)


@st.composite
def options(draw: DrawFn, dtype: str) -> tuple[tuple[str, Any], ...]:
    """Options of collage_fx."""
    storages: list[Any] = ["mcf2", "mcf3", "ulp8", "auto"]
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
    defaults = {"arithmetic": "eft", "storage": "mcf2", "multi_tensor": "auto"}
    return tuple((k, v) for k, v in found.items() if defaults.get(k) != v)


@st.composite
def programs(draw: DrawFn, ways: tuple[str, ...] = ("compile", "string", "function")) -> Program:
    """Any program."""
    way = draw(st.sampled_from(ways))
    dtype = draw(st.sampled_from(("bfloat16", "bfloat16", "float16")))
    tensor_lr = way != "function" and draw(st.integers(0, 5)) == 5
    chosen = draw(options(dtype))
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
    eps = "1e-3" if dtype == "float16" else "1e-8"
    n = draw(st.sampled_from((1, 1, 2))) if len(shapes) > 1 and way != "function" else 1
    wd = draw(st.sampled_from((0.1, 0.0, 0.01)))
    rates = tuple((draw(st.sampled_from(RATES)), wd) for _ in range(n))
    by_turns = way != "function" and draw(st.integers(0, 7)) == 7
    # load_state_dict of PyTorch casts states to the parameter's dtype; NAdam has one in fp32.
    kept_dtype = "F32" not in "".join(states.values()) and "NAdam" not in torch_optim
    resumes &= kept_dtype and counter != "tensor"
    return Program(
        lines=tuple(
            Line(
                s.text.replace("EPS", eps),
                "" if "NONE" in s.each else s.each.replace("EPS", eps),
                s.carried,
            )
            for s in lines
        ),
        states=tuple(states.items()),
        torch_optim=torch_optim.replace("EPS", eps),
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
