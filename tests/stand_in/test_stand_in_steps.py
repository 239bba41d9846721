"""Steps of which Dynamo sees one parameter of each class: equal to those of which it sees all.

For stand_in.stand_ins and stand_in.steps.
"""

import itertools
import operator
from itertools import compress
from typing import Any

import pytest
import torch
from representative_runs import Change, give_gradients, parameters, run, same
from torch import Tensor
from torch.nn import Parameter
from torch.optim import (
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)

import collage_fx
from collage_fx.stand_in import steps as stand_in_steps


def halve(optimizer: Optimizer, i: int) -> None:
    """Change the rate in the third step."""
    if i == 2:
        optimizer.param_groups[0]["lr"] /= 2


OPTIMIZERS = {
    "Adam": lambda ps: Adam(ps, lr=1e-3, weight_decay=0.1, maximize=True),
    "AdamW": lambda ps: AdamW(ps, lr=1e-3),
    "AdamW, foreach": lambda ps: AdamW(ps, lr=1e-3, foreach=True),
    "AdamW, two groups": lambda ps: AdamW([{"params": ps[:10]}, {"params": ps[10:], "lr": 0.1}]),
    "AdamW, lr a tensor": lambda ps: AdamW(ps, lr=torch.tensor(1e-3)),
    "Adadelta": lambda ps: Adadelta(ps, lr=0.1, weight_decay=0.1, maximize=True),
    "Adadelta, foreach": lambda ps: Adadelta(ps, lr=0.1, foreach=True),
    "Adagrad": lambda ps: Adagrad(ps, lr=1e-2, lr_decay=0.1, weight_decay=0.1),
    "Adagrad, foreach": lambda ps: Adagrad(ps, lr=1e-2, foreach=True),
    "NAdam": lambda ps: NAdam(ps, lr=1e-3),
    "RAdam": lambda ps: RAdam(ps, lr=1e-3, decoupled_weight_decay=True, weight_decay=0.1),
    "RAdam, foreach": lambda ps: RAdam(ps, lr=1e-3, foreach=True),
    "RMSprop": lambda ps: RMSprop(ps, lr=1e-3, momentum=0.9, centered=True),
    "RMSprop, foreach": lambda ps: RMSprop(ps, lr=1e-3, weight_decay=0.1, foreach=True),
    "Rprop": lambda ps: Rprop(ps, lr=1e-3),
    "Rprop, foreach": lambda ps: Rprop(ps, lr=1e-3, maximize=True, foreach=True),
    "Adamax": lambda ps: Adamax(ps, lr=1e-3, weight_decay=0.1),
    "Adamax, foreach": lambda ps: Adamax(ps, lr=1e-3, foreach=True),
    "SGD": lambda ps: SGD(ps, lr=1e-3, weight_decay=0.1),
    "SGD, momentum": lambda ps: SGD(ps, lr=1e-3, momentum=0.9, nesterov=True, foreach=True),
}


FEW = ("AdamW, two groups", "RMSprop", "SGD, momentum")


@pytest.mark.parametrize(
    "name",
    [n if n in FEW else pytest.param(n, marks=pytest.mark.slow) for n in OPTIMIZERS],
)
@pytest.mark.quick("RMSprop", "SGD, momentum")
def test_equal_to_a_step_that_is_traced_whole(
    name: str, monkeypatch: pytest.MonkeyPatch, traced: list[int]
) -> None:
    """Bit for bit, versions and reports included, with the rate changed on the way."""
    make = OPTIMIZERS[name]
    found = run(make, monkeypatch, whole=False, change=halve)
    few, traced[:] = max(traced), []
    expected = run(make, monkeypatch, whole=True, change=halve)
    assert same(found, expected)
    assert few < max(traced)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"level": "plus", "arithmetic": "wide"}, marks=pytest.mark.slow),
        pytest.param({"storage": "remainder16", "multi_tensor": True}, marks=pytest.mark.slow),
        {"stochastic_rounding": True, "arithmetic": "wide"},
    ],
    ids=str,
)
@pytest.mark.slow
def test_equal_in_other_storages(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """As above."""
    found, expected = (
        run(OPTIMIZERS["AdamW"], monkeypatch, whole=whole, **options) for whole in (False, True)
    )
    assert same(found, expected)


@pytest.mark.parametrize(("shapes", "rate"), [([(4, 3), (7,)], 1e-3), ([(7,)], torch.tensor(0.1))])
@pytest.mark.quick("shapes1-*")
def test_what_is_traced_does_not_grow(shapes: Any, rate: Any, traced: list[int]) -> None:
    """The graph depends on the kinds of parameters, and not on how many there are."""
    counts = []
    for times in (10, 40):
        traced.clear()
        optimizer = AdamW(parameters(shapes * times), lr=rate)
        give_gradients(optimizer, 0)
        collage_fx.compile(optimizer)()
        counts.append(list(traced))
    assert counts == [[4 * len(shapes)]] * 2


def without(optimizer: Optimizer, i: int) -> None:
    """Take gradients away, of other parameters each time, and give them back."""
    params = optimizer.param_groups[0]["params"]
    for p in {1: params[3:5], 2: params[:1], 3: params[3:5]}.get(i, []):
        p.grad = None


def other_shape(optimizer: Optimizer, i: int) -> None:
    """Give parameters, with all that they have, other shapes or dtypes under the same name."""
    if i == 2:
        for p, dtype in zip(
            optimizer.param_groups[0]["params"][5:7], (None, torch.float16), strict=True
        ):
            shape = (5, 4)[: p.dim()]
            p.data = torch.ones(shape, dtype=dtype or p.dtype)
            p.grad = torch.ones(shape, dtype=p.dtype)
            for k, x in optimizer.state[p].items():
                if x.dim():
                    optimizer.state[p][k] = torch.zeros(shape, dtype=p.dtype)


def other_state(optimizer: Optimizer, i: int) -> None:
    """Put other tensors in the place of states; in the end, other states in the place of all."""
    params = optimizer.param_groups[0]["params"]
    if i == 1:
        optimizer.state[params[5]]["exp_avg"] = torch.ones_like(params[5])
    if i == 2:
        optimizer.state[params[0]] = {k: v.clone() for k, v in optimizer.state[params[0]].items()}
    if i == 3:
        optimizer.load_state_dict(optimizer.state_dict())


def more(optimizer: Optimizer, i: int) -> None:
    """Add parameters, take others away."""
    if i == 2:
        optimizer.add_param_group({"params": parameters([(4, 3)] * 3)})
        give_gradients(optimizer, 7)
    if i == 3:
        del optimizer.param_groups[0]["params"][6]


@pytest.mark.filterwarnings("ignore:.*another shape:collage_fx.CollageWarning")
@pytest.mark.parametrize(
    "change",
    [
        other_shape,
        pytest.param(without, marks=pytest.mark.slow),
        pytest.param(other_state, marks=pytest.mark.slow),
        pytest.param(more, marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_parameters_that_change(change: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters that Dynamo has not seen are looked at before each step: nothing stale is used."""
    make = OPTIMIZERS["AdamW"]
    found = run(make, monkeypatch, whole=False, change=change)
    expected = run(make, monkeypatch, whole=True, change=change)
    assert all(map(torch.equal, found[:-1], expected[:-1]))


def late(optimizer: Optimizer, i: int) -> None:
    """Give parameters of all shapes their first gradients in the third step."""
    for p in optimizer.param_groups[0]["params"][10:] if i < 2 else ():
        p.grad = None


@pytest.mark.slow
def test_states_that_a_later_step_makes(monkeypatch: pytest.MonkeyPatch, traced: list[int]) -> None:
    """Dynamo's code puts the results of such a graph into them: the graph is done, and recorded.

    Versions may differ: where all parameters of a call have momentum, PyTorch counts in another
    way.
    """
    make = OPTIMIZERS["SGD, momentum"]
    found = run(make, monkeypatch, whole=False, change=late)
    few, traced[:] = traced[:2], []
    expected = run(make, monkeypatch, whole=True, change=late)
    values = [x.is_floating_point() for x in expected[:-1]]
    assert all(map(torch.equal, compress(found, values), compress(expected, values)))
    assert found[-1] == expected[-1]
    assert all(map(operator.lt, few, traced))


def in_one_memory(params: list[Tensor]) -> Optimizer:
    """Make parameters that lie in one piece of memory, side by side, as FSDP has them."""
    flat = torch.cat([p.detach().flatten() for p in params])
    parts = flat.split([p.numel() for p in params])
    return AdamW(
        [Parameter(part.view(p.shape)) for part, p in zip(parts, params, strict=True)], lr=1e-3
    )


@pytest.mark.slow
def test_parameters_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one piece of memory, without overlapping."""
    found, expected = (run(in_one_memory, monkeypatch, whole=whole) for whole in (False, True))
    assert all(map(torch.equal, found[:-1], expected[:-1]))


class Summed(SGD):
    """Adds to each parameter what comes from all of them."""

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            params = self.param_groups[0]["params"]
            total = sum(p.grad.sum() for p in params)
            for p in params:
                p.add_(p.grad + total, alpha=-1e-3)


class Chained(SGD):
    """Adds to each parameter a part of the one before."""

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            params = self.param_groups[0]["params"]
            for p, q in itertools.pairwise(params):
                q.add_(p.mean(), alpha=1e-3)


@pytest.mark.parametrize("cls", [Summed, Chained])
@pytest.mark.quick("Chained")
def test_a_step_that_is_not_one_of_parameters_by_themselves(
    cls: Any, monkeypatch: pytest.MonkeyPatch, traced: list[int]
) -> None:
    """A negative control: if such a class were taken for one that is, the graph would tell."""
    expected = run(cls, monkeypatch, whole=True)
    monkeypatch.setattr(stand_in_steps, "serves", lambda *_: True)
    traced.clear()
    found = run(cls, monkeypatch, whole=False)
    assert traced[0] < max(traced[1:])
    assert all(map(torch.equal, found[:-1], expected[:-1]))
