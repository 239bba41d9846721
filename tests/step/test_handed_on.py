"""States that are replaced between steps by tensors of the same values keep their residuals.

For optimizer.checkpoints.places and runtime.residuals.store.
"""

import copy
import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import collage_fx
from collage_fx.runtime.residuals.checks import Checks
from collage_fx.runtime.residuals.store import ResidualStore

STEPS = 30
Event = Callable[[optim.Optimizer], None]


def nothing(_: optim.Optimizer) -> None:
    """Leave states alone."""


def cloned(optimizer: optim.Optimizer) -> None:
    """As where states are offloaded to a host and fetched again."""
    for state in optimizer.state.values():
        for key, value in state.items():
            state[key] = value.clone()


def cloned_and_held(optimizer: optim.Optimizer) -> None:
    """As where somebody keeps the ones before."""
    HELD.extend(t for state in optimizer.state.values() for t in state.values())
    cloned(optimizer)


HELD: list[Tensor] = []


def new_parameters(optimizer: optim.Optimizer) -> None:
    """As where a model is rebuilt around its weights."""
    for group in optimizer.param_groups:
        for i, p in enumerate(group["params"]):
            new = nn.Parameter(p.detach().clone())
            new.grad = p.grad
            optimizer.state[new] = optimizer.state.pop(p)
            group["params"][i] = new


def trained(
    dtype: torch.dtype, event: Event, every: int, **options: Any
) -> tuple[list[Tensor], list[Tensor]]:
    """Return whole weights and second moments, and where the weights began."""
    grads = torch.Generator().manual_seed(0)
    start = [1 + 0.25 * torch.randn(8, 8, generator=grads) for _ in range(2)]
    params = [nn.Parameter(x.bfloat16().to(dtype)) for x in start]
    begin = [p.detach().double().clone() for p in params]
    optimizer = optim.AdamW(params, lr=1e-4, eps=1e-3)
    step = collage_fx.compile(optimizer, **options) if options else optimizer.step
    params.clear()
    for k in range(STEPS):
        for p in optimizer.param_groups[0]["params"]:
            g = 0.3 + torch.randn(8, 8, generator=grads)
            p.grad = (g if k < 3 else g / 16).bfloat16().to(dtype)
        step()
        if k % every == every // 2:
            event(optimizer)
            gc.collect()
    HELD.clear()
    moments = [optimizer.state[p]["exp_avg_sq"] for p in optimizer.param_groups[0]["params"]]
    found = [*optimizer.param_groups[0]["params"], *moments]
    return [collage_fx.value(t).double() for t in found], begin


def errors(event: Event, every: int, **options: Any) -> tuple[float, float]:
    """Return how much of the way weights are off, and how far second moments are."""
    exact, start = trained(torch.float64, nothing, every)
    found, _ = trained(torch.bfloat16, event, every, **options)
    n = len(start)
    off = sum(float((f - x).norm()) for f, x in zip(found[:n], exact[:n], strict=True))
    way = sum(float((x - s).norm()) for x, s in zip(exact[:n], start, strict=True))
    moments = zip(found[n:], exact[n:], strict=True)
    return off / way, max(float(((f - x) / x).abs().max()) for f, x in moments)


OPTIONS = [
    {"storage": "remainder16"},
    {"storage": "remainder16", "record": True},
    {"storage": "mcf3", "without": ("repeat", "share")},
]


@pytest.mark.quick("cloned-options0")
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("event", [cloned, cloned_and_held, new_parameters])
def test_a_tensor_of_the_same_value_has_the_residual(
    event: Event, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: by its identity alone it is not found."""
    undisturbed = errors(nothing, 10, **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*was cleared")
        found = errors(event, 10, **options)
    assert all(f < 2 * u for f, u in zip(found, undisturbed, strict=True)), (found, undisturbed)
    monkeypatch.setattr(ResidualStore, "hand_on", lambda *_: True)
    lost = errors(event, 10, **options)
    assert lost[event is not new_parameters] > 10 * undisturbed[event is not new_parameters]


def test_without_checks_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where the tensor that was there is gone."""
    monkeypatch.setattr(Checks, "of", lambda *_: None)
    with pytest.warns(collage_fx.CollageWarning, match="was cleared") as caught:
        trained(torch.bfloat16, cloned, 10, storage="remainder16", record=True)
    said = [str(w.message) for w in caught if "was cleared" in str(w.message)]
    assert len(said) == 1 and "exp_avg_sq" in said[0]


def taken(steps: int = 4) -> tuple[nn.Parameter, optim.Optimizer, Any]:
    p = nn.Parameter(torch.ones(8, 8).bfloat16())
    optimizer = optim.AdamW([p], lr=1e-3)
    step = collage_fx.compile_(optimizer, storage="remainder16", record=True).step
    for _ in range(steps):
        p.grad = torch.full_like(p, 0.3)
        step()
    return p, optimizer, step


def test_another_value_has_none() -> None:
    """States that begin anew, of a parameter that is another one, and of another shape."""
    p, optimizer, step = taken()
    state = optimizer.state[p]
    assert collage_fx.residuals(state["exp_avg_sq"])[0].any()
    state["exp_avg_sq"] = torch.full_like(p, 0.25)
    p.grad = torch.zeros_like(p)
    with pytest.warns(collage_fx.CollageWarning, match="exp_avg_sq .*was cleared"):
        step()
    assert collage_fx.value(state["exp_avg_sq"]).unique().tolist() == pytest.approx([0.24975])
    new = nn.Parameter(torch.ones(4, 8).bfloat16())
    optimizer.param_groups[0]["params"][0] = new
    optimizer.state[new] = {
        k: v[:4].clone() if v.dim() else v for k, v in optimizer.state.pop(p).items()
    }
    del p, state
    gc.collect()
    new.grad = torch.full_like(new, 0.3)
    with pytest.warns(collage_fx.CollageWarning, match="another shape or dtype has taken"):
        step()


def test_a_checkpoint_right_after_it_has_the_residuals() -> None:
    p, optimizer, _ = taken()
    want = collage_fx.value(optimizer.state[p]["exp_avg_sq"])
    cloned(optimizer)
    gc.collect()
    other = nn.Parameter(p.detach().clone())
    resumed = optim.AdamW([other], lr=1e-3)
    collage_fx.compile_(resumed, storage="remainder16", record=True)
    resumed.load_state_dict(optimizer.state_dict())
    assert torch.equal(collage_fx.value(resumed.state[other]["exp_avg_sq"]), want)


def test_after_a_load_the_loaded_residual_is_that_of_the_place() -> None:
    """Control: what the step before the load left belongs to the same high words."""
    p, optimizer, step = taken()
    saved = copy.deepcopy(optimizer.state_dict())
    want = collage_fx.value(optimizer.state[p]["exp_avg_sq"])
    p.grad = torch.full_like(p, 0.03)
    step()
    optimizer.load_state_dict(saved)
    cloned(optimizer)
    gc.collect()
    optimizer.state_dict()  # which hands residuals on
    found = collage_fx.value(optimizer.state[p]["exp_avg_sq"])
    assert torch.equal(found, want)


def test_a_tensor_that_is_still_used_keeps_its_own() -> None:
    p, optimizer, _ = taken()
    other = optim.SGD([p], lr=1e-3)
    want = collage_fx.value(p)
    optimizer.param_groups[0]["params"][0] = nn.Parameter(p.detach().clone())
    optimizer.state[optimizer.param_groups[0]["params"][0]] = optimizer.state.pop(p)
    optimizer.state_dict()
    for one in (optimizer, other):
        assert torch.equal(collage_fx.value(one.param_groups[0]["params"][0]), want)


def test_one_that_is_reused_does_not_keep_the_residual_from_its_clone() -> None:
    p, optimizer, _ = taken()
    old = optimizer.state[p]["exp_avg_sq"]
    want = collage_fx.value(old)
    optimizer.state[p]["exp_avg_sq"] = old.clone()
    old.zero_()
    optimizer.state_dict()
    assert torch.equal(collage_fx.value(optimizer.state[p]["exp_avg_sq"]), want)
    assert not collage_fx.value(old).any()


def test_states_on_meta_wait() -> None:
    p, optimizer, _ = taken()
    state = optimizer.state[p]
    want, kept = collage_fx.value(state["exp_avg_sq"]), dict(state)
    state.update({k: v.to("meta") for k, v in kept.items()})
    optimizer.state_dict()
    state.update(kept)
    assert torch.equal(collage_fx.value(state["exp_avg_sq"]), want)
