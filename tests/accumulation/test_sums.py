"""Gradients of several backward passes are summed with residuals, until they are zero or None.

For accumulation.sums and accumulation.accumulate.
"""

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import collage_fx
from collage_fx.runtime.residuals.store import STORE

STORAGES = ["mcf2", "mcf3", "remainder16", "ulp8", "ulp4", "auto"]
ERRORS = {"ulp8": 1e-4, "ulp4": 1e-3}


def made(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(9, 12), nn.Tanh(), nn.Linear(12, 3)).to(dtype)


def backward(model: nn.Module, seed: int) -> list[Tensor]:
    """Add the gradients of a batch, small ones too; return them."""
    x = torch.randn(4, 9, generator=torch.Generator().manual_seed(seed))
    loss = (model(x.to(model[0].weight.dtype)) * 2.0 ** (-(seed % 5))).square().sum()  # type: ignore
    own = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    loss.backward()
    return list(own)


def off(model: nn.Module, batches: int = 64) -> float:
    """Return the error of gradients after so many batches, over their size, at most."""
    exact = [torch.zeros_like(p, dtype=torch.float64) for p in model.parameters()]
    for k in range(batches):
        for total, own in zip(exact, backward(model, k), strict=True):
            total += own
    found = [collage_fx.value(p.grad) for p in model.parameters()]  # type: ignore[arg-type]
    pairs = list(zip(found, exact, strict=True))
    return max(float((f - e).norm() / e.norm()) for f, e in pairs)


def test_64_batches_beside_float64() -> None:
    plain, model = made(), made()
    collage_fx.accumulate(model)
    assert off(model) < 2**-15 < 2**-9 < off(plain)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.quick("dtype0-ulp4", "dtype1-auto")
def test_storages(storage: str, dtype: torch.dtype) -> None:
    model = made(dtype)
    if storage == "remainder16" and dtype == torch.float16:
        with pytest.raises(collage_fx.CollageError, match="has no parameter that takes gradients"):
            collage_fx.accumulate(model, storage)
        return
    collage_fx.accumulate(model, storage)
    assert off(model) < ERRORS.get(storage, 2**-15)


@pytest.mark.parametrize("alias", ["fp32", "bf16x2"])
def test_other_names_of_storages(alias: str) -> None:
    model = made()
    collage_fx.accumulate(model, alias)
    assert off(model) < 2**-15


def test_by_chance_is_right_on_average() -> None:
    model = nn.Linear(512, 1, bias=False).bfloat16()
    collage_fx.accumulate(model, "sr")
    for value in (256.0, *[1.0] * 64):
        model(torch.full((1, 512), value, dtype=torch.bfloat16)).sum().backward()
    assert abs(float(model.weight.grad.double().mean()) - 320) < 2  # type: ignore[union-attr]


def test_a_large_gradient_is_summed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("collage_fx.accumulation.addition.CHUNK", 7)
    monkeypatch.setattr("collage_fx.accumulation.addition._WITHOUT", {"cpu"})
    model = made()
    collage_fx.accumulate(model)
    assert off(model) < 2**-15


def one() -> tuple[nn.Module, Callable[[float], None]]:
    """A model of one parameter, and what adds to its gradient."""
    model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)

    def add(x: float) -> None:
        model(torch.tensor([x], dtype=torch.bfloat16)).backward()

    return model, add


def of(model: Any) -> tuple[float, float]:
    """The gradient, and its whole value."""
    return float(model.weight.grad), float(collage_fx.value(model.weight.grad))


@pytest.mark.parametrize("to_none", [True, False])
def test_it_ends_with_zero_and_none(to_none: bool, recwarn: pytest.WarningsRecorder) -> None:
    model, add = one()
    collage_fx.accumulate(model)
    for _ in range(2):
        add(256)
        add(1)
        assert of(model) == (256, 257)
        model.zero_grad(set_to_none=to_none)
    assert not recwarn.list
    if not to_none:
        add(0)
        assert of(model) == (0, 0)


def test_other_writes_drop_it_and_warn_once() -> None:
    model, add = one()
    collage_fx.accumulate(model)
    add(256)
    add(1)
    with torch.no_grad():
        model.weight.grad.mul_(0.5)
    with pytest.warns(collage_fx.CollageWarning, match="of gradient of weight was cleared"):
        add(0.5)
    assert of(model) == (128, 128.5)
    model.zero_grad()
    add(256)
    add(1)
    with torch.no_grad():
        model.weight.grad.mul_(0.5)
    add(0.5)  # an error if it warned again
    assert of(model) == (128, 128.5)


def test_a_gradient_that_the_user_puts_there_is_added_to() -> None:
    model, add = one()
    collage_fx.accumulate(model)
    given = model.weight.grad = torch.full_like(model.weight, 256)
    add(1)
    add(1)
    assert of(model) == (258, 258) and model.weight.grad is given
    kept = model.weight.grad
    model.zero_grad()
    add(1)
    add(1)
    assert float(kept) == 258 and of(model) == (2, 2)


def test_autograd_grad_leaves_sums_alone() -> None:
    model, add = one()
    collage_fx.accumulate(model)
    add(256)
    add(1)
    x = torch.ones(1, dtype=torch.bfloat16)
    torch.autograd.grad(model(x), model.weight)
    assert of(model) == (256, 257)
    add(1)
    assert of(model) == (258, 258)


def test_hooks_of_others_see_the_sum() -> None:
    model, add = one()
    seen: list[float] = []
    model.weight.register_post_accumulate_grad_hook(lambda p: seen.append(float(p.grad)))
    collage_fx.accumulate(model)
    for x in (256, 1, 1):
        add(x)
    assert seen == [256, 256, 258]


def test_what_cannot_have_a_residual_is_added_plainly() -> None:
    flat = torch.zeros(2, dtype=torch.bfloat16)
    model, add = one()
    collage_fx.accumulate(model)
    model.weight.grad = flat[:1].view(1, 1)
    with pytest.warns(collage_fx.CollageWarning, match="a part of other memory"):
        add(256)
    add(1)
    assert flat.tolist() == [256, 0]


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_differentiated_gradients_stay_so() -> None:
    model, _ = one()
    collage_fx.accumulate(model)
    x = torch.ones(1, dtype=torch.bfloat16)
    model(x).square().backward(create_graph=True)
    with pytest.warns(collage_fx.CollageWarning, match="create_graph"):
        model(x).square().backward(create_graph=True)
    assert model.weight.grad.requires_grad  # type: ignore[union-attr]
    model.zero_grad()


def test_removed_it_is_as_before() -> None:
    model, add = one()
    sums = collage_fx.accumulate(model)
    add(256)
    add(1)
    sums.remove()
    assert STORE.get(model.weight.grad) is None  # type: ignore[arg-type]
    add(1)
    assert of(model) == (256, 256)
    sums.remove()


def test_a_second_call_takes_the_place_of_the_first() -> None:
    model, add = one()
    collage_fx.accumulate(model)
    collage_fx.accumulate(model, "ulp8")
    for x in (256, 1, 1):
        add(x)
    assert of(model) == (258, 258)


def test_nothing_is_kept_alive() -> None:
    model, add = one()
    collage_fx.accumulate(model)
    add(256)
    add(1)
    alive = weakref.ref(model.weight)
    copied = copy.deepcopy(model)
    del model, add
    gc.collect()
    assert alive() is None
    for _ in range(2):
        copied(torch.full((1,), 256.0, dtype=torch.bfloat16)).backward()


def test_another_dtype_gets_sums_too() -> None:
    model, _ = one()
    collage_fx.accumulate(model)
    model.half()
    for x in (2048.0, 1.0, 1.0):
        model(torch.tensor([x], dtype=torch.float16)).backward()
    assert of(model)[1] >= 2048
    model.zero_grad()
    for x in (2048.0, 1.0):
        model(torch.tensor([x], dtype=torch.float16)).backward()
    assert of(model) == (2048, 2049)


@pytest.mark.parametrize("subject", [nn.Linear(2, 2), nn.ReLU(), 3, [torch.ones(2)]])
def test_refused_subjects(subject: Any) -> None:
    with pytest.raises(collage_fx.CollageError, match="accumulate"):
        collage_fx.accumulate(subject)
    with pytest.raises(collage_fx.CollageError, match="storage"):
        collage_fx.accumulate(one()[0], "mcf9")
