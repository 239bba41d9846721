"""Programs that failed before, and hold."""

from mended_averages import AVERAGES
from programs import Line, Program

MENDED: dict[str, Program] = AVERAGES | {
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
        options=(("level", "light"), ("storage", "mcf2")),
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
"""Defect that was -> a program that failed by it."""
