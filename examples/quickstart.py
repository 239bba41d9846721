"""Fine-tune a small language model at a rate of 2e-5: in bf16, with one line more, and in fp32.

The model predicts the next byte. It learns from Python's source code first, in fp32, and then from
prose, the topics of Python's `help()`: that part is done three times, from the same weights and on
the same batches. The losses are of 10,000 bytes of the prose.
"""

import argparse
import copy
import inspect
import pydoc
import subprocess
import typing
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy
from torch.optim import AdamW, Optimizer

import collage_fx

CONTEXT, STEPS = 8, 200
MODULES = (argparse, inspect, pydoc, subprocess, typing)
CODE, PROSE = (
    torch.frombuffer(bytearray("".join(parts).encode()), dtype=torch.uint8).long()
    for parts in (map(inspect.getsource, MODULES), topics.values())
)


def loss_of(model: nn.Module, text: Tensor = PROSE, rows: int = 10_000, seed: int = -1) -> Tensor:
    """Return the loss of some bytes, computed in fp32, as few CPUs are fast at bf16 products."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - CONTEXT, (rows, 1), generator=generator)
    found = text[starts + torch.arange(CONTEXT + 1)]
    weights = {name: p.float() for name, p in model.named_parameters()}
    return cross_entropy(functional_call(model, weights, found[:, :-1]), found[:, -1])


def train(model: nn.Module, optimizer: Optimizer, text: Tensor = PROSE, steps: int = STEPS) -> None:
    """Take steps, on the same batches for all models."""
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, text, 64, seed=step).backward()
        optimizer.step()


def pretrained() -> nn.Module:
    """Return a model that has learned from source code."""
    torch.set_num_threads(1)  # matrices as small as these gain nothing from a second
    torch.manual_seed(0)
    embedding, hidden = nn.Embedding(256, 16), nn.Linear(16 * CONTEXT, 128)
    model = nn.Sequential(embedding, nn.Flatten(), hidden, nn.GELU(), nn.Linear(128, 256))
    train(model, AdamW(model.parameters(), lr=3e-3), CODE)
    return model


def main() -> None:
    """Fine-tune in three ways."""
    begun = pretrained().bfloat16()
    start = loss_of(begun).item()
    print(f"start     loss {start:.4f}")
    for way in ("bf16", "one line", "fp32"):
        model = copy.deepcopy(begun).to(torch.float32 if way == "fp32" else torch.bfloat16)
        optimizer = AdamW(model.parameters(), lr=2e-5)
        if way == "one line":
            collage_fx.compile_(optimizer)
        train(model, optimizer)
        loss = loss_of(model).item()
        print(f"{way:9} loss {loss:.4f}, {loss - start:+.4f}")


if __name__ == "__main__":
    main()
