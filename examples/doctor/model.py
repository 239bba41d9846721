"""A small transformer on the source text of a module of Python, for the scripts beside it."""

import inspect
import random as python_random

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, LENGTH, BATCH = 64, 32, 8
TEXT = torch.tensor(list(inspect.getsource(python_random).encode()))


class Block(nn.Module):
    """Attention and a feed-forward part, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) to the same."""
        split = self.qkv(self.norm1(x)).view(*x.shape[:2], 3, 4, -1)
        mixed = F.scaled_dot_product_attention(*split.permute(2, 0, 3, 1, 4), is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(x.shape))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return out


class Model(nn.Module):
    """A transformer over bytes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(256, WIDTH)
        self.layers = nn.Sequential(Block(), Block())
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, length) to logits (batch, length, 256)."""
        logits: Tensor = self.head(self.norm(self.layers(self.embed(tokens))))
        return logits


def batch() -> Tensor:
    """Return some text, int64 (batch, length + 1)."""
    starts = torch.randint(len(TEXT) - LENGTH - 1, (BATCH, 1))
    return TEXT[starts + torch.arange(LENGTH + 1)]


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the mean loss of the next byte."""
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
