"""Optimizers that are alike share what was compiled for one of them, and nothing else.

For stand_in.shared_graph, stand_in.alike and stand_in.torch_steps.
"""

import functools
import importlib
from typing import Any

import pytest
import torch
from shared_runs import (
    SHAPES,
    bits,
    compiled,
    nothing,
    parameters,
    params_of,
    same,
    step_all,
    train,
    train_together,
)
from torch import Tensor
from torch.optim import SGD, Adam, Adamax, AdamW, NAdam, Optimizer
from torch.optim.lr_scheduler import LambdaLR

import collage_fx
from collage_fx.passes.ir.program import Unlike
from collage_fx.stand_in import stand_ins

ALONE = {"without": ("share",)}


def adamw(params: list[Tensor]) -> Optimizer:
    return AdamW(params, lr=1e-3)


OPTIMIZERS: dict[str, Any] = {
    "AdamW": adamw,
    "AdamW, foreach": lambda ps: AdamW(ps, lr=1e-3, foreach=True),
    "AdamW, fused": lambda ps: AdamW(ps, lr=1e-3, fused=True),
    "Adam, amsgrad": lambda ps: Adam(ps, lr=1e-3, amsgrad=True, weight_decay=0.1),
    "NAdam": lambda ps: NAdam(ps, lr=1e-3),
    "Adamax, foreach": lambda ps: Adamax(ps, lr=1e-3, foreach=True),
    "SGD": lambda ps: SGD(ps, lr=1e-3, weight_decay=0.1),
    "SGD, momentum": lambda ps: SGD(ps, lr=1e-3, momentum=0.9, nesterov=True),
}
FEW = ("SGD, momentum",)
slow = pytest.mark.slow


@pytest.mark.parametrize(
    "name", [n if n in FEW else pytest.param(n, marks=slow) for n in OPTIMIZERS]
)
def test_one_compilation_for_all(name: str, traced: list[int]) -> None:
    """In the backward pass; with the bits of optimizers that are compiled each alone."""
    make = OPTIMIZERS[name]
    found = train(compiled(make, parameters(SHAPES[:3])))
    assert len(traced) == 1
    traced.clear()
    alone = train(compiled(make, parameters(SHAPES[:3]), **ALONE))
    assert len(traced) == 3  # what the count would be
    assert same(bits(found), bits(alone))
    assert [str(collage_fx.report(o)) for o in found] == [str(collage_fx.report(o)) for o in alone]


def test_where_it_fails_it_is_tried_once(
    traced: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    unlike = Unlike("it is not element by element")
    monkeypatch.setattr(stand_ins, "represented", lambda *args, **kwargs: unlike)
    train(compiled(lambda ps: Adamax(ps, lr=1e-3), parameters(SHAPES[:2])), 1)
    assert len(traced) == 1 + 2


@pytest.mark.slow
def test_bits_of_one_optimizer_of_all() -> None:
    one = collage_fx.compile_(adamw(parameters()))
    for i in range(4):
        step_all([one], i)
    each = compiled(adamw, parameters())
    for i in range(4):
        step_all(each, i)
    assert same(bits(each), bits([one]))


@pytest.mark.slow
@pytest.mark.kernels
def test_bits_of_compiled_kernels(traced: list[int]) -> None:
    """But for versions: a graph that makes states does not count its first store to them."""
    found = bits(train(compiled(adamw, parameters())))
    assert len(traced) == 1
    alone = bits(train(compiled(adamw, parameters(), **ALONE)))
    assert same([t for t in found if t.dim()], [t for t in alone if t.dim()])


def test_each_set_of_numbers_is_compiled(traced: list[int]) -> None:
    """Two rates, two graphs; and each has its own, not that of the other."""
    each = (AdamW([p], lr=(1e-3, 0.1)[k % 2]) for k, p in enumerate(parameters()))
    mixed = train([collage_fx.compile_(one) for one in each])
    assert len(traced) == 2
    for k, lr in enumerate((1e-3, 0.1)):
        one = train_together(functools.partial(AdamW, lr=lr), slice(k, None, 2))
        assert same(bits(mixed[k::2]), bits([one]))


@pytest.mark.parametrize(
    "option",
    [
        {"storage": "ulp8"},
        pytest.param({"level": "plus"}, marks=slow),
        pytest.param({"seed": 1}, marks=slow),
    ],
)
def test_options_are_not_mixed(option: dict[str, Any], traced: list[int]) -> None:
    first, second = compiled(adamw, parameters()), compiled(adamw, parameters(), **option)
    train(first), train(second)
    assert len(traced) == 2
    again = compiled(adamw, parameters(), **option)
    assert same(bits(train(again)), bits(second))


class Doubling(AdamW):
    """AdamW with a step that is not that of its base."""

    def step(self, closure: Any = None) -> Any:
        for p in params_of([self]):
            p.data.mul_(2)
        return super().step(closure)


Doubling.__name__ = Doubling.__qualname__ = "AdamW"


@pytest.mark.filterwarnings("ignore::collage_fx.CollageWarning")
def test_a_class_of_the_same_name_is_another_class() -> None:
    first = train(compiled(adamw, parameters()), 1)
    other = train(compiled(lambda ps: Doubling(ps, lr=1e-3), parameters(SHAPES[:1])), 1)
    p, q = collage_fx.value(params_of(first)[0]), collage_fx.value(params_of(other)[0])
    assert torch.allclose(q, 2 * p, atol=0.01)
    assert not torch.allclose(q, p, rtol=0.1)


def test_other_code_of_the_same_class_is_traced(
    traced: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A function of torch.optim that somebody has replaced, after the others had been traced."""
    optimizers = compiled(adamw, parameters([*SHAPES, (5, 5)]))
    train(optimizers[:-1], 1)
    assert len(traced) == 1
    module = importlib.import_module("torch.optim.adam")
    own = module.adam

    def other(*args: Any, lr: float, **kwargs: Any) -> None:
        own(*args, lr=0.0, **kwargs)

    monkeypatch.setattr(module, "adam", other)
    before = params_of(optimizers)[-1].detach().clone()
    train(optimizers[-1:], 1)
    assert len(traced) == 2
    assert torch.equal(params_of(optimizers)[-1], before)


@pytest.mark.slow
def test_what_is_called_in_place_of_such_a_function_is_not_shared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a callable object nobody knows what it depends on: it may have changed since."""
    module = importlib.import_module("torch.optim.adam")
    monkeypatch.setattr(module, "adam", functools.partial(module.adam))
    optimizers = compiled(adamw, parameters(SHAPES[:3]))
    train(optimizers[:-1], 2)
    monkeypatch.setattr(module, "adam", lambda *args, **kwargs: None)
    before = params_of(optimizers)[-1].detach().clone()
    train(optimizers[-1:], 1)
    assert torch.equal(params_of(optimizers)[-1], before)
    assert not torch.equal(params_of(optimizers)[0], parameters()[0])


@pytest.mark.slow
def test_a_stance_on_compiling_anew_changes_nothing_that_is_compiled(traced: list[int]) -> None:
    optimizers = train(compiled(adamw, parameters()), 2)
    torch.compiler.set_stance("fail_on_recompile")
    try:
        step_all(optimizers, 2)
    finally:
        torch.compiler.set_stance("default")
    assert len(traced) == 1
    assert same(bits(optimizers), bits(train(compiled(adamw, parameters()), 3)))


@pytest.mark.slow
def test_a_schedule_of_each(traced: list[int]) -> None:
    """A rate that a scheduler changes is an input of the graph: one for all rates."""

    def scheduled(params: list[Tensor], factor: int) -> Optimizer:
        one = adamw(params)
        schedules[one] = LambdaLR(one, lambda t: factor / (1 + t))
        return one

    def change(optimizers: list[Optimizer], step: int) -> None:
        for one in optimizers if step else ():
            schedules[one].step()

    schedules: dict[Optimizer, LambdaLR] = {}
    each = [scheduled([p], (1, 3)[k % 2]) for k, p in enumerate(parameters())]
    found = train([collage_fx.compile_(one) for one in each], 4, change)
    assert len(traced) == 1
    for k, factor in enumerate((1, 3)):
        together = functools.partial(scheduled, factor=factor)
        one = train_together(together, slice(k, None, 2), change)
        assert same(bits(found[k::2]), bits([one]))


@pytest.mark.slow
def test_a_rate_that_some_change(traced: list[int]) -> None:
    """A rate that has not changed stays a constant, as in a run of that optimizer alone."""

    def change(optimizers: list[Optimizer], step: int) -> None:
        for one in optimizers if step == 2 else ():
            one.param_groups[0]["lr"] /= 3

    found = train(compiled(adamw, parameters()), 4, lambda these, i: change(these[::2], i))
    assert len(traced) == 2
    for k, of_half in enumerate((change, nothing)):
        one = train_together(adamw, slice(k, None, 2), of_half)
        assert same(bits(found[k::2]), bits([one]))


def test_checkpoints_of_each() -> None:
    unbroken = train(compiled(adamw, parameters()), 3)
    saved = [o.state_dict() for o in unbroken]
    values = [p.detach().clone() for p in params_of(unbroken)]
    saved = torch.utils._pytree.tree_map_only(Tensor, Tensor.clone, saved)
    resumed = compiled(adamw, parameters())
    for one, state, value in zip(resumed, saved, values, strict=True):
        params_of([one])[0].data.copy_(value)
        one.load_state_dict(state)
    for i in (7, 8):
        step_all(unbroken, i)
        step_all(resumed, i)
    without_versions = [[t for t in bits(o) if t.dim()] for o in (unbroken, resumed)]
    assert same(*without_versions)


def test_an_optimizer_with_other_residuals_has_a_graph_of_its_own(traced: list[int]) -> None:
    """One that goes on from a checkpoint of `level="all"`: what it has it keeps."""
    plus = compiled(adamw, parameters([(6, 2)]), level="all")
    train(plus, 2)
    traced.clear()
    optimizers = compiled(adamw, parameters([*SHAPES, (6, 2)]))
    params_of(optimizers[-1:])[0].data.copy_(params_of(plus)[0])
    optimizers[-1].load_state_dict(plus[0].state_dict())
    train(optimizers, 2)
    assert len(traced) == 2
    (p,) = params_of(optimizers[-1:])
    (q,) = params_of(optimizers[:1])
    assert collage_fx.residuals(optimizers[-1].state[p]["exp_avg"])
    assert not collage_fx.residuals(optimizers[0].state[q]["exp_avg"])
