"""Checkpoints as other projects write them, made anew after their public descriptions."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

Tree = dict[str, Any]
"""A checkpoint with keys `model` and `optimizer`."""
MARKS = ("master_param", "remainders", "kahan_comp", "compensation", "error_bits", "lists")
"""The formats of other projects, by what is peculiar to each."""

SETTINGS = {
    "error_bits": {"master_bytewidth": 3},
    "kahan_comp": {"kahan_sum": True},
    "compensation": {"use_kahan_summation": True},
}
"""Format -> settings of its groups."""


def trained(dtype: torch.dtype = torch.float32, steps: int = 3) -> tuple[nn.Module, AdamW]:
    """A small model after some steps, with all weights at random."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.LayerNorm(9)).to(dtype)
    for p in model.parameters():
        nn.init.normal_(p)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    take_steps(model, optimizer, 0, steps)
    return model, optimizer


def take_steps(model: nn.Module, optimizer: Any, first: int, last: int) -> None:
    """Steps first to last - 1 of a fixed stream of gradients."""
    for k in range(first, last):
        generator = torch.Generator().manual_seed(k)
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()


def fp32() -> Tree:
    """A run in fp32, as plain PyTorch saves it."""
    model, optimizer = trained()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """The upper half of fp32 numbers, one more where the lower is negative, and the lower half."""
    words = x.view(torch.int16).reshape(*x.shape, 2)
    low = words[..., 0].clone()
    return (words[..., 1] + (low < 0)).view(torch.bfloat16), low


def _entry(mark: str, whole: Tensor, index: int) -> tuple[Tensor, dict[str, Any], Tensor]:
    """A bf16 weight, the entry beside it, and the value of both, for a weight that is wanted."""
    weight = whole.bfloat16()
    rest = (whole - weight.float()).bfloat16()
    if mark == "master_param":
        return weight, {mark: whole.clone()}, whole
    if mark == "remainders":
        high, low = halves(whole)
        return high, {"master_param": low}, whole
    if mark in ("kahan_comp", "compensation"):
        return weight, {mark: rest}, weight.double() + rest.double()
    if mark == "error_bits":
        exponent = torch.frexp(weight.float())[1] - 9
        number = ((whole - weight.float()) / 2.0**exponent * 127).round().clamp(-127, 127)
        value = weight.float() + number / 127 * 2.0**exponent
        return weight, {mark: number.bfloat16()}, value
    return weight, {}, whole


def checkpoint(mark: str) -> tuple[Tree, dict[str, Tensor]]:
    """A checkpoint in a format, with the whole values of its weights by name."""
    model, optimizer = trained()
    states = optimizer.state_dict()
    (group,) = states["param_groups"]
    weights, values, masters = {}, {}, []
    for index, (name, whole) in enumerate(model.state_dict().items()):
        weights[name], entry, values[name] = _entry(mark, whole, index)
        states["state"][index].update(entry)
        masters.append(whole)
        if mark in ("master_param", "remainders"):
            del states["state"][index]["step"]
            group["step"] = 3
    group.update(SETTINGS.get(mark, {}))
    tree: Tree = {"model": weights, "optimizer": states}
    if mark == "lists":
        tree["optimizer"] = {"optimizer": states, "fp32_from_fp16_params": [masters]}
    return tree, values
