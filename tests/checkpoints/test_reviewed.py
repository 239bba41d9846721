"""Losses at the edges that a reviewer of the first version found, each with its warning now.

For optimizer.checkpoints.reading and optimizer.checkpoints.giving.
"""

import copy
import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import compiled, plain, train, words
from interpreter import without_compiler
from saved import drop_saved_residuals
from tensors import bf16
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.optim import SGD, Adagrad, AdamW, Optimizer

import collage_fx
from collage_fx.errors import CheckpointError, CollageWarning


@pytest.fixture(autouse=True)
def _interpreted() -> Iterator[None]:
    with without_compiler():
        yield


def test_states_are_made_where_there_are_only_residuals() -> None:
    """Of an optimizer that has taken no step, which master weights have given residuals."""
    model, optimizer = compiled(plain(0))
    weights = {n: torch.randn(p.shape) for n, p in model.named_parameters()}
    collage_fx.load_master_weights(model, weights)
    _, states = get_state_dict(model, optimizer)
    assert {"step", "exp_avg", "exp_avg_sq"} <= states["state"]["0.weight"].keys()
    for name, value in collage_fx.master_state_dict(model, optimizer).items():
        assert torch.allclose(value, weights[name], rtol=2**-15)


def test_no_counts_of_steps_are_added() -> None:
    class Counting(SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step()
            for p in self.param_groups[0]["params"]:
                self.state[p]["n"] = self.state[p].get("n", 0) + 1

    model = nn.Linear(4, 4).bfloat16()
    counts = []
    for ours in (False, True):
        optimizer = Counting(model.parameters(), lr=1e-3, momentum=0.9)
        if ours:
            collage_fx.compile_(optimizer)
        get_state_dict(model, optimizer)
        counts.append([optimizer.state[p]["n"] for p in model.parameters()])
    assert counts == [[1, 1]] * 2


class Mixed(Optimizer):
    """States of other dtypes than their parameter's, one of them in a list."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-3})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state["wide"] = torch.zeros_like(p, dtype=torch.float32)
                state["count"] = torch.full((), 1001, dtype=torch.int64)
                state["past"] = [torch.zeros_like(p, dtype=torch.float32)]
            state["wide"].mul_(0.9).add_(p.grad.float())
            state["past"][0].add_(state["wide"], alpha=0.1)
            state["count"] += 1
            p.sub_(state["past"][0].to(p.dtype), alpha=1e-3)


@pytest.mark.parametrize("first", ["compile", "load"])
def test_states_keep_their_dtypes(first: str) -> None:
    def made(seed: int) -> tuple[nn.Module, Optimizer]:
        torch.manual_seed(seed)
        model = nn.Linear(5, 3).bfloat16()
        return model, Mixed(model.parameters())

    run = compiled(made(0), level="auto")
    train(run, 0, 3)
    weights, states = copy.deepcopy([one.state_dict() for one in run])
    train(run, 3, 5)
    again = made(1)
    if first == "compile":
        compiled(again, level="auto")
    again[0].load_state_dict(weights)
    again[1].load_state_dict(states)
    if first == "load":  # and PyTorch has cast what it saw
        with pytest.warns(CollageWarning, match=r"has cast .*wide.* as float32, int64"):
            compiled(again, level="auto")
        return
    train(again, 3, 5)
    for p, q in zip(run[0].parameters(), again[0].parameters(), strict=True):
        ours, theirs = run[1].state[p], again[1].state[q]
        assert torch.equal(collage_fx.value(p), collage_fx.value(q))
        assert torch.equal(ours["count"], theirs["count"]) and int(theirs["count"]) == 1006
        for a, b in ((ours["wide"], theirs["wide"]), (ours["past"][0], theirs["past"][0])):
            assert a.dtype == b.dtype and torch.equal(a, b)


def test_residuals_that_a_checkpoint_lacks_are_named() -> None:
    run = compiled(plain(0))
    train(run, 0, 3)
    states = copy.deepcopy(run[1].state_dict())
    kept = states["state"].pop(0)
    drop_saved_residuals(states)
    states["state"][0] = kept
    weights = {name: 1.5 * t for name, t in run[0].state_dict().items()}
    run[0].load_state_dict(weights)  # else they keep what they have
    with pytest.warns(CollageWarning, match=r"none of 0\.bias, 1\.") as caught:
        run[1].load_state_dict(states)
    assert len(caught) == 1 and "0.weight" not in str(caught[0].message)


class Averaged(SGD):
    """Keeps an average of each parameter outside of its states."""

    def __init__(self, params: list[Tensor]) -> None:
        super().__init__(params, lr=1e-4)
        self.slow = [p.detach().clone() for p in params]

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        super().step()
        for p, q in zip(self.param_groups[0]["params"], self.slow, strict=True):
            q.mul_(0.999).add_(p, alpha=0.001)


class Own(SGD):
    """Says itself what is saved of it."""

    def state_dict(self) -> dict[str, Any]:
        return {"lr": self.param_groups[0]["lr"]}


def test_what_no_state_dict_can_hold_is_named() -> None:
    params = [bf16(8)]
    optimizer = Averaged(params)
    step = collage_fx.compile(optimizer)
    for k in range(3):
        params[0].grad = torch.full_like(params[0], 0.1 * (k + 1))
        step()
    with pytest.warns(CollageWarning, match=r"no residual of slow\.0 of Averaged") as caught:
        optimizer.state_dict()
    optimizer.state_dict()
    assert len(caught) == 1
    with pytest.warns(CollageWarning, match="Own is one of its own"):
        collage_fx.compile(Own([bf16(8)], lr=1e-3))


class Outer(Optimizer):
    """Steps by another optimizer, whose groups it borrows."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner
        self.param_groups, self.state = inner.param_groups, inner.state

    def step(self) -> None:  # type: ignore[override]
        self.inner.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)


@pytest.mark.slow
def test_a_wrapper_and_what_it_wraps_have_one_memory() -> None:
    rates = (1e-2, 2.3e-2, 1.1e-2, 1.1e-2, 1.1e-2, 1.1e-2)

    def made(seed: int) -> tuple[nn.Module, Any, Callable[[], Any]]:
        model, inner = plain(seed)
        return model, inner, collage_fx.compile(Outer(inner), arithmetic="eft")

    def steps(run: tuple[nn.Module, Any, Callable[[], Any]], first: int, last: int) -> None:
        for k in range(first, last):
            run[1].param_groups[0]["lr"] = rates[k]
            generator = torch.Generator().manual_seed(k)
            for p in run[0].parameters():
                p.grad = torch.randn(p.shape, generator=generator).bfloat16()
            run[2]()

    run = made(0)
    steps(run, 0, 3)
    weights, states = copy.deepcopy([run[0].state_dict(), run[1].state_dict()])
    steps(run, 3, 6)
    torch.compiler.reset()
    again = made(1)
    again[0].load_state_dict(weights)
    again[1].load_state_dict(states)
    steps(again, 3, 6)
    assert all(map(torch.equal, words(run[:2]), words(again[:2])))


def test_a_module_of_our_name_keeps_its_residuals() -> None:
    def made(seed: int) -> tuple[nn.Module, Optimizer]:
        torch.manual_seed(seed)
        model = nn.ModuleDict({"collage_fx": nn.Linear(3, 3)}).bfloat16()
        return compiled((model, AdamW(model.parameters(), lr=1e-3)))

    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    run = made(0)
    train(run, 0, 2)
    weights, states = copy.deepcopy(get_state_dict(*run, options=flat))
    again = made(1)
    set_state_dict(*again, model_state_dict=weights, optim_state_dict=states, options=flat)
    assert all(map(torch.equal, words(run), words(again)))


@pytest.mark.parametrize(
    "change",
    [
        {"numbers": 5},
        {"numbers": {"x": "y"}},
        {"recorded": [5]},
        {"dtypes": ["x"]},
        {"format": 1, "residuals": {0: {"exp_avg": {"components": []}}}},
    ],
    ids=str,
)
def test_an_entry_of_other_kinds_is_refused(change: dict[str, Any]) -> None:
    run = compiled(plain(0))
    states = run[1].state_dict()
    entry = {**json.loads(states["param_groups"][0]["collage_fx"]), **change}
    states["param_groups"][0]["collage_fx"] = entry
    with pytest.raises(CheckpointError, match="cannot be read"):
        run[1].load_state_dict(states)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_states_that_the_constructor_makes_have_residuals_to_be_loaded(tmp_path: Path) -> None:
    """PyTorch takes no step to make them, so that a new Adagrad had no keys for residuals."""

    def made(seed: int) -> tuple[nn.Module, Optimizer]:
        torch.manual_seed(seed)
        model = nn.Linear(4, 4).bfloat16()
        optimizer = Adagrad(model.parameters(), lr=1e-2, initial_accumulator_value=0.1)
        torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
        return compiled((model, optimizer), level="auto")

    run, again = made(0), made(1)
    train(run, 0, 3)
    parts = dict(zip(("model", "optimizer"), get_state_dict(*run), strict=True))
    dcp.save(parts, checkpoint_id=tmp_path)
    before = [collage_fx.value(t) for s in again[1].state.values() for t in s.values()]
    weights, states = get_state_dict(*again)
    after = [collage_fx.value(t) for s in again[1].state.values() for t in s.values()]
    assert all(map(torch.equal, before, after))
    dcp.load({"model": weights, "optimizer": states}, checkpoint_id=tmp_path)
    set_state_dict(*again, model_state_dict=weights, optim_state_dict=states)
    train(run, 3, 5)
    train(again, 3, 5)
    assert all(map(torch.equal, words(run), words(again)))


@pytest.mark.parametrize("made", [Tensor.to_sparse, lambda t: t.to("meta")], ids=["sparse", "meta"])
def test_words_without_data_are_refused(made: Callable[[Tensor], Tensor]) -> None:
    run = compiled(plain(0))
    train(run, 0, 1)
    states = copy.deepcopy(run[1].state_dict())
    name = "collage_fx.exp_avg.mcf2.0"
    states["state"][0][name] = made(states["state"][0][name])
    before = words(run)
    with warnings.catch_warnings(), pytest.raises(CheckpointError, match="cannot be read"):
        run[1].load_state_dict(states)
    assert all(map(torch.equal, words(run), before))
