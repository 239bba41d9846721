"""A small bf16 model and a training loop, for tests of what looks at training."""

from typing import Any

import torch


def model_in_bf16(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16)]
    return torch.nn.Sequential(*layers).bfloat16()


def train(model: torch.nn.Module, optimizer: Any, steps: int, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 16, generator=generator).bfloat16()).float().square().mean().backward()
        optimizer.step()
