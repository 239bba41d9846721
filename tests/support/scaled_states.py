"""Updates that scale a state by what is computed of it, or of another one."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

LR = 1e-3
Update = Callable[[Tensor, Tensor, Any], None]


def kept(measure: Callable[[Tensor], Tensor]) -> Update:
    """Return an update that leaves a measure of the parameter as it is."""

    def each(p: Tensor, g: Tensor, state: Any) -> None:
        before = measure(p)
        p.sub_(g, alpha=LR)
        p.mul_(before / measure(p))

    return each


def towards_its_sum(p: Tensor, g: Tensor, state: Any) -> None:
    before = p.sum(-1, keepdim=True)
    p.sub_(g, alpha=LR)
    p.add_(p * (before / p.sum(-1, keepdim=True) - 1), alpha=0.1)


def centered(p: Tensor, g: Tensor, state: Any) -> None:
    p.sub_(g, alpha=LR).sub_(p.mean(-1, keepdim=True), alpha=0.5)


def orthogonalized(p: Tensor, g: Tensor, state: Any) -> None:
    if not state:
        p.div_(p.norm())
    p.sub_(g, alpha=LR)
    p.copy_(1.5 * p - 0.5 * (p @ p.T @ p))


def held(p: Tensor, g: Tensor, state: Any) -> None:
    """Hold rows at a small RMS: what that divides is about one, and no rate."""
    p.sub_(g, alpha=0.1 * LR)
    p.mul_(0.08 / p.square().mean(-1, keepdim=True).sqrt())


def of_a_magnitude(p: Tensor, g: Tensor, state: Any) -> None:
    """Weight normalization within the step, as in DoRA."""
    if not state:
        state["mag"] = p.norm(dim=-1, keepdim=True)
    p.sub_(g, alpha=LR)
    state["mag"].mul_(1 - 1e-4)
    p.copy_(state["mag"] * p / p.norm(dim=-1, keepdim=True))


def of_a_scalar(p: Tensor, g: Tensor, state: Any) -> None:
    if not state:
        state["scale"] = p.mean()
    state["scale"].add_(g.mean(), alpha=LR)
    p.sub_(g, alpha=LR)
    p.copy_(p * state["scale"] / p.mean())


def by_numbers(p: Tensor, g: Tensor, state: Any) -> None:
    before = p.sum(-1).tolist()
    p.sub_(g, alpha=LR)
    ratio = [b / a for b, a in zip(before, p.sum(-1).tolist(), strict=True)]
    p.mul_(torch.tensor(ratio, dtype=torch.float64).unsqueeze(-1))


def exchanged(p: Tensor, g: Tensor, state: Any) -> None:
    """The state takes over what was scaled, and has nothing of its own in it."""
    p.sub_(g, alpha=LR)
    p.mul_(p.numel() / p.sum())
    x = p.clone()
    p.copy_(state["v"])
    state["v"].copy_(x)


def _zeros(p: Tensor) -> Tensor:
    return torch.zeros(8, 1, dtype=p.dtype)


SCALED: dict[str, Update] = {
    "row_sums": kept(lambda p: p.sum(-1, keepdim=True)),
    "largest": kept(lambda p: p.abs().max()),
    "median": kept(Tensor.median),
    "deviation": kept(Tensor.std),
    "norm_inf": kept(lambda p: p.norm(p=float("inf"), dim=-1, keepdim=True)),
    "products": kept(lambda p: (p @ p.T).sum().sqrt()),
    "one_of_them": kept(lambda p: p[:, :1].clone()),
    "put": kept(lambda p: _zeros(p).index_put((torch.arange(8),), p.sum(-1, keepdim=True))),
    "added": kept(lambda p: _zeros(p).index_add(0, torch.arange(8), p.sum(-1, keepdim=True))),
    "matrix_sum": kept(lambda p: torch.addmm(_zeros(p), p, torch.ones_like(p[:1]).T)),
    "sum": towards_its_sum,
    "magnitude": of_a_magnitude,
    "scalar": of_a_scalar,
}

_SKEW = 0.05 * torch.randn(16, 16, generator=torch.Generator().manual_seed(7))
TURN = torch.linalg.matrix_exp(_SKEW - _SKEW.T).bfloat16()
"""Rows of sixteen turned a little."""


def turned(p: Tensor, g: Tensor, state: Any) -> None:
    """Each way of the parameter is turned, by a matrix times a number that changes."""
    if not state:
        state["turn"], state["old"], state["k"] = TURN.to(p.dtype), p.clone(), 0
    state["k"] += 1
    way = p - state["old"]
    state["old"].copy_(p)
    p.copy_(p @ (state["turn"] * (1 - 1e-4 * state["k"])))
    p.add_(way, alpha=0.5)


def followed_product(p: Tensor, g: Tensor, state: Any) -> None:
    """The parameter follows a product of two states, as merged weights of LoRA do."""
    if not state:
        state["a"], state["b"] = p.clone(), torch.eye(16, dtype=p.dtype)
    state["a"].sub_(LR * g)
    p.lerp_(state["a"] @ state["b"], 0.5)


def followed_mean(p: Tensor, g: Tensor, state: Any) -> None:
    """The parameter follows the mean of two states that lie in another order."""
    if not state:
        state["a"], state["b"] = p.T.clone(), p.T.clone()
    state["a"].sub_(LR * g.T)
    state["b"].sub_(2 * LR * g.T)
    p.lerp_((state["a"].T + state["b"].T) / 2, 0.1)
