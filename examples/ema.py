"""An exponential moving average of bf16 weights over ten thousand steps, beside one in float64.

With a decay of 0.9999 each step adds a ten-thousandth of the distance, for which bf16 has no room:
torch's AveragedModel hardly moves. `collage_fx.EMA` takes the weights with their residuals, and has
a residual for each average, in two more bytes. An average in fp32 would take as many bytes, and
could not be used as the bf16 model that it is.
"""

import sys

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import collage_fx

DECAY = 0.9999
STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000


def whole(model: nn.Module) -> Tensor:
    """Return all weights of a model, with their residuals, as one vector in float64."""
    return torch.cat([collage_fx.value(p).flatten() for p in model.parameters()])


def main() -> None:
    """Train, average in several ways, and compare with an average in float64."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    collage_fx.compile_(optimizer)
    ours = {name: collage_fx.EMA(model, DECAY, storage=name) for name in ("remainder16", "mcf2")}
    plain = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    data = torch.randn(64, 16).bfloat16()
    exact = start = wide = torch.empty(0)
    for step in range(STEPS):
        optimizer.zero_grad()
        (model(data) - data).square().mean().backward()
        optimizer.step()
        for average in (plain, *ours.values()):
            average.update_parameters(model)
        now, high = whole(model), torch.cat([p.detach().flatten() for p in model.parameters()])
        if not step:
            exact, start, wide = now, now, high.float()
        exact, wide = exact.lerp(now, 1 - DECAY), wide.lerp(high.float(), 1 - DECAY)
        if step % 1000 == 0:
            print(f"step {step} of {STEPS}", file=sys.stderr)
    ways = {"AveragedModel in bf16": whole(plain.module), "fp32, of bf16 weights": wide.double()}
    ways |= {f"collage_fx.EMA, {name}": whole(one.module) for name, one in ours.items()}
    for way, average in ways.items():
        lost = (average - exact).norm() / (exact - start).norm()
        print(f"{way}: off by {lost:.2g} of the way that the average has come")
    with ours["remainder16"].swap(model), torch.no_grad():
        loss = float((model(data) - data).square().mean())
    back = torch.equal(now, whole(model))
    print(f"loss of the average {loss:.5f}; the weights are back: {back}")


if __name__ == "__main__":
    main()
