"""Optimizers whose own load_state_dict() or state_dict() goes through what is in a checkpoint.

For optimizer.checkpoints.own_methods.
"""

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from checkpoints import STORAGES, take_steps, words
from interpreter import without_compiler
from torch import nn
from torch.optim import AdamW, Optimizer

import collage_fx
from collage_fx.errors import CollageWarning
from collage_fx.optimizer.checkpoints import own_methods


@pytest.fixture(autouse=True)
def _interpreted() -> Iterator[None]:
    with without_compiler(), torch.compiler.set_stance("force_eager"):
        yield


class Walking(AdamW):
    """Asks for each entry of a checkpoint what became of it, as those of pytorch_optimizer do."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            assert saved.keys() <= group.keys()
            for p, name in zip(group["params"], saved["params"], strict=True):
                for key, value in state_dict["state"][name].items():
                    assert self.state[p][key].shape == value.shape


class Putting(AdamW):
    """Puts all entries of a checkpoint into the states once more."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        Optimizer.load_state_dict(self, state_dict)
        for p, saved in zip(
            self.param_groups[0]["params"], state_dict["state"].values(), strict=True
        ):
            self.state[p].update({k: v.clone() for k, v in saved.items()})


class Renaming(AdamW):
    """Gives a state another form when it is saved: its root."""

    def state_dict(self) -> dict[str, Any]:
        found = super().state_dict()
        found["state"] = {k: dict(state) for k, state in found["state"].items()}
        for state in found["state"].values():
            state["root"] = state.pop("exp_avg_sq").sqrt()
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state["exp_avg_sq"] = state.pop("root").square()


Run = tuple[nn.Module, Optimizer]


def run(cls: type[AdamW], seed: int) -> Run:
    torch.manual_seed(seed)
    model = nn.Linear(6, 9).bfloat16()
    optimizer = cls(model.parameters(), lr=1e-3)
    return model, collage_fx.compile_(optimizer, storage=STORAGES, level="all")


def resumed(cls: type[AdamW], way: Callable[[Run], Run]) -> tuple[Run, Run]:
    first = run(cls, 0)
    take_steps(first[0], first[1].step, 0, 3)
    second = way(first)
    for model, optimizer in (first, second):
        take_steps(model, optimizer.step, 3, 5)
    return first, second


def loaded(first: Run) -> Run:
    second = run(type(first[1]), 1)  # type: ignore[arg-type]
    for there, here in zip(second, copy.deepcopy([one.state_dict() for one in first]), strict=True):
        there.load_state_dict(here)
    return second


def copied(first: Run) -> Run:
    """Copy a run; what it loads is loaded into the copy before that is compiled."""
    second = copy.deepcopy(first)
    second[1].load_state_dict(copy.deepcopy(first[1].state_dict()))
    collage_fx.compile_(second[1], storage=STORAGES, level="all")
    return second


@pytest.mark.parametrize("way", [loaded, copied])
@pytest.mark.parametrize("cls", [Walking, Putting])
@pytest.mark.quick("Walking-loaded", "Putting-copied")
def test_they_resume_bit_for_bit(cls: type[AdamW], way: Callable[[Run], Run]) -> None:
    first, second = resumed(cls, way)
    found, expected = words(second), words(first)
    assert len(found) == len(expected) > 10
    assert all(map(torch.equal, found, expected))
    assert {k for s in second[1].state.values() for k in s} == {"step", "exp_avg", "exp_avg_sq"}
    assert "collage_fx" not in second[1].param_groups[0]


def test_without_it_they_find_nothing_or_keep_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: our entries are gone before the class looks for them."""

    def by_class(method: own_methods.OwnMethod, *args: Any) -> Any:
        optimizer = method.optimizer()
        return getattr(type(optimizer), method.name)(optimizer, *args)

    monkeypatch.setattr(own_methods.OwnMethod, "__call__", by_class)
    with pytest.raises((KeyError, AssertionError)):
        resumed(Walking, loaded)
    _, (_, optimizer) = resumed(Putting, loaded)
    assert any(k.startswith("collage_fx.") for s in optimizer.state.values() for k in s)


def test_a_state_of_another_form_has_no_residual() -> None:
    first = run(Renaming, 0)
    take_steps(first[0], first[1].step, 0, 3)
    with pytest.warns(CollageWarning, match="no residual of exp_avg_sq, which that of Renaming"):
        saved = first[1].state_dict()
    entries = {k.split(".")[1] for k in saved["state"][0] if k.startswith("collage_fx.")}
    assert entries == {"<param>", "exp_avg"}
    with warnings.catch_warnings():
        warnings.simplefilter("error", CollageWarning)
        first[1].state_dict()
    second = run(Renaming, 1)
    second[0].load_state_dict(first[0].state_dict())
    second[1].load_state_dict(saved)
    for a, b in zip(first[0].parameters(), second[0].parameters(), strict=True):
        assert torch.equal(collage_fx.value(a), collage_fx.value(b))
