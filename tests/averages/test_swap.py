"""Values of a model and its average are exchanged and come back to the last word.

For averages.exchange.
"""

from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

import collage_fx
from collage_fx.errors import SubjectError

X = torch.linspace(-1, 1, 64).reshape(8, 8).bfloat16()


def run(swaps: bool, storages: tuple[Any, Any], steps: int = 12) -> tuple[Any, Any, list[Tensor]]:
    """Train and average a model, with an evaluation of the average every third step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).bfloat16()
    optimizer = AdamW(model.parameters(), lr=1e-3)
    collage_fx.compile_(optimizer, storage=storages[0])
    average = collage_fx.EMA(model, 0.9, storage=storages[1])
    for k in range(steps):
        optimizer.zero_grad()
        (model(X) - X).square().mean().backward()
        optimizer.step()
        average.update_parameters(model)
        if swaps and k % 3 == 0:
            model.eval()
            with torch.no_grad(), average.swap(model):
                model(X)
            model.train()
    found = [collage_fx.value(t) for m in (model, average.module) for t in m.parameters()]
    return model, average, [*found, *model.buffers()]


def tensors(module: nn.Module) -> list[Tensor]:
    return [collage_fx.value(t) for t in (*module.parameters(), *module.buffers())]


def same(one: list[list[Tensor]], other: list[list[Tensor]]) -> bool:
    pairs = zip(chain(*one), chain(*other), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize(
    "storages",
    [("auto", "auto"), ("mcf2", "auto"), ("auto", "ulp4"), ("mcf3", "mcf2"), ("sr", "ulp8")],
    ids=str,
)
@pytest.mark.quick("*auto*auto*", "*auto*ulp4*")
@pytest.mark.filterwarnings("error::collage_fx.CollageWarning")
def test_training_goes_on_as_if_nothing_had_been(storages: tuple[str, str]) -> None:
    *_, swapped = run(True, storages)
    *_, straight = run(False, storages)
    assert all(torch.equal(a, b) for a, b in zip(swapped, straight, strict=True))


def test_whole_values_and_buffers_are_exchanged() -> None:
    model, average, _ = run(False, ("auto", "mcf2"))
    modules = model, average.module
    before = list(map(tensors, modules))
    assert average.swap(model) is not None
    after = list(map(tensors, modules))
    assert all(
        torch.equal(a, b) for a, b in zip(after[0] + after[1], before[1] + before[0], strict=True)
    )
    whole = collage_fx.master_state_dict(model)
    assert torch.equal(whole["0.weight"], before[1][0].float())
    with pytest.raises(SubjectError, match="swapped"):
        average.update_parameters(model)
    with pytest.raises(SubjectError, match="swapped"):
        average.state_dict()
    average.swap(model)
    again = list(map(tensors, modules))
    assert all(
        torch.equal(a, b) for a, b in zip(again[0] + again[1], before[0] + before[1], strict=True)
    )


def test_an_error_within_exchanges_again() -> None:
    model, average, _ = run(False, ("auto", "auto"))
    before = [collage_fx.value(p) for p in model.parameters()]
    with pytest.raises(RuntimeError, match="stop"), average.swap(model):
        raise RuntimeError("stop")
    after = [collage_fx.value(p) for p in model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    with average.swap(model):
        average.swap(model)  # by hand, before the end of the context
    assert not average.swapped


def test_a_model_that_is_trained_plainly() -> None:
    model = nn.Linear(4, 4, dtype=torch.bfloat16)
    average = collage_fx.EMA(model, 0.9)
    for _ in range(3):
        with torch.no_grad():
            model.weight.add_(0.01)
        average.update_parameters(model)
    own, theirs = collage_fx.value(average.module.weight), model.weight.detach().clone()
    with average.swap(model):
        assert torch.equal(collage_fx.value(model.weight), own)
    assert torch.equal(model.weight, theirs) and collage_fx.residuals(model.weight) == ()
    assert torch.equal(collage_fx.value(average.module.weight), own)


def test_a_step_within_goes_on_with_the_average() -> None:
    model, average, _ = run(False, ("auto", "auto"))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    collage_fx.compile_(optimizer)
    average.swap(model)
    exact = [collage_fx.value(p) for p in model.parameters()]
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    for p, value in zip(model.parameters(), exact, strict=True):
        assert torch.allclose(collage_fx.value(p), value - 1e-5, rtol=0, atol=1e-7)
