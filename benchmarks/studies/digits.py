"""Task `digits`: a small convolution net on the 1,797 handwritten digits of scikit-learn.

The last 360 of them, which other people wrote, are held out.
"""

from collections.abc import Iterator
from functools import cache

import data
import torch
import torch.nn.functional as F
from models import Batch, Named
from torch import Tensor, nn

HELD_OUT, BATCH = 360, 32


class Net(nn.Module):
    """Two convolutions and two linear layers: 38,298 weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 32, 3, stride=2)
        self.third, self.last = nn.Linear(288, 112), nn.Linear(112, 10)


def weights() -> Named:
    """Return weights that PyTorch draws."""
    return dict(Net().named_parameters())


def loss(weights: Named, images: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy (nats an image); products are summed in fp32."""

    def layer(name: str) -> tuple[Tensor, Tensor]:
        return weights[f"{name}.weight"].float(), weights[f"{name}.bias"].float()

    kind = weights["last.weight"].dtype
    x = F.relu(F.conv2d(images, *layer("first"), padding=1)).to(kind)
    x = F.relu(F.conv2d(x.float(), *layer("second"), stride=2)).to(kind)
    x = F.relu(F.linear(x.float().flatten(1), *layer("third"))).to(kind)
    return F.cross_entropy(F.linear(x.float(), *layer("last")), labels)


@cache
def _read() -> Batch:
    lines = data.unpacked("digits").decode().split()
    rows = torch.tensor([[float(v) for v in line.split(",")] for line in lines])
    return rows[:, :64].reshape(-1, 1, 8, 8) / 16, rows[:, 64].long()


def batches(seed: int) -> Iterator[Batch]:
    """Yield random images and their labels, without end."""
    images, labels = (t[:-HELD_OUT] for t in _read())
    generator = torch.Generator().manual_seed(seed)
    while True:
        rows = torch.randint(len(labels), (BATCH,), generator=generator)
        yield images[rows], labels[rows]


def held_out() -> list[Batch]:
    """Return images and labels that are held out, in one batch."""
    return [tuple(t[-HELD_OUT:] for t in _read())]
