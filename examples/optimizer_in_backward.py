"""An optimizer for each parameter, which steps within the backward pass: no gradient outlives it.

That saves the memory of gradients. Each optimizer is compiled as any other, and the weights have
the bits of those that one optimizer of all parameters steps afterwards.
"""

import torch
from torch import Tensor, nn
from torch.optim import AdamW

import collage_fx

LAYERS, STEPS = 14, 10


def made() -> nn.Module:
    """Return a model of 28 parameters."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(LAYERS)]
    return nn.Sequential(*layers).bfloat16()


def step_in_backward(model: nn.Module) -> list[AdamW]:
    """Have each parameter stepped, and its gradient freed, as soon as that is there."""
    optimizers = {p: collage_fx.compile_(AdamW([p], lr=1e-3)) for p in model.parameters()}

    def step(p: Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    return list(optimizers.values())


def main() -> None:
    """Train in both ways, and compare."""
    model, other = made(), made()
    optimizers, one = step_in_backward(model), AdamW(other.parameters(), lr=1e-3)
    collage_fx.compile_(one)
    for _ in range(STEPS):
        data = torch.randn(16, 32).bfloat16()
        (model(data) - data).square().mean().backward()
        assert all(p.grad is None for p in model.parameters())
        (other(data) - data).square().mean().backward()
        one.step()
        one.zero_grad()
    pairs = list(zip(model.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(collage_fx.value(p), collage_fx.value(q)) for p, q in pairs)
    states = [s for one in optimizers for s in collage_fx.report(one).states]
    print(f"{sum(s.compensated for s in states)} of {len(states)} states compensated")
    print("the weights have the bits of those of one optimizer")


if __name__ == "__main__":
    main()
