"""The text of a random program's function `train`: tensors, gradients, and between steps."""

from typing import TYPE_CHECKING

from step_text import begin_of, lines_of

if TYPE_CHECKING:
    from programs import Program


def train_text(program: "Program", model: bool) -> str:
    """Return the text of the function that trains, and of what it needs."""
    return (_train_function if program.way == "function" else _train_optimizer)(program, model)


def _groups(program: "Program") -> str:
    found, n = [], len(program.rates)
    if program.frozen:
        decay = "" if program.torch_optim else ', "wd": 0.0'
        found.append(f'{{"params": [torch.ones_like(params[0])], "lr": 0.1{decay}}}')
    for i, (lr, wd) in enumerate(program.rates):
        chosen = "params" if n == 1 else f"params[{i}::{n}]"
        rate = f"torch.tensor({lr}, dtype=F32)" if program.tensor_lr else lr
        decay = f', "{"weight_decay" if program.torch_optim else "wd"}": {wd}'
        if program.torch_optim and not wd:
            decay = ""
        found.append(f'{{"params": {chosen}, "lr": {rate}{decay}}}')
    return f"[{', '.join(found)}]"


def _start(program: "Program") -> str:
    spread = "1 + 0.25 * x" if program.near_one else "0.05 * x"
    text = lines_of(0, [f"SHAPES = {list(program.shapes)}"])
    if program.dtypes:
        low = [f"torch.{program.dtype_of(f'p{i}')}" for i in range(len(program.shapes))]
        text += lines_of(0, [f"LOWS = [{', '.join(low)}]"])
    text += lines_of(0, ["", ""])
    if program.way != "function":
        kind = program.torch_optim and f"torch.optim.{program.torch_optim}"
        made = (kind or "Opt(GROUPS)").replace("GROUPS", _groups(program))
        text += lines_of(0, ["def optimizer(params):", f"    return {made}", "", ""])
    text += lines_of(0, ["def train(dtype, compiled):"])
    text += lines_of(1, [f"gen = torch.Generator().manual_seed({program.seed})"])
    text += lines_of(1, ["drift = [torch.randn(s, generator=gen) for s in SHAPES]"])
    if program.draws:
        text += lines_of(1, [f"torch.manual_seed({program.seed})"])
    if "GEN" in program.statements:
        text += lines_of(1, [f"GEN.manual_seed({program.seed})"])
    if not program.dtypes:
        return text + lines_of(
            1, [f"params = [{_placed(program, f'({spread}).to(LOW).to(dtype)')} for x in drift]"]
        )
    made = _placed(program, f"({spread}).to(LOWS[i]).to(kinds[i])")
    own = "kinds = LOWS if dtype == LOW else [dtype] * len(SHAPES)"
    return text + lines_of(1, [own, f"params = [{made} for i, x in enumerate(drift)]"])


def _placed(program: "Program", x: str) -> str:
    return f'laid_out({x}, "{program.layout}")' if program.layout else x


_OPTIMIZED = ["opt = optimizer(params)", "step = compiled(opt)"]
_GIVEN_BACK = [
    "for a, b in zip(old, [x for p, st in zip(params, states) for x in (p, *st.values())]):",
    "    if isinstance(a, torch.Tensor) and collage_fx.residuals(a):",
    "        collage_fx.load_residuals(b, collage_fx.residuals(a), draws=collage_fx.draws(a))",
]


def _results(program: "Program") -> list[str]:
    x = 'getattr(x, "inner", x)' if "Boxed" in program.statements else "x"
    return [
        'found = {f"p{i}": p for i, p in enumerate(params)}',
        f'return found | {{f"{{k}}{{i}}": {x} for i, st in enumerate(states)'
        " for k, x in st.items()}",
    ]


def _train_optimizer(program: "Program", model: bool) -> str:
    text = _start(program)
    begun = [*_OPTIMIZED]
    if program.wrapped:
        begun[1] = begun[1].replace("opt", "Wrapper(opt)")
    again = [*begun]
    if program.joins:
        begun[0] = begun[0].replace("params", "params[:-1]")
    text += lines_of(1, ["params = [p.requires_grad_() for p in params]", *begun])
    text += lines_of(1, [f"for t in range({program.steps}):"])
    if program.resumed and not model:
        text += lines_of(2, [f"if t == {program.resumed}:"])
        if program.way == "string":
            text += lines_of(3, ["old = [x for p in params for x in (p, *opt.state[p].values())]"])
        text += lines_of(3, ["saved = copy.deepcopy(opt.state_dict())"])
        text += lines_of(3, ["params = [p.detach().clone().requires_grad_() for p in params]"])
        text += lines_of(3, [*again, "opt.load_state_dict(saved)"])
        if program.way == "string":
            # Residuals are entries of what is loaded, until a first step takes them out.
            own = '{k: x for k, x in opt.state[p].items() if not k.startswith("collage_fx.")}'
            text += lines_of(3, [f"states = [{own} for p in params]", *_GIVEN_BACK])
    text += _between(program, model)
    if program.gradients == "kept":
        text += lines_of(2, ["opt.zero_grad(set_to_none=False)"])
    text += lines_of(2, ["for i, p in enumerate(params):"])
    kept = "g if p.grad is None else p.grad.add_(g)" if program.gradients == "kept" else "g"
    text += lines_of(3, [*_gradient(program), f"p.grad = {kept}"])
    if program.by_turns:
        text += lines_of(3, ["if (t + i) % 3 == 2:", "    p.grad = None"])
    if program.schedule:
        rates = ", ".join(str(lr) for lr, _ in program.rates)
        groups = "opt.param_groups[1:]" if program.frozen else "opt.param_groups"
        text += lines_of(2, [f"for group, lr in zip({groups}, ({rates},)):"])
        fill = 'group["lr"].fill_(' if program.tensor_lr else 'group["lr"] = ('
        text += lines_of(3, [f"{fill}lr * {program.schedule})"])
    if most := dict(program.options).get("clip_grad_norm"):
        text += lines_of(2, [f"clip(opt, {most}, step)"])
    text += lines_of(2, ["step()"])
    return text + lines_of(1, ["states = [opt.state[p] for p in params]", *_results(program)])


def _between(program: "Program", model: bool) -> str:
    """Return what happens before some step."""
    text = ""
    if program.joins:
        lr, wd = program.rates[0]
        decay = "" if program.torch_optim else f', "wd": {wd}'
        group = f'{{"params": params[-1:], "lr": {lr}{decay}}}'
        joined = [f"if t == {program.joins}:", f"    opt.add_param_group({group})"]
        text += lines_of(2, joined)
    for t, event in program.events:
        text += lines_of(2, [f"if t == {t}:"])
        inner = model and "opt.eval()" in event
        text += lines_of(3, ["with EVENT:"]) if inner else ""
        text += lines_of(4 if inner else 3, event.split("\n"))
    return text


def _gradient(program: "Program") -> list[str]:
    scale = 0.5 if program.dtype == "float16" else 0.1
    kinds = ("LOWS[i]", "kinds[i]") if program.dtypes else ("LOW", "dtype")
    lines = [
        f"x = {scale} * (torch.randn(SHAPES[i], generator=gen) + drift[i])",
        "g = x.to({}).to({})".format(*kinds),
    ]
    if program.zero_rows:
        lines.append("g.view(-1)[::3] = 0")
    if program.infinite:
        lines += ["if t == 4:", f'    g.view(-1)[:2] = float("{program.infinite}")']
    if program.gradients in ("Named", "Boxed"):
        named = "g.as_subclass(Named)" if program.gradients == "Named" else "Boxed(g)"
        lines.append(f"g = {named}")
    elif program.gradients not in ("", "kept"):
        lines.append(f'g = laid_out(g, "{program.gradients}")')
    return lines


def _train_function(program: "Program", model: bool) -> str:
    lr, wd = program.rates[0]
    text = _start(program)
    text += lines_of(1, [f"states = [{begin_of(program, model)} for p in params]"])
    text += lines_of(1, ["call = compiled(step)", f"for t in range({program.steps}):"])
    if program.resumed and not model:
        text += lines_of(2, [f"if t == {program.resumed}:"])
        text += lines_of(
            3,
            [
                "old = [x for p, st in zip(params, states) for x in (p, *st.values())]",
                "params = [p.clone() for p in params]",
                "states = [{k: v.clone() for k, v in st.items()} for st in states]",
                *_GIVEN_BACK,
            ],
        )
    text += lines_of(2, ["grads = []", "for i, p in enumerate(params):"])
    text += lines_of(3, [*_gradient(program), "grads.append(g)"])
    rate = f"{lr} * {program.schedule}" if program.schedule else str(lr)
    text += lines_of(2, [f"call(params, grads, states, {rate}, {wd}, t + 1)"])
    return text + lines_of(1, _results(program))


def main_text(program: "Program") -> str:
    call = "collage_fx.compile(x, **OPTIONS)"
    if program.way == "string":
        call = 'torch.compile(x.step, backend="collage", options=OPTIONS)'
    if program.way in ("record", "at once"):
        call = f"collage_fx.compile(x, record={program.way == 'record'}, **OPTIONS)"
    stance = ["    torch.compiler.set_stance('force_eager')"] if program.way == "engine" else []
    return lines_of(
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
