"""Budgets: what is chosen fits and is better than one storage for all; resumes; refusals.

For budget.plan, budget.prediction and budget.step.
"""

import copy
import gc
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from small_training import model_in_bf16, train
from torch import Tensor
from torch.optim import Optimizer

import collage_fx
from collage_fx.budget import step as budgeted
from collage_fx.budget.step import rates_to_come
from collage_fx.errors import BudgetError, OptionError

PLANNED = 20


@pytest.fixture(autouse=True)
def early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at more steps than usual, and plan sooner."""
    monkeypatch.setattr(budgeted, "PLANNED", PLANNED)
    monkeypatch.setattr(budgeted, "EVERY", 4)
    monkeypatch.setattr(budgeted, "HORIZON", 2 * PLANNED)


def made(lr: float = 1e-3, **options: Any) -> tuple[torch.nn.Module, Optimizer]:
    model = model_in_bf16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    return model, collage_fx.compile_(optimizer, **options) if options else optimizer


def tensors(optimizer: Optimizer) -> list[Tensor]:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return [t for p in params for t in (p, *optimizer.state[p].values()) if t.dim()]


def size(optimizer: Optimizer) -> float:
    """Return the bytes for each element of the parameters."""
    held = tensors(optimizer)
    numel = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
    return sum(t.nbytes + sum(r.nbytes for r in collage_fx.residuals(t)) for t in held) / numel


def storages(optimizer: Optimizer) -> list[str]:
    return [s.storage for s in collage_fx.explain(optimizer).plan if s.dtype is torch.bfloat16]


def error(lr: float, **options: Any) -> float:
    """Return the error after 40 steps on fixed gradients, relative to the way."""
    ways = []
    for kind in ({"dtype": torch.float64}, options):
        model, optimizer = made(lr, **({} if "dtype" in kind else kind))
        if "dtype" in kind:
            model.double()
        begin = torch.cat([p.detach().double().flatten() for p in model.parameters()])
        for k in range(2 * PLANNED):
            generator = torch.Generator().manual_seed(k)
            for p in model.parameters():
                p.grad = (0.3 + torch.randn(p.shape, generator=generator)).bfloat16().to(p.dtype)
            optimizer.step()
        values = torch.cat([collage_fx.value(p).flatten() for p in model.parameters()])
        ways.append((values - begin).detach())
    return float((ways[1] - ways[0]).norm() / ways[0].norm())


@pytest.mark.parametrize("budget", [6.0, 8.25, "5.5KiB"])
def test_takes_no_more_than_the_budget(budget: float | str) -> None:
    model, optimizer = made(budget=budget)
    most = budget if isinstance(budget, float) else 5.5 * 1024 / 544
    for steps in (1, PLANNED):
        train(model, optimizer, steps)
        assert most - 0.5 < size(optimizer) <= most


FIXED = ({"param": "remainder16", "*": "sr"}, {"param": "ulp8", "*": "ulp4"})
"""Storages for each kind in 8 bytes, of which one is better at each rate."""


@pytest.mark.quick("0.001")
@pytest.mark.parametrize("lr", [1e-3, 1e-5])
def test_errs_no_more_than_one_storage_for_each_kind(lr: float) -> None:
    chosen = error(lr, budget=8.0)
    fixed = [error(lr, storage=s, level="all", stochastic_rounding=True) for s in FIXED]
    assert chosen <= 1.15 * min(fixed)
    assert chosen < 0.7 * max(fixed)


def test_a_resumed_run_plans_as_one_that_goes_on() -> None:
    model, optimizer = made(lr=1e-5, budget=7.5)
    train(model, optimizer, 6)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    found = []
    for entry in (
        None,
        {"budget": 7.5, "steps": 6, "planned": True, "moves": {}},
    ):  # as if there were a plan
        other, resumed = made(lr=1e-5, budget=7.5)
        weights, states = copy.deepcopy(saved)
        if entry is not None:
            about = json.loads(states["param_groups"][0]["collage_fx"])
            states["param_groups"][0]["collage_fx"] = json.dumps({**about, "budget": entry})
        other.load_state_dict(weights)
        resumed.load_state_dict(states)
        train(other, resumed, PLANNED, seed=2)
        found.append((resumed, [collage_fx.value(t) for t in tensors(resumed)]))
    train(model, optimizer, PLANNED, seed=2)
    values = [collage_fx.value(t) for t in tensors(optimizer)]
    equal = [all(map(torch.equal, values, one)) for _, one in found]
    assert equal == [True, False]  # the second is the control
    assert storages(found[0][0]) == storages(optimizer) != storages(found[1][0])


@pytest.mark.parametrize("budget", [8.25, 9.0])
def test_residuals_that_were_converted_are_let_go_of(budget: float) -> None:
    model, optimizer = made(budget=budget)
    train(model, optimizer, PLANNED - 1)
    before = [weakref.ref(r) for t in tensors(optimizer) for r in collage_fx.residuals(t)]
    train(model, optimizer, 3)
    gc.collect()
    now = {id(r) for t in tensors(optimizer) for r in collage_fx.residuals(t)}
    left = [r for ref in before if (r := ref()) is not None]
    assert len(left) < len(before)  # the control
    assert {id(r) for r in left} <= now


def test_recorded_steps_choose_alike() -> None:
    (model, optimizer), (other, recorded) = made(budget=8.0), made(budget=8.0, record=True)
    train(model, optimizer, PLANNED + 2)
    train(other, recorded, PLANNED + 2)
    assert size(recorded) <= 8
    assert storages(recorded) == storages(optimizer)


class Unforeseen(torch.optim.AdamW):
    """An optimizer of which no copies without data tell the states."""

    def step(self) -> None:  # type: ignore[override]
        if self.param_groups[0]["params"][0].grad.norm().item() >= 0:
            super().step()


def test_too_small_a_budget_names_the_least() -> None:
    with pytest.raises(BudgetError, match=r"^budget=5\.0: 6 bytes for each element"):
        made(budget=5.0)
    with pytest.raises(BudgetError, match=r"6 bytes for each element .* \(0\.00 MiB\)"):
        made(budget="3kB")
    model = model_in_bf16()
    optimizer: Any = collage_fx.compile_(Unforeseen(model.parameters()), budget=5.0)
    train(model, optimizer, 1)
    before = [t.clone() for t in tensors(optimizer)]
    with pytest.raises(BudgetError, match=r"^budget=5\.0: 6 bytes for each element"):
        train(model, optimizer, 1)
    assert all(map(torch.equal, before, tensors(optimizer)))
    model, optimizer = made(budget=6.0)
    train(model, optimizer, PLANNED)
    assert size(optimizer) == 6


def test_states_that_are_made_late_fit_in() -> None:
    model, optimizer = made(budget=8.0)
    late = torch.nn.Linear(16, 16).bfloat16()
    model[2].requires_grad_(False)
    train(model, optimizer, 6)
    model[2].requires_grad_(True)
    train(model, optimizer, 3)
    assert size(optimizer) <= 8
    train(model, optimizer, PLANNED)
    optimizer.add_param_group({"params": list(late.parameters())})
    for p in late.parameters():
        p.grad = torch.ones_like(p)
    for _ in range(2):
        optimizer.step()
    assert size(optimizer) <= 8


def test_a_checkpoint_of_another_budget_is_planned_anew() -> None:
    model, optimizer = made(budget=11.0)
    train(model, optimizer, PLANNED + 4)
    other, resumed = made(budget=7.0)
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert size(resumed) > 10
    train(other, resumed, 1)
    assert 6.5 < size(resumed) <= 7
    # What was seen of another run is no part of this one.
    train(other, resumed, PLANNED)
    resumed.load_state_dict(copy.deepcopy(resumed.state_dict()))
    assert collage_fx.explain(resumed).budget.steps == 0


def test_other_options_beside_a_budget() -> None:
    for options in ({"storage": "ulp8"}, {"level": "light"}, {"arithmetic": "eft"}):
        with pytest.raises(OptionError, match="beside budget=8"):
            made(budget=8, **options)
    with pytest.raises(OptionError, match="states of an optimizer"):
        collage_fx.compile(lambda p, g: p.add_(g), budget=8)
    # What a step would be with a storage is explained without the budget of now.
    _, optimizer = made(budget=8)
    text = str(collage_fx.explain(optimizer, storage="ulp8"))
    assert "storage=ulp8" in text
    assert "budget" not in text
    assert "budget=7" in str(collage_fx.explain(optimizer, budget=7.0))
    _, optimizer = made(storage="ulp8")
    assert "budget 7" not in str(collage_fx.explain(optimizer, budget=7.0))
    assert "storages are chosen" in str(collage_fx.explain(made(budget=8.0)[1]))


def test_explain_and_monitor_show_the_error(tmp_path: Path) -> None:
    model, optimizer = made(budget=7.5)
    train(model, optimizer, 1)
    assert "is made anew after step" in str(collage_fx.explain(optimizer))
    train(model, optimizer, 3 * PLANNED - 1)
    monitor = collage_fx.monitor(optimizer, every=8, model=model)
    train(model, optimizer, PLANNED)
    explanation = collage_fx.explain(optimizer, model=model)
    text, about = " ".join(str(explanation).split()), explanation.to_dict()["budget"]
    assert "budget 7.5:" in text
    assert "this choice of storages stays as it is" in text
    assert "predicted error of the parameters after" in text
    assert about["bytes_per_element"] == pytest.approx(size(optimizer))
    assert {one["name"] for one in about["states"]} >= {"0.weight", "exp_avg of 0.weight"}
    page = explanation.save(tmp_path / "step.html").read_text()
    assert "budget 7.5: parameters" in page
    # What a monitor measures of a state is what is predicted, and not that of another one.
    found = {str(name): stats.noise for name, stats in monitor.latest.found.items()}
    noise = {s["name"]: s["noise"] for s in about["states"]}
    ratios = sorted(found[name] / noise[name] for name in noise if noise[name] and found[name])
    assert 0.5 < ratios[len(ratios) // 2] < 2
    assert max(noise.values()) > 8 * min(noise.values())


def test_a_rate_that_warms_up_counts_as_the_largest() -> None:
    _, optimizer = made(lr=1e-2)
    assert set(rates_to_come(optimizer).values()) == {1.0}
    torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.125)
    assert set(rates_to_come(optimizer).values()) == {8.0}
    optimizer.param_groups[0]["lr"] = torch.tensor(2.5e-3)
    assert max(rates_to_come(optimizer).values()) == pytest.approx(4)
    optimizer.param_groups[0]["lr"] = 0.0
    assert rates_to_come(optimizer) == {}
