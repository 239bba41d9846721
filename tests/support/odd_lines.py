"""Statements of random programs that are recorded, judged or stored in other ways than most.

Each is of a kind that once lost low words in silence: reductions that scale a parameter, scratch
memory, states in all kinds of holders, numbers that are read, comparisons with numbers or with an
element of the same tensor, views, arrays of NumPy, random numbers, states that are shared,
replaced, of other shapes or of classes of their own.

Random numbers that are drawn in the dtype of the parameter are the same in float64 (`draws`).
"""

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from moments import Lines, one

_HELD = 'st.setdefault("held", {})'
_HOLDERS = tuple(
    f"m = {m}\nm.mul_(0.9).add_(u, alpha=0.1)\nu = m"
    for m in (
        _HELD.format("Holder(p)") + ".m",
        _HELD.format("Slotted(p)") + ".m",
        _HELD.format("Buffered(p)") + ".m",
        _HELD.format("SimpleNamespace(m=torch.zeros_like(p))") + ".m",
        _HELD.format("UserDict(m=torch.zeros_like(p))") + '["m"]',
        _HELD.format('{"m": [torch.zeros_like(p)]}') + '["m"][0]',
        _HELD.format("partial(torch.mul, torch.zeros_like(p))") + ".args[0]",
        "attribute(p)",
        "listed(st, p)",
        "enclosed(st, p)",
    )
)
_NOT_ITSELF = (
    "first = torch.arange(u.numel()).view(u.shape) == 0\nu = torch.where(first & (u != {}), -u, u)"
)
"""Lines with a first element, which is compared with itself alone: others may be as large."""
_DIRECTIONS = {
    "reductions": (
        "u = u - u.mean()",
        "u = u / (u.std(unbiased=False) + 1)",
        "u = u - u.mean(0, keepdim=True)",
        "u = u / (u.abs().amax(-1, keepdim=True) + 1)",
        "u = u / (u.norm(1) + 1)",
        "u = u / (torch.linalg.vector_norm(u, 3, dim=-1, keepdim=True) + 1)",
        "u = u / (u.abs() / 4 + 1).prod()",
        "u = u + u.flatten().softmax(0).view(u.shape)",
        "u = u / ((g != 0).sum() + 1)",
        "u = u.flatten().cumsum(0).view(u.shape) / u.numel() + u",
    ),
    "comparisons with numbers": (
        "u = u.clamp(-0.1, 0.1)\nu = torch.where(u == 0.1, -u, u)",
        "u = torch.where(u > 0.05, 0.5 * u + 0.025, u)",
        "u = torch.where(u.ge(-0.1), u, -0.1)",
    ),
    "indices": (
        "u = u.flatten()[torch.arange(u.numel()).flip(0)].view(u.shape)",
        "i = torch.arange(u.numel()).flip(0)\nu = u + u.flatten().gather(0, i).view(u.shape)",
        "x = u.flatten().clone()\nx[:1] = 0\nu = x.view(u.shape)",
        "x = torch.zeros_like(u).flatten()\nx.index_add_(0, torch.arange(len(x)), u.flatten())\n"
        "u = x.view(u.shape)",
    ),
    "picked elements": (
        _NOT_ITSELF.format("u.flatten()[0]"),
        _NOT_ITSELF.format("u.flatten()[:1]"),
        _NOT_ITSELF.format("u.flatten().unbind()[0]"),
        _NOT_ITSELF.format("u.take(torch.tensor(0))"),
        _NOT_ITSELF.format("torch.where(first, u, 0).sum()"),
        _NOT_ITSELF.format("u.masked_fill(~first, -torch.inf).amax()"),
        _NOT_ITSELF.format("(u * (1 - (~first).to(u.dtype))).sum()"),
        _NOT_ITSELF.format("u.new_zeros(1).index_add(0, torch.tensor([0]), u.flatten()[:1])"),
        _NOT_ITSELF.format("u.flatten()[0].item()"),
        "u = u - u.flatten()[-1]",
    ),
    "masks": (
        "u = torch.where(u.abs() >= u.abs().median(), u, 0.5 * u)",
        "u = u.masked_fill(g > 0, 0)",
        "u = u.clone()\nu[g > 0] *= 0.5",
    ),
    "sorting": (
        # Of gradients: which of two near ties comes first is no question of lost values.
        "i = g.flatten().abs().argsort(stable=True)\n"
        "u = u.flatten().index_fill(0, i[:1], 0).view(u.shape)",
        "u = u - u.flatten().sort().values[u.numel() // 2]",
        "u = u / (u.abs().flatten().topk(1).values.squeeze() + 1)",
    ),
    "products of matrices": (
        "u = u @ (u.mT @ u) + u if u.dim() == 2 else u",
        "if u.dim() > 1:\n    u = u / (u.norm() + 1e-3)\n    for _ in range(2):\n"
        "        u = 1.5 * u - 0.5 * (u @ u.mT) @ u",
        'u = u + torch.einsum("i,j->i", u.flatten(), u.flatten()).view(u.shape)',
    ),
    "numbers that are read": (
        "n = float(u.norm())\nu = u / max(n, 1.0)",
        "n = u.abs().amax().item()\nu = u / max(n, 0.5)",
        "u = torch.tensor(u.tolist(), dtype=F32).to(p.dtype)",
    ),
    "views": (
        "u = u.t().contiguous().t() if u.dim() == 2 else u",
        "u = torch.cat([x * 0.5 for x in u.flatten().chunk(2)]).view(u.shape)",
        "u = u.unsqueeze(0).expand(2, *u.shape).sum(0)",
    ),
    "two words": (
        "w = u.to(F32) * 1.25\nu = w.to(p.dtype) + (w - w.to(p.dtype)).to(p.dtype)",
        "w = u.to(F32) * 1.25\nhi = torch.zeros_like(p)\nhi.copy_(w)\nw -= hi\n"
        "u = hi + w.to(p.dtype)",
    ),
    "inference mode": (
        "with torch.inference_mode():\n    u = (u * 1.0).reshape(-1).view(u.shape)",
    ),
    "NumPy": (
        "a = HIGH(u).to(F32).reshape(-1).numpy() * 1.0\n"
        "u = torch.from_numpy(a).view(u.shape).to(u.dtype)",
        "a = torch.zeros(u.shape).numpy()\ntorch.from_numpy(a).copy_(u)\n"
        "a *= 0.5\nu = torch.from_numpy(a).to(u.dtype)",
    ),
    "random numbers": (
        "u = u + 0.1 * torch.randn_like(u)",
        "u = u * torch.bernoulli(torch.full_like(u, 0.75))",
        "u = u * torch.empty_like(u).bernoulli_(0.5)",
        "u = torch.nn.functional.dropout(u, 0.25)",
        "u = u + torch.empty_like(u).uniform_(-0.1, 0.1)",
        "u = torch.where(torch.rand(u.shape) < 0.25, 0.5 * u, u)",
        "u = u + 0.1 * torch.randn(u.shape, generator=GEN).to(u.dtype)",
        "u = u.index_fill(0, torch.randperm(len(u))[:1], 0) if u.dim() else u",
    ),
    "holders": _HOLDERS,
}
"""Lines that change the update u, by kind."""
_UPDATES = (
    "torch.add(p, u, alpha=-lr, out=g)\nif bool(g.isfinite().all()):\n    p.copy_(g)",
    "g.copy_(p - lr * u)\nif g.isfinite().all().item():\n    p.copy_(g)",
    "x = buffer(p)\ntorch.sub(p, u, alpha=lr, out=x)\nif x.isfinite().all():\n    p.copy_(x)",
    "p.view(-1).sub_((lr * u).reshape(-1))",
    "p.data.sub_(lr * u)",
    "p.detach().sub_(lr * u)",
    "p[...].sub_(lr * u)",
    "p.data = p - lr * u",
    "with torch.inference_mode():\n    p.sub_(lr * u)",
    "p[g != 0] -= (lr * u)[g != 0]",
    "p.view(-1).index_add_(0, torch.arange(p.numel()), (-lr * u).reshape(-1))",
    "for x, y in zip(p.view(-1).chunk(2), (lr * u).reshape(-1).chunk(2)):\n    x.sub_(y)",
)
"""Lines that update the parameter by the update, for a rate that is a number."""
_SCALES = (
    "p.mul_(p.numel() / p.sum())",
    "p.mul_(1.5 / p.abs().max())",
    "p.div_(p.mean())",
    "p.mul_((p.numel() / p.square().sum()).sqrt())",
    "s = p.sum().item()\np.mul_(p.numel() / s)",
)
"""Lines that scale a parameter about 1 by what is computed of all of it."""


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
    may = {"random numbers": draws, "holders": holds}
    kinds = [name for name in _DIRECTIONS if may.get(name, True)]
    before = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=2, unique=True))
    lines: Lines = one(f"u = {u}")
    for kind in before:
        lines += one(draw(st.sampled_from(_DIRECTIONS[kind])), carried=kind == "holders")
    update: Lines = []
    if not tensor_lr and draw(st.booleans()):
        text = draw(st.sampled_from(_UPDATES))
        update = one(text, carried=any(word in text for word in ("copy_", "data =", "] -=")))
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
    "of rows": "torch.zeros_like(p).sum(-1, keepdim=True)",
    "a number": "p.new_zeros(())",
    "magnitudes": "p.detach().abs().amax(-1, keepdim=True)",
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
    "of rows": (
        'st["q"].mul_(0.99).add_(u.square().mean(-1, keepdim=True), alpha=0.01)\n'
        'u = u / (st["q"].sqrt() + 0.1)',
        'st["q"].lerp_(u.mean(-1, keepdim=True), 0.01)\nu = u - st["q"]',
    ),
    "a number": (
        'st["q"].mul_(0.99).add_(u.norm(), alpha=0.01)\nu = u / (st["q"] + 1)',
        'st["q"].add_(u.abs().max())\nu = u / (st["q"] / 8 + 1)',
    ),
    "magnitudes": (
        'st["q"].sub_(lr * u.mean(-1, keepdim=True))\n'
        'p.copy_(st["q"] * p / p.abs().amax(-1, keepdim=True))',
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


KINDS: dict[str, tuple[str, ...]] = {
    **_DIRECTIONS,
    "updates": _UPDATES,
    "scales": _SCALES,
    **{name: (begin,) for name, begin in _BEGIN.items() if begin != "torch.zeros_like(p)"},
    **{name: _HOLDS[name] for name in ("replaced", "drawn")},
}
"""Texts of which statements and states of each kind are made."""
