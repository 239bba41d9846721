"""A small byte-level transformer, and text for it: the Python standard library's own source."""

from __future__ import annotations

import math
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CONTEXT, BATCH, WIDTH, HEADS, LAYERS = 64, 16, 128, 4, 2
PACKAGES = ("asyncio", "collections", "concurrent", "email", "http", "importlib", "json", "logging")
HELD_OUT_EVERY = 10  # one file in ten is for validation
Batch = tuple[Tensor, Tensor]  # inputs and targets, int64 (batch, context)


@dataclass(frozen=True)
class Size:
    """Dimensions of a model, and of the batches that it sees."""

    layers: int = LAYERS
    width: int = WIDTH
    heads: int = HEADS
    context: int = CONTEXT
    batch: int = BATCH
    vocabulary: int = 256


SIZE = Size()


class Linear(nn.Linear):
    """A linear layer, which a CPU computes as it does fp32 and rounds once, as a GPU does.

    Most CPUs have no instructions for products of bf16 matrices and take 16 times as long for them.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Bf16 (..., inputs) to bf16 (..., outputs), with sums in fp32."""
        if x.device.type != "cpu":
            return super().forward(x)
        return F.linear(x.float(), self.weight.float()).to(x.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention; bf16 (batch, heads, length, width) to the same."""
    length = q.shape[-2]
    if length > CONTEXT:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    # written out: at this length on a CPU several times as fast as the fused backward pass
    future = torch.full((length, length), -math.inf, device=q.device).triu(1)
    scores = (q.float() * q.shape[-1] ** -0.5) @ k.float().transpose(-1, -2) + future
    return (scores.softmax(-1) @ v.float()).to(q.dtype)


class Block(nn.Module):
    """Attention and a feed-forward part, each behind a norm and added to the stream."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads, width = size.heads, size.width
        self.norm1, self.norm2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.qkv = Linear(width, 3 * width, bias=False)
        self.project = Linear(width, width, bias=False)
        self.up = Linear(width, 4 * width, bias=False)
        self.down = Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Bf16 (batch, length, width) to the same."""
        batch, length, width = x.shape
        split = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        mixed = attend(*split.permute(2, 0, 3, 1, 4))
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        hidden: Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + hidden


class ByteModel(nn.Module):
    """Next-byte prediction; every layer with PyTorch's default initialisation."""

    def __init__(self, size: Size = SIZE) -> None:
        super().__init__()
        self.bytes = nn.Embedding(size.vocabulary, size.width)
        self.places = nn.Embedding(size.context, size.width)
        self.blocks = nn.Sequential(*(Block(size) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width, bias=False)
        self.head = Linear(size.width, size.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Int64 (batch, length) to bf16 logits (batch, length, vocabulary)."""
        x = self.bytes(tokens) + self.places.weight[: tokens.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


def read_text() -> tuple[Tensor, Tensor]:
    """Training and validation bytes (uint8, 1-d) from disjoint files of the standard library."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(root.glob("*.py"))
    files += [path for package in PACKAGES for path in sorted((root / package).rglob("*.py"))]
    held_out = files[::HELD_OUT_EVERY]
    train = [path for i, path in enumerate(files) if i % HELD_OUT_EVERY]

    def joined(paths: list[Path]) -> Tensor:
        return torch.frombuffer(
            bytearray(b"".join(p.read_bytes() for p in paths)), dtype=torch.uint8
        )

    return joined(train), joined(held_out)


def batches(text: Tensor, seed: int, device: str, size: Size = SIZE) -> Iterator[Batch]:
    """Random windows of the text without end; one order per seed, whatever the device."""
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.arange(size.context + 1)
    while True:
        starts = torch.randint(len(text) - size.context, (size.batch, 1), generator=generator)
        rows = text[starts + offsets].long().to(device)
        yield rows[:, :-1], rows[:, 1:]


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats per byte; fp32 from the logits on, as is usual."""
    return F.cross_entropy(model(inputs).float().flatten(0, 1), targets.flatten())
