"""Steps of optimizers whose members are alike, and such that look so."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

SHAPES = [(4, 3), (3, 5), (1, 6), (7,), (6, 1), (5,), (2, 2, 3), (1, 8), (4, 1), (3, 2, 2), (1,)]
SHAPES += [(1,), (0, 3), (0,), (), ()]


class Written(Optimizer):
    """An optimizer whose step is a function of the parameters, the gradients and the states."""

    def __init__(self, params: list[Tensor], update: Callable[..., Any]) -> None:
        super().__init__(params, {})
        self.update = update
        self.count = torch.tensor(1.0)
        self.param_groups[0]["number"] = 0
        for p in params:
            self.state[p] |= {"t": torch.tensor(1.0), "m": torch.zeros_like(p)}
            self.state[p] |= {"w": p.detach().float(), "n": torch.zeros_like(p, dtype=torch.int32)}
        self.state[params[0]]["extra"] = torch.zeros_like(params[0])

    def step(self) -> None:  # type: ignore[override]
        params = [p for p in self.param_groups[0]["params"] if p.grad is not None]
        grads, states = [p.grad for p in params], [self.state[p] for p in params]
        self.update(self, params, grads, states)


def each(update: Callable[..., Any]) -> Callable[..., Any]:
    """Make a step of what is done to one parameter."""

    @torch.no_grad()
    def step(self: Any, params: Any, grads: Any, states: Any) -> None:
        for p, g, s in zip(params, grads, states, strict=True):
            update(self, p, g, s)

    step.__name__ = update.__name__
    return step


@each
def momentum(self: Any, p: Tensor, g: Tensor, s: Any) -> None:
    s["t"] += 1
    s["m"].mul_(0.9).add_(g)
    p.addcdiv_(s["m"], 1 + g.square().mul_(2), value=-0.01).mul_(1 - 0.1 / s["t"])


@torch.no_grad()
def clipped(self: Any, params: Any, grads: Any, states: Any) -> None:
    """A norm of all gradients in each update."""
    norm = torch.stack([g.float().norm() for g in grads]).norm()
    for p, g, s in zip(params, grads, states, strict=True):
        s["m"].add_(g * (1 / (norm + 1)))
        p.sub_(s["m"], alpha=0.01)


@torch.no_grad()
def counted(self: Any, params: Any, grads: Any, states: Any) -> None:
    """One count for all, written in the step; outside of no_grad a part of it."""
    self.count.add_(1)
    with torch.enable_grad():
        factor = 1 / self.count
    for p, g, s in zip(params, grads, states, strict=True):
        s["m"].mul_(0.9).add_(g * factor)
        p.sub_(s["m"] * 0.01)


@torch.no_grad()
def lists(self: Any, params: Any, grads: Any, states: Any) -> None:
    ms = [s["m"] for s in states]
    torch._foreach_mul_(ms, 0.9)
    torch._foreach_add_(ms, grads)
    ts = [s["t"] for s in states]
    torch._foreach_add_(ts, 1)
    steps = torch._foreach_mul(ms, [-1e-3 * (i % 2 + 1) for i in range(len(ms))])
    torch._foreach_div_(steps, ts)
    torch._foreach_add_(params, steps)


@torch.no_grad()
def numbered(self: Any, params: Any, grads: Any, states: Any) -> None:
    """A count in Python, of which Dynamo makes an input when it changes."""
    group = self.param_groups[0]
    group["number"] += 1
    for p, g in zip(params, grads, strict=True):
        p.sub_(g * (0.01 / group["number"]))


@torch.no_grad()
def halved(self: Any, params: Any, grads: Any, states: Any) -> None:
    """A rate that the step itself overwrites, after all have read it."""
    rate = self.count * 0.01
    for p, g in zip(params, grads, strict=True):
        p.sub_(g * rate)
    self.count.mul_(0.5)


@torch.no_grad()
def of_one_gradient(self: Any, params: Any, grads: Any, states: Any) -> None:
    """Another tensor takes the gradient of a member."""
    norm = torch.stack([g.float().norm() for g in grads]).norm()
    twice = grads[0] * 2
    states[0]["extra"].add_(twice)
    for p, g in zip(params, grads, strict=True):
        p.sub_(g * (0.01 / norm))


@each
def norm_of_its_own(self: Any, p: Tensor, g: Tensor, s: Any) -> None:
    s["m"].mul_(0.9).add_(g)
    p.sub_(s["m"] * (0.01 / (1 + s["m"].float().norm())))


@torch.no_grad()
def norms(self: Any, params: Any, grads: Any, states: Any) -> None:
    """A norm of all gradients, and that of the member's own, in one number."""
    norm = torch.stack([g.float().norm() for g in grads]).norm()
    for p, g in zip(params, grads, strict=True):
        p.sub_(g * (0.01 * g.float().norm() / norm))


@each
def sums(self: Any, p: Tensor, g: Tensor, s: Any) -> None:
    """Nothing is summed in a parameter of size 1."""
    p.sub_(0.01 * g.sum(0, keepdim=True) if g.dim() else g * 0.01)


@each
def sizes(self: Any, p: Tensor, g: Tensor, s: Any) -> None:
    p.sub_(g * (0.1 / (p.numel() + 1)))


@each
def noise(self: Any, p: Tensor, g: Tensor, s: Any) -> None:
    p.sub_(torch.empty(()).geometric_(0.5) * 0.01 * g)


@each
def in_fp32(self: Any, p: Tensor, g: Tensor, s: Any) -> None:
    """Averages in fp32, and a count of each element, beside a parameter of 16 bits."""
    g = g.float()
    s["w"].mul_(0.999).addcmul_(g, g, value=0.001)
    s["n"].add_(g > 0)
    p.sub_((0.01 * g / (s["w"].abs().sqrt() + 0.1 + s["n"])).to(p.dtype))


@each
def from_a_master(self: Any, p: Tensor, g: Tensor, s: Any) -> None:
    """Weights in fp32 that the parameter takes over."""
    s["m"].mul_(0.9).add_(g)
    s["w"].sub_(0.01 * s["m"])
    p.copy_(s["w"])


@each
def through_data(self: Any, p: Tensor, g: Tensor, s: Any) -> None:
    s["m"].data.mul_(0.99).add_(g.data, alpha=0.01)
    p.data.add_(s["m"].data, alpha=-1e-3)


ALIKE = [
    momentum,
    clipped,
    through_data,
    lists,
    in_fp32,
    counted,
    numbered,
    halved,
    of_one_gradient,
]
ALIKE += [from_a_master]
UNLIKE = [norm_of_its_own, sizes, norms, sums, noise]
"""Updates in the order of what they tell: `make test` takes some of the first."""
