"""Statements of random programs that are recorded, judged or stored in other ways than most.

Each is of a kind that once lost low words in silence: reductions that scale a parameter, scratch
memory, states that no optimizer holds, numbers that are read, comparisons with numbers, views,
arrays of NumPy.
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
    "a = u.to(F32).reshape(-1).numpy() * 1.0\nu = torch.from_numpy(a).view(u.shape).to(u.dtype)",
    "u = torch.tensor(u.tolist(), dtype=F32).to(p.dtype)",
    "u = u.t().contiguous().t() if u.dim() == 2 else u",
)
"""Of the update u."""
_UPDATES = (
    "torch.add(p, u, alpha=-lr, out=g)\nif bool(g.isfinite().all()):\n    p.copy_(g)",
    "g.copy_(p - lr * u)\nif g.isfinite().all().item():\n    p.copy_(g)",
    "x = buffer(p)\ntorch.sub(p, u, alpha=lr, out=x)\nif x.isfinite().all():\n    p.copy_(x)",
    "p.view(-1).sub_((lr * u).reshape(-1))",
    "p.data.sub_(lr * u)",
    "p.detach().sub_(lr * u)",
    "p[...].sub_(lr * u)",
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
    draw: DrawFn, u: str, *, near_one: bool, tensor_lr: bool, holds: bool
) -> tuple[Lines, Lines, Lines]:
    """Return statements about the update, one that applies it (or none), and some after it.

    Args:
        draw: of hypothesis.
        u: the update, a name or a call.
        near_one: whether parameters are about 1.
        tensor_lr: whether the rate is a tensor.
        holds: whether there may be states that no state dict has.
    """
    kinds = [*_DIRECTIONS, *([_HELD] if holds else [])]
    before = draw(st.lists(st.sampled_from(kinds), max_size=2, unique=True))
    lines: Lines = one(f"u = {u}") if before else []
    for text in before:
        lines += one(text, carried=text == _HELD)
    update: Lines = []
    if not tensor_lr and draw(st.booleans()):
        text = draw(st.sampled_from(_UPDATES))
        update = one(("" if before else f"u = {u}\n") + text, carried="copy_" in text)
    after: Lines = []
    if near_one and draw(st.integers(0, 2)) == 2:
        after = one(draw(st.sampled_from(_SCALES)), carried=True)
    return lines, update, after
