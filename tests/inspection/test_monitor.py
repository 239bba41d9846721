"""monitor: its numbers beside a recomputation, where they go, and what it leaves alone.

For inspection.monitor and step.watches.
"""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support.interpreter import without_compiler
from support.small_training import model_in_bf16, train
from support.update_metrics import edq, lost_update_share
from torch import Tensor

import collage_fx
from collage_fx.errors import CollageWarning, OptionError, SubjectError


def _wholes(model: torch.nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """The values of parameters and states with their residuals, in float64."""
    found = {}
    for name, p in model.named_parameters():
        found[name] = collage_fx.value(p)
        for key, t in optimizer.state.get(p, {}).items():
            if t.dim():
                found[f"{key} of {name}"] = collage_fx.value(t)
    return found


def _in_float64(model: torch.nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """The same after a step that AdamW's formulas take in float64, written out."""
    group, found = optimizer.param_groups[0], {}
    (b1, b2), lr = group["betas"], group["lr"]
    for name, p in model.named_parameters():
        g, state = p.grad.double(), optimizer.state[p]
        t = float(state["step"]) + 1
        m = b1 * collage_fx.value(state["exp_avg"]) + (1 - b1) * g
        v = b2 * collage_fx.value(state["exp_avg_sq"]) + (1 - b2) * g * g
        denom = (v / (1 - b2**t)).sqrt() + group["eps"]
        decayed = collage_fx.value(p) * (1 - lr * group["weight_decay"])
        found |= {f"exp_avg of {name}": m, f"exp_avg_sq of {name}": v}
        found[name] = decayed - lr * (m / (1 - b1**t)) / denom
    return found


@pytest.mark.parametrize("storage", ["plain", "mcf2", "remainder16"])
@pytest.mark.quick("mcf2")
def test_numbers_are_those_of_a_float64_recomputation(storage: str) -> None:
    model = model_in_bf16()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4)
    with without_compiler():
        if storage != "plain":
            optimizer.step = collage_fx.compile(optimizer, storage=storage)
        found = collage_fx.monitor(optimizer, every=4, model=model)
        train(model, optimizer, 3)
        model(torch.ones(2, 16).bfloat16()).float().square().mean().backward()
        before, exact = _wholes(model, optimizer), _in_float64(model, optimizer)
        high = {n: p.detach().clone() for n, p in model.named_parameters()}
        optimizer.step()
    after = _wholes(model, optimizer)
    told = found.latest["states"]
    assert found.latest is found.history[-1]
    assert found.latest["step"] == 4 and set(told) == set(before)
    for name, stats in told.items():
        update, stored = exact[name] - before[name], after[name] - before[name]
        share = lost_update_share(before[name], after[name], update)
        length = float(torch.linalg.vector_norm(update))
        assert stats["lost"] == pytest.approx(share, abs=1e-3)
        assert stats["edq"] == pytest.approx(edq(update, stored) / length, abs=1e-3)
    for name, hi in high.items():
        update = exact[name] - before[name]
        plain = (hi.double() + update).bfloat16()
        assert told[name]["lost_plain"] == pytest.approx(
            lost_update_share(hi, plain, update), abs=1e-3
        )
    total = found.latest["kinds"]["parameter"]
    assert total["lost_plain"] > 0.5, "the control: plain bf16 loses most of them"
    assert total["lost"] > 0.5 if storage == "plain" else total["lost"] < 0.01
    assert abs(total["edq"] - 1) > 0.1 if storage == "plain" else abs(total["edq"] - 1) < 0.01
    assert set(found.latest["layers"]) == {"0", "2"}


def test_it_changes_nothing_and_is_removed() -> None:
    ends = []
    for watched in (False, True):
        model = model_in_bf16()
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4)
        with without_compiler():
            optimizer.step = collage_fx.compile(optimizer)
            found = collage_fx.monitor(optimizer, every=2) if watched else None
            train(model, optimizer, 5)
        if found is not None:
            assert [one.step for one in found.history] == [2, 4]
            found.remove()
            with without_compiler():
                optimizer.zero_grad()
                optimizer.step()
            assert found.steps == 5
        ends.append(_wholes(model, optimizer))
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


@pytest.mark.parametrize("compiled", ["before", "between", "after"])
@pytest.mark.quick("between")
def test_several_monitors_and_the_compiler_in_any_order(compiled: str) -> None:
    model, found = model_in_bf16(), []
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4)
    with without_compiler():
        for k, when in enumerate(("before", "between", "after")):
            if when == compiled:
                collage_fx.compile_(optimizer)
            if k < 2:
                found.append(collage_fx.monitor(optimizer, every=1 + k))
        train(model, optimizer, 4)
        assert [[one.step for one in m.history] for m in found] == [[1, 2, 3, 4], [2, 4]]
        assert all(m.latest["kinds"]["parameter"]["lost"] < 0.01 for m in found), "compensated"
        found[0].remove()
        train(model, optimizer, 1)
        found[1].remove()
        train(model, optimizer, 1)
    assert [m.steps for m in found] == [4, 5]


def test_infinities_are_counted_and_do_not_spread() -> None:
    p = torch.ones(4).bfloat16().requires_grad_()
    optimizer = torch.optim.SGD([p], lr=1.0)
    with collage_fx.monitor(optimizer, every=1) as found:
        p.grad = torch.tensor([1.0, float("inf"), float("nan"), 0.5]).bfloat16()
        optimizer.step()
    (stats,) = found.latest["states"].values()
    assert stats["infinities"] == 2 and stats["lost"] == 0 and stats["edq"] == 1.0


@pytest.mark.parametrize("often", [1, 2])
def test_closures_are_evaluated_once(often: int) -> None:
    class Evaluating(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            for _ in range(often - 1):
                closure()
            return super().step(closure)

    model, calls = model_in_bf16(), []
    optimizer = Evaluating(model.parameters(), lr=1e-3)

    def closure() -> Tensor:
        calls.append(1)
        optimizer.zero_grad()
        loss = model(torch.ones(2, 16).bfloat16()).float().square().mean()
        loss.backward()
        return loss

    found = collage_fx.monitor(optimizer, every=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step(closure)
    said = [str(w.message) for w in caught if w.category is CollageWarning]
    assert len(calls) == often
    assert len(found.history) == (often == 1)
    assert bool(said) == (often > 1) and bool(found.problem) == (often > 1)


def test_bad_input() -> None:
    optimizer = torch.optim.SGD(model_in_bf16().parameters(), lr=0.1)
    for every in (0, True, 1.5):
        with pytest.raises(OptionError, match=f"every={every}"):
            collage_fx.monitor(optimizer, every=every)
    with pytest.raises(OptionError, match="to=int"):
        collage_fx.monitor(optimizer, to=3)
    with pytest.raises(SubjectError, match="takes an optimizer, got Sequential"):
        collage_fx.monitor(model_in_bf16())  # type: ignore[arg-type]
    with pytest.raises(SubjectError, match="Sequential does not have"):
        collage_fx.monitor(optimizer, model=model_in_bf16(1))
    assert "step" not in vars(optimizer), "nothing of the optimizer changed"


def test_tensorboard_and_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    board = pytest.importorskip("torch.utils.tensorboard", reason="tensorboard is not installed")
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_SILENT", "true")
    model = model_in_bf16()
    run = wandb.init(mode="offline", dir=str(tmp_path), project="collage")
    writer = board.SummaryWriter(str(tmp_path / "board"))
    for to in (writer, run):
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        collage_fx.monitor(optimizer, every=1, to=to)
        train(model, optimizer, 2)
    writer.close()
    name = "collage/parameter/lost"
    assert run.summary[name] > 0.1
    run.finish()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    assert [e.step for e in events.Scalars(name)] == [1, 2]
