"""Programs that failed before: parameters beside their averages, as slow and fast weights."""

from programs import Line, Program

_SLOW = 'x = 0.5 * st["slow"] + 0.5 * p\nst["slow"].copy_(x)\np.copy_(x)'
AVERAGES: dict[str, Program] = {
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
        options=(("level", "auto"), ("arithmetic", "wide"), ("storage", "mcf2")),
    ),
    "an exchange of values in the first step drops an update": Program(
        lines=(
            Line("p.sub_(g, alpha=lr)"),
            Line('x = p.clone()\np.copy_(st["slow"])\nst["slow"].copy_(x)'),
        ),
        states=(("slow", "p.detach().clone()"),),
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
        options=(("level", "light"), ("storage", "mcf2")),
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
        options=(("level", "all"), ("storage", "mcf2")),
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
        options=(("level", "auto"), ("arithmetic", "wide"), ("storage", "mcf2")),
    ),
    "a momentum over a root hides that a parameter enters an average": Program(
        lines=(
            Line('st["m"].lerp_(g, 0.1)'),
            Line('st["v"].mul_(0.999).addcmul_(g, g, value=0.001)'),
            Line('u = st["m"] / (st["v"].sqrt() + 1e-8)'),
            Line("p.sub_(u, alpha=lr)"),
            Line('x = 0.99 * st["slow"] + 0.01 * p\nst["slow"].copy_(x)\np.copy_(x)', carried=True),
        ),
        states=(
            ("m", "torch.zeros_like(p)"),
            ("v", "torch.zeros_like(p)"),
            ("slow", "p.detach().clone()"),
        ),
        rates=((0.001, 0.1),),
        options=(("level", "auto"), ("storage", "mcf2")),
    ),
    "eft rounds what begins at a state that is only read, and enters an average": Program(
        lines=(
            Line('st["v"].addcmul_(g, g, value=lr)'),
            Line('z = st["x0"] - lr * g / (st["v"].sqrt() + 1e-8)'),
            Line("p.mul_(0.9).add_(z, alpha=0.1)"),
        ),
        states=(("v", "torch.zeros_like(p)"), ("x0", "p.detach().clone()")),
        in_init=True,
        rates=((0.001, 0.1),),
        options=(("level", "auto"), ("storage", "mcf2")),
    ),
    "light leaves what a parameter is computed anew from in every second step": Program(
        lines=(
            Line("p.sub_(g, alpha=lr)"),
            Line(
                'if k % 2:\n    st["slow"].lerp_(p, 0.1)\n'
                'else:\n    p.mul_(0.8).add_(st["slow"], alpha=0.2)'
            ),
        ),
        states=(("slow", "p.detach().clone()"),),
        counter="state",
        near_one=False,
        rates=((0.001, 0.1),),
        options=(("level", "light"), ("storage", "mcf2")),
    ),
    "light drops what a parameter will be computed anew from in every second step": Program(
        lines=(
            Line("p.sub_(g, alpha=lr)"),
            Line(
                'if k % 2 == 0:\n    st["slow"].lerp_(p, 0.1)\n'
                'else:\n    p.mul_(0.8).add_(st["slow"], alpha=0.2)'
            ),
        ),
        states=(("slow", "p.detach().clone()"),),
        counter="state",
        near_one=False,
        rates=((0.001, 0.1),),
        way="record",
        options=(("level", "light"), ("storage", "mcf2")),
    ),
    "a parameter takes over, every few steps, a state that its graph only reads": Program(
        lines=(
            Line("p.sub_(g, alpha=lr)"),
            Line(
                'if k % 3 == 0:\n    p.copy_(st["slow"])\nelif k % 3 == 1:\n    st["slow"].copy_(p)'
            ),
        ),
        states=(("slow", "p.detach().clone()"),),
        counter="state",
        rates=((0.001, 0.1),),
        options=(("level", "auto"), ("storage", "mcf2")),
    ),
    "light drops a low word for a graph that is not used": Program(
        lines=(
            Line('d = p - st["old"]'),
            Line('st["old"].copy_(p)'),
            Line("p.sub_(g, alpha=lr)"),
            Line('st["slow"].lerp_(p, 0.1)'),
            Line("p.add_(d, alpha=0.5)"),
        ),
        states=(("slow", "p.detach().clone()"), ("old", "p.detach().clone()")),
        near_one=False,
        rates=((0.001, 0.1),),
        way="record",
        options=(("level", "light"), ("storage", "mcf2")),
    ),
    "light drops a low word for a graph that is recorded when it is called": Program(
        lines=(
            Line('st["m"].mul_(0.9).add_(g, alpha=0.1)'),
            Line('st["slow"].sub_(st["m"] * 0.01)'),
            Line('p.copy_(torch.tanh(st["slow"]))'),
            Line('st["q"] = g * 2'),
        ),
        states=(("m", "torch.zeros_like(p)"), ("slow", "p.detach().clone()")),
        near_one=False,
        rates=((0.001, 0.1),),
        options=(("level", "light"), ("storage", "mcf2")),
    ),
}
