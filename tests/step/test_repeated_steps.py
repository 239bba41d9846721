"""Steps that are done again as the last was, beside the same steps done as any other."""

import gc
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from repeated_steps import compare, counted, give_gradients, made, params, params_of, trained
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, NAdam, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

import collage_fx
from collage_fx.runtime.kernels.tensor_snapshot import TensorSnapshot

pytestmark = pytest.mark.kernels


class Passing(TorchDispatchMode):
    """Does what it is asked for."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


CASES = [
    (AdamW, {"lr": 1e-3}, "mcf2"),
    (AdamW, {"lr": 1e-3, "fused": True}, "remainder16"),
    (Adam, {"lr": 1e-3, "amsgrad": True, "foreach": True}, "mcf2"),
    (SGD, {"lr": 1e-2, "momentum": 0.9}, "mcf2"),
    (NAdam, {"lr": 1e-3}, "remainder16"),
    (AdamW, {"lr": 1e-3, "by_chance": True}, "mcf2"),
]


@pytest.mark.parametrize(("kind", "options", "storage"), CASES)
@pytest.mark.quick("NAdam-*", "AdamW-options5-*")
def test_same_bits(
    monkeypatch: pytest.MonkeyPatch, kind: Any, options: dict[str, Any], storage: str
) -> None:
    repeats = compare(monkeypatch, lambda: made(kind, storage, **options), 12)
    assert len(repeats) >= 7


def test_left_out_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with counted(monkeypatch, allowed=True) as repeats:
        optimizer = AdamW(params(0))
        step = collage_fx.compile(optimizer, without=("repeat",))
        for i in range(6):
            give_gradients(optimizer, i)
            step()
    assert not repeats


def test_rates_that_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """A schedule makes the rate an input of the graph, and each step has another."""

    def schedule(optimizer: Optimizer, i: int) -> None:
        optimizer.param_groups[0]["lr"] = 1e-2 / (i + 1)
        optimizer.param_groups[1]["lr"] = 1e-3 * (i + 1)

    def two_groups() -> Optimizer:
        optimizer = made(AdamW, "mcf2", lr=1e-3)
        optimizer.add_param_group({"params": params(1)})
        return optimizer

    repeats = compare(monkeypatch, two_groups, 16, schedule)
    assert len(repeats) >= 5


def test_closures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is called once, with gradients on, and its loss returned, whoever does the step."""
    calls: list[bool] = []

    def step(optimizer: Optimizer, i: int) -> None:
        def closure() -> int:
            calls.append(torch.is_grad_enabled())
            give_gradients(optimizer, i)
            return i

        if i == 8:
            optimizer.param_groups[0]["lr"] = 3e-3
        loss: Any = optimizer.step(closure) if i % 2 else optimizer.step(closure=closure)  # type: ignore[call-overload]
        assert loss == i

    def steps() -> Optimizer:
        optimizer = made(AdamW, "mcf2", lr=1e-3)
        with torch.no_grad():
            for i in range(12):
                step(optimizer, i)
        return optimizer

    assert len(compare(monkeypatch, steps, 2)) >= 6
    assert calls == [True] * 24


def write(optimizer: Optimizer) -> None:
    with torch.no_grad():
        params_of(optimizer)[3].mul_(0.5)


def give_data(optimizer: Optimizer) -> None:
    p = params_of(optimizer)[3]
    p.data = p.detach() * 0.5


def give_transposed(optimizer: Optimizer) -> None:
    p = params_of(optimizer)[1]
    p.grad = p.grad.t().contiguous().t()  # type: ignore[union-attr]


def replace_state(optimizer: Optimizer) -> None:
    state = optimizer.state[params_of(optimizer)[2]]
    state["exp_avg_sq"] = state["exp_avg_sq"] * 0.5


def add_group(optimizer: Optimizer) -> None:
    p = torch.nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
    p.grad = torch.ones_like(p)
    optimizer.add_param_group({"params": [p]})


def load_residual(optimizer: Optimizer) -> None:
    p = params_of(optimizer)[2]
    collage_fx.load_residuals(p, [torch.full_like(r, 1e-4) for r in collage_fx.residuals(p)])


def hook(optimizer: Optimizer) -> None:
    optimizer.register_step_post_hook(lambda one, *_: write(one))


def call_wrongly(optimizer: Optimizer) -> None:
    with pytest.raises(TypeError):
        optimizer.step(None, None)  # type: ignore[call-arg]


CHANGES: dict[str, Callable[[Optimizer], Any]] = {
    "written": write,
    "data": give_data,
    "no gradient": lambda o: setattr(params_of(o)[4], "grad", None),
    "transposed gradient": give_transposed,
    "state": replace_state,
    "state lost": lambda o: o.state.pop(params_of(o)[6]),
    "group": add_group,
    "rate": lambda o: o.param_groups[0].update(lr=3e-3),
    "betas": lambda o: o.param_groups[0].update(betas=(0.8, 0.99)),
    "maximize": lambda o: o.param_groups[0].update(maximize=True),
    "loaded": lambda o: o.load_state_dict(o.state_dict()),
    "residual": load_residual,
    "hook": hook,
    "mode": lambda o: Passing(),
    "stance": lambda o: torch.compiler.set_stance("force_eager"),
    "another backend": lambda o: torch.compiler.set_stance("default", force_backend="eager"),
    "gradients off": lambda o: torch.no_grad(),
    "wrong call": call_wrongly,
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.quick(
    "written", "data", "no gradient", "state lost", "residual", "hook", "stance", "wrong call"
)
def test_what_has_changed(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Before one step, and in that step only."""
    at = 7

    def change(optimizer: Optimizer, i: int) -> Any:
        entered = CHANGES[name](optimizer) if i == at else None
        return entered if hasattr(entered, "__enter__") else None

    repeats = compare(monkeypatch, lambda: made(AdamW, "mcf2", lr=1e-3), 14, change)
    assert at - 1 in repeats and at not in repeats


def test_control(monkeypatch: pytest.MonkeyPatch) -> None:
    """If nothing were compared, a residual would be added to a value that it does not belong to."""
    own = TensorSnapshot.unchanged

    def blind(self: TensorSnapshot, attributes: dict[str, Any]) -> list[Tensor]:
        return own(self, attributes) or [torch.zeros(())]

    monkeypatch.setattr(TensorSnapshot, "unchanged", blind)
    with pytest.raises(AssertionError):
        compare(
            monkeypatch,
            lambda: made(AdamW, "mcf2", lr=1e-3),
            10,
            lambda optimizer, i: write(optimizer) if i == 7 else None,
        )


@pytest.mark.parametrize("refers", [False, True])
def test_is_let_go_of(refers: bool) -> None:
    """What repeats a step keeps no optimizer alive that nobody else needs."""
    optimizer = made(AdamW, "mcf2", lr=1e-3)
    if refers:  # as where a framework patches a method
        vars(optimizer)["zero_grad"] = types.MethodType(AdamW.zero_grad, optimizer)
    trained(optimizer, 6)
    gone = [weakref.ref(optimizer), *map(weakref.ref, params_of(optimizer))]
    del optimizer
    gc.collect()
    assert not any(reference() is not None for reference in gone)
