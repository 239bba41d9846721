"""Defects that are known, by a narrow switch for each, and programs that failed before."""

from collections.abc import Callable

from programs import Line, Program
from runs import Run

KNOWN: dict[str, Callable[[Program, Run], bool]] = {}
"""A defect that is open -> whether a run, with what it was seen to do, may have it, and does not
count then. Delete the entry when the defect is mended, and put a program for it below."""

_SLOW = 'x = 0.5 * st["slow"] + 0.5 * p\nst["slow"].copy_(x)\np.copy_(x)'
MENDED: dict[str, Program] = {
    "lr = 0 makes NaN of elements that never had a gradient": Program(
        torch_optim="AdamW(GROUPS)", zero_rows=True, schedule="min(1, t / 4)"
    ),
    "numbers are frozen in a graph that is compiled again": Program(
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
    "one value stored to states of different storages": Program(
        lines=(Line("p.sub_(g, alpha=lr)"), Line(_SLOW, carried=True)),
        states=(("slow", "p.detach().clone()"),),
        options=(("level", "auto"), ("storage", {"param": "mcf2", "*": "ulp8"})),
    ),
    "a graph reads the high word of a state through a product": Program(
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
    "a 0-d gradient is an operand of lerp_ in a recorded step": Program(
        lines=(Line('st["m"].lerp_(g, 0.01)'), Line('p.sub_(st["m"], alpha=lr)')),
        states=(("m", "torch.zeros_like(p)"),),
        shapes=((),),
        options=(("level", "auto"), ("storage", "auto")),
    ),
    "a denominator of AdamW is beyond the range of fp16": Program(
        torch_optim="AdamW(GROUPS)",
        dtype="float16",
        rates=((1e-4, 0.1),),
        schedule="1 if t < 5 else 0.1",
    ),
    "light drops the first update of a state that the first step makes": Program(
        lines=(Line('p.lerp_(st["z"], 0.1)'), Line('st["z"].add_(g * -lr)')),
        states=(("z", "p.detach().clone()"),),
        options=(("level", "light"),),
    ),
    "an exchange of values in the first step drops an update": Program(
        lines=(
            Line("p.sub_(g, alpha=lr)"),
            Line('x = p.clone()\np.copy_(st["slow"])\nst["slow"].copy_(x)'),
        ),
        states=(("slow", "p.detach().clone()"),),
    ),
    "a parameter that takes over a state is on a cycle through its decay": Program(
        lines=(
            Line("h = g.add(p, alpha=wd)"),
            Line('st["m"].lerp_(h, 0.1)'),
            Line('st["z"].sub_(lr * st["m"])'),
            Line('p.copy_(st["z"])', carried=True),
        ),
        states=(("m", "torch.zeros_like(p)"), ("z", "p.detach().clone()")),
        rates=((0.001, 0.1),),
        way="function",
    ),
    "light leaves a decaying parameter beside an average that it compensates": Program(
        lines=(
            Line('st["m"].lerp_(g, 0.1)'),
            Line("p.mul_(1 - lr * wd)"),
            Line('p.sub_(st["m"], alpha=lr)'),
            Line('st["slow"].lerp_(p, 0.1)', carried=True),
        ),
        states=(("m", "torch.zeros_like(p)"), ("slow", "p.detach().clone()")),
        rates=((0.01, 0.1),),
        way="function",
        options=(("level", "light"),),
    ),
    "eft rounds the product with a parameter that enters an average of it": Program(
        lines=(
            Line("p.sub_(g, alpha=lr)"),
            Line('st["slow"].copy_(0.99 * st["slow"] + 0.01 * p)', carried=True),
        ),
        states=(("slow", "p.detach().clone()"),),
        near_one=True,
        way="function",
        rates=((0.001, 0.1),),
    ),
    "a factor that changes from call to call is taken for one": Program(
        lines=(
            Line("p.mul_(1 - lr * wd)"),
            Line("p.sub_(g, alpha=lr)"),
            Line('x = 0.9 * st["slow"] + 0.1 * p\nst["slow"].copy_(x)\np.copy_(x)', carried=True),
        ),
        states=(("slow", "p.detach().clone()"),),
        schedule="0.9**t",
        way="function",
        rates=((0.001, 0.1),),
    ),
    "eft rounds a parameter that enters an average by lerp and then takes it over": Program(
        lines=(
            Line("p.sub_(g, alpha=lr)"),
            Line('st["slow"].lerp_(p, 0.01)\np.copy_(st["slow"])'),
        ),
        states=(("slow", "p.detach().clone()"),),
        near_one=False,
        way="function",
        options=(("level", "auto"), ("storage", "mcf3")),
    ),
    "a sign in the update of a parameter hides that it enters an average": Program(
        lines=(
            Line("h = g + wd * p.sign()"),
            Line("p.sub_(h, alpha=lr)"),
            Line('st["slow"].copy_(0.9 * st["slow"] + 0.1 * p)', carried=True),
        ),
        states=(("slow", "p.detach().clone()"),),
        way="function",
        rates=((0.001, 0.1),),
        options=(("level", "all"),),
    ),
    "a state times a small rate, a tensor, is off by the last bits of the state": Program(
        lines=(
            Line('st["m"].mul_(0.999).add_(g)'),
            Line('st["v"].lerp_(g * g, 0.001)'),
            Line('u = st["m"] / (st["v"].sqrt() + 1e-8)'),
            Line("p.add_(u * -lr)"),
        ),
        states=(("m", "torch.zeros_like(p)"), ("v", "torch.zeros_like(p)")),
        shapes=((4, 3), (4, 3)),
        rates=((1e-4, 0.1),),
        schedule="0.9**t",
        tensor_lr=True,
        near_one=False,
        way="engine",
    ),
    "a factor that is not known stands in a sum of known ones": Program(
        lines=(
            Line('d = p - st["old"]\nst["old"].copy_(p)', carried=True),
            Line("p.mul_(1 - lr * wd)"),
            Line("p.sub_(g, alpha=lr)"),
            Line('st["slow"].lerp_(p, 0.1)\np.copy_(st["slow"])'),
            Line("p.add_(d, alpha=0.5)"),
        ),
        states=(("slow", "p.detach().clone()"), ("old", "p.detach().clone()")),
        schedule="0.9**t",
        counter="tensor",
        near_one=False,
        rates=((1e-3, 0.1),),
        way="string",
        options=(("level", "auto"), ("storage", "mcf3")),
    ),
    "weights of a mean add up to less than one where the parameter decays": Program(
        lines=(
            Line("p.mul_(1 - lr * wd)"),
            Line("p.sub_(g, alpha=lr)"),
            Line('st["slow"].copy_(0.99 * st["slow"] + 0.01 * p)', carried=True),
        ),
        states=(("slow", "p.detach().clone()"),),
        near_one=False,
        rates=((0.001, 0.1),),
        options=(("level", "auto"), ("storage", "mcf3")),
    ),
    "a guarded update, where(c, p - lr * g, p), hides a cycle with an average": Program(
        lines=(
            Line("p.copy_(torch.where(g.isfinite(), p - lr * g, p))", carried=True),
            Line('st["slow"].add_(p - st["slow"], alpha=0.1)\np.lerp_(st["slow"], 0.5)'),
        ),
        states=(("slow", "p.detach().clone()"),),
        in_init=True,
        near_one=False,
        rates=((0.001, 0.1),),
    ),
    "an average of a parameter that a tensor of a rate lets decay": Program(
        lines=(
            Line('st["m"].lerp_(g, 0.1)'),
            Line("p.mul_(1 - lr * wd)"),
            Line('p.sub_(lr * st["m"])'),
            Line('st["slow"].copy_(0.9 * st["slow"] + 0.1 * p)', carried=True),
        ),
        states=(("m", "torch.zeros_like(p)"), ("slow", "p.detach().clone()")),
        near_one=False,
        tensor_lr=True,
        rates=((0.001, 0.1),),
    ),
    "a correction by a number that changes has a pole where it is tried": Program(
        lines=(
            Line("h = g.add(p, alpha=wd)"),
            Line("u = h / (1 - 0.9**k)"),
            Line("p.sub_(u, alpha=lr)"),
        ),
        counter="function",
        near_one=False,
        rates=((0.001, 0.1),),
        way="function",
        options=(("level", "light"), ("storage", "mcf3")),
    ),
    "a graph reads the high word of a state into an update that is not linear": Program(
        lines=(
            Line("h = g.add(p, alpha=wd)"),
            Line("u = h.clamp(-0.1, 0.1)"),
            Line("p.sub_(u, alpha=lr)"),
            Line(
                'if k % 2:\n    st["slow"].lerp_(p, 0.1)\n'
                'else:\n    p.mul_(0.8).add_(st["slow"], alpha=0.2)'
            ),
        ),
        states=(("slow", "p.detach().clone()"),),
        counter="state",
        near_one=False,
        rates=((0.001, 0.1),),
        options=(("level", "auto"), ("arithmetic", "wide")),
    ),
    "a rate times a gradient is below the smallest fp16 number before it is divided": Program(
        torch_optim="Adagrad(GROUPS, eps=1e-3)",
        dtype="float16",
        near_one=False,
        zero_rows=True,
        rates=((1e-4, 0.1),),
        way="engine",
        options=(("level", "auto"), ("storage", "mcf3")),
    ),
    "light finds too late that a parameter is an average, of which a tensor is a factor": Program(
        lines=(
            Line("p.mul_(1 - lr * wd)"),
            Line('st["z"].sub_(lr * g)'),
            Line('p.lerp_(st["z"], 0.1)'),
        ),
        states=(("z", "p.detach().clone()"),),
        rates=((0.001, 0.1),),
        tensor_lr=True,
        near_one=False,
        way="engine",
        options=(("level", "light"), ("storage", "mcf3")),
    ),
    "a parameter of no dimensions is divided by zero": Program(
        torch_optim="AdamW(GROUPS)",
        dtype="float16",
        shapes=((),),
        zero_rows=True,
        rates=((0.001, 0.1),),
        way="engine",
    ),
    "traced bias corrections are computed in fp32, as torch does": Program(
        torch_optim="RAdam(GROUPS)",
        near_one=False,
        rates=((1e-2, 0.1),),
        options=(("level", "all"), ("storage", "mcf3"), ("arithmetic", "wide")),
    ),
}
"""Programs that once failed, and hold."""


def known(program: Program, run: Run) -> str:
    """Return the first defect that a run may have; "" for none."""
    return next((name for name, has in KNOWN.items() if has(program, run)), "")
