"""Misuse is said once, by the names of the model, or is an error of collage_fx.

For api and inspection.values.
"""

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from interpreter import without_compiler
from torch import nn
from torch._inductor import list_mode_options

import collage_fx
from collage_fx.__main__ import main
from collage_fx.dynamo.options import MODES
from collage_fx.errors import CollageWarning, OptionError, ResidualError, SubjectError
from collage_fx.runtime.residuals.store import STORE
from collage_fx.runtime.storage.registry import EXPANSIONS, STORAGES

Run = tuple[nn.Module, torch.optim.Optimizer]


@pytest.fixture(autouse=True, scope="module")
def _interpreted() -> Iterator[None]:
    with without_compiler():
        yield


def made(seed: int = 0, layers: int = 2, dtype: torch.dtype = torch.bfloat16, **how: Any) -> Run:
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(layers))).to(dtype)
    return model, collage_fx.compile_(torch.optim.AdamW(model.parameters(), lr=1e-3), **how)


def train(run: Run, steps: int = 2) -> None:
    for _ in range(steps):
        for p in run[0].parameters():
            p.grad = torch.full_like(p, 0.5)
        run[1].step()


def loaded_beside_other_weights() -> Run:
    first, run = made(0), made(1)
    train(first)
    run[1].load_state_dict(copy.deepcopy(first[1].state_dict()))
    return run


def shifted() -> Run:
    run = made()
    train(run)
    with torch.no_grad():
        for p in run[0].parameters():
            p.add_(1)
    return run


def converted(run: Run) -> None:
    collage_fx.convert_residuals(run[1], "mcf3")


@pytest.mark.parametrize("make", [loaded_beside_other_weights, shifted])
@pytest.mark.parametrize(
    "use",
    [lambda run: collage_fx.master_state_dict(*run), converted, lambda run: train(run, 1)],
)
@pytest.mark.quick("<lambda>0-*", "converted-shifted")
def test_cleared_residuals_are_named_in_one_warning(
    make: Callable[[], Run], use: Callable[[Run], Any]
) -> None:
    run = make()
    for p in run[0].parameters():
        assert not collage_fx.residuals(p)
        assert torch.equal(collage_fx.value(p), p.detach().double())
    with pytest.warns(CollageWarning, match="was cleared") as caught:
        use(run)
    assert len(caught) == 1
    # A step looks at those of one shape together.
    names = str(caught[0].message).split(" was cleared")[0].split("residual of ")[1].split(", ")
    assert sorted(names) == ["0.bias", "0.weight", "1.bias", "1.weight"]


@pytest.mark.parametrize("layers", [1, 5])
@pytest.mark.quick("1")
def test_a_model_that_gets_another_dtype_is_refused_by_name(layers: int) -> None:
    """Before Dynamo sees it; a new optimizer, or the dtype of before, goes on."""
    run = made(layers=layers)
    train(run, 3)
    run[0].float()
    before = copy.deepcopy(run[0].state_dict())
    for _ in range(2):
        with pytest.raises(ResidualError, match=r"weight, .*bias.* of AdamW had torch.bf"):
            train(run, 1)
    assert all(map(torch.equal, before.values(), run[0].state_dict().values()))
    new = collage_fx.compile_(torch.optim.SGD(run[0].parameters(), lr=1e-3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CollageWarning)  # of residuals of bf16, and of fp32
        train((run[0], new), 1)
        assert not any(map(torch.equal, before.values(), run[0].state_dict().values()))
        run[0].bfloat16()
        train(run, 2)
    assert all(len(collage_fx.residuals(p)) == 1 for p in run[0].parameters())


@pytest.mark.filterwarnings("ignore:.*nothing needed compensation")
def test_a_report_tells_steps_of_fp32_from_none() -> None:
    run = made(dtype=torch.float32)
    assert "no step has been taken yet" in str(collage_fx.report(run[1]))
    train(run, 3)
    assert "in 3 steps nothing was written" in str(collage_fx.report(run[1]))


@pytest.mark.parametrize("storage", [*STORAGES, "auto", {"param": "ulp8", "*": "mcf2"}])
def test_eft_beside_a_storage_that_has_no_such_arithmetic_is_an_error(storage: Any) -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).bfloat16().parameters())
    if storage in list(EXPANSIONS):
        collage_fx.compile(optimizer, arithmetic="eft", storage=storage)
        return
    with pytest.raises(OptionError, match=r"arithmetic='eft' with storage=.*pass arithmetic"):
        collage_fx.compile(optimizer, arithmetic="eft", storage=storage)
    collage_fx.compile(optimizer, storage=storage)


CALLS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "value": (lambda: collage_fx.value("a"), SubjectError, "value takes tensors, got str 'a'"),  # type: ignore[arg-type]
    "dtype": (
        lambda: collage_fx.value(torch.ones(2), torch.int8),
        OptionError,
        "int8 is no floating dtype",
    ),
    "residuals": (lambda: collage_fx.residuals(None), SubjectError, "got NoneType"),  # type: ignore[arg-type]
    "draws": (lambda: collage_fx.draws(3), SubjectError, "got int 3"),  # type: ignore[arg-type]
    "load": (
        lambda: collage_fx.load_residuals(torch.ones(2).bfloat16(), [1]),  # type: ignore[list-item]
        SubjectError,
        "load_residuals takes tensors, got int 1",
    ),
    "mode": (lambda: made(mode="fast"), OptionError, "mode='fast' is no mode of torch.compile"),
    "trainer": (lambda: collage_fx.trainer_callback(every=0), OptionError, "every=0: a number"),
    "lightning": (lambda: collage_fx.lightning_callback(every=-1), OptionError, "every=-1"),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_cannot_be_is_an_error_of_ours(name: str) -> None:
    call, error, message = CALLS[name]
    with pytest.raises(error, match=message):
        call()


def test_the_command_says_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert not ended.value.code
    assert capsys.readouterr().out == f"collage_fx {collage_fx.__version__}\n"


def passes(compiled: nn.Module, *, steps: bool = False) -> list[str]:
    """Return the warnings of 70 batches, with a step after each eighth if wanted."""
    optimizer = torch.optim.SGD(compiled.parameters(), lr=1e-3)
    step = torch.compile(optimizer.step, backend="collage")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in range(70):
            compiled(torch.ones(2, 3).bfloat16()).sum().backward()
            if steps and batch % 8 == 7:
                step()
    return [str(w.message) for w in caught if w.category is CollageWarning]


def test_a_model_is_not_what_the_backend_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(STORE, "generation", 0)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).bfloat16()
    compiled: Any = torch.compile(model, backend="collage")
    (said,) = passes(compiled)
    assert said.startswith(
        "collage_fx: the backend 'collage' compiles what autograd differentiates"
    )
    assert passes(compiled) == []


def test_a_model_beside_steps_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(STORE, "generation", 0)
    compiled: Any = torch.compile(nn.Linear(3, 3).bfloat16(), backend="collage")
    assert passes(compiled, steps=True) == []


def test_modes_are_what_torch_makes_of_them() -> None:
    """All but `lite`, which leaves operations to PyTorch."""
    expected = {k: v for k, v in list_mode_options().items() if k not in ("default", "lite")}
    assert expected == MODES
