"""Statements of random programs that are recorded, judged or stored in other ways than most.

Each is of a kind that once lost low words in silence: reductions that scale a parameter, scratch
memory, states that no optimizer holds, numbers that are read, comparisons with numbers, views,
arrays of NumPy, random numbers, states that are shared, replaced or of classes of their own.

Random numbers that are drawn in the dtype of the parameter are the same in float64 (`draws`).
"""

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from moments import Lines, one

_DIRECTIONS = (
    "n = float(u.norm())\nu = u / max(n, 1.0)",
    "n = u.abs().amax().item()\nu = u / max(n, 0.5)",
    "u = u.clamp(-0.1, 0.1)\nu = torch.where(u == 0.1, -u, u)",
    "u = torch.where(u.abs() >= u.abs().median(), u, 0.5 * u)",
    "u = u - u.mean()",
    "u = u / (u.std(unbiased=False) + 1)",
    "u = u @ (u.mT @ u) + u if u.dim() == 2 else u",
    "i = u.flatten().abs().argsort()\nu = u.flatten().index_fill(0, i[:1], 0).view(u.shape)",
    "u = u.flatten().cumsum(0).view(u.shape) / u.numel() + u",
    "with torch.inference_mode():\n    u = (u * 1.0).reshape(-1).view(u.shape)",
    "a = HIGH(u).to(F32).reshape(-1).numpy() * 1.0\n"
    "u = torch.from_numpy(a).view(u.shape).to(u.dtype)",
    "u = torch.tensor(u.tolist(), dtype=F32).to(p.dtype)",
    "u = u.t().contiguous().t() if u.dim() == 2 else u",
)
"""Of the update u."""
_DRAWN = (
    "u = u + 0.1 * torch.randn_like(u)",
    "u = u * torch.bernoulli(torch.full_like(u, 0.75))",
    "u = u * torch.empty_like(u).bernoulli_(0.5)",
    "u = torch.nn.functional.dropout(u, 0.25)",
    "u = u + torch.empty_like(u).uniform_(-0.1, 0.1)",
    "u = torch.where(torch.rand(u.shape) < 0.25, 0.5 * u, u)",
    "u = u + 0.1 * torch.randn(u.shape, generator=GEN).to(u.dtype)",
    "u = u.index_fill(0, torch.randperm(len(u))[:1], 0) if u.dim() else u",
)
"""Of the update u, by random numbers: noise, and masks."""
_UPDATES = (
    "torch.add(p, u, alpha=-lr, out=g)\nif bool(g.isfinite().all()):\n    p.copy_(g)",
    "g.copy_(p - lr * u)\nif g.isfinite().all().item():\n    p.copy_(g)",
    "x = buffer(p)\ntorch.sub(p, u, alpha=lr, out=x)\nif x.isfinite().all():\n    p.copy_(x)",
    "p.view(-1).sub_((lr * u).reshape(-1))",
    "p.data.sub_(lr * u)",
    "p.detach().sub_(lr * u)",
    "p[...].sub_(lr * u)",
    "p.data = p - lr * u",
)
"""Of the parameter by the update, for a rate that is a number."""
_SCALES = (
    "p.mul_(p.numel() / p.sum())",
    "p.mul_(1.5 / p.abs().max())",
    "p.div_(p.mean())",
    "p.mul_((p.numel() / p.square().sum()).sqrt())",
    "s = p.sum().item()\np.mul_(p.numel() / s)",
)
"""Of a parameter about 1, by what is computed of all of it."""
_HELD = 'st.setdefault("held", Holder(p)).m.mul_(0.9).add_(u, alpha=0.1)\nu = st["held"].m'


def odd(
    draw: DrawFn, u: str, *, near_one: bool, tensor_lr: bool, holds: bool, draws: bool
) -> tuple[Lines, Lines, Lines]:
    """Return statements about the update, one that applies it (or none), and some after it.

    Args:
        draw: of hypothesis.
        u: the update, a name or a call.
        near_one: whether parameters are about 1.
        tensor_lr: whether the rate is a tensor.
        holds: whether there may be states that no state dict has.
        draws: whether there may be random numbers.
    """
    kinds = [*_DIRECTIONS, *(_DRAWN if draws else ()), *([_HELD] if holds else [])]
    before = draw(st.lists(st.sampled_from(kinds), max_size=2, unique=True))
    lines: Lines = one(f"u = {u}") if before else []
    for text in before:
        lines += one(text, carried=text == _HELD)
    update: Lines = []
    if not tensor_lr and draw(st.booleans()):
        text = draw(st.sampled_from(_UPDATES))
        update = one(
            ("" if before else f"u = {u}\n") + text, carried="copy_" in text or "data =" in text
        )
    after: Lines = []
    if draws and draw(st.integers(0, 4)) == 4:
        after = one("p.add_(torch.randn_like(p), alpha=0.01)")
    elif near_one and draw(st.integers(0, 2)) == 2:
        after = one(draw(st.sampled_from(_SCALES)), carried=True)
    return lines, update, after


_BEGIN = {
    "in a class": "torch.zeros_like(p).as_subclass(Named)",
    "in a box": "Boxed(torch.zeros_like(p))",
    "replaced": "torch.zeros_like(p)",
    "shared": "shared(p)",
    "drawn": "torch.zeros_like(p)",
}
_HOLDS = {
    "": (
        'st["q"].mul_(0.9).add_(u, alpha=0.1)\nu = st["q"]',
        'st["q"].lerp_(u, 0.01)\nu = u + st["q"]',
        'st["q"].add_(u)\nu = st["q"] / 8',
        'st["q"].copy_(0.95 * st["q"] + 0.05 * u)\nu = u - st["q"]',
    ),
    "replaced": (
        'st["q"] = 0.9 * st["q"] + 0.1 * u\nu = st["q"]',
        'st["q"] = torch.lerp(st["q"], u, 0.01)\nu = u + st["q"]',
        'st["q"] = st["q"].add(u)\nu = st["q"] / 8',
    ),
    "drawn": (
        'st["q"].uniform_(-0.1, 0.1)\nu = u + st["q"]',
        'st["q"].bernoulli_(0.75)\nu = u * st["q"]',
        'st["q"].mul_(0.9).add_(u, alpha=0.1)\nu = st["q"].normal_() * 0.1 + u',
        'st["q"].mul_(0.99).add_(torch.randn_like(p), alpha=0.1)\nu = u + st["q"]',
    ),
}


def held(draw: DrawFn, u: str, *, shares: bool, draws: bool) -> tuple[Lines, dict[str, str]]:
    """Return statements about a state that is kept in an odd way, and how it begins.

    Args:
        draw: of hypothesis.
        u: the update, a name or a call.
        shares: whether parameters may share it.
        draws: whether it may be drawn at random.
    """
    left_out = {name for name, may in {"shared": shares, "drawn": draws}.items() if not may}
    kind = draw(st.sampled_from([name for name in _BEGIN if name not in left_out]))
    text = draw(st.sampled_from(_HOLDS.get(kind, _HOLDS[""])))
    carried = kind == "replaced" or "copy_" in text
    return one(f"u = {u}") + one(text, carried=carried), {"q": _BEGIN[kind]}
