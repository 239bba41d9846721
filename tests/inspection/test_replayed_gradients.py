"""Gradients are recorded, and errors measured on copies.

For inspection.gradients, inspection.replay and step.optimizer_clone.
"""

import copy
import gc
from typing import Any

import pages
import pytest
import torch

import collage_fx
from collage_fx.errors import OptionError, SubjectError
from collage_fx.step.first_steps import values_of


def trained(optimizer: Any, steps: int) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for p in optimizer.param_groups[0]["params"]:
            p.grad = torch.randn(p.shape, generator=generator).bfloat16()
        optimizer.step()


@pytest.mark.parametrize("compiled", [False, True])
def test_the_last_steps_are_kept(compiled: bool) -> None:
    optimizer = pages.optimizer(3)
    if compiled:
        collage_fx.compile_(optimizer)
    step = optimizer.step
    with collage_fx.record_gradients(optimizer, last=2) as recorder:
        trained(optimizer, 3)
        last = [p.grad for p in optimizer.param_groups[0]["params"]]
    assert len(recorder) == 2
    assert all(map(torch.equal, recorder.steps[-1], last))
    assert optimizer.step == step and not optimizer._optimizer_step_pre_hooks
    trained(optimizer, 1)
    assert len(recorder) == 2
    if compiled:  # and no hook is in the way of a graph
        assert all(s.graph and not s.joined for s in collage_fx.report(optimizer).states if s.shape)


def test_errors_are_those_of_float64() -> None:
    optimizer = pages.optimizer(2, torch.optim.SGD, lr=1e-3)
    params = optimizer.param_groups[0]["params"]
    before = [p.detach().clone() for p in params]
    replayed = collage_fx.explain(optimizer, replay=3).replayed
    assert replayed is not None and replayed.steps == 3
    for i, p in enumerate(before):
        exact, plain = p.double(), p.clone()
        for step in range(3):
            exact = exact - 1e-3 * params[i].grad.double()
            plain.add_(params[i].grad, alpha=-1e-3)
            errors = replayed.errors([f"param_groups[0].params[{i}]"])[step]
            expected = float((plain.double() - exact).norm() / exact.norm())
            assert errors[0] == pytest.approx(expected, rel=1e-6)
            assert errors[1] < errors[0] / 20


@pytest.mark.slow
def test_nothing_of_the_optimizer_changes() -> None:
    optimizer = pages.optimizer(9)
    with collage_fx.record_gradients(optimizer) as recorder:
        trained(optimizer, 2)
        hooks = dict(optimizer._optimizer_step_pre_hooks)
        before, state = values_of(optimizer), copy.deepcopy(optimizer.state_dict())
        gradients = [p.grad.clone() for p in optimizer.param_groups[0]["params"]]
        chance = torch.get_rng_state()
        explanation = collage_fx.explain(optimizer, replay=recorder)
        pages.page(explanation)
        assert torch.equal(chance, torch.get_rng_state())
        after = values_of(optimizer)
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)
        now = optimizer.state_dict()
        assert now["param_groups"] == state["param_groups"]
        grads = [p.grad for p in optimizer.param_groups[0]["params"]]
        assert all(map(torch.equal, gradients, grads))
        assert dict(optimizer._optimizer_step_pre_hooks) == hooks
        assert len(recorder) == 2, "copies took steps, which are not recorded"
    assert not explanation.replayed.failure
    assert set(explanation.memory) == {"parameters", "gradients", "step", "exp_avg", "exp_avg_sq"}


def test_what_cannot_be_replayed_says_why() -> None:
    class Narrow(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            if any(p.dtype is torch.float64 for p in self.param_groups[0]["params"]):
                raise ValueError("no float64 here")
            super().step()

    explanation, text = pages.explained(pages.optimizer(2, Narrow, lr=0.1), replay=1)
    assert "no float64 here" in explanation.replayed.failure
    assert "Not measured: the step cannot be replayed: ValueError: no float64 here" in text


def test_bad_input() -> None:
    optimizer = pages.optimizer(2)
    with pytest.raises(SubjectError, match="takes an optimizer, got Linear"):
        collage_fx.record_gradients(torch.nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="last=0"):
        collage_fx.record_gradients(optimizer, last=0)
    with pytest.raises(OptionError, match="replay=-1"):
        collage_fx.explain(optimizer, replay=-1)
    recorder = collage_fx.record_gradients(optimizer)
    with pytest.raises(OptionError, match="no step has been recorded"):
        collage_fx.explain(optimizer, replay=recorder)
    trained(optimizer, 1)
    with pytest.raises(SubjectError, match="of another optimizer"):
        collage_fx.explain(pages.optimizer(3), replay=recorder)
    with pytest.raises(SubjectError, match="for optimizers"):
        collage_fx.explain(lambda p: p.add_(1), torch.ones(2).bfloat16(), replay=1)


def test_a_recorder_does_not_keep_an_optimizer_alive() -> None:
    optimizer = pages.optimizer(2)
    recorder = collage_fx.record_gradients(optimizer)
    del optimizer
    gc.collect()
    recorder.remove()
