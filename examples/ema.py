"""An exponential moving average of bf16 weights, by torch's AveragedModel.

With a decay of 0.999 each step adds a thousandth of the distance, for which bf16 has no room.
`collage_fx.compile` of the method that updates the average keeps it, in two more bytes for each
weight, and takes the weights with their residuals. An average in fp32 would take as many bytes, and
could not be used as the bf16 model that it is.
"""

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import collage_fx

DECAY, STEPS = 0.999, 300


def averaged(model: nn.Module) -> AveragedModel:
    """Return an average of a model, which begins with its weights."""
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))


def whole(model: nn.Module) -> Tensor:
    """Return all weights of a model, with their residuals, as one vector in float64."""
    values = [collage_fx.value(p).detach().double().flatten() for p in model.parameters()]
    return torch.cat(values)


def main() -> None:
    """Train, average both ways, and compare with an average in float64."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    collage_fx.compile_(optimizer)
    plain, ours = averaged(model), averaged(model)
    update = collage_fx.compile(ours.update_parameters)
    data = torch.randn(64, 16).bfloat16()
    exact = start = torch.empty(0)
    for step in range(STEPS):
        optimizer.zero_grad()
        (model(data) - data).square().mean().backward()
        optimizer.step()
        plain.update_parameters(model)
        update(model)  # in place of ours.update_parameters(model)
        if step == 0:
            exact = start = whole(model)
        exact = exact.lerp(whole(model), 1 - DECAY)
    for way, average in (("plain bf16", plain), ("compensated", ours)):
        lost = (whole(average.module) - exact).norm() / (exact - start).norm()
        print(f"{way}: off by {100 * lost:.3f}% of the way that the average has come")


if __name__ == "__main__":
    main()
