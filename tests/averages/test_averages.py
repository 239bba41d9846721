"""EMA and SWA: as near to averages of whole values in float64 as their storage is.

For averages.averaged and averages.average_step.
"""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

import collage_fx
from collage_fx.errors import OptionError, SubjectError

DECAY = 0.99
X = torch.linspace(-1, 1, 64).reshape(8, 8).bfloat16()


class Net(nn.Module):
    """With tied weights, fp32 ones, buffers of floats and integers, and a 0-d parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8, bias=False, dtype=torch.bfloat16)
        self.second = nn.Linear(8, 8, bias=False, dtype=torch.bfloat16)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(8)
        self.scale = nn.Parameter(torch.ones((), dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x).float()).bfloat16()
        return self.second(x) * self.scale


def run(**options: Any) -> tuple[nn.Module, Callable[[], None]]:
    torch.manual_seed(0)
    model = Net()
    optimizer = AdamW(model.parameters(), lr=1e-3)
    collage_fx.compile_(optimizer, **options)

    def step() -> None:
        optimizer.zero_grad()
        (model(X) - X).square().mean().backward()
        optimizer.step()

    return model, step


def values(module: nn.Module) -> list[Tensor]:
    return [collage_fx.value(p) for p in module.parameters()]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def off(found: list[Tensor], exact: list[Tensor], start: list[Tensor]) -> float:
    pairs = zip(found, exact, start, strict=True)
    lost, way = zip(*[((f - e).norm(), (e - s).norm()) for f, e, s in pairs], strict=True)
    return float(torch.stack(lost).norm() / torch.stack(way).norm())


@pytest.mark.parametrize(
    "storage", [None, "mcf2", "ulp8", "ulp4", "sr", {"scale": "mcf2"}], ids=str
)
@pytest.mark.parametrize("kind", ["EMA", "SWA"])
@pytest.mark.quick("EMA-None", "SWA-None", "EMA-ulp4", "EMA-sr")
def test_averages_of_whole_values(kind: str, storage: Any) -> None:
    model, step = run()
    average: Any = collage_fx.SWA(model, storage=storage)
    if kind == "EMA":
        average = collage_fx.EMA(model, DECAY, storage=storage)
    plain = AveragedModel(
        model, multi_avg_fn=get_ema_multi_avg_fn(DECAY) if kind == "EMA" else None
    )
    exact, start = list[Tensor](), list[Tensor]()
    for k in range(40):
        step()
        average.update_parameters(model)
        plain.update_parameters(model)
        share = 1 - DECAY if kind == "EMA" else 1 / (k + 1)
        now = values(model)
        exact = [e.lerp(v, share) for e, v in zip(exact or now, now, strict=True)]
        start = start or exact
    allowed = {"mcf2": 0.02, "ulp8": 0.02, "ulp4": 0.3, "sr": 0.9}.get(str(storage), 1e-3)
    assert off(values(average.module), exact, start) < allowed
    assert off(values(plain.module), exact, start) > 0.1, "control: AveragedModel in bf16"
    assert int(average.n_averaged) == int(plain.n_averaged) == 40
    assert average.module.norm.num_batches_tracked == model.norm.num_batches_tracked  # type: ignore[union-attr]
    report = str(collage_fx.report(average))
    assert "0 joined" in report and "2 x parameter" in report


def test_a_pattern_is_for_names_of_the_model() -> None:
    """The step that moves the averages knows them by their places."""
    model, step = run()
    average: Any = collage_fx.EMA(model, DECAY, storage={"first.*": "mcf2", "*": "ulp8"})
    for _ in range(4):
        step()
        average.update_parameters(model)
    kept = {name: collage_fx.residuals(p) for name, p in average.module.named_parameters()}
    assert [lo.dtype for lo in kept["first.weight"]] == [torch.bfloat16]
    assert [lo.dtype for lo in kept["scale"]] == [torch.int8]
    wrong: Any = collage_fx.EMA(model, DECAY, storage={"third": "mcf2"})
    with pytest.warns(collage_fx.CollageWarning, match="the pattern 'third' fits no state"):
        for _ in range(2):
            wrong.update_parameters(model)


def test_the_first_values_are_taken_whole() -> None:
    model, step = run()
    step()
    for kind in (collage_fx.EMA, collage_fx.SWA):
        average = kind(model)
        assert same(values(average.module), values(model))
        step()
        average.update_parameters(model)
        assert same(values(average.module), values(model))


def test_the_decay_may_change() -> None:
    model, step = run()
    average = collage_fx.EMA(model, 0.0)
    average.update_parameters(model)
    step()
    average.update_parameters(model)
    assert same(values(average.module), values(model))
    average.decay = 1.0
    before = values(average.module)
    step()
    average.update_parameters(model)
    assert same(values(average.module), before)


def test_buffers_are_averaged_if_asked_for() -> None:
    model, step = run()
    average = collage_fx.EMA(model, 0.5, use_buffers=True)
    plain = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
    for _ in range(3):
        step()
        average.update_parameters(model)
        plain.update_parameters(model)
    for ours, theirs in zip(average.module.buffers(), plain.module.buffers(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-6)


def test_an_average_is_called_as_its_model() -> None:
    model, step = run()
    step()
    average = collage_fx.SWA(model)
    average.update_parameters(model)
    update_bn([X], average)
    assert average(X).dtype == torch.bfloat16 and isinstance(average, AveragedModel)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_copies_go_on_alike(copied: Any) -> None:
    model, step = run()
    average = collage_fx.EMA(model, DECAY)
    for _ in range(3):
        step()
        average.update_parameters(model)
    other = copied(average)
    assert same(values(other.module), values(average.module))
    step()
    for one in (average, other):
        one.update_parameters(model)
    assert same(values(other.module), values(average.module))
    assert not same(values(average.module), values(model)), "control"


def test_gradients_of_an_average_stay() -> None:
    model, step = run()
    average = collage_fx.EMA(model)
    average(X).sum().backward()
    before = [p.grad for p in average.module.parameters()]
    for _ in range(2):
        step()
        average.update_parameters(model)
    assert all(p.grad is g for p, g in zip(average.module.parameters(), before, strict=True))


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: collage_fx.EMA(3), SubjectError, "got int"),  # type: ignore[arg-type]
        (lambda: collage_fx.EMA(nn.Linear(2, 2), 1.5), OptionError, "decay=1.5"),
        (lambda: collage_fx.EMA(nn.Linear(2, 2), float("nan")), OptionError, "decay=nan"),
        (lambda: collage_fx.SWA(nn.Linear(2, 2), storage="mcf9"), OptionError, "mcf9"),
    ],
    ids=["kind", "decay", "nan", "storage"],
)
def test_mistakes(make: Callable[[], Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make()


@pytest.mark.parametrize(
    "other",
    [nn.Linear(8, 8), nn.Linear(8, 9, dtype=torch.bfloat16), nn.Sequential(), 5],
    ids=["dtype", "shape", "count", "kind"],
)
def test_another_model_is_refused(other: Any) -> None:
    model = nn.Linear(8, 8, dtype=torch.bfloat16)
    average = collage_fx.EMA(model)
    before = values(average.module)
    for act in (average.update_parameters, average.swap):
        with pytest.raises(SubjectError, match=r"the model|got int"):
            act(other)
    assert same(values(average.module), before) and not int(average.n_averaged)
