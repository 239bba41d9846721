"""Full-precision weights in and out, and residuals from one storage into another.

For optimizer.master_weights.
"""

import copy
from typing import Any

import pytest
import torch
from saved import saved_residuals
from torch import Tensor, nn

import collage_fx
from collage_fx.errors import CheckpointError, CollageWarning, OptionError, StorageError
from collage_fx.runtime.residuals.store import STORE


def model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Linear(9, 2)).to(dtype)


def masters() -> dict[str, Tensor]:
    """Weights that bf16 rounds."""
    return model(torch.float32).state_dict()


def values(module: nn.Module) -> dict[str, Tensor]:
    return {n: collage_fx.value(p).detach() for n, p in module.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fp32_weights_come_back_bit_for_bit(dtype: torch.dtype) -> None:
    there = model(torch.bfloat16)
    exact = {n: w.to(dtype) if w.is_floating_point() else w for n, w in masters().items()}
    rounded = {n: w.bfloat16() for n, w in exact.items()}
    collage_fx.load_master_weights(there, exact)
    back = collage_fx.master_state_dict(there, dtype=dtype)
    assert back.keys() == exact.keys()
    for name, p in there.named_parameters():
        assert torch.equal(back[name], exact[name]) and back[name].dtype == dtype
        assert not back[name].requires_grad and back[name].data_ptr() != p.data_ptr()
        assert (p - rounded[name]).abs().max() <= p.abs().max() * 2**-8
    assert not torch.equal(back["0.weight"], rounded["0.weight"].to(dtype))  # the control
    assert back["1.num_batches_tracked"].dtype == torch.int64


@pytest.mark.parametrize("storage", ["mcf2", "remainder16"])
@pytest.mark.filterwarnings("ignore:.*keeps 17 bits instead of 24")
@pytest.mark.quick("remainder16")
def test_a_step_goes_on_from_the_weights_that_were_loaded(storage: str) -> None:
    there = model(torch.bfloat16)
    optimizer = torch.optim.SGD(there.parameters(), lr=1e-4)
    step = collage_fx.compile(optimizer, storage=storage)
    collage_fx.load_master_weights(there, masters())
    for p in there.parameters():
        p.grad = torch.ones_like(p)
    step()
    bits, update = (16, 2.0**-9) if storage == "mcf2" else (23, 2.0**-24)
    for name, value in values(there).items():
        exact = masters()[name].double() - 1e-4
        assert (value - exact).abs().max() <= exact.abs().max() * 2.0**-bits + 1e-4 * update, name


def test_an_optimizer_takes_weights_in_its_order_or_by_name() -> None:
    exact = [p.detach() for p in model(torch.float32).parameters()]
    there = model(torch.bfloat16)
    optimizer = torch.optim.SGD(there.parameters(), lr=1e-4)
    collage_fx.load_master_weights(optimizer, exact)
    assert all(map(torch.equal, values(there).values(), [e.double() for e in exact]))
    there = model(torch.bfloat16)
    optimizer = torch.optim.SGD(there.named_parameters(), lr=1e-4)  # type: ignore[arg-type]
    collage_fx.load_master_weights(optimizer, dict(model(torch.float32).named_parameters()))
    assert all(map(torch.equal, values(there).values(), [e.double() for e in exact]))


def _shorter(weights: dict[str, Tensor]) -> Any:
    return {n: w for n, w in weights.items() if n != "0.bias"}


@pytest.mark.parametrize(
    "change, message",
    [
        (_shorter, r"missing \['0\.bias'\]"),
        (lambda w: {**w, "2.scale": torch.ones(2)}, r"unknown \['2\.scale'\]"),
        (lambda w: {**w, "2.bias": torch.ones(3)}, r"2\.bias is \(2,\), given \(3,\)"),
        (lambda w: {**w, "2.bias": 1.0}, r"2\.bias is given as float"),
        (lambda w: {**w, "2.bias": torch.ones(2, device="meta")}, "meta"),
        (lambda w: {**w, "2.bias": torch.ones(2).to_sparse()}, "sparse"),
        (lambda w: {**w, "2.bias": torch.ones(2, dtype=torch.complex64)}, "complex64"),
        (lambda w: list(w.values()), "by name"),
    ],
)
def test_weights_that_do_not_fit_change_nothing(change: Any, message: str) -> None:
    there = model(torch.bfloat16)
    before = copy.deepcopy(there.state_dict())
    with pytest.raises(CheckpointError, match=message):
        collage_fx.load_master_weights(there, change(masters()))
    assert all(map(torch.equal, before.values(), there.state_dict().values()))
    assert all(STORE.get(p) is None for p in there.parameters())


def test_tied_weights_have_one_value() -> None:
    there = nn.ModuleList([nn.Linear(2, 2, bias=False).bfloat16()])
    there.append(there[0])
    with pytest.raises(CheckpointError, match="same tensor"):
        collage_fx.load_master_weights(
            there, {"0.weight": torch.ones(2, 2), "1.weight": torch.zeros(2, 2)}
        )


def test_bad_options_are_refused() -> None:
    with pytest.raises(OptionError, match="mcf2"):
        collage_fx.load_master_weights(model(torch.bfloat16), masters(), storage=["mcf2"])  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="mcf9"):
        collage_fx.load_master_weights(model(torch.bfloat16), masters(), storage="mcf9")
    with pytest.raises(StorageError, match="remainder16"):
        collage_fx.load_master_weights(model(torch.float16), masters(), storage="remainder16")
    with pytest.raises(OptionError, match="bfloat16"):
        collage_fx.master_state_dict(model(torch.bfloat16), dtype=torch.bfloat16)
    with pytest.raises(OptionError, match=r"float32.*stochastic=True rounds"):
        collage_fx.master_state_dict(model(torch.bfloat16), stochastic=True)


def test_an_export_by_chance_keeps_what_one_to_nearest_loses() -> None:
    """A fine-tune that has moved each weight by a 32nd of a unit in the last place."""
    begin = nn.Linear(64, 64, bias=False).bfloat16()
    weights = begin.weight.detach().double()
    moved = weights * (1 + 2.0**-13)
    collage_fx.load_master_weights(begin, {"weight": moved})

    def kept(exported: Tensor) -> float:
        return float(((exported.detach().double() - weights) / (moved - weights)).mean())

    by_chance = [
        collage_fx.master_state_dict(begin, dtype=torch.bfloat16, stochastic=True, seed=seed)
        for seed in (0, 0, 1)
    ]
    one, again, other = (found["weight"] for found in by_chance)
    assert one.dtype == torch.bfloat16 and torch.equal(one, again) and not torch.equal(one, other)
    assert abs(kept(one) - 1) < 0.4  # of 4096 elements, four standard errors
    assert kept(begin.weight) < 0.05  # the control
    whole = collage_fx.master_state_dict(begin)["weight"]
    assert abs(kept(whole) - 1) < 1e-3


def trained(storage: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    there = model(torch.bfloat16)
    optimizer = torch.optim.SGD(there.parameters(), lr=1e-4)
    step = collage_fx.compile(optimizer, storage=storage)
    for _ in range(3):
        for p in there.parameters():
            p.grad = torch.ones_like(p)
        step()
    return there, optimizer


def test_a_checkpoint_goes_from_one_storage_to_another_without_a_step() -> None:
    there, optimizer = trained("ulp8")
    exact = values(there)
    saved, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(there.state_dict())
    other = model(torch.bfloat16)
    other.load_state_dict(weights)
    optimizer = torch.optim.SGD(other.parameters(), lr=1e-4)
    optimizer.load_state_dict(saved)
    collage_fx.convert_residuals(optimizer, "remainder16")
    assert all(torch.equal(v, exact[n]) for n, v in values(other).items())
    entry = saved_residuals(optimizer.state_dict())[0]["<param>"]
    assert entry.storage == "remainder16"
    collage_fx.convert_residuals(optimizer, "ulp8")
    assert all(torch.equal(v, exact[n]) for n, v in values(other).items())


def test_residuals_are_converted_by_patterns_as_steps_keep_them() -> None:
    params = [torch.ones(4, dtype=d, requires_grad=True) for d in (torch.bfloat16, torch.float32)]
    optimizer = torch.optim.SGD(params, lr=1e-4)
    step = collage_fx.compile(optimizer, storage={"*params[[]1]": "double_single", "*": "mcf2"})
    with torch.compiler.set_stance("force_eager"):
        for p in params:
            p.grad = torch.full_like(p, 0.3)
        step()
    before = [collage_fx.value(p) for p in params]
    for storage, words in (({"param": "remainder16"}, torch.int16), ("auto", torch.int16)):
        collage_fx.convert_residuals(optimizer, storage)
        assert [collage_fx.residuals(p)[0].dtype for p in params] == [words, torch.float32]
    assert all(torch.equal(collage_fx.value(p), v) for p, v in zip(params, before, strict=True))
    for wrong, refused in (("mcf2", "float32"), ("double_single", "bfloat16")):
        with pytest.raises(StorageError, match=refused):
            collage_fx.convert_residuals(optimizer, wrong)
    assert all(torch.equal(collage_fx.value(p), v) for p, v in zip(params, before, strict=True))


def test_a_loaded_optimizer_gives_its_residuals_to_the_full_weights() -> None:
    there, optimizer = trained("mcf2")
    exact = values(there)
    other = model(torch.bfloat16)
    other.load_state_dict(there.state_dict())
    again = torch.optim.SGD(other.parameters(), lr=1e-4)
    again.load_state_dict(optimizer.state_dict())
    full = collage_fx.master_state_dict(other, again, dtype=torch.float64)
    assert all(torch.equal(full[n], v) for n, v in exact.items())


def test_weights_that_were_written_from_outside_stand_for_themselves() -> None:
    there, _ = trained("remainder16")
    with torch.no_grad():
        there[0].weight.mul_(2)
    with pytest.warns(CollageWarning, match="written from outside"):
        full = collage_fx.master_state_dict(there)
    assert torch.equal(full["0.weight"], there[0].weight.detach().float())


def descend(optimizer: torch.optim.Optimizer, way: str, **options: Any) -> Any:
    """Take ten steps of 1e-6, at which 17 bits lose nearly all; return the step."""
    step: Any = torch.compile(optimizer.step, backend="collage", options=options)
    if way != "string":
        step = collage_fx.compile(optimizer, **options)
    for _ in range(10):
        for p in optimizer.param_groups[0]["params"]:
            p.grad = torch.ones_like(p)
        with torch.compiler.set_stance("force_eager" if way == "eager" else "default"):
            step()
    return step


WAYS = pytest.mark.parametrize(
    ("way", "count"), [("graph", 2), ("shared", 9), ("eager", 2), ("string", 2)]
)
KEPT = pytest.mark.parametrize("storage", [None, "mcf3", "ulp8"])


def near_one(count: int) -> tuple[list[nn.Parameter], list[Tensor]]:
    weights = [1 + torch.rand(8) / 8 for _ in range(count)]
    return [nn.Parameter(torch.empty(8).bfloat16()) for _ in weights], weights


@WAYS
@KEPT
@pytest.mark.quick("None-string-2", "ulp8-graph-2")
def test_a_step_goes_on_in_the_storage_of_the_master_weights(
    way: str, count: int, storage: str | None
) -> None:
    bits = {None: 2**-24, "mcf3": 2**-24, "ulp8": 2**-16}[storage]
    params, weights = near_one(count)
    optimizer = torch.optim.SGD(params, lr=1e-6)
    collage_fx.load_master_weights(optimizer, weights, storage=storage)
    dtypes = [[r.dtype for r in collage_fx.residuals(p)] for p in params]
    step = descend(optimizer, way)
    for p, weight, before in zip(params, weights, dtypes, strict=True):
        assert [r.dtype for r in collage_fx.residuals(p)] == before
        off = collage_fx.value(p) - (weight.double() - 1e-5)
        assert float(off.abs().max()) < 12 * bits
    name = storage or "remainder16"
    if way != "string":
        assert {s.storage for s in collage_fx.explain(step).plan} == {name}
    saved = saved_residuals(optimizer.state_dict())
    assert len(saved) == count and all(one["<param>"].storage == name for one in saved.values())
    # The control: a storage that is named is the one that states are converted to.
    params, weights = near_one(count)
    optimizer = torch.optim.SGD(params, lr=1e-6)
    collage_fx.load_master_weights(optimizer, weights, storage="remainder16")
    STORE._coarser.clear()
    with pytest.warns(CollageWarning, match="17 bits instead of 24.*storage='remainder16'"):
        descend(optimizer, way, storage="mcf2")
    assert all(collage_fx.residuals(p)[0].dtype == torch.bfloat16 for p in params)


@WAYS
@pytest.mark.quick("string-2")
def test_a_step_goes_on_in_the_storage_of_a_checkpoint(way: str, count: int) -> None:
    params, weights = near_one(count)
    optimizer = torch.optim.SGD(params, lr=1e-6, momentum=0.5)
    collage_fx.load_master_weights(optimizer, weights)
    descend(optimizer, "graph", storage="remainder16", level="all")
    others = [nn.Parameter(p.detach().clone()) for p in params]
    again = torch.optim.SGD(others, lr=1e-6, momentum=0.5)
    again.load_state_dict(optimizer.state_dict())
    descend(again, way)
    states = [t for p in others for t in (p, again.state[p]["momentum_buffer"])]
    assert all(collage_fx.residuals(t)[0].dtype == torch.int16 for t in states)


def test_explaining_another_storage_leaves_the_warning_to_the_step() -> None:
    params, weights = near_one(2)
    optimizer = torch.optim.SGD(params, lr=1e-6)
    collage_fx.load_master_weights(optimizer, weights)
    STORE._coarser.clear()
    collage_fx.explain(optimizer, storage="mcf2")
    assert not STORE._coarser


def test_what_is_neither_a_module_nor_an_optimizer() -> None:
    with pytest.raises(collage_fx.errors.SubjectError, match="got int"):
        collage_fx.master_state_dict(3)  # type: ignore[arg-type]
    with pytest.raises(collage_fx.errors.SubjectError, match="got NoneType"):
        collage_fx.load_master_weights(None, {})  # type: ignore[arg-type]
