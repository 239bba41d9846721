"""Steps that put new tensors in the place of states: bit for bit as steps that write the old ones.

For dynamo.renewed_states.
"""

import copy
from typing import Any

import pytest
import torch
from repeated_steps import params_of, values
from shared_runs import same
from torch import Tensor
from torch.optim import Optimizer

import collage_fx
from collage_fx.dynamo import backend
from collage_fx.optimizer.discovery import OptimizerStates


class Written(Optimizer):
    """One that is written down by what it does to each parameter."""

    in_place = False

    def __init__(self, params: list[Tensor]) -> None:
        super().__init__(params, {"lr": 1e-3})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, p.grad, self.state[p], group["lr"])

    def update(self, p: Tensor, g: Tensor, state: Any, lr: float) -> None:
        raise NotImplementedError

    def store(self, state: Any, **new: Tensor) -> None:
        """Put new values into the places of states, or into the states."""
        for key in new:
            if self.in_place:
                state[key].copy_(new[key])
            else:
                state[key] = new[key]


class Adam(Written):
    """Adam as one writes it down."""

    def update(self, p: Tensor, g: Tensor, state: Any, lr: float) -> None:
        if not state:
            state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
        m = 0.9 * state["m"] + 0.1 * g
        v = 0.999 * state["v"] + 0.001 * g * g
        self.store(state, m=m, v=v)
        p.addcdiv_(state["m"], state["v"].sqrt() + 1e-8, value=-lr)


class InPlace(Adam):
    in_place = True


class Adan(Written):
    """Adan as one writes it down: results of two states, and one of none."""

    def update(self, p: Tensor, g: Tensor, state: Any, lr: float) -> None:
        if not state:
            state.update({key: torch.zeros_like(p) for key in ("m", "d", "v")})
            state["before"] = g.clone()
        change = g - state["before"]
        before = g.clone()
        m = 0.98 * state["m"] + 0.02 * g
        d = 0.08 * change + 0.92 * state["d"]
        v = 0.01 * (g + 0.92 * change) ** 2 + 0.99 * state["v"]
        self.store(state, before=before, m=m, d=d, v=v)
        p.addcdiv_(state["m"] + 0.92 * state["d"], state["v"].sqrt() + 1e-8, value=-lr)


class AdanInPlace(Adan):
    in_place = True


class Exchanging(Written):
    """One whose moments exchange their places."""

    def update(self, p: Tensor, g: Tensor, state: Any, lr: float) -> None:
        if not state:
            state["m"], state["v"] = torch.zeros_like(p), torch.ones_like(p)
        m, v = 0.99 * state["v"] + 0.01 * g, 0.99 * state["m"] + 0.02 * g
        self.store(state, m=m, v=v)
        p.add_(state["v"], alpha=-lr)


def start(kind: Any, dtype: torch.dtype = torch.bfloat16) -> Any:
    draw = torch.Generator().manual_seed(0)
    shapes: list[tuple[int, ...]] = [(4, 3), (7,), (5, 2), ()]
    params = [(1 + 0.3 * torch.randn(s, generator=draw)).bfloat16().to(dtype) for s in shapes]
    return kind([p.requires_grad_() for p in params])


def take(optimizer: Any, first: int, last: int, turns: bool = False) -> None:
    for k in range(first, last):
        draw = torch.Generator().manual_seed(k)
        for i, p in enumerate(params_of(optimizer)):
            g = 0.5 + torch.randn(p.shape, generator=draw)
            p.grad = None if turns and (k + i) % 4 == 3 else g.bfloat16().to(p.dtype)
        optimizer.step()


def trained(kind: Any, last: int = 8, turns: bool = False, **options: Any) -> Any:
    optimizer = start(kind)
    collage_fx.compile_(optimizer, **options)
    take(optimizer, 0, last, turns)
    return optimizer


def same_bits(one: Optimizer, other: Optimizer) -> bool:
    return same(values(one), values(other))


OPTIONS: list[dict[str, Any]] = [
    {},
    {"storage": "mcf2", "arithmetic": "eft"},
    {"storage": "ulp4"},
    {"storage": "sr"},
    {"level": "light", "storage": "mcf2"},
    {"clip_grad_norm": 0.5},
    {"changed": True},
    {"verify": 2},
]


@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kinds", [(Adam, InPlace), (Adan, AdanInPlace)], ids=["Adam", "Adan"])
@pytest.mark.quick("*-{}-*", "Adam-*ulp4*-False")
def test_bits_are_those_of_a_step_that_writes_its_states(
    kinds: tuple[Any, Any], options: dict[str, Any], turns: bool
) -> None:
    ours = trained(kinds[0], turns=turns, **options)
    assert same_bits(ours, trained(kinds[1], turns=turns, **options))
    report = str(collage_fx.report(ours))
    assert "0 graph" not in report and "recorded whole" not in report


def test_states_that_exchange_places_are_recorded() -> None:
    """The nearest state of a result is the other one."""

    class InPlace(Exchanging):
        in_place = True

    with pytest.warns(collage_fx.CollageWarning, match="recorded whole from now on"):
        ours = trained(Exchanging)
    other, exact = trained(InPlace), start(Exchanging, torch.float64)
    take(exact, 0, 8)
    for key in ("p", "m", "v"):
        value = whole(exact, key)
        assert (whole(ours, key) - value).norm() < 1e-4 * value.norm()
        assert (whole(other, key) - value).norm() < 1e-4 * value.norm()


def test_values_are_those_of_float64() -> None:
    """The control is plain bf16."""
    ours, plain, exact = trained(Adam), start(Adam), start(Adam, torch.float64)
    take(plain, 0, 8)
    take(exact, 0, 8)
    for key, moved in (("p", whole(start(Adam), "p")), ("v", 0)):
        way = (whole(exact, key) - moved).norm()
        assert (whole(ours, key) - whole(exact, key)).norm() < 0.003 * way
        assert (whole(plain, key) - whole(exact, key)).norm() > 0.003 * way


def whole(optimizer: Optimizer, key: str) -> Tensor:
    found = [p if key == "p" else optimizer.state[p][key] for p in params_of(optimizer)]
    return torch.cat([collage_fx.value(t).detach().double().flatten() for t in found])


def test_who_has_the_old_tensor_has_its_value() -> None:
    optimizer = trained(Adam, 4)
    old = optimizer.state[params_of(optimizer)[0]]["v"]
    word, value = old.clone(), collage_fx.value(old).clone()
    take(optimizer, 4, 7)
    assert optimizer.state[params_of(optimizer)[0]]["v"] is not old
    assert torch.equal(old, word) and torch.equal(collage_fx.value(old), value)
    assert not torch.equal(value, word)


def test_writes_from_outside_are_seen() -> None:
    """The residual of the old tensor is judged before it is copied, with the bits that it keeps."""
    found = []
    for kind in (Adam, InPlace):
        optimizer = trained(kind, 4, storage="mcf2")
        for k in range(4, 9):
            for p in params_of(optimizer)[:3]:
                optimizer.state[p]["v"][0].mul_(0.5)
            if k == 4:
                with pytest.warns(collage_fx.CollageWarning, match="from outside"):
                    take(optimizer, k, k + 1)
            else:
                take(optimizer, k, k + 1)
        found.append(optimizer)
    assert same_bits(*found)


def test_a_resumed_run_has_the_same_bits() -> None:
    whole, first = trained(Adam, 8), trained(Adam, 5)
    resumed = start(Adam)
    with torch.no_grad():
        for p, q in zip(params_of(resumed), params_of(first), strict=True):
            p.copy_(q)
    collage_fx.compile_(resumed)
    resumed.load_state_dict(copy.deepcopy(first.state_dict()))
    take(resumed, 5, 8)
    assert same_bits(whole, resumed)


def test_without_it_such_steps_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a graph would have the high words only of what it returns."""
    monkeypatch.setattr(backend, "with_renewed_states", lambda gm, *_: (gm, {}))
    assert "the steps are recorded whole" in str(collage_fx.report(trained(Adam)))


def test_a_step_like_the_last_does_not_look_for_its_states(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The control: who puts another tensor in the place of one has them looked for.

    It gets the residual of the place, which the steps before have noted.
    """
    looks: list[str] = []
    find = OptimizerStates.find
    monkeypatch.setattr(OptimizerStates, "find", lambda *a: looks.append("") or find(*a))
    found = []
    for kind in (Adan, AdanInPlace):
        optimizer = trained(kind, 4)
        looks.clear()
        take(optimizer, 4, 7)
        assert not looks
        for p in params_of(optimizer):
            optimizer.state[p]["v"] = optimizer.state[p]["v"].clone()
        take(optimizer, 7, 9)
        assert looks
        found.append(optimizer)
    assert same_bits(*found)
