"""Residuals follow the states that a hook gives to parameters by their names.

For optimizer.checkpoints.state_dicts.
"""

import copy
from typing import Any

import pytest
import torch
from interpreter import without_compiler
from recorded_steps import Each
from torch import Tensor
from torch.optim import AdamW, Optimizer

import collage_fx

SHAPES = {"weight": (4, 3), "bias": (5,)}


def by_name(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict in the order of the optimizer's own parameters."""
    (group,), (own,) = state_dict["param_groups"], optimizer.state_dict()["param_groups"]
    saved = dict(zip(group["param_names"], group["params"], strict=True))
    places = zip(own["params"], own["param_names"], strict=True)
    state = {at: state_dict["state"][saved[name]] for at, name in places}
    order = {key: own[key] for key in ("params", "param_names")}
    return {"state": state, "param_groups": [group | order]}


def made(weights: dict[str, Tensor]) -> Any:
    params = [(name, torch.nn.Parameter(x.detach().clone())) for name, x in weights.items()]
    return AdamW(params, lr=1e-4), dict(params)


def train(optimizer: Optimizer, params: dict[str, Any], steps: range) -> None:
    for k in steps:
        for name, p in params.items():
            draw = torch.Generator().manual_seed(1000 * len(name) + k)
            p.grad = (torch.randn(p.shape, generator=draw) + 0.5).bfloat16()
        optimizer.step()


@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_a_hook_may_come_before_or_after_ours(same: bool, first: bool) -> None:
    shapes = dict.fromkeys(SHAPES, (4, 3)) if same else SHAPES
    draw = torch.Generator().manual_seed(0)
    weights = {k: torch.randn(s, generator=draw).bfloat16() for k, s in shapes.items()}
    with without_compiler():
        optimizer, params = made(weights)
        train(collage_fx.compile_(optimizer), params, range(5))
        saved = copy.deepcopy(optimizer.state_dict())
        second, others = made({name: params[name] for name in reversed(shapes)})
        if first:
            second.register_load_state_dict_pre_hook(by_name)
        collage_fx.compile_(second)
        if not first:
            second.register_load_state_dict_pre_hook(by_name)
        second.load_state_dict(saved)
        train(optimizer, params, range(5, 9))
        train(second, others, range(5, 9))
    for name, p in params.items():
        assert torch.equal(collage_fx.value(p), collage_fx.value(others[name]))
        assert not torch.equal(collage_fx.value(p), p), "the control: there are low words"


def in_fp32(p: Tensor, g: Tensor, state: Any) -> None:
    state.setdefault("m", torch.zeros_like(p, dtype=torch.float32)).mul_(0.9).add_(g, alpha=0.1)
    p.sub_(state["m"], alpha=1e-4)


def test_a_hook_that_does_nothing_changes_nothing() -> None:
    """States in fp32 beside bf16 parameters stay so, which PyTorch casts when it loads them."""
    params = {"weight": torch.nn.Parameter(torch.ones(4, 3).bfloat16())}
    with without_compiler():
        optimizer = collage_fx.compile_(Each([params["weight"]], in_fp32))
        train(optimizer, params, range(3))
        saved = copy.deepcopy(optimizer.state_dict())
        optimizer.register_load_state_dict_pre_hook(lambda *_: None)
        optimizer.load_state_dict(saved)
    found = optimizer.state[params["weight"]]["m"]
    assert found.dtype == torch.float32
    assert torch.equal(found, saved["state"][0]["m"])
