"""Averages that are loaded, replaced, swapped with others or fail half way: nothing is lost.

For averages.averaged, averages.exchange and averages.saved.
"""

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import collage_fx
from collage_fx.averages import exchange
from collage_fx.errors import OptionError, SubjectError


def made(**options: Any) -> tuple[nn.Module, Any]:
    """A model and its average, which have moved by less than bf16 has room for."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3)).bfloat16()
    average = collage_fx.EMA(model, 0.9, **options)
    for _ in range(4):
        move(model)
        average.update_parameters(model)
    return model, average


def move(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.0625)


def words(*modules: nn.Module) -> list[Tensor]:
    return [collage_fx.value(t) for m in modules for t in (*m.parameters(), *m.buffers())]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


ACTS: dict[str, Callable[[nn.Module, Any], object]] = {
    "load": lambda model, average: average.load_state_dict({}, strict=False),
    "deepcopy": lambda model, average: copy.deepcopy(average),
    "pickle": lambda model, average: pickle.dumps(average),
    "other model": lambda model, average: average.swap(copy.deepcopy(model)),
    "other average": lambda model, average: collage_fx.EMA(model).swap(model),
    "other update": lambda model, average: collage_fx.EMA(model).update_parameters(model),
}


@pytest.mark.parametrize("act", ACTS.values(), ids=ACTS)
def test_what_would_lose_a_swapped_model_is_refused(
    act: Callable[[nn.Module, Any], object],
) -> None:
    model, average = made()
    before = words(model, average.module)
    with average.swap(model):
        within = words(model, average.module)
        with pytest.raises(SubjectError, match="swap"):
            act(model, average)
        assert same(words(model, average.module), within)
    assert same(words(model, average.module), before)


def test_an_average_that_is_gone_holds_nothing_up() -> None:
    model, average = made()
    average.swap(model)
    del average
    gc.collect()
    collage_fx.EMA(model).update_parameters(model)


def test_parameters_on_one_memory_come_back() -> None:
    model = nn.Module()
    model.a = nn.Parameter(torch.arange(4.0).bfloat16())
    model.b = nn.Parameter(model.a.data)
    average = collage_fx.EMA(model, 0.9)
    with torch.no_grad():
        model.a.add_(1)
    average.update_parameters(model)
    before = words(model)
    with average.swap(model):
        pass
    assert same(words(model), before)


def test_an_error_in_a_swap_gives_all_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model, average = made()
    before, give, calls = words(model, average.module), exchange._give, []

    def failing(tensor: Tensor, value: Any) -> None:
        calls.append(tensor)
        if len(calls) == 6:
            raise MemoryError("none left")
        give(tensor, value)

    monkeypatch.setattr(exchange, "_give", failing)
    with pytest.raises(MemoryError):
        average.swap(model)
    assert same(words(model, average.module), before) and not average.swapped


def test_buffers_that_do_not_fit_are_seen_first() -> None:
    _, average = made()
    before = words(average.module)
    other = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3)).bfloat16()
    other[1].running_mean = torch.zeros(4, dtype=torch.bfloat16)
    with pytest.raises(SubjectError, match="running_mean"):
        average.update_parameters(other)
    assert same(words(average.module), before) and int(average.n_averaged) == 4


@pytest.mark.parametrize("residuals", [True, False])
@pytest.mark.filterwarnings("ignore:.*holds no residuals")
def test_a_load_that_puts_other_parameters_there(residuals: bool) -> None:
    model, average = made()
    state = average.state_dict(residuals=residuals)
    _, again = made()
    again.load_state_dict({k: t.clone() for k, t in state.items()}, assign=True)
    exact = words(again.module)[:4]
    assert same(exact, words(average.module)[:4]) == residuals
    for _ in range(3):
        move(model)
        again.update_parameters(model)
        now = words(model)[:4]
        exact = [e.lerp(v, 0.1) for e, v in zip(exact, now, strict=True)]
    found = zip(words(again.module), exact, strict=False)
    assert max(float((a - b).abs().max()) for a, b in found) < 1e-6


def test_a_part_of_a_state_dict_keeps_the_other_residuals() -> None:
    _, average = made()
    before = words(average.module)
    average.load_state_dict({}, strict=False)
    assert same(words(average.module), before)


def test_hooks_of_all_optimizers_write_no_weights() -> None:
    model, average = made()
    before = words(model)

    def halve(optimizer: Any, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(0.5)

    handle = register_optimizer_step_pre_hook(halve)
    try:
        for _ in range(3):
            average.update_parameters(model)
    finally:
        handle.remove()
    assert same(words(model), before)


@pytest.mark.filterwarnings("ignore::collage_fx.CollageWarning")
def test_an_update_within_what_is_compiled() -> None:
    torch.manual_seed(0)
    model = nn.Linear(5, 3).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    collage_fx.compile_(optimizer)
    averages = [collage_fx.EMA(model, 0.9) for _ in range(2)]
    updates = [averages[0].update_parameters, collage_fx.compile(averages[1].update_parameters)]
    for _ in range(5):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        for update in updates:
            update(model)
    found = zip(words(averages[0].module), words(averages[1].module), strict=True)
    assert max(float((a - b).abs().max()) for a, b in found) < 1e-7


@pytest.mark.parametrize("decay", [1.7, True, None])
def test_a_decay_that_is_none(decay: Any) -> None:
    model, average = made()
    average.decay = decay
    with pytest.raises(OptionError, match="decay="):
        average.update_parameters(model)
    with pytest.raises(OptionError, match="decay="):
        collage_fx.EMA(model, decay)
